"""What only CUDA has: ``scripts/test --device cuda tests/device``. docs/hardware.md lists these calls."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from accel import Accelerator
from accel_state import devices
from accel_state.errors import ConfigurationError
from accel_state.memory import find_executable_batch_size
from accel_state.testing import run_world

DEVICE = torch.device("cuda", 0)


def in_a_fresh_process(code: str, *launcher: str, **variables: str) -> str:
    """What a script prints that starts as a user's does; CUDA is not initialised before it is."""
    hidden = ("ACCELERATE_", "ACCEL_TEST_DEVICE")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    command = [sys.executable, *launcher, "-c", textwrap.dedent(code)]
    done = subprocess.run(
        command, env={**environment, **variables}, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_counting_devices_starts_no_cuda_and_leaves_the_process_able_to_fork() -> None:
    printed = in_a_fresh_process(
        """
        import os, torch
        from accel import Accelerator
        from accel_launch.accelerators.nvidia import Nvidia
        from accel_state import devices
        from accel_state.device_checks import get_driver_version, get_gpu_info
        cuda = devices.get("cuda")
        assert devices.detect().name == "cuda" and cuda.supports_autocast(torch.float16)
        names, listed = get_gpu_info()
        assert Nvidia().count_installed() == cuda.device_count() == listed == len(names) > 0, (names, listed)
        assert not torch.cuda.is_initialized()
        child = os.fork()
        if child == 0:
            assert Accelerator().device == torch.device("cuda", 0) and torch.ones(2, device="cuda").sum() == 2
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        print(names[0], get_driver_version())
        """
    )
    assert printed.split()[-1][0].isdigit()


def test_a_notebook_whose_session_has_used_cuda_is_told_so_before_it_forks() -> None:
    printed = in_a_fresh_process(
        """
        import torch
        from accel import notebook_launcher
        from accel_state.errors import ConfigurationError
        weights = torch.ones(2, device="cuda")
        try:
            notebook_launcher(print, num_processes=2)
        except ConfigurationError as error:
            print(error)
        """
    )
    assert "CUDA is initialised in this session already" in printed and "On a GPU: weights." in printed


def test_values_are_not_read_while_a_graph_is_captured() -> None:
    from accel_state.operations import gather

    cuda, x = devices.get("cuda"), torch.ones(4, device=DEVICE)
    Accelerator()
    torch.cuda.synchronize()
    graph, seen = torch.cuda.CUDAGraph(), []
    assert not cuda.is_capturing()
    with torch.cuda.graph(graph):
        seen.append(cuda.is_capturing())
        y = gather(x * 2)
    x.fill_(3)
    graph.replay()
    assert seen == [True] and not cuda.is_capturing() and y.tolist() == [6.0] * 4


def test_a_prepared_step_can_be_captured_and_gives_the_losses_of_an_eager_one() -> None:
    def losses(captured: bool) -> list[float]:
        torch.manual_seed(0)
        accelerator = Accelerator()
        model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
        x, labels = torch.randn(8, 16, device=DEVICE), torch.randint(4, (8,), device=DEVICE)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())

        def step() -> torch.Tensor:
            loss = functional.cross_entropy(model(x), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            return loss.detach()

        with torch.cuda.stream(side):
            found = [float(step()) for _ in range(3)]
        torch.cuda.current_stream().wait_stream(side)
        if not captured:
            return [*found, *(float(step()) for _ in range(4))]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            loss = step()
        for _ in range(4):
            graph.replay()
            found.append(float(loss))
        return found

    eager, replayed = losses(False), losses(True)
    assert len(set(eager)) == 7 and replayed == pytest.approx(eager, rel=1e-6)


def test_deterministic_training_repeats_to_the_last_bit() -> None:
    code = """
        import torch
        from torch import nn
        from torch.nn import functional
        from accel import Accelerator
        from accel_state.random import set_seed
        set_seed(0, deterministic=True)
        accelerator = Accelerator(mixed_precision="bf16")
        model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.GELU(), nn.Flatten(), nn.Linear(16 * 36, 10))
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        for step in range(5):
            images, labels = torch.randn(32, 3, 8, 8, device="cuda"), torch.randint(10, (32,), device="cuda")
            loss = functional.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        total = sum(p.double().sum() for p in model.parameters())
        print(torch.backends.cudnn.deterministic, loss.item().hex(), total.item().hex())
    """
    first, second = in_a_fresh_process(code), in_a_fresh_process(code)
    assert first == second and first.startswith("True ")


def test_a_batch_that_does_not_fit_becomes_smaller_until_it_does() -> None:
    tried: list[int] = []
    total = torch.cuda.mem_get_info(DEVICE)[1]
    torch.cuda.set_per_process_memory_fraction(0.5, DEVICE)  # others may use it

    @find_executable_batch_size(starting_batch_size=1 << 14)
    def train(batch_size: int) -> int:
        tried.append(batch_size)
        return torch.empty(batch_size * total >> 12, dtype=torch.uint8, device=DEVICE).numel()

    try:
        assert train() <= total / 2
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
    assert tried[0] == 1 << 14 and len(tried) >= 4


@pytest.mark.parametrize("library", ["cuBLAS", "cuDNN"])
def test_errors_of_libraries_without_memory_are_recognised(library: str) -> None:
    """In a process of its own, which fills the GPU before the library has its workspace."""
    printed = in_a_fresh_process(
        f"""
        import torch
        from accel_state import devices
        cuda, library = devices.get("cuda"), {library!r}
        weight = torch.randn(64, 64, 3, 3, device="cuda", dtype=torch.float16)
        images = torch.randn(256, 64, 128, 128, device="cuda", dtype=torch.float16)
        kept = []
        for size in (2**30, 2**26, 2**22, 2**20):
            try:
                while True:
                    kept.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
            except torch.OutOfMemoryError as error:
                assert cuda.is_out_of_memory(error)
        try:
            if library == "cuBLAS":
                images[0, 0] @ images[0, 0]
            else:
                torch.nn.functional.conv2d(images, weight)
            torch.cuda.synchronize()
        except Exception as error:
            print(type(error).__name__, str(error).splitlines()[0])
            assert cuda.is_out_of_memory(error), error
        else:
            raise AssertionError("there was memory left")
        """
    )
    assert printed


def plain(precision: str, compiled: bool) -> list[float]:
    """Losses of plain PyTorch, as its documents on mixed precision write a step."""
    model, optimizer, batches = parts()
    if compiled:
        model = torch.compile(model)
    dtype = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")
    found = []
    for inputs, labels in batches:
        with torch.autocast("cuda", dtype, enabled=precision != "no"):
            loss = functional.cross_entropy(model(inputs).float(), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def parts() -> tuple[Any, torch.optim.Optimizer, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 10)).to(DEVICE)
    batches = [(torch.randn(32, 64, device=DEVICE), torch.randint(10, (32,), device=DEVICE)) for _ in range(8)]
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), batches


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_losses_are_those_of_plain_pytorch(precision: str, compiled: bool) -> None:
    expected = plain(precision, compiled)
    model, optimizer, batches = parts()
    accelerator = Accelerator(mixed_precision=precision, dynamo_backend="inductor" if compiled else None)
    model, optimizer = accelerator.prepare(model, optimizer)
    found = []
    for inputs, labels in batches:
        with accelerator.autocast():
            loss = functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    # Compiled, the graphs differ: accel's model contains the autocast.
    wanted = pytest.approx(expected, rel=1e-5 if precision == "no" else 1e-2) if compiled else expected
    assert len(set(expected)) == 8 and found == wanted


