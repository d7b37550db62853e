"""The registered strategies and their plugins."""

from __future__ import annotations

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

PLUGINS: Registry[type[Any]] = Registry(
    "strategy plugin",
    {
        "fsdp": "accel.fsdp.plugin:FullyShardedDataParallelPlugin",
        "deepspeed": "accel.deepspeed.plugin:DeepSpeedPlugin",
        "mesh": "accel.parallel.config:ParallelismConfig",
        "torch_tp": "accel.parallel.config:TorchTensorParallelPlugin",
    },
    entry_point_group="accel.strategy_plugins",
)
"""The plugin classes of strategies, by the names that the launcher and the Accelerator use.

Without arguments, such a class takes the launcher's values; its ``strategy`` is the name of the strategy that it
configures."""
