"""Dispatched models give the outputs of undispatched ones, wherever their weights are."""

from __future__ import annotations

import copy
import gc
import io
import json
import mmap
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from bigmodel_nets import Net, blocks_on, net, save, transformers_models, words
from safetensors.torch import load_file, save_file
from torch import nn

from accel_bigmodel import (
    AlignDevicesHook,
    OffloadedWeightsLoader,
    align_module_device,
    cpu_offload,
    disk_offload,
    dispatch_model,
    has_offloaded_params,
    has_offloaded_weights,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    offload_state_dict,
    remove_hook_from_submodules,
)
from accel_bigmodel.checkpoint import mapped_pages
from accel_bigmodel.checkpoint.safetensors_file import SafetensorsFile
from accel_bigmodel.hooks.attach import align_hooks
from accel_bigmodel.offload import prefetch, staging
from accel_bigmodel.offload.prefetch import Prefetcher
from accel_state.errors import ConfigurationError


def on_disk(file: Path, device_map: dict | None = None, max_memory: dict | None = None, **settings) -> Net:
    with init_empty_weights():
        model = Net(**settings).eval()
    return load_checkpoint_and_dispatch(model, file, device_map=device_map or {"": "disk"}, max_memory=max_memory)


def streamed_from_disk(file: Path, **settings) -> Net:
    """A model of which no weight stays mapped between forwards."""
    with init_empty_weights():
        model = Net(**settings).eval()
    load_checkpoint_in_model(model, file, device_map={"": "disk"})
    return dispatch_model(model, {"": "disk"})


def same(one: object, other: object) -> bool:
    return all(torch.allclose(one[key], other[key], rtol=1e-5, atol=1e-6) for key in ("logits", "hidden"))