@pytest.mark.parametrize("scaling", ["dynamic", "delayed", "rowwise"])
def test_products_of_8_bits_are_those_of_the_wider_dtype(scaling: str) -> None:
    """Within what one rounding of the 8-bit operands costs."""
    from accel_fp8 import FP8Recipe, NativeLinear, autocast, convert
    from accel_fp8.matmul import computes_in_8_bits

    assert computes_in_8_bits(DEVICE) == (torch.cuda.get_device_capability() >= (8, 9))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512, bias=False)).to(DEVICE)
    weight = model[0].weight.detach().double()
    convert(model, FP8Recipe(backend="native", scaling=scaling, module_filter_func=lambda layer, name: True))
    assert isinstance(model[0], NativeLinear)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(128, 256, device=DEVICE, dtype=dtype).requires_grad_()
        seen = torch.randn(128, 512, device=DEVICE, dtype=dtype)
        for _ in range(2):  # delayed scales are known after one step
            model.zero_grad()
            x.grad = None
            with autocast(model):
                out = model(x)
            out.backward(seen.to(out.dtype))
        exact = x.detach().double() @ weight.T
        assert x.grad is not None and model[0].weight.grad is not None
        # E4M3 rounds to 2**-4, E5M2 to 2**-3: errors of sums of random signs relative to the sums.
        assert (out.double() - exact).norm() / exact.norm() < 0.06
        exact = seen.double() @ weight
        assert (x.grad.double() - exact).norm() / exact.norm() < 0.09
        exact = seen.double().T @ x.detach().double()
        assert (model[0].weight.grad.double() - exact).norm() / exact.norm() < 0.09


