"""PowerSGD over whole buckets.

torch has a hook of this kind, ``batched_powerSGD_hook``, but up to 2.13 at least it hands matrices to a function that
asserts batches of matrices, so it fails at the first compressed step. This one keeps torch's state class and settings.

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS
2019, https://arxiv.org/abs/1905.13727, Algorithm 1, with a bucket's gradients laid out as one square matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from accel_state.enums import NamedChoice
from accel_state.errors import ConfigurationError

from .base import KwargsHandler

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel


def batched_power_sgd(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients in a low-rank approximation.

    A bucket of n elements, padded to an s x s matrix M, travels as P (s x r) and Q (s x r), so as 2 s r numbers instead
    of n.

    Args:
        state: settings (rank, when to start, error feedback, warm start) and what is kept between steps.
        bucket: the gradients.

    Returns:
        A future of the averaged gradients, of the bucket's shape.
    """
    if state.iter < state.start_powerSGD_iter:
        state.maybe_increase_iter(bucket)
        return allreduce_hook(state.process_group, bucket)
    gradient, index = bucket.buffer(), bucket.index()
    side = math.ceil(math.sqrt(gradient.numel()))
    matrix = gradient.new_zeros(side, side)
    flat = matrix.view(-1)[: gradient.numel()]
    flat.copy_(gradient)
    if state.use_error_feedback and index in state.error_dict:
        flat.add_(state.error_dict[index])
    q = _orthonormal(_right_factor(state, index, matrix))
    p = matrix @ q
    world_size = dist.get_world_size(state.process_group)

    def on_p(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        p = _orthonormal(future.value()[0])
        q = matrix.t() @ p
        dist.all_reduce(q, group=state.process_group)
        q /= world_size
        if state.warm_start:
            state.q_memory_dict[index] = q
        approximation = (p @ q.t()).view(-1)[: gradient.numel()]
        if state.use_error_feedback:
            state.error_dict[index] = flat - approximation
        gradient.copy_(approximation)
        state.maybe_increase_iter(bucket)
        return gradient

    future = dist.all_reduce(p, group=state.process_group, async_op=True).get_future()
    result: torch.futures.Future[torch.Tensor] = future.then(on_p)
    return result


def _right_factor(state: PowerSGDState, index: int, matrix: torch.Tensor) -> torch.Tensor:
    """The last step's Q, or random values that are the same on all ranks."""
    side = matrix.shape[0]
    rank = min(state.matrix_approximation_rank, side)
    kept = state.q_memory_dict.get(index)
    if state.warm_start and kept is not None and kept.shape == (side, rank):
        return kept
    # The state's generator is seeded alike on every rank.
    generator = torch.Generator().manual_seed(int(state.rng.randint(1_000_000_000)))
    return torch.randn(side, rank, generator=generator).to(matrix.device, matrix.dtype)


def _orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Columns that span the same space; QR factorisation has no half precision."""
    return torch.linalg.qr(matrix.float())[0].to(matrix.dtype)


# DDP compares annotations as objects, and here they are text.
batched_power_sgd.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}


class DDPCommunicationHookType(NamedChoice):
    """How DDP compresses gradients on their way."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """How models are wrapped in ``torch.nn.parallel.DistributedDataParallel``; see there for the first seven.

    Args:
        dim: the batch dimension.
        broadcast_buffers: send rank 0's buffers to all ranks at the start of each forward.
        bucket_cap_mb: size in MiB of the buckets in which gradients are reduced.
        find_unused_parameters: look for parameters that take no part in the loss, at each forward.
        check_reduction: accepted by torch for compatibility.
        gradient_as_bucket_view: let gradients be views of the buckets, which saves a copy of them.
        static_graph: promise that every iteration uses the same parameters.
        comm_hook: how gradients are compressed for the all-reduce.
        comm_wrapper: "fp16" or "bf16": a conversion around the hook.
        comm_state_option: settings of the PowerSGD state, such as ``{"matrix_approximation_rank": 2}``.

    Raises:
        ConfigurationError: a hook or wrapper that is not known.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: Literal[DDPCommunicationHookType.NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16] = (
        DDPCommunicationHookType.NO
    )
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.comm_hook = DDPCommunicationHookType(self.comm_hook)
        wrapper = DDPCommunicationHookType(self.comm_wrapper)
        if wrapper not in (DDPCommunicationHookType.NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16):
            raise ConfigurationError(f"comm_wrapper={wrapper.value!r} is not one of no, fp16, bf16.")
        self.comm_wrapper = wrapper

    def to_dict(
        self, ignore_keys: tuple[str, ...] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """All settings but those of the communication hook, which are no arguments of DDP."""
        return {key: value for key, value in super().to_dict().items() if key not in ignore_keys}

    def ddp_arguments(self) -> dict[str, Any]:
        """The arguments for DDP: those that differ from the defaults, so that torch keeps its own."""
        return {key: value for key, value in self.to_kwargs().items() if key in self.to_dict()}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Install the communication hook on a wrapped model; nothing for "no" without a wrapper."""
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        hook, state = _HOOKS[self.comm_hook](self.comm_state_option)
        if hook is None and self.comm_wrapper == DDPCommunicationHookType.NO:
            return
        hook = _wrap(hook or allreduce_hook, self.comm_wrapper)
        model.register_comm_hook(state=state, hook=_accepted_by_torch(hook))


Hook = Callable[..., Any]


def _no_hook(options: dict[str, Any]) -> tuple[Hook | None, Any]:
    _refuse_options("no", options)
    return None, None


def _fp16(options: dict[str, Any]) -> tuple[Hook | None, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    _refuse_options("fp16", options)
    return fp16_compress_hook, None


def _bf16(options: dict[str, Any]) -> tuple[Hook | None, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

    _refuse_options("bf16", options)
    return bf16_compress_hook, None


def _power_sgd(options: dict[str, Any]) -> tuple[Hook | None, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

    return powerSGD_hook.powerSGD_hook, powerSGD_hook.PowerSGDState(process_group=None, **options)


def _batched_power_sgd(options: dict[str, Any]) -> tuple[Hook | None, Any]:
    from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

    return batched_power_sgd, PowerSGDState(process_group=None, **options)


_HOOKS: dict[DDPCommunicationHookType, Callable[[dict[str, Any]], tuple[Hook | None, Any]]] = {
    DDPCommunicationHookType.NO: _no_hook,
    DDPCommunicationHookType.FP16: _fp16,
    DDPCommunicationHookType.BF16: _bf16,
    DDPCommunicationHookType.POWER_SGD: _power_sgd,
    DDPCommunicationHookType.BATCHED_POWER_SGD: _batched_power_sgd,
}


def _accepted_by_torch(hook: Hook) -> Hook:
    """A hook that DDP takes: it looks at annotations, and refuses bf16 by the hook's name unless NCCL is new enough.

    gloo reduces bfloat16 as well, so over gloo the hook goes by another name.
    """
    import torch
    import torch.distributed as dist

    if dist.get_backend() != "gloo" or not hook.__name__.startswith("bf16"):
        return hook

    def compress_over_gloo(state: Any, bucket: Any) -> Any:
        return hook(state, bucket)

    compress_over_gloo.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    return compress_over_gloo


def _refuse_options(hook: str, options: dict[str, Any]) -> None:
    if options:
        raise ConfigurationError(
            f"comm_state_option={options!r} has no effect with comm_hook={hook!r}, which keeps no state. It is for "
            "power_sgd and "
            "batched_power_sgd."
        )


def _wrap(hook: Hook, wrapper: DDPCommunicationHookType) -> Hook:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    if wrapper == DDPCommunicationHookType.FP16:
        return default_hooks.fp16_compress_wrapper(hook)
    if wrapper == DDPCommunicationHookType.BF16:
        return default_hooks.bf16_compress_wrapper(hook)
    return hook