class Wrapped(nn.Module):
    """An adapter around a layer, which renames the layer's weights."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.base_layer(x)


@pytest.mark.parametrize("now", [{"": "cpu"}, {"embed": "cpu", "": "disk"}, {"blocks.0": "disk", "": "cpu"}])
def test_wrapped_layers_of_a_model_on_the_disk_are_dispatched_again(tmp_path: Path, now: dict[str, str]) -> None:
    model = on_disk(save(net(), tmp_path / "model.safetensors"))
    expected = net()
    for block in (*model.blocks, *expected.blocks):
        remove_hook_from_submodules(block.up)
        block.up = Wrapped(block.up)
    remove_hook_from_submodules(model)
    del model.__dict__["hf_device_map"]
    names = {name: name.replace(".base_layer", "") for name in model.state_dict()}
    file = str(tmp_path / "model.safetensors")
    stored = set(SafetensorsFile(file).names())
    index = {
        new: {"safetensors_file": file, "weight_name": old, "dtype": "float32"}
        for new, old in names.items()
        if old in stored
    }
    dispatch_model(model, now, offload_dir=tmp_path, offload_index=index)
    with torch.no_grad():
        assert same(model(words()), expected(words()))
    assert model.head.weight is model.embed.weight or now != {"": "cpu"}


@pytest.mark.parametrize("source", ["directory", "index"])
@pytest.mark.parametrize("shared", ["cpu", "disk"])
def test_a_tied_weight_that_is_stored_under_one_of_its_names(tmp_path: Path, source: str, shared: str) -> None:
    build, inputs = transformers_models()["t5"]
    torch.manual_seed(0)
    model = build().eval()
    expected = model(**inputs).logits
    aliases = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    stored = {name: value.clone() for name, value in model.state_dict().items() if name not in aliases}
    device_map = {"shared": shared, "encoder": "disk", "decoder": "disk", "lm_head": "disk"}
    if source == "directory":
        offload_state_dict(tmp_path, stored)
        dispatch_model(model, device_map, offload_dir=tmp_path)
    else:
        save_file(stored, tmp_path / "model.safetensors")
        index = {name: {"safetensors_file": str(tmp_path / "model.safetensors")} for name in stored}
        dispatch_model(model, device_map, offload_index=index)
    with torch.no_grad():
        torch.testing.assert_close(model(**inputs).logits, expected)


@pytest.mark.parametrize("family", ["gpt2", "bert", "t5", "llama"])
def test_transformers_models(family: str, tmp_path: Path) -> None:
    build, inputs = transformers_models()[family]
    model = build().eval()
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = model(**inputs).logits
    before = sorted(tmp_path.iterdir())
    no_split = sorted(model._no_split_modules or ())  # None in some models of Transformers 4
    total = sum(parameter.numel() * 4 for parameter in model.parameters())
    limits = [{"cpu": total * part // 10} for part in (0, 5, 8, 10)]
    for device_map, max_memory in [({"": "disk"}, None), ({"": "cpu"}, None), *(("auto", limit) for limit in limits)]:
        with init_empty_weights():
            empty = build().eval()
        loaded = load_checkpoint_and_dispatch(
            empty, tmp_path, device_map, max_memory=max_memory, no_split_module_classes=no_split
        )
        with torch.no_grad():
            for _ in range(2):
                torch.testing.assert_close(loaded(**inputs).logits, expected)
            if model.can_generate():
                arguments = {
                    "input_ids": inputs["input_ids"][:1],
                    "max_new_tokens": 6,
                    "do_sample": False,
                    "attention_mask": torch.ones(1, 9),
                }
                assert torch.equal(loaded.generate(**arguments), model.generate(**arguments)), "one row, with a cache"
        assert sorted(tmp_path.iterdir()) == before


def test_maps_of_all_kinds(tmp_path: Path) -> None:
    model = net()
    file = save(model, tmp_path / "model.safetensors")
    expected = model(words())
    for device_map in (
        blocks_on(model, "disk"),
        blocks_on(model, "cpu", "disk"),
        {"": "cpu", "blocks.1": "disk", "blocks.2.up": "disk", "scale": "disk"},
        {"": "disk", "blocks.3.down.weight": "cpu", "blocks.3.down.bias": "disk"} | {"embed": "cpu", "head": "cpu"},
    ):
        loaded = on_disk(file, device_map)
        assert loaded.hf_device_map == device_map
        with torch.no_grad():
            assert same(loaded(words()), expected) and same(loaded(words(1, 1)), model(words(1, 1))), device_map
        remaining = [name for name, tensor in loaded.named_parameters() if tensor.device.type != "meta"]
        assert all("blocks.1" not in name for name in remaining) or device_map["blocks.1"] == "cpu"


def test_dispatching_a_model_that_has_its_values(tmp_path: Path) -> None:
    expected = net()(words())
    for device_map in (blocks_on(net(), "disk"), {"": "disk"}):
        folder = tmp_path / f"offload{len(device_map)}"
        with pytest.raises(ConfigurationError, match="offload_dir="):
            dispatch_model(net(), device_map)
        model = dispatch_model(net(), device_map, offload_dir=folder)
        assert same(model(words()), expected)
        again = dispatch_model(net(), device_map, offload_dir=folder)
        assert same(again(words()), expected)
        remove_hook_from_submodules(model)
        assert same(model(words()), expected) and model.head.weight is model.embed.weight
        assert {tensor.device.type for tensor in model.parameters()} == {"cpu"}
    file = str(save(net(), tmp_path / "m.safetensors"))
    index = {name: {"safetensors_file": file, "weight_name": name} for name in load_file(file)}
    index["head.weight"] = index["embed.weight"] | {"weight_name": "embed.weight"}
    with init_empty_weights():
        empty = Net().eval()
    assert same(dispatch_model(empty, {"": "disk"}, offload_index=index, offload_buffers=True)(words()), expected)


def test_dispatching_anew(tmp_path: Path) -> None:
    file = save(net(), tmp_path / "model.safetensors")
    expected = net()(words())
    model = on_disk(file)
    for device_map in ({"": "disk"}, blocks_on(model, "disk"), {"": "disk"}, {"": "cpu"}):
        assert same(load_checkpoint_and_dispatch(model, file, device_map=device_map)(words()), expected)
        assert model.hf_device_map == device_map
    model = on_disk(file)
    assert same(dispatch_model(model, {"": "disk"})(words()), expected)
    with pytest.raises(ConfigurationError, match="has offloaded weights"):
        load_checkpoint_in_model(model, file)
    remove_hook_from_submodules(model)
    load_checkpoint_in_model(model, file)
    assert same(model(words()), expected)


def test_inference_mode_and_autocast(tmp_path: Path) -> None:
    model, plain = on_disk(save(net(), tmp_path / "model.safetensors")), net()
    with torch.inference_mode():
        assert same(model(words()), plain(words()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same(model(words()), plain(words()))
    assert same(model(words()), plain(words()))


def test_one_device_needs_no_hooks(tmp_path: Path) -> None:
    file = save(net(), tmp_path / "model.safetensors")
    model = on_disk(file, {"": "cpu"})
    assert not any(hasattr(module, "_hf_hook") for module in model.modules()) and model.hf_device_map == {"": "cpu"}
    with init_empty_weights():
        forced = Net().train()
    load_checkpoint_and_dispatch(forced, file, device_map={"": "cpu"}, force_hooks=True)
    assert hasattr(forced, "_hf_hook") and not has_offloaded_weights(forced)
    plain = net().train()
    for one in (forced, plain):
        one(words())["logits"].square().mean().backward()
    assert all(
        torch.allclose(a.grad, b.grad, atol=1e-6) for a, b in zip(forced.parameters(), plain.parameters(), strict=True)
    )


def test_models_without_values_are_refused(tmp_path: Path) -> None:
    with init_empty_weights():
        model = Net()
    for device_map in ({"": "cpu"}, blocks_on(model, "disk")):
        with pytest.raises(ConfigurationError, match=r"without values|location of their weights is unknown"):
            dispatch_model(model, device_map)
    offload_state_dict(
        tmp_path, {name: value for name, value in net().state_dict().items() if name != "blocks.2.up.bias"}
    )
    with pytest.raises(ConfigurationError, match=r"has 1 tensor.*values.*blocks\.2\.up\.bias"):
        dispatch_model(model, {"": "disk"}, offload_dir=tmp_path)


def test_a_directory_with_the_weights_of_another_model_is_refused(tmp_path: Path) -> None:
    disk_offload(nn.Sequential(nn.Linear(4, 8)), tmp_path)
    for model, message in (
        (nn.Sequential(nn.Linear(8, 4)), r"0\.weight has shape \(8, 4\) there, \(4, 8\) here"),
        (nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), r"1\.weight is not among them"),
    ):
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ConfigurationError, match=f"holds the weights of another model: {message}"):
            disk_offload(model, tmp_path)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_cpu_and_disk_offload(tmp_path: Path) -> None:
    expected = net()(words())
    for offload in (
        cpu_offload,
        lambda model: cpu_offload(model, offload_buffers=True),
        lambda model: cpu_offload(model, state_dict=net().state_dict(), execution_device="cpu"),
        lambda model: disk_offload(model, tmp_path / "a"),
        lambda model: disk_offload(model, tmp_path / "a", offload_buffers=True),
    ):
        model = offload(net())
        assert all(parameter.device.type == "meta" for parameter in model.parameters())
        assert has_offloaded_params(model.head) and not has_offloaded_params(model.blocks)
        assert same(model(words()), expected) and same(model(words(), scale=1.0), expected)
        assert all(parameter.device.type == "meta" for parameter in model.parameters())
        remove_hook_from_submodules(model)
        assert same(model(words()), expected) and not hasattr(model.head, "_old_forward")
        assert model.head.weight is model.embed.weight and all(
            parameter.requires_grad for parameter in model.parameters()
        )


class Borrower(nn.Module):
    """Uses a weight of a submodule without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.inner.weight) + self.inner(x)