@pytest.mark.parametrize("heads", [(4, 4), (4, 2)], ids=["equal heads", "fewer keys"])
@pytest.mark.parametrize("length", [256, 328])
def test_flex_attention_keeps_packed_documents_apart(heads: tuple[int, int], length: int) -> None:
    from accel.parallel.documents import Documents

    torch.manual_seed(0)
    lengths = (length // 2, 1, 60, length - length // 2 - 61)
    documents = Documents.of_positions(torch.cat([torch.arange(n) for n in lengths])[None].to(DEVICE))

    def attended(attend: Callable[..., torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
        torch.manual_seed(1)
        shapes = [(1, n, length, 64) for n in (heads[0], heads[1], heads[1])]
        inputs = [torch.randn(shape, device=DEVICE).to(dtype).requires_grad_() for shape in shapes]
        out = attend(*inputs)
        (out * torch.linspace(-1, 1, out.numel(), device=DEVICE, dtype=dtype).view_as(out)).sum().backward()
        return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]

    def each(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        pieces = zip(*(x.split(lengths, 2) for x in (query, key, value)), strict=True)
        each = functional.scaled_dot_product_attention
        return torch.cat([each(*one, is_causal=True, enable_gqa=heads[0] != heads[1]) for one in pieces], 2)

    exact = attended(each, torch.float64)
    for dtype, allowed in ((torch.float32, 2e-3), (torch.bfloat16, 2e-2)):  # float32 is multiplied as TF32 by Triton
        found = attended(lambda *qkv: documents.attend_whole(*qkv, None, 0.0), dtype)
        for got, right in zip(found, exact, strict=True):
            assert (got.double() - right).norm() / right.norm() < allowed


def reduce_and_split() -> list[Any]:
    """A group bound to the GPU, a part of it, and what they sum."""
    import torch.distributed as dist

    accelerator = Accelerator()
    group = dist.group.WORLD
    assert group is not None
    part = dist.new_group([accelerator.process_index], use_local_synchronization=True)
    whole, own = (torch.full((3,), accelerator.process_index + 1.0, device=accelerator.device) for _ in range(2))
    dist.all_reduce(whole)
    dist.all_reduce(own, group=part)
    return [dist.get_backend(), str(group.bound_device_id), whole.tolist(), own.tolist()]


def test_nccl_is_bound_to_the_gpu_and_splits() -> None:
    found = run_world(reduce_and_split, 2)
    assert [rank[0] for rank in found] == ["nccl", "nccl"] and all(rank[1].startswith("cuda:") for rank in found)
    assert [rank[2:] for rank in found] == [[[3.0] * 3, [1.0] * 3], [[3.0] * 3, [2.0] * 3]]


def ring(dtype: str, size: int) -> float:
    """The largest difference of attention in a ring from that of one process, relative to the largest value."""
    from accel import ParallelismConfig

    accelerator = Accelerator(parallelism_config=ParallelismConfig(cp_size=size))
    torch.manual_seed(0)
    shape = (2, 4, 256, 64)
    full = [torch.randn(shape, device=accelerator.device).to(getattr(torch, dtype)) for _ in range(3)]
    weights = torch.randn(shape, device=accelerator.device)

    def attend(tensors: list[torch.Tensor], factor: torch.Tensor) -> list[torch.Tensor]:
        inputs = [tensor.clone().requires_grad_() for tensor in tensors]
        out = functional.scaled_dot_product_attention(*inputs, is_causal=True)
        (out.float() * factor).sum().backward()
        return [out.detach(), *(x.grad for x in inputs if x.grad is not None)]

    expected = attend(full, weights)
    parts = [tensor.clone() for tensor in (*full, weights)]
    marks = torch.arange(256, device=accelerator.device).expand(2, 256).clone()
    with accelerator.maybe_context_parallel(buffers=[*parts, marks], buffer_seq_dims=[2, 2, 2, 2, 1]):
        found, places = attend(parts[:3], parts[3]), marks[0].clone()
    worst = [
        float((got - right[:, :, places]).abs().max() / right.abs().max())
        for got, right in zip(found, expected, strict=True)
    ]
    return max(worst)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_ring_of_torchs_kernels_is_attention(dtype: str) -> None:
    """fp16 and bf16 take the fused kernel that torch registers for CUDA, float32 the memory-efficient one."""
    assert max(run_world(ring, 2, dtype, 2)) < {"bfloat16": 3e-2, "float16": 4e-3, "float32": 1e-5}[dtype]


def test_more_processes_than_gpus_are_refused_in_words() -> None:
    count = torch.cuda.device_count()
    device = devices.get("cuda")
    if getattr(type(device).device, "shares_gpus", False):
        pytest.skip("the ranks of this run share the GPU")
    with pytest.raises(ConfigurationError, match=f"this process sees {count}"):
        device.device(count)
