"""The sizes of the axes of a mesh of processes, and the settings of each kind of parallelism. Torch is imported where a
mesh is built.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from accel_state.errors import ArgumentTypeError, ConfigurationError
from accel_state.humanize import counted
from accel_state.options import ParallelismOptions

from .axes import AXES, DATA_AXES, EXPERT_AXES

if TYPE_CHECKING:
    from torch.distributed import DeviceMesh

SCHEDULES: Mapping[str, str] = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
}
"""Schedules of torch.distributed.pipelining, by name."""

INTERLEAVED = frozenset({"interleaved1f1b", "interleaved_zero_bubble"})
"""Schedules with several stages on a rank."""

SPLIT_BACKWARD = frozenset({"interleaved_zero_bubble"})
"""Schedules that compute gradients of weights later than those of inputs. If parameters are freed in between, torch
computes wrong gradients in them, without an error."""


@dataclass
class TorchTensorParallelConfig:
    """How layers are sharded over the processes of the tensor-parallel axis.

    Args:
        enable_async_tp: overlap communication with matrix products; not available in this version: True logs a warning
            and has no effect.
        plan: how each module is sharded, by name or by pattern with ``*``: a style of Transformers ("colwise",
            "rowwise", ...) or a ``ParallelStyle`` of torch. None takes the model's own plan, or derives one for blocks
            shaped as Llama's or GPT-2's.
        loss_parallel: whether models of Transformers compute their loss from sharded logits in training. Logits are
            gathered when ``output.logits`` is read, on every rank of the axis.
    """

    enable_async_tp: bool = False
    plan: Mapping[str, Any] | None = None
    loss_parallel: bool = True

    def __post_init__(self) -> None:
        if self.enable_async_tp:
            logging.getLogger(__name__).warning(
                "enable_async_tp=True has no effect: overlapping communication with matrix products needs compiled "
                "models on devices with symmetric memory, and is not available in this version. Results are the same."
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


SP_ATTENTION = ("sdpa", "flash_attention_2", "flash_attention_3")


@dataclass
class DeepSpeedSequenceParallelConfig:
    """How sequences are exchanged for attention heads (Ulysses).

    A value of None takes the launcher's (``--parallelism_config_sp_...``).

    Args:
        sp_seq_length: tokens of a sequence, where all have the same length.
        sp_seq_length_is_variable: whether sequences differ in length (default True).
        sp_attn_implementation: name of the implementation of attention (default "sdpa").

    Raises:
        ConfigurationError: a length below 1, or an unknown implementation.
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
            _positive("sp_seq_length", self.sp_seq_length)
        name = str(self.sp_attn_implementation)
        if name not in SP_ATTENTION and "/" not in name:
            raise ConfigurationError(
                f"sp_attn_implementation={name!r} is not one of {', '.join(SP_ATTENTION)}, nor a kernel on the Hub "
                "(owner/name)."
            )


@dataclass
class PipelineParallelConfig:
    """How batches pass through the stages of a pipeline.

    Args:
        schedule: the order of forward and backward passes: "1f1b" (as few micro-batches in memory as there are stages),
            "gpipe" (all forward passes first), "interleaved1f1b" (several stages on each rank, so that less time is
            spent waiting), or "interleaved_zero_bubble" (the same, and gradients of weights are computed where a rank
            would wait; parameters must not be freed after the forward).
        num_microbatches: number of micro-batches of each rank's batch; None takes the number of ranks in the pipeline.
        stages_per_rank: stages on each rank; None takes 2 for the interleaved schedules and 1 otherwise.
        loss_fn: the loss of a micro-batch, from outputs and labels, a mean; None takes that of Transformers' causal
            language models.
        example: a small batch to record the model's calls with: a tuple or a dict. Generated for models of
            Transformers.

    Raises:
        ConfigurationError: a value that is not known, or that contradicts another.
    """

    schedule: str = "1f1b"
    num_microbatches: int | None = None
    stages_per_rank: int | None = None
    loss_fn: Callable[[Any, Any], Any] | None = None
    example: Mapping[str, Any] | Sequence[Any] | None = None

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ConfigurationError(
                f"{self.label('schedule')} is not one of {', '.join(SCHEDULES)}. Choose one of them."
            )
        is_interleaved = self.schedule in INTERLEAVED
        if self.stages_per_rank is None:
            self.stages_per_rank = 2 if is_interleaved else 1
        _positive("stages_per_rank", self.stages_per_rank)
        if self.num_microbatches is not None:
            _positive("num_microbatches", self.num_microbatches)
        if (self.stages_per_rank > 1) != is_interleaved:
            raise ConfigurationError(
                f"{self.label('stages_per_rank')} does not go with {self.label('schedule')}. Use "
                f"{' or '.join(sorted(INTERLEAVED))} with 2 or more stages per rank, or another schedule with 1."
            )

    def check_batch(self, samples: int, ranks: int) -> int:
        """The number of micro-batches for a batch of ``samples`` on a pipeline of ``ranks``.

        Raises:
            ConfigurationError: the batch cannot be split into that number, or the schedule does not allow it.
        """
        count = self.num_microbatches or ranks
        if self.schedule == "1f1b" and count < ranks:
            reason = f"1f1b needs at least as many as there are ranks in the pipeline ({ranks})"
        elif self.schedule in INTERLEAVED and count % ranks:
            reason = f"{self.schedule} needs a multiple of the {ranks} ranks of the pipeline"
        elif samples % count:
            reason = (
                f"a batch of {samples} samples on a rank is not a multiple of it (drop_last=True drops a short last "
                "batch)"
            )
        else:
            return count
        raise ConfigurationError(
            f"{self.label('num_microbatches', count)}: {reason}. Choose another number, or change the batch size."
        )

    def label(self, name: str, value: Any = None) -> str:
        """A setting in messages; by default with its own value. A subclass may name the option that it comes from."""
        return f"{name}={getattr(self, name) if value is None else value!r}"