def test_preloading_whole_classes() -> None:
    model, x = nn.Sequential(Borrower()), torch.ones(2, 3)
    expected = model(x)
    assert torch.equal(cpu_offload(copy.deepcopy(model), preload_module_classes=["Borrower"])(x), expected)


def test_copies_and_pickles(tmp_path: Path) -> None:
    file = save(net(), tmp_path / "model.safetensors")
    expected = net()(words())
    for model in (on_disk(file), cpu_offload(net()), on_disk(file, blocks_on(net(), "disk"))):
        model(words())
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)):
            assert same(other(words()), expected)
            assert other.forward.module is other and other.head.weight is other.embed.weight
            remove_hook_from_submodules(other)
        assert same(model(words()), expected), "the original is untouched"


class Watched:
    """A forward that notes whether the weights that it used live on."""

    def __init__(self, module: nn.Module, alive: list[weakref.ref]) -> None:
        self.module, self.alive = module, alive

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.alive.append(weakref.ref(self.module.weight.untyped_storage()))
        return type(self.module).forward(self.module, x)


def test_autograd_keeps_no_offloaded_weights(tmp_path: Path) -> None:
    model = net(blocks=6, width=64)
    file = save(model, tmp_path / "model.safetensors")
    loaded = on_disk(file, blocks_on(model, "disk"), max_memory={"cpu": 0}, blocks=6, width=64)
    alive: list[weakref.ref] = []
    for block in loaded.blocks:
        block.up._old_forward = Watched(block.up, alive)
    result = loaded(words())["logits"].sum()
    gc.collect()
    assert len(alive) == 6 and sum(reference() is not None for reference in alive) == 0
    result.backward()
    plain = net(blocks=6, width=64)
    plain(words())["logits"].sum().backward()
    assert torch.allclose(plain.scale.grad, loaded.scale.grad)


