"""What the simulated GPU enforces, and that it computes what the CPU computes."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

FIRST, SECOND = torch.device("simgpu", 0), torch.device("simgpu", 1)


@pytest.fixture
def small() -> Iterator[int]:
    """A limit of 1 MiB for the first device."""
    limit = torch.simgpu.mem_get_info(0)[1]
    torch.simgpu.set_memory_limit(torch.simgpu.memory_allocated(0) + (1 << 20), 0)
    yield 1 << 20
    torch.simgpu.set_memory_limit(limit, 0)


def test_the_cpu_cannot_touch_its_memory() -> None:
    program = "import torch, torch_simgpu, ctypes; ctypes.string_at(torch.ones(4, device='simgpu').data_ptr(), 4)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGSEGV


def test_devices_cannot_touch_each_others_memory() -> None:
    x, y = torch.ones(3, device=FIRST), torch.ones(3, device=SECOND)
    for other in (y, torch.ones(3)):
        with pytest.raises(RuntimeError, match="same device.*simgpu:0"):
            x.add_(other)
    with pytest.raises(RuntimeError, match="same device"):
        torch.cat([x, y])
    assert (x + y.to(FIRST)).tolist() == [2, 2, 2]
    assert (x + torch.tensor(1.0)).tolist() == [2, 2, 2]  # numbers may come from the CPU
    assert x[torch.tensor([0])].tolist() == [1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_memory_that_was_not_written_is_poison(dtype: torch.dtype) -> None:
    for _ in range(2):  # the second time it is a block that was freed
        x = torch.empty(1000, dtype=dtype, device=FIRST)
        assert x.isnan().all()
        x.fill_(1)
        del x
    assert (torch.empty(100, dtype=torch.int64, device=FIRST) < 0).all()


def test_beyond_the_limit_is_torchs_own_error(small: int) -> None:
    failures = torch.simgpu.failed_allocations(0)
    with pytest.raises(torch.OutOfMemoryError, match="2.00 MiB"):
        torch.empty(2 * small, dtype=torch.uint8, device=FIRST)
    kept = torch.empty(small - 512, dtype=torch.uint8, device=FIRST)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1024, dtype=torch.uint8, device=FIRST)
    torch.empty(1024, dtype=torch.uint8, device=SECOND)
    assert torch.simgpu.failed_allocations(0) == failures + 2
    del kept
    torch.empty(1024, dtype=torch.uint8, device=FIRST)


def test_memory_is_counted_and_used_again() -> None:
    before = torch.simgpu.memory_allocated(0)
    for elements in range(1, 20_000, 700):  # of many sizes, more together than fits
        x = torch.zeros(elements * 100, device=FIRST)
        assert torch.simgpu.memory_allocated(0) - before >= elements * 400
        del x
    assert torch.simgpu.memory_allocated(0) == before
    torch.simgpu.empty_cache()
    assert torch.simgpu.memory_reserved(0) == before


def test_memory_that_is_given_back_is_not_that_of_its_neighbours() -> None:
    blocks = [torch.full((128,), float(number), device=FIRST) for number in range(64)]  # eight to a page
    kept = blocks[1::2]
    del blocks
    torch.simgpu.empty_cache()
    assert [block.unique().tolist() for block in kept] == [[number] for number in range(1, 64, 2)]


@pytest.mark.parametrize("recorded", [True, False])
def test_giving_memory_back_waits_for_recorded_streams_only(recorded: bool) -> None:
    main, side = torch.simgpu.current_stream(FIRST), torch.Stream(FIRST)
    x, y = torch.full((1024,), 5.0, device=FIRST), torch.ones(1024, device=FIRST)
    side.wait_stream(main)
    with torch.simgpu.stream(side):
        on_side = torch.empty(1024, pin_memory=True).copy_(x, non_blocking=True)
    on_main = torch.empty(1024, pin_memory=True).copy_(y, non_blocking=True)
    if recorded:
        x.record_stream(side)
    del x, y
    torch.simgpu.empty_cache()
    assert torch.simgpu.queued_copies() == (1 if recorded else 2)
    assert (on_side.unique().tolist() == [5.0]) == recorded
    torch.simgpu.synchronize()
    assert (on_side.unique().tolist(), on_main.unique().tolist()) == ([5.0], [1.0])


def test_views_that_conjugate_or_negate_are_copied() -> None:
    x = torch.tensor([1 + 2j, 3 - 1j], device=FIRST)
    for view, expected in ((x.conj(), [1 - 2j, 3 + 1j]), (x.conj().imag, [-2, 1])):
        assert view.clone().tolist() == expected
        assert view.to(SECOND).tolist() == expected


def test_index_that_does_not_exist() -> None:
    with pytest.raises(RuntimeError, match="invalid device ordinal"):
        torch.empty(1, device=torch.device("simgpu", torch.simgpu.device_count()))


def test_a_forked_process_cannot_use_it_again() -> None:
    program = """