@dataclass
class ExpertParallelConfig:
    """How the experts of a mixture are distributed and kept busy.

    Args:
        balance_rate: after each optimizer step, the bias with which a router chooses experts changes by this much: up
            for experts with fewer tokens than the mean, down for those with more (the auxiliary-loss-free balancing of
            DeepSeek-V3, arXiv:2408.15664, which uses 1e-3). It needs routers with such a bias
            (``e_score_correction_bias``). 0 leaves the bias as it is.

    Raises:
        ConfigurationError: a negative rate, or one that is not finite.
    """

    balance_rate: float = 0.0

    def __post_init__(self) -> None:
        rate = self.balance_rate
        if isinstance(rate, bool) or not isinstance(rate, (int, float)):
            raise ArgumentTypeError(f"balance_rate={rate!r} must be a number.")
        if not math.isfinite(rate) or rate < 0:
            raise ConfigurationError(f"balance_rate={rate!r} must be 0 or a positive number, such as 1e-3.")


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
            setattr(self, name, _positive(name, getattr(launched, name) if value is None else value))
        for axis in ("cp", "sp"):
            name = f"{axis}_backend"
            setattr(self, name, _one_of(name, getattr(self, name) or getattr(launched, name), _choices(name)))
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
        """The size of an axis of :data:`accel.parallel.axes.AXES`, or of "ep"."""
        return int(getattr(self, f"{axis}_size"))

    @property
    def strategy(self) -> str:
        """The name of the strategy that this configures: plain data parallelism needs no more than DDP."""
        if self.pp_enabled:
            return "mesh_pp"
        return "mesh_ddp" if self.active_mesh_dims == ["dp_replicate"] else "mesh"

    def for_world(self, num_processes: int) -> ParallelismConfig:
        """This configuration, if it describes ``num_processes`` processes.

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
        """Whether there are several copies of the model."""
        return self.size("dp_replicate") > 1

    @property
    def dp_shard_enabled(self) -> bool:
        """Whether each copy of the model is sharded."""
        return self.size("dp_shard") > 1

    @property
    def tp_enabled(self) -> bool:
        """Whether layers are sharded."""
        return self.size("tp") > 1

    @property
    def cp_enabled(self) -> bool:
        """Whether sequences are split by context parallelism."""
        return self.size("cp") > 1

    @property
    def sp_enabled(self) -> bool:
        """Whether sequences are split by sequence parallelism."""
        return self.size("sp") > 1

    @property
    def ep_enabled(self) -> bool:
        """Whether experts are distributed."""
        return self.size("ep") > 1

    @property
    def pp_enabled(self) -> bool:
        """Whether the model is a pipeline."""
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
        """The mesh; it is built first if a device type is given and there is none yet.

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
        _positive("tp_size", self.tp_size)

    @property
    def strategy(self) -> str:
        """The name of the strategy that this configures."""
        return "mesh"

    def for_world(self, num_processes: int) -> ParallelismConfig:
        """The configuration of this plugin for ``num_processes`` processes.

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
    """A size for every axis, so that none comes from the launcher."""
    return {f"{axis}_size": given.get(axis, 1) for axis in (*AXES, "ep")}


def _positive(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        kind = ConfigurationError if isinstance(value, int) else ArgumentTypeError
        raise kind(f"{name}={value!r} must be a positive integer.")
    return value


def _choices(name: str) -> tuple[str, ...]:
    return next(opt.choices or () for opt in ParallelismOptions.options() if opt.field == name)


def _one_of(name: str, value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ConfigurationError(f"{name}={value!r} is not one of {', '.join(allowed)}.")
    return str(value)
