"""The sizes of the axes of a mesh of processes. Torch is imported where a mesh is built."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from accel_state.errors import ArgumentTypeError, ConfigurationError
from accel_state.humanize import counted
from accel_state.options import ParallelismOptions

from .axes import AXES, DATA_AXES, EXPERT_AXES
from .axis_settings import (
    SPLIT_BACKWARD,
    DeepSpeedSequenceParallelConfig,
    ExpertParallelConfig,
    PipelineParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
    one_of_choices,
    positive,
)

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh


@dataclass
class ParallelismConfig:
    """The sizes of the axes of a mesh; their product, without ``ep_size``, is the number of processes.
    A size that is left out takes the launcher's (``--parallelism_config_...``), and is 1 without one.

    Args:
        dp_replicate_size: copies of the model, each with data of its own.
        dp_shard_size: processes that a copy's parameters, gradients and optimizer state are sharded over, each with
            data of its own.
        tp_size: processes that each layer is sharded over.
        cp_size: processes that each sequence is split over.
        cp_backend: implementation of context parallelism.
        sp_size: processes that each sequence is split over, with attention split by heads.
        sp_backend: implementation of sequence parallelism.
        tp_handler: further settings of tensor parallelism.
        cp_handler: further settings of context parallelism.
        sp_handler: further settings of sequence parallelism.
        pp_size: ranks that a model is split over in stages, as a pipeline.
        pp_handler: further settings of the pipeline.
        tp_sequence_parallel: shard hidden states between the layers that tp shards along the sequence. None does so for
            the models that support it; True raises an error for others.
        ep_size: ranks that the experts of a mixture are distributed over. It divides ``dp_shard_size * cp_size *
            tp_size`` and adds no processes: samples stay distributed over dp_shard, and what is left of the three axes
            shards each expert.
        ep_handler: further settings of expert parallelism.

    Raises:
        ConfigurationError: a size below 1, axes that exclude each other, an ``ep_size`` that does not divide, or
            settings of another class.

    Examples:
        >>> configuration = ParallelismConfig(dp_shard_size=2, tp_size=4)
        >>> configuration.total_size
        8
    """

    dp_replicate_size: int | None = None
    dp_shard_size: int | None = None
    tp_size: int | None = None
    cp_size: int | None = None
    cp_backend: str = None  # type: ignore[assignment]
    sp_size: int | None = None
    sp_backend: str = None  # type: ignore[assignment]
    tp_handler: TorchTensorParallelConfig | None = None
    cp_handler: TorchContextParallelConfig | None = None
    sp_handler: DeepSpeedSequenceParallelConfig | None = None
    pp_size: int | None = None
    pp_handler: PipelineParallelConfig | None = None
    tp_sequence_parallel: bool | None = None
    ep_size: int | None = None
    ep_handler: ExpertParallelConfig | None = None
    device_mesh: DeviceMesh | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        launched = ParallelismOptions.from_environment()
        for axis in (*AXES, "ep"):
            name = f"{axis}_size"
            value = getattr(self, name)
            setattr(self, name, positive(name, getattr(launched, name) if value is None else value))
        for axis in ("cp", "sp"):
            name = f"{axis}_backend"
            setattr(self, name, one_of_choices(name, getattr(self, name) or getattr(launched, name)))
        if self.tp_sequence_parallel is None:
            self.tp_sequence_parallel = launched.tp_sequence_parallel
        elif not isinstance(self.tp_sequence_parallel, bool):
            raise ArgumentTypeError(f"tp_sequence_parallel={self.tp_sequence_parallel!r} must be True, False or None.")
        if self.tp_sequence_parallel and self.size("tp") == 1:
            raise ConfigurationError(
                "tp_sequence_parallel=True shards hidden states between tensor-parallel layers, and tp_size=1. Set "
                "tp_size, or leave it out."
            )
        if self.size("cp") > 1 and self.size("sp") > 1:
            raise ConfigurationError(
                f"cp_size={self.cp_size} and sp_size={self.sp_size} exclude each other: both split the sequences. Set "
                "one of them to 1."
            )
        self._check_experts()
        for axis, kind in _HANDLERS.items():
            name = f"{axis}_handler"
            handler = getattr(self, name)
            if handler is None:
                setattr(self, name, kind() if self.size(axis) > 1 else None)
            elif not isinstance(handler, kind):
                raise ArgumentTypeError(f"{name}={handler!r} must be a {kind.__name__}. Pass one, or leave it out.")
        self._check_async(launched)
        schedule = self.pp_handler.schedule if self.pp_handler is not None else ""
        if self.size("ep") > 1 and self.size("tp") > 1 and schedule in SPLIT_BACKWARD:
            raise ConfigurationError(
                f"ep_size={self.ep_size} and tp_size={self.tp_size} with schedule={schedule!r}: computing gradients of "
                "experts later than those of inputs is not supported where ranks share their tokens. Use the schedule "
                "'interleaved1f1b', or tp_size=1."
            )

    def _check_async(self, launched: ParallelismOptions) -> None:
        enabled = launched.enable_async_tp if self.tp_handler is None else self.tp_handler.enable_async_tp
        if not enabled:
            return
        advice = "Leave it out, or set"
        if self.size("tp") == 1:
            raise ConfigurationError(
                "enable_async_tp=True overlaps the communication of tensor parallelism, and tp_size=1. "
                f"{advice} tp_size."
            )
        if self.tp_sequence_parallel is False:
            raise ConfigurationError(
                "enable_async_tp=True needs hidden states that are sharded along the sequence, and "
                f"tp_sequence_parallel=False. {advice} that to True."
            )
        for axis in ("cp", "sp", "pp", "ep"):
            if self.size(axis) > 1:
                raise ConfigurationError(
                    f"enable_async_tp=True does not support {axis}_size={self.size(axis)}: the combination has not "
                    f"been compared with one process. {advice} {axis}_size=1."
                )

    def _check_experts(self) -> None:
        experts = self.size("ep")
        if experts == 1:
            return
        if self.size("sp") > 1:
            raise ConfigurationError(
                f"ep_size={experts} does not support sp_size={self.size('sp')}: the combination has not been compared "
                "with one process. Set one of them to 1, or use cp_size."
            )
        ranks = math.prod(self.size(axis) for axis in EXPERT_AXES)
        if ranks % experts:
            factors = " x ".join(f"{axis}_size={self.size(axis)}" for axis in EXPERT_AXES)
            raise ConfigurationError(
                f"ep_size={experts} does not divide {factors} = {ranks}, the processes that experts are distributed "
                "over. Choose a size that does."
            )

    def size(self, axis: str) -> int:
        """Return the size of an axis of :data:`accel.parallel.axes.AXES`, or of "ep"."""
        return int(getattr(self, f"{axis}_size"))

    @property
    def strategy(self) -> str:
        """The name of the strategy that this configures: plain data parallelism needs no more than DDP."""
        if self.pp_enabled:
            return "mesh_pp"
        return "mesh_ddp" if self.active_mesh_dims == ["dp_replicate"] else "mesh"

    def for_world(self, num_processes: int) -> ParallelismConfig:
        """Return this configuration, if it describes ``num_processes`` processes.

        Raises:
            ConfigurationError: the product of the sizes is another number; the message names every factor.
        """
        if self.total_size == num_processes:
            return self
        factors = " x ".join(f"{axis}_size={self.size(axis)}" for axis in AXES)
        raise ConfigurationError(
            f"ParallelismConfig: {factors} = {self.total_size}, but there "
            f"{'is' if num_processes == 1 else 'are'} {counted(num_processes, 'process')}. Start "
            f"{self.total_size} (--num_processes), or choose sizes whose product is {num_processes}."
        )

    @property
    def total_size(self) -> int:
        """The product of all sizes."""
        return math.prod(self.size(axis) for axis in AXES)

    @property
    def data_parallel_size(self) -> int:
        """How many ranks get different samples."""
        return math.prod(self.size(axis) for axis in DATA_AXES)

    @property
    def non_data_parallel_size(self) -> int:
        """How many ranks work on the same samples."""
        return self.total_size // self.data_parallel_size

    @property
    def active_mesh_dims(self) -> list[str]:
        """The axes of more than one rank, in the order of the mesh."""
        return self._active(AXES)

    @property
    def dp_dim_names(self) -> list[str]:
        """The active axes along which samples differ."""
        return self._active(DATA_AXES)

    @property
    def non_dp_dim_names(self) -> list[str]:
        """The active axes along which samples are the same."""
        return [axis for axis in self.active_mesh_dims if axis not in DATA_AXES]

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        """Those of dp_shard and cp that are active, over which parameters are sharded."""
        return self._active(("dp_shard", "cp"))

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """Those of dp_replicate, dp_shard and cp that are active, over which losses are averaged."""
        return self._active(("dp_replicate", "dp_shard", "cp"))

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The names of the axes that ``fully_shard`` works on; "dp_shard_cp" is dp_shard and cp as one."""
        return [*(["dp_replicate"] if self.dp_replicate_enabled else []), "dp_shard_cp"]

    def _active(self, axes: tuple[str, ...]) -> list[str]:
        return [axis for axis in axes if self.size(axis) > 1]

    @property
    def dp_replicate_enabled(self) -> bool:
        """True if there are several copies of the model."""
        return self.size("dp_replicate") > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """True if each copy of the model is sharded."""
        return self.size("dp_shard") > 1

    @property
    def tp_enabled(self) -> bool:
        """True if layers are sharded."""
        return self.size("tp") > 1

    @property
    def cp_enabled(self) -> bool:
        """True if sequences are split by context parallelism."""
        return self.size("cp") > 1

    @property
    def sp_enabled(self) -> bool:
        """True if sequences are split by sequence parallelism."""
        return self.size("sp") > 1

    @property
    def ep_enabled(self) -> bool:
        """True if experts are distributed."""
        return self.size("ep") > 1

    @property
    def pp_enabled(self) -> bool:
        """True if the model is a pipeline."""
        return self.size("pp") > 1

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Create the mesh, once; every rank must call it. None where no axis has more than one rank.

        Creates the process group first if there is none, from the variables of the launcher.

        Args:
            device_type: a device type of torch, such as "cpu".

        Raises:
            ConfigurationError: the number of processes is not the product of the sizes, or there is no process group
                and no launcher started several processes.
        """
        from .mesh import build, is_alive

        if self.active_mesh_dims and not is_alive(self.device_mesh):
            self.device_mesh = build({axis: self.size(axis) for axis in AXES}, self.for_world, device_type)
        return self.device_mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """Return the mesh; it is built first if a device type is given and there is none yet.

        Raises:
            ConfigurationError: there is no mesh yet, and no device type was given; or as in
                :meth:`build_device_mesh`.
        """
        if self.device_mesh is None and self.active_mesh_dims and device_type is None:
            raise ConfigurationError(
                "the device mesh has not been built. Pass get_device_mesh a device type, or create the Accelerator "
                "first."
            )
        return self.device_mesh if device_type is None else self.build_device_mesh(device_type)

    def to_json(self) -> str:
        """Sizes and backends as JSON, for logs and trackers."""
        return json.dumps(
            {f"{axis}_size": self.size(axis) for axis in (*AXES, "ep")}
            | {"cp_backend": self.cp_backend, "sp_backend": self.sp_backend}
        )


_HANDLERS: Mapping[str, type] = {
    "tp": TorchTensorParallelConfig,
    "cp": TorchContextParallelConfig,
    "sp": DeepSpeedSequenceParallelConfig,
    "pp": PipelineParallelConfig,
    "ep": ExpertParallelConfig,
}


@dataclass
class TorchTensorParallelPlugin:
    """Tensor parallelism by ``Accelerator(torch_tp_plugin=...)``, the older form of ``ParallelismConfig(tp_size=...)``.

    Args:
        tp_size: processes that each layer is sharded over. The remaining factor of the world size is copies of the
            model, each with data of its own.
        torch_device_mesh: an existing mesh with an axis "tp" of that size; it is used as it is.

    Raises:
        ConfigurationError: a size below 1.
    """

    tp_size: int = 1
    torch_device_mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        positive("tp_size", self.tp_size)

    @property
    def strategy(self) -> str:
        """The name of the strategy that this configures."""
        return "mesh"

    def for_world(self, num_processes: int) -> ParallelismConfig:
        """Return the configuration of this plugin for ``num_processes`` processes.

        Raises:
            ConfigurationError: ``tp_size`` does not divide the number of processes, or the mesh does not fit it.
        """
        if self.torch_device_mesh is not None:
            from .mesh import adopt

            config = ParallelismConfig(**_sizes(adopt(self.torch_device_mesh, self.tp_size)))
            config.device_mesh = self.torch_device_mesh
            return config.for_world(num_processes)
        if num_processes % self.tp_size:
            raise ConfigurationError(
                f"tp_size={self.tp_size} does not divide the {num_processes} processes. Choose a size that does."
            )
        return ParallelismConfig(**_sizes({"tp": self.tp_size, "dp_replicate": num_processes // self.tp_size}))


def _sizes(given: Mapping[str, int]) -> dict[str, Any]:
    """Return a size for every axis, so that none comes from the launcher."""
    return {f"{axis}_size": given.get(axis, 1) for axis in (*AXES, "ep")}