def test_any_order_of_modules(tmp_path: Path) -> None:
    model = net(blocks=6)
    loaded = on_disk(save(model, tmp_path / "model.safetensors"), blocks=6)
    x = torch.randn(3, 16)
    for order in ([0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [2, 2, 2, 0, 5, 1], [0, 1, 2, 3, 4, 5]):
        for index in order:
            torch.testing.assert_close(loaded.blocks[index](x), model.blocks[index](x))
    assert same(loaded(words()), model(words()))


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the threads in which groups of weights are read, one for each read."""
    read_by: list[str] = []
    fetch = Prefetcher._fetch

    def note(self: Prefetcher, index: int) -> Any:
        read_by.append(threading.current_thread().name)
        return fetch(self, index)

    monkeypatch.setattr(Prefetcher, "_fetch", note)
    return read_by


def offloading_hooks(model: nn.Module) -> list[AlignDevicesHook]:
    return [hook for module in model.modules() for hook in align_hooks(module) if hook.slots]


def test_the_next_weights_are_read_in_the_thread(tmp_path: Path, fetches: list[str]) -> None:
    loaded = streamed_from_disk(save(net(), tmp_path / "model.safetensors"))
    loaded(words())
    hooks = len(offloading_hooks(loaded))
    assert sum(name.startswith("accel-prefetch") for name in fetches) == hooks - 1, "only the first is waited for"
    fetches.clear()
    loaded.blocks[2].up(torch.ones(1, 16))
    loaded(words())
    assert len(fetches) >= hooks, "nothing stays mapped"
    assert sum(not name.startswith("accel-prefetch") for name in fetches) <= 3


def test_weights_stay_mapped_as_far_as_there_is_room(tmp_path: Path, fetches: list[str]) -> None:
    model = net(blocks=6, width=64)
    file = save(model, tmp_path / "model.safetensors")
    expected = model(words())
    loaded = on_disk(file, blocks=6, width=64)
    assert same(loaded(words()), expected)
    fetches.clear()
    with torch.inference_mode():
        assert same(loaded(words()), expected)
    assert not fetches
    largest = max(hook.weight_group().nbytes for module in loaded.modules() for hook in align_hooks(module))
    limit = 5 * largest
    bounded = on_disk(file, max_memory={"cpu": limit}, blocks=6, width=64)
    for _ in range(3):
        fetches.clear()
        assert same(bounded(words()), expected)
    hooks = offloading_hooks(bounded)
    prefetcher = hooks[0].prefetcher
    kept = sum(prefetcher._groups[index].nbytes for index in prefetcher._kept if index != 0)  # 0: a lookup table
    assert 2 * largest <= kept <= limit - 2 * largest
    assert len(fetches) == len(hooks) - len(prefetcher._kept) > 0


def test_writing_into_weights_in_files_is_refused(tmp_path: Path) -> None:
    loaded = on_disk(save(net(), tmp_path / "model.safetensors"))
    expected = loaded(words())
    with pytest.raises(ConfigurationError, match="blocks.1.up.weight"), align_module_device(loaded.blocks[1].up):
        loaded.blocks[1].up.weight.data.zero_()
    assert same(loaded(words()), expected)

    def write(layer: nn.Module, inputs: object) -> None:
        with torch.no_grad():
            layer.bias.add_(100)

    up = loaded.blocks[1].up
    up.forward.module._old_forward = Before(up, write)
    with pytest.raises(ConfigurationError, match="blocks.1.up.bias"):
        loaded(words())
    up.forward.module._old_forward = Before(up, lambda *_: None)
    assert same(loaded(words()), expected)


class Before:
    """A forward after an action on its module."""

    def __init__(self, module: nn.Module, action: Any) -> None:
        self.module, self.action = module, action

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.action(self.module, x)
        return type(self.module).forward(self.module, x)


needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="resident sizes are read from /proc")


@needs_linux
def test_the_resident_size_keeps_to_max_memory(tmp_path: Path) -> None:
    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(1024, 256, bias=False) if i % 2 else nn.Linear(256, 1024) for i in range(32)))

    plain = build()
    file = tmp_path / "model.safetensors"
    save_file(plain.state_dict(), file)
    row = torch.ones(1, 256)
    expected = plain(row)
    device_map = {str(index): "disk" if index < 30 else "cpu" for index in range(32)}
    peaks = {}
    for mebibytes in (8, 64):
        with init_empty_weights():
            model = build()
        load_checkpoint_and_dispatch(model, file, device_map=device_map, max_memory={"cpu": mebibytes * 2**20})
        torch.testing.assert_close(plain(row), expected)
        with torch.no_grad():
            for _ in range(2):
                gc.collect()
                Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
                before = resident("VmRSS")
                torch.testing.assert_close(model(row), expected)
        peaks[mebibytes] = resident("VmHWM") - before
        kept = sum(p.nbytes for kept in model[0]._hf_hook.prefetcher._kept.values() for p in kept.values.values())
        assert kept <= mebibytes * 2**20
        del model
    # The first forward has mapped what stays mapped.
    assert peaks[8] <= 8 * 2**20 and peaks[64] <= 2**21


def resident(key: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0]) * 1024


@needs_linux
def test_a_truncated_file_is_an_error_instead_of_a_crash(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    file = tmp_path / "model.safetensors"
    save_file(model.state_dict(), file)
    load_checkpoint_and_dispatch(model, file, device_map={"": "disk"})
    mapped = SafetensorsFile(file).tensors(["1.weight"])["1.weight"].view(-1).view(torch.uint8)
    os.truncate(file, 2**16)
    with pytest.raises(OSError, match=r"model\.safetensors"):
        model(torch.ones(1, 256))
    # The file can also become shorter once it is mapped.
    if mapped_pages._madvise()(mapped.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE, 0) != 0:
        pytest.skip("this kernel lacks MADV_POPULATE_READ (Linux 5.14)")
    with pytest.raises(OSError, match="was truncated"):
        mapped_pages.populate(mapped, file)


@pytest.mark.parametrize(
    "convert",
    [lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.to("cpu"), lambda m: m.to_empty(device="cpu")],
    ids=["half", "to(dtype)", "to(device)", "to_empty"],
)
def test_offloaded_weights_refuse_conversions(convert: Any, tmp_path: Path) -> None:
    file = save(net(), tmp_path / "model.safetensors")
    loaded = on_disk(file, {**blocks_on(net(), "cpu"), "blocks.2": "disk"})
    for model in (loaded, loaded.blocks[2], loaded.blocks[2].up, copy.deepcopy(loaded), cpu_offload(net())):
        with pytest.raises(ConfigurationError, match="load_checkpoint_and_dispatch"):
            convert(model)
    assert same(loaded(words()), net()(words())), "nothing was converted"
    assert loaded.blocks[0].half().up.weight.dtype is torch.float16
    assert loaded.float().blocks[0].up.weight.dtype is torch.float32, "offloaded weights have this dtype"
    remove_hook_from_submodules(loaded)
    assert "_apply" not in loaded.__dict__ and "_apply" not in loaded.blocks[2].__dict__


def test_weights_reach_a_device_through_staging_buffers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The path to accelerators, on the CPU: without streams, which tests/test_accelerators.py checks."""
    monkeypatch.setattr(staging, "_BUFFER_BYTES", 1000)
    values = {
        "float": torch.rand(40, 9),
        "transposed": torch.rand(7, 5).t(),
        "flags": torch.tensor([True, False]),
        "half": torch.rand(3).half(),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "empty": torch.empty(0, 4),
        "parameter": nn.Parameter(torch.rand(600)),
    }
    copies = staging.StagedCopies(torch.device("cpu"), 10**6)
    for _ in range(3):
        sent, arrival = copies.send(values)
        assert arrival is None and list(sent) == list(values)
        for name, value in values.items():
            assert torch.equal(sent[name], value) and sent[name].dtype == value.dtype
            assert sent[name].data_ptr() != value.data_ptr() or not value.numel()
        for name in values:
            sent[name].zero_()  # no weight lies in another or in a buffer
    file = save(net(), tmp_path / "model.safetensors")
    loaded = streamed_from_disk(file)
    monkeypatch.setattr(prefetch, "_is_host", lambda device: False)
    expected = net()(words())
    for _ in range(3):
        assert same(loaded(words()), expected)
    assert list(offloading_hooks(loaded)[0].prefetcher._staging) == [torch.device("cpu")]


def test_the_reading_thread_ends_with_its_model(tmp_path: Path) -> None:
    before = set(threading.enumerate())

    def threads() -> list[threading.Thread]:
        started = [thread for thread in threading.enumerate() if thread not in before]
        return [thread for thread in started if thread.name.startswith("accel-prefetch")]

    loaded = on_disk(save(net(), tmp_path / "model.safetensors"))
    loaded(words())
    assert len(threads()) == 1
    del loaded
    gc.collect()
    deadline = time.monotonic() + 60
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not threads()


def sum_in_forked_process(model: Net) -> float:
    """The sum of the logits that a forked process computes."""
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(sender, repr(model(words())["logits"].sum().item()).encode())
        finally:
            os._exit(0)
    os.close(sender)
    with os.fdopen(receiver) as pipe:
        answered, _, _ = select.select([pipe], [], [], 100)
        if not answered:
            os.kill(child, signal.SIGKILL)
        found = pipe.read()
    os.waitpid(child, 0)
    return float(found)


@pytest.mark.timeout(300)
def test_a_process_forked_while_the_thread_reads_does_not_wait_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = streamed_from_disk(save(net(), tmp_path / "model.safetensors"))
    expected = loaded(words())["logits"].sum().item()
    fetch = Prefetcher._fetch
    reading, read_on, here = threading.Event(), threading.Event(), os.getpid()

    def slow(self: Prefetcher, index: int) -> Any:
        if os.getpid() == here and threading.current_thread().name.startswith("accel-prefetch"):
            reading.set()
            read_on.wait(250)
        return fetch(self, index)

    monkeypatch.setattr(Prefetcher, "_fetch", slow)
    loaded.embed(words())
    try:
        assert reading.wait(60)
        assert sum_in_forked_process(loaded) == pytest.approx(expected, rel=1e-5)
    finally:
        read_on.set()
    assert loaded(words())["logits"].sum().item() == pytest.approx(expected, rel=1e-5)


def test_a_checkpoint_may_be_replaced_and_not_changed(tmp_path: Path) -> None:
    file = save(net(), tmp_path / "model.safetensors")
    expected = net()(words())
    loaded = on_disk(file)
    assert same(loaded(words()), expected)
    save_file({name: torch.zeros_like(value) for name, value in load_file(file).items()}, tmp_path / "other")
    os.replace(tmp_path / "other", file)
    assert same(loaded(words()), expected), "the opened file is still read"
    with pytest.raises(ConfigurationError, match="has changed since the model was loaded"):
        pickle.loads(pickle.dumps(loaded))


def test_weights_are_used_in_place_wherever_they_begin_in_the_file(tmp_path: Path) -> None:
    torch.manual_seed(0)

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(96, 256), nn.ReLU(), nn.Linear(256, 96)).eval()

    model = build()
    rows = [torch.randn(1, 96), torch.randn(4, 96), torch.randn(96)]
    for padding in range(0, 64, 8):
        file = tmp_path / f"{padding}.safetensors"
        save_file(model.state_dict(), file, metadata={"pad": "x" * padding})
        offset = SafetensorsFile(file).entries["0.weight"].start
        for location in ("cpu", "disk"):
            with init_empty_weights():
                loaded = build()
            load_checkpoint_and_dispatch(loaded, file, device_map={"": location})
            with torch.no_grad():
                for row in rows:
                    torch.testing.assert_close(loaded(row), model(row))
            with align_module_device(loaded[0]):
                assert (loaded[0].weight.data_ptr() - offset) % 4096 == 0, "a copy"


