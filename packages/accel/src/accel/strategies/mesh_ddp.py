"""A mesh of one axis: copies of the model. DDP does all there is to do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh

from accel_state import PartialState
from accel_state.errors import ConfigurationError

from ..parallel.config import ParallelismConfig
from .ddp import DDPStrategy

if TYPE_CHECKING:
    from ..kwargs.base import Handlers


class MeshDDPStrategy(DDPStrategy):
    """DDP, with the device mesh that was asked for.

    Raises:
        ConfigurationError: there are settings of FSDP, which nothing here would use.
    """

    def __init__(self, state: PartialState, handlers: Handlers, settings: ParallelismConfig, fsdp: Any = None) -> None:
        super().__init__(state, handlers, settings)
        if fsdp is not None:
            raise ConfigurationError(
                f"FSDP divides a model over the ranks of dp_shard, but the mesh has dp_replicate_size={settings.dp_replicate_size} and "
                "dp_shard_size=1. Set dp_shard_size, or leave FSDP out."
            )
        self.mesh: DeviceMesh | None = settings.build_device_mesh(state.device.type)
