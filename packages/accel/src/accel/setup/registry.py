"""The table of strategies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from accel_state import get_logger
from accel_state.registry import Registry

from ..contract.strategy import Strategy

logger: Final = get_logger(__name__)

StrategyName = Literal[
    "single",
    "ddp",
    "fsdp1",
    "fsdp2",
    "deepspeed",
    "mesh",
    "mesh_ddp",
    "xla",
    "xla_spmd",
    "ft",
    "ft_fsdp2",
    "mesh_pp",
]
"""The names of accel's own strategies, for type checkers."""


@dataclass(frozen=True)
class Row:
    """Strategies that share their settings.

    Attributes:
        strategies: their classes, as ``"module:class"``, by name.
        plugin: the class of their settings. Without arguments, it takes the launcher's values; its ``strategy`` names
            the strategy that it configures.
        argument: the argument of the Accelerator with the settings; empty if there is none.
        switch: the option of the launcher that asks for them, a field of :class:`ParadigmOptions`.
        compatible_with: the rows whose settings may be given together with these.
        replaceable: whether a device with a sharded strategy of its own takes these settings instead.
    """

    strategies: Mapping[str, str] = field(default_factory=dict)
    plugin: str = ""
    argument: str = ""
    switch: str = ""
    compatible_with: tuple[str, ...] = ()
    replaceable: bool = False


# Of settings that are combined, the first in this order lead: they name the strategy, which gets the others.
TABLE: Final[dict[str, Row]] = {
    "single": Row({"single": "accel.strategies.single:SingleStrategy"}),
    "ddp": Row({"ddp": "accel.strategies.ddp:DDPStrategy"}),
    "mesh": Row(
        {
            "mesh": "accel.strategies.mesh:MeshStrategy",
            "mesh_ddp": "accel.strategies.mesh_ddp:MeshDDPStrategy",
            "mesh_pp": "accel.strategies.mesh_pp:PipelineStrategy",
        },
        "accel.parallel.config:ParallelismConfig",
        "parallelism_config",
        "use_parallelism_config",
        ("fsdp",),
        replaceable=True,
    ),
    "fsdp": Row(
        {"fsdp1": "accel.strategies.fsdp1:FSDP1Strategy", "fsdp2": "accel.strategies.fsdp2:FSDP2Strategy"},
        "accel.fsdp.plugin:FullyShardedDataParallelPlugin",
        "fsdp_plugin",
        "use_fsdp",
        ("mesh", "ft"),
        replaceable=True,
    ),
    # The older form of a mesh.
    "torch_tp": Row({}, "accel.parallel.config:TorchTensorParallelPlugin", "torch_tp_plugin", replaceable=True),
    "deepspeed": Row(
        {"deepspeed": "accel.strategies.deepspeed:DeepSpeedStrategy"},
        "accel.deepspeed.plugin:DeepSpeedPlugin",
        "deepspeed_plugin",
        "use_deepspeed",
    ),
    # Argument and switch are the reference's; accel-megatron registers the strategy.
    "megatron": Row(argument="megatron_lm_plugin", switch="use_megatron_lm"),
    "ft": Row(
        {
            "ft": "accel.strategies.ft:FaultTolerantStrategy",
            "ft_fsdp2": "accel.strategies.ft_fsdp2:FaultTolerantFSDP2Strategy",
        },
        switch="ft",
        compatible_with=("fsdp",),
    ),
    "xla": Row({"xla": "accel.strategies.xla:XlaStrategy"}),
    "xla_spmd": Row({"xla_spmd": "accel.strategies.xla_spmd:XlaSpmdStrategy"}),
}

STRATEGIES: Final[Registry[type[Strategy]]] = Registry(
    "strategy",
    {name: target for row in TABLE.values() for name, target in row.strategies.items()},
    entry_point_group="accel.strategies",
)
"""The strategies of the table, and those of other distributions."""

PLUGINS: Final[Registry[type[Any]]] = Registry(
    "plugin", {name: row.plugin for name, row in TABLE.items() if row.plugin}
)
