"""The sizes of a mesh of processes: which kinds of parallelism a run is made of. Torch is imported where a mesh is
built.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from accel_state.errors import ConfigurationError
from accel_state.options import ParallelismOptions

from .pipeline import PipelineParallelConfig

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")
"""The axes, from the one whose neighbours are furthest apart to the one whose neighbours are consecutive ranks.

What talks most lies innermost, where ranks share a node: tensor parallelism all-reduces in every layer, a pipeline
passes activations on once a stage.
"""

MEANINGS: Mapping[str, str] = {
    "pp": "stages of a pipeline",
    "dp_replicate": "copies of the model",
    "dp_shard": "shards of a copy",
    "cp": "parts of a sequence",
    "sp": "parts of a sequence, by attention heads",
    "tp": "parts of each layer",
}

DATA_AXES = ("dp_replicate", "dp_shard")
"""Ranks that differ along these get different samples."""

AVERAGING_AXES = ("dp_replicate", "dp_shard", "cp", "sp")
"""Ranks that differ along these have different tokens, over which gradients are averaged."""

SHARDING_AXES = ("dp_shard", "cp", "sp")
"""Ranks over which parameters may be divided, since each needs all of them in turn."""


@dataclass
class TorchTensorParallelConfig:
    """How layers are shared by the processes of the tensor-parallel axis.

    Args:
        enable_async_tp: overlap communication with matrix products, which this version does not do.
        plan: how each module is divided, by name or by pattern with ``*``: a word of Transformers ("colwise",
            "rowwise", ...) or a ``ParallelStyle`` of torch. None takes the model's own plan, or derives one for blocks
            shaped as Llama's or GPT-2's.

    Raises:
        ConfigurationError: ``enable_async_tp`` is set.
    """

    enable_async_tp: bool = False
    plan: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            raise ConfigurationError(
                "enable_async_tp=True asks to overlap communication with matrix products, which needs compiled models "
                "on devices that map "
                "each other's memory, and is not part of this version. Leave it out: results are the same."
            )


@dataclass
class TorchContextParallelConfig:
    """How attention works where each process has a part of the sequence.

    Args:
        cp_comm_strategy: how keys and values travel: "allgather" (all at once) or "alltoall" (round a ring). None takes
            the launcher's choice (``--parallelism_config_cp_comm_strategy``), and "allgather" without one.

    Raises:
        ConfigurationError: another value.
    """

    cp_comm_strategy: str | None = None

    def __post_init__(self) -> None:
        if self.cp_comm_strategy is None:
            self.cp_comm_strategy = ParallelismOptions.from_environment().cp_comm_strategy
        _one_of("cp_comm_strategy", self.cp_comm_strategy, _choices("cp_comm_strategy"))


@dataclass
class DeepSpeedSequenceParallelConfig:
    """How sequences are shared by attention heads (Ulysses).

    What is None takes the launcher's value (``--parallelism_config_sp_...``).

    Args:
        sp_seq_length: tokens of a sequence, where they are always as many.
        sp_seq_length_is_variable: whether sequences differ in length (default True).
        sp_attn_implementation: name of the implementation of attention (default "sdpa").

    Raises:
        ConfigurationError: a length below 1.
    """

    sp_seq_length: int | None = None
    sp_seq_length_is_variable: bool | None = None
    sp_attn_implementation: str | None = None

    def __post_init__(self) -> None:
        launched = ParallelismOptions.from_environment()
        for item in fields(self):
            if getattr(self, item.name) is None:
                setattr(self, item.name, getattr(launched, item.name))
        if self.sp_seq_length is not None:
            _count("sp_seq_length", self.sp_seq_length)


@dataclass
class ParallelismConfig:
    """The sizes of the axes of a mesh; their product is the number of processes.

    A size that is left out takes the launcher's (``--parallelism_config_...``), and is 1 without one.

    Args:
        dp_replicate_size: copies of the model, each with data of its own.
        dp_shard_size: processes that a copy's parameters, gradients and optimizer state are divided over, each with
            data of its own.
        tp_size: processes that share each layer.
        cp_size: processes that share each sequence, in parts.
        cp_backend: implementation of that.
        sp_size: processes that share each sequence, by attention heads.
        sp_backend: implementation of that.
        tp_handler: further settings of tensor parallelism.
        cp_handler: further settings of context parallelism.
        sp_handler: further settings of sequence parallelism.
        pp_size: ranks that a model is divided over in stages, as a pipeline.
        pp_handler: further settings of the pipeline.

    Raises:
        ConfigurationError: a size below 1, axes that exclude each other, or settings of another class.
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
    device_mesh: DeviceMesh | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        launched = ParallelismOptions.from_environment()
        for axis in AXES:
            name = f"{axis}_size"
            value = getattr(self, name)
            setattr(self, name, _count(name, getattr(launched, name) if value is None else value))
        for axis in ("cp", "sp"):
            name = f"{axis}_backend"
            setattr(self, name, _one_of(name, getattr(self, name) or getattr(launched, name), _choices(name)))
        if self.size("cp") > 1 and self.size("sp") > 1:
            raise ConfigurationError(
                f"cp_size={self.cp_size} and sp_size={self.sp_size} contradict each other: a sequence is shared in "
                "one way. Leave one of "
                "them at 1."
            )
        for axis, kind in _HANDLERS.items():
            self._settle_handler(axis, kind)

    def _settle_handler(self, axis: str, kind: type) -> None:
        name = f"{axis}_handler"
        handler = getattr(self, name)
        if handler is None:
            setattr(self, name, kind() if self.size(axis) > 1 else None)
        elif not isinstance(handler, kind):
            raise ConfigurationError(f"{name}={handler!r} is no {kind.__name__}. Pass one, or leave it out.")

    def size(self, axis: str) -> int:
        """The size of an axis of :data:`AXES`."""
        return int(getattr(self, f"{axis}_size"))

    @property
    def strategy(self) -> str:
        """The name of the strategy that this configures: plain data parallelism needs no more than DDP."""
        if self.pp_enabled:
            return "mesh_pp"
        return "mesh_ddp" if self.active_mesh_dims == ["dp_replicate"] else "mesh"

    def for_world(self, num_processes: int) -> ParallelismConfig:
        """The mesh of so many processes: this one.

        Raises:
            ConfigurationError: there is another number than the product of the sizes; it names every factor.
        """
        if self.total_size == num_processes:
            return self
        factors = " x ".join(f"{axis}_size={self.size(axis)}" for axis in AXES)
        raise ConfigurationError(
            f"ParallelismConfig: {factors} = {self.total_size}, but there are {num_processes} processes. Start "
            f"{self.total_size} "
            f"(--num_processes), or choose sizes whose product is {num_processes}."
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
        """The active ones of dp_shard and cp, over which parameters are divided."""
        return self._active(("dp_shard", "cp"))

    @property
    def dp_cp_dim_names(self) -> list[str]:
        """The active ones of dp_replicate, dp_shard and cp, over which losses are averaged."""
        return self._active(("dp_replicate", "dp_shard", "cp"))

    @property
    def fsdp_dim_names(self) -> list[str]:
        """The names of the axes that ``fully_shard`` works on; "dp_shard_cp" is dp_shard and cp as one."""
        return [*(["dp_replicate"] if self.dp_replicate_enabled else []), "dp_shard_cp"]

    def _active(self, axes: tuple[str, ...]) -> list[str]:
        return [axis for axis in axes if self.size(axis) > 1]

    @property
    def dp_replicate_enabled(self) -> bool:
        """Whether there are several copies of the model."""
        return self.size("dp_replicate") > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether a copy is divided."""
        return self.size("dp_shard") > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are shared."""
        return self.size("tp") > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are shared in parts."""
        return self.size("cp") > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether sequences are shared by attention heads."""
        return self.size("sp") > 1

    @property
    def pp_enabled(self) -> bool:
        """Whether the model is a pipeline."""
        return self.size("pp") > 1

    def build_device_mesh(self, device_type: str) -> DeviceMesh | None:
        """Lay the processes out as a mesh, once; every rank must call it. None where no axis has more than one rank.

        Args:
            device_type: as torch names it, such as "cpu".

        Raises:
            ConfigurationError: there is another number of processes than the sizes say, or no process group.
        """
        from .mesh import build, is_alive

        if self.active_mesh_dims and not is_alive(self.device_mesh):
            self.device_mesh = build(self, device_type)
        return self.device_mesh

    def get_device_mesh(self, device_type: str | None = None) -> DeviceMesh | None:
        """The mesh; it is built first if a kind of device is given and there is none yet.

        Raises:
            ConfigurationError: there is no mesh yet, and no kind of device was given; or as in
                :meth:`build_device_mesh`.
        """
        if self.device_mesh is None and self.active_mesh_dims and device_type is None:
            raise ConfigurationError(
                "the device mesh has not been built. Give get_device_mesh a kind of device, or make the Accelerator "
                "first."
            )
        return self.device_mesh if device_type is None else self.build_device_mesh(device_type)

    def to_json(self) -> str:
        """Sizes and back ends as JSON, for logs and trackers."""
        return json.dumps(
            {f"{axis}_size": self.size(axis) for axis in AXES}
            | {"cp_backend": self.cp_backend, "sp_backend": self.sp_backend}
        )


_HANDLERS: Mapping[str, type] = {
    "tp": TorchTensorParallelConfig,
    "cp": TorchContextParallelConfig,
    "sp": DeepSpeedSequenceParallelConfig,
    "pp": PipelineParallelConfig,
}


@dataclass
class TorchTensorParallelPlugin:
    """The older way to ask for tensor parallelism: ``Accelerator(torch_tp_plugin=...)``.

    Args:
        tp_size: processes that share each layer. The others hold copies of the model, each with data of its own.
        torch_device_mesh: a mesh of one's own with an axis "tp" of that size; it is used as it is.

    Raises:
        ConfigurationError: a size below 1.
    """

    tp_size: int = 1
    torch_device_mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        _count("tp_size", self.tp_size)

    @property
    def strategy(self) -> str:
        """The name of the strategy that this configures."""
        return "mesh"

    def for_world(self, num_processes: int) -> ParallelismConfig:
        """The mesh of so many processes that this asks for.

        Raises:
            ConfigurationError: the processes cannot be divided in that way, or the mesh is another one.
        """
        from .mesh import config_of

        if self.torch_device_mesh is not None:
            return config_of(self.torch_device_mesh, self.tp_size).for_world(num_processes)
        if num_processes % self.tp_size:
            raise ConfigurationError(
                f"tp_size={self.tp_size} does not divide the {num_processes} processes. Choose a size that does."
            )
        sizes = dict.fromkeys((f"{axis}_size" for axis in AXES), 1)
        return ParallelismConfig(
            **{**sizes, "tp_size": self.tp_size, "dp_replicate_size": num_processes // self.tp_size}
        )  # type: ignore[arg-type]


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{name}={value!r} is no number of processes. Allowed: whole numbers from 1.")
    return value


def _choices(name: str) -> tuple[str, ...]:
    return next(opt.choices or () for opt in ParallelismOptions.options() if opt.field == name)


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ConfigurationError(f"{name}={value!r} is not one of {', '.join(allowed)}.")
    return str(value)