import os, sys, torch, torch_simgpu
torch.ones(1, device="simgpu")
child = os.fork()
if child == 0:
    try:
        torch.ones(1, device="simgpu")
    except RuntimeError as error:
        os._exit(7 if "forked" in str(error) and torch.simgpu._is_in_bad_fork() else 1)
    os._exit(0)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 7


def _train(device: torch.device, optimizer: type[torch.optim.Optimizer], **options: bool) -> list[float]:
    torch.manual_seed(0)
    encoder = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.1)
    model = torch.nn.Sequential(torch.nn.Embedding(10, 8), encoder, torch.nn.Linear(8, 10)).to(device)
    stepper = optimizer(model.parameters(), lr=0.1, **options)
    losses = []
    for step in range(4):
        x = (torch.arange(20).view(4, 5) * (step + 1) % 10).to(device)
        torch.manual_seed(step)
        loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepper.step()
        stepper.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_trains_as_the_cpu_does(optimizer: type[torch.optim.Optimizer], options: dict[str, bool]) -> None:
    # Not to the last bit: on accelerators clip_grad_norm_ takes the norm of all tensors at once.
    assert _train(SECOND, optimizer, **options) == pytest.approx(
        _train(torch.device("cpu"), optimizer, **options), rel=1e-6
    )


@pytest.mark.parametrize("transposed", [False, True])
def test_convolution(transposed: bool) -> None:
    torch.manual_seed(0)
    layer = (torch.nn.ConvTranspose2d if transposed else torch.nn.Conv2d)(2, 4, 3, groups=2)
    x = torch.randn(1, 2, 5, 5)
    grads = []
    for device in ("cpu", SECOND):
        layer.to(device).zero_grad()
        out = layer(x.to(device))
        out.square().sum().backward()
        grads.append([out.detach().cpu(), *(parameter.grad.clone().cpu() for parameter in layer.parameters())])
    for expected, got in zip(*grads, strict=True):
        torch.testing.assert_close(got, expected)


def test_each_device_has_a_generator() -> None:
    torch.manual_seed(3)
    states = torch.simgpu.get_rng_state_all()
    first = torch.rand(4, device=FIRST)
    assert torch.equal(first.cpu(), torch.rand(4, device=SECOND).cpu())
    assert not torch.equal(first.cpu(), torch.rand(4, device=FIRST).cpu())
    torch.simgpu.set_rng_state_all(states)
    assert torch.equal(first.cpu(), torch.rand(4, device=FIRST).cpu())
    cpu = torch.get_rng_state()
    F.dropout(torch.ones(8, device=FIRST))
    assert torch.equal(torch.get_rng_state(), cpu)
    with pytest.raises(RuntimeError, match="simgpu"):
        torch.rand(2, device=FIRST, generator=torch.Generator())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    layer = torch.nn.Linear(4, 4).to(FIRST)
    with torch.autocast("simgpu", dtype):
        out = layer(torch.ones(2, 4, device=FIRST))
        assert out.dtype == dtype
        assert F.softmax(out, -1).dtype == torch.float32


def test_saves_and_loads() -> None:
    buffer = io.BytesIO()
    torch.save({"x": torch.arange(3.0, device=SECOND)}, buffer)
    for where in (None, "cpu", FIRST):
        buffer.seek(0)
        loaded = torch.load(buffer, map_location=where, weights_only=True)["x"]
        assert loaded.device == torch.device(where or SECOND)
        assert loaded.tolist() == [0, 1, 2]


def test_module_to_device_keeps_parameters() -> None:
    layer = torch.nn.Linear(2, 2)
    weight = layer.weight
    assert layer.to(FIRST).weight is weight
    assert weight.device == FIRST
