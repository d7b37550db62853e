"""Collectives over real gloo worlds, against what the ranks' inputs say the result must be."""

from __future__ import annotations

import linecache
from collections import namedtuple
from functools import partial
from typing import Any

import pytest
import torch

from accel_state import PartialState
from accel_state import operations as ops
from accel_state.collectives.packing import SMALL_BYTES, ByteLayout, as_bytes, groups_by_dtype, nbytes, split_small
from accel_state.collectives.single import Collectives
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

Pair = namedtuple("Pair", "a b")
DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.bool,
    torch.int8,
    torch.int64,
    torch.complex64,
]


def make(rank: int) -> dict[str, Any]:
    """A batch of known difficult cases: scalars, empties, bools, bf16, non-contiguous, large and small."""
    generator = torch.Generator().manual_seed(rank)
    return {
        "dtypes": [(torch.randn(3, generator=generator) * 3).to(d) for d in DTYPES],
        "scalar": torch.tensor(float(rank)),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(3, 5, generator=generator).t(),
        "pair": Pair(torch.tensor([rank]), (torch.randn(2, 2, 2, generator=generator).requires_grad_(),)),
        "large": torch.randn(SMALL_BYTES // 4 + 10, generator=generator),
    }


def check_all() -> None:
    state = PartialState()
    rank, world = state.process_index, state.num_processes
    everyone = [make(r) for r in range(world)]
    check_gather(rank, everyone)
    check_broadcast(rank, world, everyone)
    check_reduce(rank, world)
    check_exchange(rank, world)
    check_padding(rank, world)
    check_objects(rank, world)
    assert ops.copy_tensor_to_devices(torch.arange(3) + rank if rank == world - 1 else None).tolist() == [
        world - 1,
        world,
        world + 1,
    ]
    own = torch.full((1 + rank,), rank)
    assert ops.copy_tensor_to_devices(own).tolist() == [0], "the lowest rank's"
    assert own.tolist() == [rank] * (1 + rank), "another rank's tensor was overwritten"
    assert ops.gather_tensor_shape(torch.ones(2, 5) if rank == 1 else None) == torch.Size([2, 5])


def equal(left: Any, right: Any) -> bool:
    lefts, rights = ops.nested.leaves(left), ops.nested.leaves(right)
    return len(lefts) == len(rights) and all(
        a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(lefts, rights, strict=True)
    )


def check_gather(rank: int, everyone: list[Any]) -> None:
    gathered = ops.gather(everyone[rank])
    at_least_1d = [
        ops.recursively_apply(lambda t: t.detach().reshape(1) if t.ndim == 0 else t.detach(), data) for data in everyone
    ]
    assert equal(gathered, ops.concatenate(at_least_1d))
    assert type(gathered["pair"]) is Pair and not gathered["pair"].b[0].requires_grad
    with pytest.raises(TypeError, match="not a str"):
        ops.gather({"a": "text"})


def check_broadcast(rank: int, world: int, everyone: list[Any]) -> None:
    mine = ops.recursively_apply(lambda t: t.detach().clone() if t.is_contiguous() else t.detach(), make(rank))
    result = ops.broadcast(mine, from_process=world - 1)
    assert result is mine and equal(mine, everyone[world - 1])
    for wrong in (-1, world):
        with pytest.raises(ValueError, match=f"from_process={wrong}"):
            ops.broadcast(mine, from_process=wrong)


def check_reduce(rank: int, world: int) -> None:
    data = {
        "f": [torch.tensor([1.0, 2.0]) * (rank + 1), torch.tensor(float(rank))],
        "i": torch.tensor([rank, 2 * rank]),
        "b": torch.tensor([rank == 0, True]),
    }
    total = sum(range(1, world + 1))
    mean = ops.reduce(data)
    assert torch.allclose(mean["f"][0], torch.tensor([1.0, 2.0]) * total / world) and mean["i"].dtype == torch.float32
    assert data["f"][0].tolist() == [rank + 1.0, 2.0 * (rank + 1)], "the input was changed"
    assert mean["b"].tolist() == [1 / world, 1.0]
    for reduction in ("sum", "max", "min"):
        assert ops.reduce(data, reduction)["i"].dtype == torch.int64
    summed = ops.reduce(data, "sum", scale=0.5)
    assert summed["f"][0].tolist() == [total / 2, float(total)]
    assert ops.reduce(data, "sum")["b"].tolist() == [1, world]
    for dtype in (torch.uint8, torch.int8, torch.int32, torch.int64):
        # In their own dtype twice as many overflow.
        small = torch.tensor([200 if dtype == torch.int64 else torch.iinfo(dtype).max // 2 + 1], dtype=dtype)
        before = small.clone()
        assert ops.reduce(small, "sum").tolist() == [world * small.item()], dtype
        assert torch.equal(small, before) and ops.reduce(small, "max").dtype == dtype
    assert ops.reduce(data, "max")["i"].tolist() == [world - 1, 2 * (world - 1)] and ops.reduce(data, "min")[
        "i"
    ].tolist() == [0, 0]
    assert ops.reduce(data, "none")["i"].tolist() == [rank, 2 * rank]
    assert ops.reduce(torch.ones(3, dtype=torch.bfloat16), "sum").tolist() == [float(world)] * 3
    large = torch.ones(SMALL_BYTES)
    assert ops.reduce([large, large], "sum")[1].sum() == world * SMALL_BYTES


def check_exchange(rank: int, world: int) -> None:
    collectives = PartialState().collectives
    # Rank r sends r + 1 elements to every rank.
    sent = torch.tensor([100.0 * rank + target for target in range(world) for _ in range(rank + 1)])
    received = collectives.all_to_all(sent, [source + 1 for source in range(world)])
    assert received.tolist() == [100.0 * source + rank for source in range(world) for _ in range(source + 1)]
    # Every rank sends each of the others two tensors, which arrive in this order.
    others = [other for other in range(world) if other != rank]
    given = [(other, torch.full((count,), rank)) for other in others for count in (3, 5)]
    arrived = [(other, torch.full((count,), -1)) for other in others for count in (3, 5)]
    collectives.exchange(given, arrived)
    assert [tensor.tolist() for _, tensor in arrived] == [[other] * count for other in others for count in (3, 5)]
    # Rank 0 sends rank r a part of its own; also without the backend's scatter.
    for scatter in (collectives.scatter, partial(Collectives.scatter, collectives)):
        parts = [torch.tensor([10 * target, -target]) for target in range(world)] if rank == 0 else None
        assert scatter(torch.zeros(2, dtype=torch.int64), parts).tolist() == [10 * rank, -rank]


def check_padding(rank: int, world: int) -> None:
    data = [torch.full((rank + 1, 2), rank + 1), torch.full((3,), rank), torch.tensor(rank)]
    scalar = torch.tensor(5.0 + rank)
    for dim in (0, -1):
        assert ops.pad_across_processes(scalar, dim=dim) is scalar, "it has no dimension to pad"
    padded = ops.pad_across_processes(data, pad_index=-1)
    assert (
        padded[0].shape == (world, 2)
        and (padded[0][: rank + 1] == rank + 1).all()
        and (padded[0][rank + 1 :] == -1).all()
    )
    assert padded[1].shape == (3,) and padded[2].item() == rank
    assert ops.pad_across_processes(torch.ones(rank + 1, 2), dim=-2).shape == (world, 2)
    first = ops.pad_across_processes(torch.ones(2, rank + 1), dim=-1, pad_first=True)
    assert first.shape == (2, world) and first[0].tolist() == [0.0] * (world - rank - 1) + [1.0] * (rank + 1)
    for value, dtype, allowed in (
        (-100, torch.uint8, "0 to 255"),
        (-100, torch.bool, "0 to 1"),
        (0.5, torch.int64, "to 9"),
    ):
        equal = torch.ones(2, dtype=dtype)
        with pytest.raises(ConfigurationError, match=f"pad_index={value} is not a value of {dtype}.*{allowed}"):
            ops.pad_across_processes([equal, torch.ones(rank + 1, dtype=dtype)], pad_index=value)  # type: ignore[arg-type]
        assert ops.pad_across_processes(equal, pad_index=value) is equal  # type: ignore[arg-type]
        assert ops.pad_across_processes(torch.ones(rank + 1, dtype=dtype), pad_index=1).tolist() == [1] * world
    ragged = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    with pytest.warns(ops.CannotPadNestedTensorWarning) as nested_warnings:
        padded = ops.pad_across_processes(ragged)
    assert padded is ragged
    with pytest.warns(UserWarning, match="values of type NoneType, str unchanged") as type_warnings:
        mixed = ops.pad_across_processes({"x": torch.ones(rank + 1), "name": f"r{rank}", "none": None})
    assert mixed["x"].shape == (world,) and mixed["name"] == f"r{rank}" and mixed["none"] is None
    for warning in (*nested_warnings, *type_warnings):
        assert "pad_across_processes(" in linecache.getline(warning.filename, warning.lineno), "not the caller's line"


def check_objects(rank: int, world: int) -> None:
    assert ops.gather_object([f"r{rank}"] * (rank + 1)) == [f"r{r}" for r in range(world) for _ in range(r + 1)]
    assert ops.gather_object({"rank": rank}) == [{"rank": r} for r in range(world)]
    assert ops.gather_object([]) == []
    # Around the size up to which objects travel with the header, and one rank above it.
    collectives = PartialState().collectives
    for largest in range(450, 500):
        for sizes in ([largest] * world, [largest if r == 1 else 0 for r in range(world)]):
            expected = [bytes([r + 1]) * size for r, size in enumerate(sizes)]
            assert collectives.all_gather_object(expected[rank]) == expected
            assert collectives.gather_object(expected[rank], 1) == (expected if rank == 1 else None)
            assert collectives.broadcast_object(expected[rank], 1) == expected[1]
    rows = ops.gather_object(torch.tensor([rank, rank + 10]))
    assert [row.item() for row in rows] == [value for r in range(world) for value in (r, r + 10)]
    objects = [rank, "x" * rank]
    assert ops.broadcast_object_list(objects, 1) is objects and objects == [1, "x"]
    if rank == 1:
        ops.broadcast_object_list(["a", "b"], 1)
    else:
        with pytest.raises(ValueError, match=f"list of 1 on rank {rank} and of 2 on rank 1"):
            ops.broadcast_object_list([None], 1)
    state = PartialState()
    assert state.collectives.scatter_object([f"for {r}" for r in range(world)] if rank == 0 else None) == f"for {rank}"


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])  # the same for more ranks
def test_collectives(world: int) -> None:
    run_world(check_all, world)


def test_a_single_process_is_a_world_of_one() -> None:
    data = make(0)
    assert ops.gather(data) is data
    assert ops.gather_object(["a"]) == ["a"] and ops.gather_object({"a": 1}) == [{"a": 1}]
    tensor = torch.arange(3)
    assert ops.gather_object(tensor) is tensor and ops.gather_object(torch.tensor(1)) == [torch.tensor(1)]
    assert ops.pad_across_processes(data["scalar"]) is data["scalar"]
    assert ops.reduce(torch.tensor([2.0]), "mean", scale=3).tolist() == [6.0]
    assert ops.reduce(torch.tensor([2])).dtype == torch.float32
    with pytest.raises(ValueError, match=r"reduction='median' is not one of"):
        ops.reduce(torch.ones(1), "median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="None on every rank"):
        ops.copy_tensor_to_devices(None)
    collectives = PartialState().collectives
    assert (collectives.rank, collectives.world_size) == (0, 1)
    assert collectives.scatter_object(["mine"]) == "mine" and collectives.broadcast_object(3) == 3
    with pytest.raises(ValueError, match="one object per rank"):
        collectives.scatter_object(["a", "b"])


def gradients_of_reductions() -> dict[str, list[float]]:
    """Each rank's gradient of a loss over reduced values, with weights that differ between ranks and elements."""
    rank = PartialState().process_index
    weight = torch.tensor([1.0 + rank, 10.0])
    found = {}
    for reduction, scale in (("sum", 1.0), ("mean", 1.0), ("mean", 3.0), ("none", 1.0), ("none", 3.0)):
        value = torch.tensor([2.0, 3.0 + rank], requires_grad=True)
        data = ops.reduce({"loss": value * 2, "count": torch.tensor([rank])}, reduction, scale)
        assert not data["count"].requires_grad
        data["loss"] += 1  # what is returned may be changed in place
        (data["loss"] * weight).sum().backward()
        found[f"{reduction} {scale:g}"] = value.grad.tolist()
    with torch.no_grad():
        assert not ops.reduce(value, "sum").requires_grad
    assert not any(ops.reduce(value, reduction).requires_grad for reduction in ("max", "min"))
    constant = ops.reduce(value if rank == 0 else value.detach(), "mean")
    assert constant.requires_grad == (rank == 0)
    return found


def test_gradients_flow_through_means_and_sums_to_every_rank() -> None:
    assert run_world(gradients_of_reductions, 2) == [
        # of both ranks' losses together: 2 * (1 + 2) and 2 * (10 + 10)
        {"sum 1": [6, 40], "mean 1": [3, 20], "mean 3": [9, 60], "none 1": [2 * own, 20], "none 3": [6 * own, 60]}
        for own in (1, 2)
    ]
    assert gradients_of_reductions() == {
        **{name: [2, 20] for name in ("sum 1", "mean 1", "none 1")},
        **{name: [6, 60] for name in ("mean 3", "none 3")},
    }


def test_layout_is_aligned_and_reversible() -> None:
    tensors = [
        torch.ones(3, dtype=torch.bool),
        torch.randn(5, dtype=torch.float64),
        torch.randn(2, 2).bfloat16(),
        torch.tensor(1 + 2j),
    ]
    layout = ByteLayout(tensors)
    assert (layout.spans, layout.total) == ([(0, 3), (16, 56), (64, 72), (80, 88)], 96)
    assert layout.pack(tensors).shape == (96,) and layout.pack(tensors, 100).shape == (100,)
    assert all(torch.equal(a, b) for a, b in zip(tensors, layout.unpack(layout.pack(tensors), tensors), strict=True))
    of_two_ranks = layout.unpack(torch.stack([layout.pack(tensors)] * 2), tensors)
    assert all(torch.equal(torch.stack([a, a]), b) for a, b in zip(tensors, of_two_ranks, strict=True))
    assert ByteLayout(tensors[:1]).pack(tensors[:1]).shape == (16,)


def test_every_tensor_is_sent_once() -> None:
    sizes = [0, 1, 2, SMALL_BYTES, SMALL_BYTES + 1]
    empty, one, two, limit, large = (torch.empty(size, dtype=torch.uint8) for size in sizes)
    assert split_small([empty, one, two, limit, large]) == ([1, 2, 3], [4])
    assert split_small([large, one, large]) == ([], [0, 1, 2]), "nothing to pack it with"
    assert split_small([one, two]) == ([0, 1], [])
    tensors = [torch.ones(1), torch.ones(1).half(), torch.ones(2), torch.ones(3)]
    assert groups_by_dtype(tensors, [0, 1, 3]) == [[0, 3], [1]]
    assert nbytes(tensors[3]) == 12 and as_bytes(torch.ones(2, 2)).shape == (16,)


def count_messages() -> tuple[int, int]:
    """How many collectives a nested batch costs, counted by torch's own record of the process group."""
    import torch.distributed as dist

    from accel_state.collectives import torch as over_torch

    calls = []
    original = over_torch._all_gather_flat

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return original(*args, **kwargs)

    over_torch._all_gather_flat = counting
    PartialState().collectives.schedule.next = 100  # no header: the steady state
    ops.gather({f"k{i}": torch.ones(4).to(DTYPES[i % len(DTYPES)]) for i in range(40)})
    assert dist.is_initialized()
    return len(calls), PartialState().num_processes


def test_many_small_tensors_travel_in_one_message() -> None:
    assert run_world(count_messages, 2) == [(1, 2), (1, 2)]


class Marked(torch.Tensor):
    """A subclass with an attribute, which its operations hand on."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, Marked) and isinstance(args[0], Marked):
            result.mark = getattr(args[0], "mark", None)
        return result


def types_of_results() -> dict[str, list[Any]]:
    marked = torch.arange(3.0).as_subclass(Marked)
    marked.mark = "here"
    scalar, parameter = torch.tensor(1.0).as_subclass(Marked), torch.nn.Parameter(torch.ones(2))
    results = {name: getattr(ops, name)([marked, scalar, parameter]) for name in ("gather", "reduce", "broadcast")}
    assert results["gather"][0].tolist() == [0.0, 1.0, 2.0] * 2
    assert results["gather"][1].tolist() == [1.0, 1.0]
    return {
        name: [type(tensor).__name__ for tensor in result] + [result[0].mark, bool(result[2].requires_grad)]
        for name, result in results.items()
    }


def test_subclasses_of_tensors_are_kept_by_every_operation() -> None:
    for found in run_world(types_of_results, 2):
        assert found == {
            "gather": ["Marked", "Marked", "Tensor", "here", False],
            "reduce": ["Marked", "Marked", "Tensor", "here", True],
            "broadcast": ["Marked", "Marked", "Parameter", "here", True],  # in place
        }
