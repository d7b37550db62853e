"""Collectives whose ranks pass different inputs raise on every rank, without debug mode."""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed as dist

from accel_state import DistributedOperationException, PartialState
from accel_state import operations as ops
from accel_state.collectives import header
from accel_state.collectives.header import Schedule
from accel_state.collectives.packing import SMALL_BYTES
from accel_state.operations.input_checks import exchange_lengths
from accel_state.testing import run_world

DRAWS = 120
# Other dtypes of the same size, whose bytes would be misread.
SAME_SIZE = {
    torch.float32: torch.int32,
    torch.int64: torch.float64,
    torch.bfloat16: torch.float16,
    torch.bool: torch.uint8,
}


def draw_tensor(draw: random.Random) -> torch.Tensor:
    shape = [draw.randint(1, 4) for _ in range(draw.randint(0, 3))]
    if draw.random() < 0.05:
        shape = [SMALL_BYTES // 2, 2]
    return torch.zeros(shape, dtype=draw.choice(list(SAME_SIZE)))


def draw_data(draw: random.Random, depth: int = 2) -> Any:
    kind = draw.choice(["tensor", "tensor", "list", "tuple", "dict"]) if depth else "tensor"
    if kind == "tensor":
        return draw_tensor(draw)
    members = [draw_data(draw, depth - 1) for _ in range(draw.randint(1, 3))]
    if kind == "dict":
        return {f"key{i}": member for i, member in enumerate(members)}
    return members if kind == "list" else tuple(members)


def other_dtype(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(SAME_SIZE[tensor.dtype])


def other_shape(tensor: torch.Tensor) -> torch.Tensor:
    # The same number of elements; scalars and tensors of length 1 are interchangeable.
    return tensor.reshape(1, 1) if tensor.numel() == 1 and tensor.ndim < 2 else tensor.reshape(-1, *(1,) * tensor.ndim)


def longer(tensor: torch.Tensor) -> torch.Tensor:
    return torch.cat([tensor.reshape(1), tensor.reshape(1)]) if tensor.ndim == 0 else torch.cat([tensor, tensor])


def empty(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty(0, 3)


def change_one(data: Any, draw: random.Random) -> tuple[str, Any]:
    """Data that differs in one tensor or in its keys, and the change."""
    tensors = ops.nested.leaves(data)
    change = draw.choice([other_dtype, other_shape, longer, empty])
    if isinstance(data, dict) and len(data) > 1 and draw.random() < 0.5:
        return "key order", dict(reversed(data.items()))
    if isinstance(data, (list, tuple)) and draw.random() < 0.2:
        return "number of tensors", [*data, torch.zeros(1)]
    chosen = draw.randrange(len(tensors))
    return change.__name__, ops.nested.replace_leaves(
        data, (change(tensor) if i == chosen else tensor for i, tensor in enumerate(tensors))
    )


def fill(data: Any, value: int) -> Any:
    return ops.recursively_apply(lambda tensor: torch.full_like(tensor, value % 2), data)


def check_result(operation: str, data: Any, world: int) -> None:
    """An operation whose inputs agree gives what the ranks' values imply."""
    rank = PartialState().process_index
    mine = fill(data, rank)
    if operation == "gather":
        result = ops.gather(mine)
        expected = [torch.cat([torch.full_like(t, r % 2).reshape(-1) for r in range(world)]) for t in leaves(data)]
        assert all(torch.equal(a.reshape(-1), b) for a, b in zip(leaves(result), expected, strict=True))
    elif operation == "reduce":
        result = ops.reduce(mine, "max")
        assert all((tensor == 1).all() for tensor in leaves(result))
    else:
        ops.broadcast(mine, from_process=1)
        assert all((tensor == 1).all() for tensor in leaves(mine))


def leaves(data: Any) -> list[torch.Tensor]:
    return ops.nested.leaves(data)


def random_calls(seed: int) -> list[str]:
    """Random operations on random data; in half of them, one rank's data differs. Returns the changes."""
    state = PartialState()
    world, rank = state.num_processes, state.process_index
    draw = random.Random(seed)  # the same draws on every rank
    refused = []
    for number in range(DRAWS):
        state.collectives.schedule.next = 0  # exchange a header in every call, although they follow each other fast
        operation = draw.choice(["gather", "reduce", "broadcast"])
        data = draw_data(draw)
        change, changed = change_one(data, draw)
        odd_rank = draw.randrange(world)
        if draw.random() < 0.5:
            check_result(operation, data, world)
            continue
        with pytest.raises(DistributedOperationException) as caught:
            getattr(ops, operation)(changed if rank == odd_rank else data)
        text = str(caught.value)
        case = f"draw {number}: {operation}, {change} on rank {odd_rank}: {data}\n{text}"
        assert f"Operation: `accel_state.operations.{operation}`" in text, case
        assert all(f"- Process {r}: " in text for r in range(world)) and "test_unequal_inputs.py" in text, case
        assert "--debug" in text, case
        assert any(advice in text for advice in ("pad_across_processes", "same keys", "same dtype")), case
        refused.append(change)
    return refused


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])  # the same for more ranks
def test_random_data_of_unequal_ranks(world: int) -> None:
    per_rank = run_world(random_calls, world, world, timeout=120)
    assert all(refused == per_rank[0] for refused in per_rank)
    assert len(set(per_rank[0])) == 6


def refused(function: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(DistributedOperationException) as caught:
        function(*args, **kwargs)
    return str(caught.value)


def left_early() -> str:
    """Rank 1 leaves the loop after two steps, and calls the next collective of the program."""
    for step in range(3):
        if PartialState().process_index == 1 and step == 2:
            return refused(ops.gather_object, ["end"])
        if step == 2:
            with pytest.raises(DistributedOperationException) as caught:
                ops.gather(torch.ones(2))
            return str(caught.value)
        ops.gather(torch.ones(2))
    raise AssertionError("the ranks did the same")


def named_cases() -> dict[str, str]:
    rank = PartialState().process_index
    found = {
        "keys": refused(
            ops.gather, {"x": torch.ones(2), "y": torch.zeros(2)} if rank else {"y": torch.zeros(2), "x": torch.ones(2)}
        ),
        "dtype": refused(ops.gather, torch.zeros(2, dtype=torch.int32 if rank else torch.float32)),
        "length": refused(ops.gather, {"logits": torch.zeros(2, 3 + rank)}),
        "operations": refused(ops.reduce if rank else ops.gather, torch.zeros(2)),
        "objects": refused(ops.gather_object if rank else ops.gather, torch.zeros(2)),
        "padding": refused(ops.pad_across_processes, [torch.zeros((2,) if rank else (2, 1))]),
        "number to pad": refused(ops.pad_across_processes, [torch.zeros(2)] * (1 + rank)),
        "ragged": refused(
            exchange_lengths, "metrics", torch.zeros(2 + rank, 3 + rank), [2 + rank], PartialState().collectives, 0
        ),
        "source": refused(ops.broadcast, torch.zeros(2), from_process=rank),
        "reduction": refused(ops.reduce, torch.zeros(2), "max" if rank else "sum"),
        "many": refused(ops.gather, [torch.zeros(2 + (rank and i == 37)) for i in range(50)]),
    }
    # What ranks may pass differently.
    assert ops.gather(torch.tensor(1.0) if rank else torch.ones(1)).tolist() == [1.0, 1.0]
    assert ops.reduce({"a": torch.ones(1), "name": f"rank {rank}"}, "sum")["a"].tolist() == [2.0]
    assert ops.gather([torch.ones(1)] if rank else (torch.ones(1),))[0].tolist() == [1.0, 1.0]
    assert ops.gather(OrderedDict(a=torch.ones(1)) if rank else {"a": torch.ones(1)})["a"].tolist() == [1.0, 1.0]
    assert ops.gather({object: torch.ones(1)})[object].tolist() == [1.0, 1.0]
    assert ops.pad_across_processes([torch.ones(1 + rank)] * 100)[99].shape == (2,)  # more lengths than a header has
    assert ops.pad_across_processes(torch.ones(3 - rank, 1 + rank), dim=1).shape == (3 - rank, 2)
    if rank:  # without communication, so one rank may call it alone
        assert ops.reduce(torch.ones(2, 2), "none").shape == (2, 2)
    return {**found, "early": left_early()}


def test_errors_name_what_differs() -> None:
    for found in run_world(named_cases, 2, timeout=60):
        assert "the structures of the ranks differ" in found["keys"]
        assert "Process 0: ['y']: float32[2], ['x']: float32[2] at" in found["keys"]
        assert "Process 1: ['x']: float32[2], ['y']: float32[2] at" in found["keys"]
        assert "the dtypes of the ranks differ" in found["dtype"] and "Process 1: int32[2] at" in found["dtype"]
        assert "- Process 0: {'logits': [2, 3]}" in found["length"] and "pad_across_processes" in found["length"]
        assert "test_unequal_inputs.py:" in found["length"] and " in refused" in found["length"]
        assert "Process 1: `accel_state.operations.reduce`" in found["operations"]
        assert "Process 1: `all_gather_object`" in found["objects"]
        assert "[0]: 2 dimensions" in found["padding"] and "calling `accel_state.operations.padding" in found["padding"]
        assert "same number of tensors" in found["number to pad"]
        assert "Operation: `metrics`" in found["ragged"] and "float32[*, 4]" in found["ragged"]
        assert "Process 1: from_process=1" in found["source"] and "Process 1: reduction='max'" in found["reduction"]
        assert "leaves a loop early" in found["early"] and "in left_early" in found["early"]
        assert "Process 1: [37]: float32[3] at" in found["many"] and "[36]" not in found["many"]


def compiled_calls() -> list[float]:
    function = torch.compile(lambda x: ops.gather(x * 2) + 1, fullgraph=True, backend="eager")
    gathered = function(torch.ones(1)) + function(torch.ones(1))
    return (gathered + ops.gather(torch.ones(1))).tolist()


@pytest.mark.slow  # importing the compiler takes up to 20 s on a loaded machine
def test_compiled_functions_exchange_no_headers() -> None:
    assert run_world(compiled_calls, 2) == [[7.0, 7.0]] * 2


def gather_elsewhere(value: Any) -> Any:
    return ops.gather(value)


def many_calls() -> tuple[int, int]:
    """Calls from other lines on each rank, with other pauses: (calls, headers)."""
    state = PartialState()
    rank, world = state.process_index, state.num_processes
    draw = random.Random(rank)
    schedule = state.collectives.schedule
    headers = 0
    plan = schedule.plan

    def counting(rows: Any, seconds: float) -> None:
        nonlocal headers
        headers += 1
        plan(rows, seconds)

    schedule.plan = counting
    for number in range(300):
        if draw.random() < 0.02:
            time.sleep(0.005)
        value = torch.tensor([rank, number])
        gathered = ops.gather(value) if rank == 0 else gather_elsewhere(value)
        assert gathered.tolist() == [item for r in range(world) for item in (r, number)]
        if number % 50 == 0:
            assert ops.gather_object(rank) == list(range(world))
            assert ops.pad_across_processes(torch.ones(1 + rank)).shape == (world,)
    group = dist.new_group()
    from accel_state.collectives.torch import TorchCollectives

    two = [TorchCollectives(torch.device("cpu"), group) for _ in range(2)]
    assert two[0].schedule is two[1].schedule is not schedule
    return schedule.calls, headers


def test_ranks_agree_on_the_calls_with_a_header() -> None:
    results = run_world(many_calls, 2, timeout=60)
    assert results[0] == results[1]
    calls, headers = results[0]
    assert calls == 300 and header.FIRST_CALLS <= headers < 150


def test_a_schedule_takes_a_hundredth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: clock)

    def spent(seconds_per_call: float, calls: int, schedule: Schedule) -> tuple[float, float]:
        nonlocal clock
        begin, in_headers = clock, 0.0
        for _ in range(calls):
            clock += seconds_per_call
            if schedule.is_due():
                mine, per_call = schedule.measurements()
                clock += 0.0001
                in_headers += 0.0001
                # The other rank came 50 ms earlier and waited.
                schedule.plan([(mine, per_call), (mine + 50_000, per_call)], 0.0001)
        return in_headers, clock - begin

    schedule = Schedule(host=True)
    assert spent(0.001, header.FIRST_CALLS, schedule)[0] == pytest.approx(0.0001 * header.FIRST_CALLS)
    in_headers, total = spent(0.001, 5000, schedule)
    assert 0.005 * total < in_headers < 0.02 * total
    # Steps of 20 ms leave time to check every call.
    assert spent(0.02, 100, schedule)[0] > 0.0001 * 80
    # On a device, a header waits for the queue, and all of that counts.
    device = Schedule(host=False)
    spent(0.02, header.FIRST_CALLS, device)
    assert spent(0.02, 1000, device)[0] < 0.0001 * 10
