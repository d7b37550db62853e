"""Norms of gradients of which each rank holds a part, against torch's of the whole."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from accel.core.grad_norm import distinct, groups_over, norm_of, power_sum, scale_to_norm
from accel_state import PartialState
from accel_state.testing import run_world

CPU = torch.device("cpu")
ORDERS = (1.0, 2.0, 3.0, math.inf)


def norms_of_parts() -> None:
    rank = PartialState().process_index
    generator = torch.Generator().manual_seed(0)
    whole, copied, single, own = (torch.randn(n, 3, generator=generator) for n in (7, 2, 1, 2))
    mesh = init_device_mesh("cpu", (1, 2))
    sharded = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
    replica = distribute_tensor(copied, mesh, [Replicate(), Replicate()])
    of_one_rank = distribute_tensor(single, mesh, [Replicate(), Shard(0)]).to_local()
    assert of_one_rank.numel() == (0 if rank else 3)
    groups = groups_over(sharded)
    assert groups == (mesh.get_group(1),)
    assert groups_over(replica) == groups_over(whole) == ()
    for order in ORDERS:
        parts = [sharded.to_local(), of_one_rank]
        totals = [power_sum(parts, groups, order, CPU), power_sum([replica.to_local()], (), order, CPU)]
        everything = torch.cat([whole, copied, single])
        assert norm_of(totals, order, (), CPU).item() == pytest.approx(everything.norm(order).item(), rel=1e-6)
        # Each stage of a pipeline has parameters of its own.
        of_stages = norm_of([power_sum([own[rank]], (), order, CPU)], order, (dist.group.WORLD,), CPU)
        assert of_stages.item() == pytest.approx(own.norm(order).item(), rel=1e-6)


def test_the_norm_of_parts_on_two_ranks_is_that_of_the_whole() -> None:
    run_world(norms_of_parts, 2)


def test_powers_are_added_up_in_the_given_precision() -> None:
    tiny = torch.full((2,), 1e-30, dtype=torch.float64)
    assert power_sum([tiny], (), 2.0, CPU, torch.float64).item() == pytest.approx(2e-60)
    halves = [torch.full((1000,), 1.0078125, dtype=torch.bfloat16)] * 3
    assert power_sum(halves, (), 2.0, CPU).item() == pytest.approx(3000 * 1.0078125**2, rel=1e-6)
    nothing = norm_of([power_sum([], (), 2.0, CPU)], 2.0, (), CPU)
    assert nothing.item() == norm_of([], 2.0, (), CPU).item() == 0.0


@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_gradients_are_scaled_as_torch_does(max_norm: float) -> None:
    ours, theirs = [], []
    for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.float64):
        parameter = nn.Parameter(torch.zeros(5, dtype=dtype))
        parameter.grad = torch.arange(1, 6).to(dtype)
        ours.append(parameter.grad.clone())
        theirs.append(parameter)
    norm = nn.utils.clip_grad_norm_(theirs, max_norm, foreach=False)
    scale_to_norm(ours, norm, max_norm)
    for mine, parameter in zip(ours, theirs, strict=True):
        # The factor is rounded to the type of the gradients.
        torch.testing.assert_close(mine, parameter.grad, rtol=2 * torch.finfo(mine.dtype).eps, atol=0)
        assert (mine[0].item() < 1) is (max_norm < 1)


def test_gradients_that_are_views_of_another_one_are_left_out() -> None:
    flat, other = torch.arange(10.0), torch.arange(10.0)
    assert [part.numel() for part in distinct([flat[2:5], flat, flat[:2], flat[9:], other[2:5]])] == [10, 3]
    # Neighbours and parts that only overlap are not inside one another.
    assert len(distinct([flat[:5], flat[5:], flat[4:6], flat[1:2]])) == 3
    assert len(distinct([flat[3:6], flat[3:6], flat[3:5], flat[4:6]])) == 1
