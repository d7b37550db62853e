"""Settings of DDP, and its gradient compression hooks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from accel_state.arguments import check_number
from accel_state.enums import NamedChoice
from accel_state.errors import ConfigurationError
from accel_state.logging import warn_once

from .base import KwargsHandler

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

Hook = Callable[..., Any]


def batched_power_sgd(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket by PowerSGD (https://arxiv.org/abs/1905.13727, Algorithm 1), as one square matrix.

    torch's ``batched_powerSGD_hook`` fails at the first compressed step (up to 2.13 at least).
    """
    if state.iter < state.start_powerSGD_iter:
        state.maybe_increase_iter(bucket)
        return default_hooks.allreduce_hook(state.process_group, bucket)
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
    """Q of the last step, or random values that are equal on all ranks."""
    side = matrix.shape[0]
    rank = min(state.matrix_approximation_rank, side)
    last = state.q_memory_dict.get(index)
    if state.warm_start and last is not None and last.shape == (side, rank):
        return last
    # The state's generator has the same seed on every rank.
    generator = torch.Generator().manual_seed(int(state.rng.randint(1_000_000_000)))
    return torch.randn(side, rank, generator=generator).to(matrix.device, matrix.dtype)


def _orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Orthonormal columns that span the same space; QR does not support half precision."""
    return torch.linalg.qr(matrix.float())[0].to(matrix.dtype)


def _annotate(hook: Hook) -> Hook:
    """Give a hook the annotations that DDP compares as objects; here they are strings."""
    hook.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
    return hook


_annotate(batched_power_sgd)


class DDPCommunicationHookType(NamedChoice):
    """How DDP compresses gradients for the all-reduce."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """How models are wrapped in ``torch.nn.parallel.DistributedDataParallel``, which documents the first seven.

    Args:
        dim: the batch dimension.
        broadcast_buffers: broadcast rank 0's buffers at the start of each forward.
        bucket_cap_mb: size of the gradient buckets in MiB.
        find_unused_parameters: search for parameters that do not contribute to the loss, at each forward.
        check_reduction: accepted by torch for compatibility.
        gradient_as_bucket_view: make gradients views of the buckets, which saves a copy of them.
        static_graph: promise that every iteration uses the same parameters.
        comm_hook: how gradients are compressed for the all-reduce.
        comm_wrapper: "fp16" or "bf16": convert gradients before the hook.
        comm_state_option: settings of the PowerSGD state, such as ``{"matrix_approximation_rank": 2}``.

    Raises:
        ConfigurationError: an unknown hook or wrapper.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("DistributedDataParallelKwargs.bucket_cap_mb", self.bucket_cap_mb, above=0)
        self.comm_hook = DDPCommunicationHookType(self.comm_hook)
        wrapper = DDPCommunicationHookType(self.comm_wrapper)
        if wrapper not in (DDPCommunicationHookType.NO, DDPCommunicationHookType.FP16, DDPCommunicationHookType.BF16):
            raise ConfigurationError(f"comm_wrapper={wrapper.value!r} is not one of no, fp16, bf16.")
        self.comm_wrapper = wrapper

    def to_dict(
        self, ignore_keys: tuple[str, ...] = ("comm_hook", "comm_wrapper", "comm_state_option")
    ) -> dict[str, Any]:
        """Return all settings except those of the communication hook, which DDP does not take."""
        return {key: value for key, value in super().to_dict().items() if key not in ignore_keys}

    def ddp_arguments(self) -> dict[str, Any]:
        """Return the arguments for DDP: those that differ from the defaults here."""
        return {key: value for key, value in self.to_kwargs().items() if key in self.to_dict()}

    def register_comm_hook(self, model: DistributedDataParallel) -> None:
        """Install the communication hook on a wrapped model; nothing for "no" without a wrapper."""
        hook_type = DDPCommunicationHookType
        if self.comm_hook in (hook_type.POWER_SGD, hook_type.BATCHED_POWER_SGD):
            state = PowerSGDState(process_group=None, **self.comm_state_option)
        else:
            state = None
            if self.comm_state_option:
                warn_once(
                    __name__,
                    f"comm_state_option={self.comm_state_option!r} has no effect with "
                    f"comm_hook={self.comm_hook.value!r}: only power_sgd and batched_power_sgd keep a state.",
                )
        if self.comm_hook == hook_type.NO and self.comm_wrapper == hook_type.NO:
            return
        hooks: dict[DDPCommunicationHookType, Hook] = {
            hook_type.NO: default_hooks.allreduce_hook,
            hook_type.FP16: default_hooks.fp16_compress_hook,
            hook_type.BF16: default_hooks.bf16_compress_hook,
            hook_type.POWER_SGD: powerSGD_hook,
            hook_type.BATCHED_POWER_SGD: batched_power_sgd,
        }
        hook = hooks[self.comm_hook]
        if self.comm_wrapper == hook_type.FP16:
            hook = default_hooks.fp16_compress_wrapper(hook)
        elif self.comm_wrapper == hook_type.BF16:
            hook = default_hooks.bf16_compress_wrapper(hook)
        if dist.get_backend() == "gloo" and hook.__name__.startswith("bf16"):
            # gloo reduces bfloat16, but DDP refuses hooks with this name unless NCCL is new enough.
            compress = hook
            hook = _annotate(lambda state, bucket: compress(state, bucket))
        model.register_comm_hook(state=state, hook=hook)
