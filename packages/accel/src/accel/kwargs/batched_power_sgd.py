"""PowerSGD over whole buckets.

torch has a hook of this kind, ``batched_powerSGD_hook``, but up to 2.13 at least it hands matrices to a function that asserts
batches of matrices, so it fails at the first compressed step. This one keeps torch's state class and settings.

Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", NeurIPS 2019,
https://arxiv.org/abs/1905.13727, Algorithm 1, with a bucket's gradients laid out as one square matrix.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState


def batched_power_sgd(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients in a low-rank approximation.

    A bucket of n elements, padded to an s x s matrix M, travels as P (s x r) and Q (s x r), so as 2 s r numbers instead of n.

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
