"""The registered strategies, and the families of settings that a script or the launcher asks for them with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from accel_state.registry import Registry

from ..contract.strategy import Strategy

STRATEGIES: Registry[type[Strategy]] = Registry(
    "strategy",
    {
        "single": "accel.strategies.single:SingleStrategy",
        "ddp": "accel.strategies.ddp:DDPStrategy",
        "fsdp1": "accel.strategies.fsdp1:FSDP1Strategy",
        "fsdp2": "accel.strategies.fsdp2:FSDP2Strategy",
        "deepspeed": "accel.strategies.deepspeed:DeepSpeedStrategy",
        "mesh": "accel.strategies.mesh:MeshStrategy",
        "mesh_ddp": "accel.strategies.mesh_ddp:MeshDDPStrategy",
        "xla": "accel.strategies.xla:XlaStrategy",
        "xla_spmd": "accel.strategies.xla_spmd:XlaSpmdStrategy",
        "ft": "accel.strategies.ft:FaultTolerantStrategy",
        "ft_fsdp2": "accel.strategies.ft_fsdp2:FaultTolerantFSDP2Strategy",
        "mesh_pp": "accel.strategies.mesh_pp:PipelineStrategy",
    },
    entry_point_group="accel.strategies",
)


@dataclass(frozen=True)
class Family:
    """A kind of training that a script or the launcher asks for.

    Attributes:
        plugin: the class of its settings. Without arguments, it takes the launcher's values; its ``strategy`` is the
            name of the strategy that it configures.
        argument: the argument of the Accelerator with its settings; empty if a script cannot pass any.
        attribute: the attribute of :class:`AcceleratorState` that holds them.
        switch: the option of the launcher, a field of :class:`ParadigmOptions`.
        combines_with: the families whose settings may be given together with these.
        replaceable: whether a device with a sharded strategy of its own takes these settings instead.
    """

    plugin: str = ""
    argument: str = ""
    attribute: str = ""
    switch: str = ""
    combines_with: tuple[str, ...] = ()
    replaceable: bool = False


# Of families that are combined, the first in this order leads: its settings name the strategy, which gets those of the
# others.
FAMILIES = {
    "mesh": Family(
        "accel.parallel.config:ParallelismConfig",
        "parallelism_config",
        "parallelism_config",
        "use_parallelism_config",
        ("fsdp",),
        replaceable=True,
    ),
    "fsdp": Family(
        "accel.fsdp.plugin:FullyShardedDataParallelPlugin",
        "fsdp_plugin",
        "fsdp_plugin",
        "use_fsdp",
        ("mesh", "ft"),
        replaceable=True,
    ),
    "torch_tp": Family(
        "accel.parallel.config:TorchTensorParallelPlugin", "torch_tp_plugin", "torch_tp_plugin", replaceable=True
    ),
    "deepspeed": Family(
        "accel.deepspeed.plugin:DeepSpeedPlugin", "deepspeed_plugin", "deepspeed_plugins", "use_deepspeed"
    ),
    # accel-megatron registers its plugin.
    "megatron": Family("", "megatron_lm_plugin", "megatron_lm_plugin", "use_megatron_lm"),
    "ft": Family(switch="ft", combines_with=("fsdp",)),
}

PLUGINS: Registry[type[Any]] = Registry(
    "strategy plugin",
    {name: family.plugin for name, family in FAMILIES.items() if family.plugin},
    entry_point_group="accel.strategy_plugins",
)
"""The classes of settings (``Family.plugin``) by family, also those of other distributions."""
