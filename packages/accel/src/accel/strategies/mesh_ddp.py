"""Data parallelism on a device mesh whose only axis copies the model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from accel_state import PartialState
from accel_state.errors import ConfigurationError

from ..kwargs.base import Handlers
from ..parallel.config import ParallelismConfig
from .ddp import DDPStrategy


class MeshDDPStrategy(DDPStrategy):
    """DDP on a device mesh with a ``dp_replicate`` axis only."""

    def __init__(
        self,
        state: PartialState | None = None,
        handlers: Handlers | None = None,
        settings: ParallelismConfig | None = None,
        fsdp: Any = None,
    ) -> None:
        super().__init__(state, handlers, settings)
        if fsdp is not None:
            raise ConfigurationError(
                f"FSDP shards models over dp_shard, but the mesh has dp_replicate_size="
                f"{self.settings.dp_replicate_size} and dp_shard_size=1. Set dp_shard_size, or leave FSDP out."
            )

    def default_settings(self) -> ParallelismConfig:
        return ParallelismConfig()

    @property
    def active_plugins(self) -> Mapping[str, Any]:
        return {"mesh": self.settings}

    def attach(self, state: PartialState, handlers: Handlers) -> None:
        super().attach(state, handlers)
        self.settings: Any = self.settings.for_world(state.num_processes)
        self.mesh: DeviceMesh | None = self.settings.build_device_mesh(state.device.type)
