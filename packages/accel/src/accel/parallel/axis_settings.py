"""The settings of each kind of parallelism, which :class:`accel.parallel.config.ParallelismConfig` combines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from accel_state.arguments import check_flag, check_number
from accel_state.errors import ArgumentTypeError, ConfigurationError
from accel_state.options import ParallelismOptions

SCHEDULES: Mapping[str, str] = {
    "gpipe": "ScheduleGPipe",
    "1f1b": "Schedule1F1B",
    "interleaved1f1b": "ScheduleInterleaved1F1B",
    "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
    "zbv": "ScheduleZBVZeroBubble",
    "dualpipev": "ScheduleDualPipeV",
}
"""Schedules of torch.distributed.pipelining, by name."""

INTERLEAVED = frozenset({"interleaved1f1b", "interleaved_zero_bubble"})
"""Schedules with several stages on a rank, assigned to the ranks in turns."""

V_SHAPED = frozenset({"zbv", "dualpipev"})
"""Schedules with two stages on a rank: the stages go from the first rank to the last one, and back."""

SPLIT_BACKWARD = frozenset({"interleaved_zero_bubble"}) | V_SHAPED
"""Schedules that compute gradients of weights later than those of inputs. If parameters are freed in between, torch
computes wrong gradients in them, without an error."""


@dataclass
class TorchTensorParallelConfig:
    """How layers are sharded over the processes of the tensor-parallel axis.

    Args:
        enable_async_tp: overlap the products of sharded layers with their communication, by torch's operators over
            symmetric memory: needs CUDA devices of one node and hidden states that are sharded along the sequence.
            ``--parallelism_config_enable_async_tp`` turns it on too.
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
        check_flag("enable_async_tp", self.enable_async_tp)
        self.enable_async_tp = self.enable_async_tp or ParallelismOptions.from_environment().enable_async_tp


@dataclass
class TorchContextParallelConfig:
    """How attention works where each process has a part of the sequence.

    Args:
        cp_comm_strategy: how keys and values travel: "allgather" (all at once) or "alltoall" (round a ring). None takes
            the launcher's choice (``--parallelism_config_cp_comm_strategy``), and "allgather" without one.
        cp_balance: which positions each process gets: pieces of equal length from both ends of a sequence ("length"),
            which are equal work for one document; or, if there are positions of several documents among the buffers,
            pieces with about the same number of attended pairs ("documents"), for which those positions are read. None
            takes the launcher's choice (``--parallelism_config_cp_balance``), and "length" without one.

    Raises:
        ConfigurationError: another value.
    """

    cp_comm_strategy: str | None = None
    cp_balance: str | None = None

    def __post_init__(self) -> None:
        for item in fields(self):
            if getattr(self, item.name) is None:
                setattr(self, item.name, getattr(ParallelismOptions.from_environment(), item.name))
            one_of_choices(item.name, getattr(self, item.name))


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
            positive("sp_seq_length", self.sp_seq_length)
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
            spent waiting), "interleaved_zero_bubble" (the same, and gradients of weights are computed where a rank
            would wait; parameters must not be freed after the forward), or "zbv" and "dualpipev" (as the one before,
            with the first and the last stage on the first rank).
        num_microbatches: number of micro-batches of each rank's batch; None takes the number of ranks in the pipeline,
            and twice that for "dualpipev".
        stages_per_rank: stages on each rank; None takes 1 for "1f1b" and "gpipe" and 2 for all others.
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
        is_interleaved, is_v_shaped = self.schedule in INTERLEAVED, self.schedule in V_SHAPED
        if self.stages_per_rank is None:
            self.stages_per_rank = 2 if is_interleaved or is_v_shaped else 1
        positive("stages_per_rank", self.stages_per_rank)
        if self.num_microbatches is not None:
            positive("num_microbatches", self.num_microbatches)
        if is_v_shaped and self.stages_per_rank != 2:
            raise ConfigurationError(
                f"{self.label('stages_per_rank')} does not go with {self.label('schedule')}, which has two stages on "
                "each rank. Leave it out."
            )
        if not is_v_shaped and (self.stages_per_rank > 1) != is_interleaved:
            raise ConfigurationError(
                f"{self.label('stages_per_rank')} does not go with {self.label('schedule')}. Use "
                f"{' or '.join(sorted(INTERLEAVED))} with 2 or more stages per rank, or another schedule with 1."
            )

    def stages_of(self, rank: int, ranks: int) -> list[int]:
        """Return the stages of a rank in a pipeline of ``ranks``, in order."""
        count = ranks * (self.stages_per_rank or 1)
        return [rank, count - 1 - rank] if self.schedule in V_SHAPED else list(range(rank, count, ranks))

    def check_batch(self, samples: int, ranks: int) -> int:
        """Return the number of micro-batches for a batch of ``samples`` on a pipeline of ``ranks``.

        Raises:
            ConfigurationError: the batch cannot be split into that number, or the schedule does not allow it.
        """
        count = self.num_microbatches or ranks * (2 if self.schedule == "dualpipev" else 1)
        if self.schedule == "dualpipev" and count < 2 * ranks:
            reason = f"dualpipev needs at least as many as there are stages in the pipeline ({2 * ranks})"
        elif self.schedule == "1f1b" and count < ranks:
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
        """Return a setting in messages; by default with its own value.

        A subclass may name the option that it comes from.
        """
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
        check_number("balance_rate", self.balance_rate, at_least=0)


def positive(name: str, value: Any) -> int:
    """Return the value of a setting, if it is a positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        kind = ConfigurationError if isinstance(value, int) else ArgumentTypeError
        raise kind(f"{name}={value!r} must be a positive integer.")
    return value


def one_of_choices(name: str, value: Any) -> str:
    """Return the value of a setting, if the launcher allows it."""
    allowed = next(opt.choices or () for opt in ParallelismOptions.options() if opt.field == name)
    if value not in allowed:
        raise ConfigurationError(f"{name}={value!r} is not one of {', '.join(allowed)}.")
    return str(value)