def test_a_loader_needs_a_place(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="there are no weights to load"):
        OffloadedWeightsLoader()
    with pytest.raises(ConfigurationError, match=r"has no index\.json"):
        OffloadedWeightsLoader(save_folder=tmp_path)
    with pytest.raises(ConfigurationError, match="give save_folder="):
        OffloadedWeightsLoader(index={"a": {"dtype": "float32", "shape": [1]}})["a"]


LIMITED = """
import json, resource, sys, torch
from pathlib import Path
from torch import nn
from accel_bigmodel import init_empty_weights, load_checkpoint_and_dispatch
torch.set_num_threads(1)
status = lambda key: int(Path("/proc/self/status").read_text().split(key + ":")[1].split()[0]) * 1024
limit = status("VmSize") + int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
io = lambda key: int(Path("/proc/self/io").read_text().split(key + ": ")[1].split()[0])
before = io("wchar"), io("\\nwrite_bytes")
with init_empty_weights():
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(80)))
load_checkpoint_and_dispatch(model, sys.argv[1], device_map={"": "disk"})
with torch.no_grad():
    outputs = [model(torch.ones(rows, 1024)).double().sum().item() for rows in (3, 1)]
print(json.dumps([io("wchar") - before[0], io("\\nwrite_bytes") - before[1], outputs]))
"""


@pytest.mark.slow  # writes 336 MB of weights; test_maps_of_all_kinds offloads small models
@pytest.mark.skipif(
    not Path("/proc/self/io").exists(),
    reason="limits of the address space and counts of written bytes are those of Linux",
)
@pytest.mark.timeout(300)  # 336 MB are written and read, on a disk and cores that others use too
def test_a_model_larger_than_the_memory_runs_and_nothing_is_written(tmp_path: Path) -> None:
    """336 MB of weights where the process may take 224 MB more than it has; benchmarks/big_model_limit.py does it with
    6 GB in 2 GB.
    """
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(80)))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with torch.no_grad():
        expected = [model(torch.ones(rows, 1024)).double().sum().item() for rows in (3, 1)]
    # -B: bytecode of a module that is imported for the first time would be counted too.
    command = [sys.executable, "-B", "-c", LIMITED, str(tmp_path / "model.safetensors"), str(224 * 2**20)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=250, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-2000:]
    given_to_write, dirty_pages, outputs = json.loads(done.stdout)
    assert given_to_write == 0 and outputs == pytest.approx(expected, rel=1e-5)
    # Pages of files that were mapped to be written. The file system adds a page at times (when a file was last read).
    assert dirty_pages <= 2**16
