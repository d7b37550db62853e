"""Loading checkpoints: every form, every fault, nothing left without values."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import select
import struct
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from bigmodel_nets import Net, net, save, words
from safetensors.torch import load_file, save_file
from torch import nn

from accel_bigmodel import (
    get_state_dict_offloaded_model,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    load_state_dict,
    loading,
    shard_checkpoint,
)
from accel_bigmodel.checkpoint.safetensors_file import SafetensorsFile
from accel_state.errors import ConfigurationError
from accel_state.safetensors_writer import write_safetensors


def empty(**settings) -> Net:
    with init_empty_weights():
        return Net(**settings).eval()


def shards(model: nn.Module, folder: Path, index: str, suffix: str, plain: bool = False) -> Path:
    """Write a checkpoint of several files, with either form of index."""
    folder.mkdir()
    state = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    files, found = shard_checkpoint(state, 6000, f"weights.{suffix}")
    assert found is not None and len(files) > 2
    for file, part in files.items():
        save_file(part, folder / file) if suffix == "safetensors" else torch.save(part, folder / file)
    (folder / index).write_text(json.dumps(found["weight_map"] if plain else found))
    return folder


def checkpoints(model: nn.Module, folder: Path) -> dict[str, Path]:
    """The same weights in every form."""
    for name in ("one", "bin", "other"):
        (folder / name).mkdir()
    state = model.state_dict()
    torch.save(state, folder / "bin" / "pytorch_model.bin")
    torch.save(state, folder / "old.bin", _use_new_zipfile_serialization=False)
    return {
        "file": save(model, folder / "weights.safetensors"),
        "folder": save(model, folder / "one" / "model.safetensors").parent,
        "other name": save(model, folder / "other" / "net.safetensors").parent,
        "bin file": folder / "bin" / "pytorch_model.bin",
        "bin folder": folder / "bin",
        "bin without zip": folder / "old.bin",
        "index": shards(model, folder / "s1", "model.safetensors.index.json", "safetensors")
        / "model.safetensors.index.json",
        "index in folder": shards(model, folder / "s2", "model.safetensors.index.json", "safetensors"),
        "plain index": shards(model, folder / "s3", "index.json", "bin", plain=True),
        "bin index": shards(model, folder / "s4", "pytorch_model.bin.index.json", "bin"),
    }


def test_every_form_of_checkpoint_gives_the_same_model(tmp_path: Path) -> None:
    model = net()
    expected = model(words())["logits"]
    forms = checkpoints(model, tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    for form, checkpoint in forms.items():
        for device_map in (None, {"": "cpu"}, "auto"):
            loaded = load_checkpoint_and_dispatch(empty(), checkpoint, device_map=device_map)
            torch.testing.assert_close(loaded(words())["logits"], expected)
            assert loaded.head.weight is loaded.embed.weight, form
            assert all(tensor.device.type == "cpu" for tensor in loaded.state_dict().values())
        if "bin" not in form and form != "plain index":
            on_disk = load_checkpoint_and_dispatch(empty(), checkpoint, device_map={"": "disk"})
            torch.testing.assert_close(on_disk(words())["logits"], expected)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before, "loading writes nothing"


def test_other_formats_are_written_for_the_disk(tmp_path: Path) -> None:
    model = net()
    expected = model(words())["logits"]
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigurationError, match="offload_folder="):
        load_checkpoint_and_dispatch(empty(), tmp_path, device_map={"": "disk"})
    loaded = load_checkpoint_and_dispatch(
        empty(), tmp_path, device_map={"": "disk"}, offload_folder=tmp_path / "offload"
    )
    torch.testing.assert_close(loaded(words())["logits"], expected)
    written = {path.name for path in (tmp_path / "offload").iterdir()}
    assert "index.json" in written and "blocks.0.up.weight.dat" in written
    assert not {"embed.weight.dat", "head.weight.dat"} <= written, "a shared weight is written once"


def test_types(tmp_path: Path) -> None:
    model = net()
    file = save(model, tmp_path / "model.safetensors")
    half = load_checkpoint_and_dispatch(empty(), file, device_map={"": "cpu"}, dtype="bfloat16")
    assert {value.dtype for value in half.state_dict().values()} == {torch.bfloat16}
    assert half.mask.dtype == torch.bfloat16, "a buffer in no checkpoint too, as in model.to(dtype)"
    expected = half(words())["logits"]
    torch.testing.assert_close(net().to(torch.bfloat16)(words())["logits"], expected, rtol=0, atol=0)
    for folder in (None, tmp_path / "offload"):
        loaded = load_checkpoint_and_dispatch(
            empty(), file, device_map={"": "disk"}, dtype=torch.bfloat16, offload_folder=folder
        )
        torch.testing.assert_close(loaded(words())["logits"], expected)
    assert (tmp_path / "offload" / "blocks.0.up.weight.dat").stat().st_size == 2 * model.blocks[0].up.weight.numel()
    kept = empty()
    load_checkpoint_in_model(kept, file, dtype=torch.float16, keep_in_fp32_modules=["norm"])
    assert kept.blocks[0].norm.weight.dtype == torch.float32 and kept.blocks[0].up.weight.dtype == torch.float16
    # Without dtype a model keeps its own types, in memory and on the disk alike.
    save_file({name: value.half() for name, value in load_file(file).items()}, tmp_path / "half.safetensors")
    for place in ("cpu", "disk"):
        full = load_checkpoint_and_dispatch(empty(), tmp_path / "half.safetensors", device_map={"": place})
        assert full(words())["logits"].dtype == torch.float32
    with pytest.raises(ConfigurationError, match="dtype='float12' is not a torch dtype"):
        load_checkpoint_in_model(empty(), file, dtype="float12")


def test_what_does_not_fit_is_listed_and_nothing_is_loaded(tmp_path: Path) -> None:
    state = {name: value for name, value in load_file(save(net(), tmp_path / "whole.safetensors")).items()}
    del state["blocks.1.up.weight"], state["scale"]
    state["extra.weight"] = torch.ones(2)
    state["blocks.0.down.bias"] = torch.ones(3)
    save_file(state, tmp_path / "wrong.safetensors")
    for device_map in (None, {"": "cpu"}, {"": "disk"}):
        model = empty()
        with pytest.raises(ConfigurationError, match="Nothing was loaded") as caught:
            load_checkpoint_and_dispatch(model, tmp_path / "wrong.safetensors", device_map=device_map)
        text = str(caught.value)
        assert "missing (2): scale, blocks.1.up.weight" in text and "unexpected (1): extra.weight" in text
        assert "misshapen (1): blocks.0.down.bias: (3,) in the checkpoint, (16,) in the model" in text
        assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_strict_is_about_what_has_values_anyway(tmp_path: Path, caplog) -> None:
    file = save(net(), tmp_path / "part.safetensors", without=("scale",))
    model = Net()
    with pytest.warns(UserWarning, match=r"missing \(1\): scale.*keep their values"):
        load_checkpoint_in_model(model, file)
    assert torch.equal(model.scale, torch.ones(16)) and torch.equal(model.embed.weight, net().embed.weight)
    with pytest.raises(ConfigurationError, match=r"missing \(1\): scale"):
        load_checkpoint_in_model(Net(), file, strict=True)
    with pytest.raises(ConfigurationError, match=r"missing \(1\): scale"):
        load_checkpoint_in_model(empty(), file)
    more = {**load_file(save(net(), tmp_path / "all.safetensors")), "more": torch.ones(1)}
    save_file(more, tmp_path / "more.safetensors")
    with caplog.at_level(logging.WARNING, "accel_bigmodel"):
        load_checkpoint_in_model(empty(), tmp_path / "more.safetensors")
    (record,) = [record for record in caplog.records if record.name.startswith("accel_bigmodel")]
    assert record.levelno == logging.WARNING and "does not have: more" in record.getMessage()
    with pytest.raises(RuntimeError, match=r"unexpected \(1\): more"):
        load_checkpoint_in_model(empty(), tmp_path / "more.safetensors", strict=True)
    with pytest.raises(ConfigurationError, match=r"unexpected \(1\): more"):
        load_checkpoint_in_model(empty(), tmp_path / "more.safetensors", strict=True)


def test_buffers_that_no_checkpoint_holds_are_never_garbage(tmp_path: Path) -> None:
    file = save(net(), tmp_path / "model.safetensors")
    with init_empty_weights(include_buffers=True):
        model = Net()
    assert model.mask.device.type == model.shift.device.type == "meta"
    for device_map in ({"": "cpu"}, {"": "disk"}, None):
        with pytest.raises(ConfigurationError, match=r"device.*: mask\."):
            load_checkpoint_and_dispatch(model, file, device_map=device_map)
    model.mask = torch.linspace(1, 2, 16)
    loaded = load_checkpoint_and_dispatch(model, file, device_map={"": "cpu"}).eval()
    torch.testing.assert_close(loaded(words())["logits"], net()(words())["logits"])


def test_an_untied_model_gets_both_weights_and_a_tied_one_the_last(tmp_path: Path) -> None:
    model = net(tied=False)
    file = save(model, tmp_path / "model.safetensors")
    for place in ("cpu", "disk"):
        loaded = load_checkpoint_and_dispatch(empty(tied=False), file, device_map={"": place})
        torch.testing.assert_close(loaded(words())["logits"], model(words())["logits"])
    plain = net()
    plain.load_state_dict(load_file(file))
    for place in ("cpu", "disk"):
        loaded = load_checkpoint_and_dispatch(empty(), file, device_map={"": place})
        torch.testing.assert_close(loaded(words())["logits"], plain(words())["logits"])


def test_a_loaded_model_trains_and_does_not_change_its_file(tmp_path: Path) -> None:
    file = save(net(), tmp_path / "model.safetensors")
    content = file.read_bytes()
    plain, loaded = net().train(), load_checkpoint_and_dispatch(empty(), file, device_map={"": "cpu"}).train()
    for model in (plain, loaded):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(words())["logits"].square().mean().backward()
            optimizer.step()
    for trained, expected in zip(loaded.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(trained, expected)
    assert file.read_bytes() == content


def test_a_model_with_values_keeps_its_parameters(tmp_path: Path) -> None:
    model = Net()
    held = list(model.parameters())
    load_checkpoint_in_model(model, save(net(), tmp_path / "model.safetensors"))
    assert all(one is other for one, other in zip(held, model.parameters(), strict=True))
    assert torch.equal(held[0], net().embed.weight) or torch.equal(model.embed.weight, net().embed.weight)


class Harm:
    def __reduce__(self):
        return os.system, ("touch harmed",)


def test_damaged_and_hostile_files_are_refused(tmp_path: Path) -> None:
    good = save(net(), tmp_path / "good.safetensors").read_bytes()
    # test_safetensors_files.py has every damage of a header.
    faults = {"cut.safetensors": good[:-100], "empty.safetensors": b"", "text.bin": b"neither a zip nor a pickle"}
    for name, content in faults.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ConfigurationError, match=name):
            load_checkpoint_in_model(empty(), tmp_path / name)
    torch.save({"a": Harm()}, tmp_path / "harm.bin")
    torch.save([torch.ones(1)], tmp_path / "list.bin")
    torch.save({"a": torch.ones(1), "b": 3}, tmp_path / "mixed.bin")
    for name in ("harm.bin", "list.bin", "mixed.bin"):
        with pytest.raises(ConfigurationError, match=name):
            load_state_dict(tmp_path / name)
    assert not Path("harmed").exists()


class Embedded(nn.Module):
    """What is not in a checkpoint: a table of frequencies, a shared buffer, a late parameter, complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.linspace(0, 1, 8), persistent=False)
        self.register_buffer("turns", torch.exp(1j * torch.arange(8.0)), persistent=False)
        self.register_buffer("counts", torch.arange(8), persistent=False)
        self.norm = nn.LayerNorm(8)
        self.norm.register_buffer("shared", self.frequencies, persistent=False)
        self.out = nn.Linear(8, 2)
        self.late = nn.Parameter(torch.ones(8), requires_grad=False)

    def forward(self, steps: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(steps * self.frequencies * self.late))


@pytest.mark.parametrize("place", ["cpu", "disk", None])
def test_a_dtype_holds_for_what_no_checkpoint_has(tmp_path: Path, place: str | None) -> None:
    torch.manual_seed(0)
    model = Embedded()
    state = model.state_dict()
    del state["late"]
    save_file(state, tmp_path / "model.safetensors")
    loaded = Embedded()
    place_map = None if place is None else {"": place}
    with pytest.warns(UserWarning, match="late"):
        load_checkpoint_in_model(
            loaded, tmp_path / "model.safetensors", place_map, dtype="bfloat16", keep_in_fp32_modules=["norm"]
        )
    assert (loaded.frequencies.dtype, loaded.late.dtype) == (torch.bfloat16, torch.bfloat16)
    assert (loaded.turns.dtype, loaded.counts.dtype) == (torch.complex64, torch.int64)
    assert loaded.norm.shared is loaded.frequencies and not loaded.late.requires_grad
    if place == "cpu":
        model.to(torch.bfloat16).norm.float()
        expected = model.out(model.norm((torch.ones(3, 8).bfloat16() * model.frequencies).float()).bfloat16())
        found = loaded.out(loaded.norm((torch.ones(3, 8).bfloat16() * loaded.frequencies).float()).bfloat16())
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Masked(nn.Module):
    """A mask and indices, of which old checkpoints hold other kinds of whole numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("hidden", torch.tensor([True, False, True, False]))
        self.register_buffer("order", torch.arange(4))
        self.out = nn.Linear(4, 4)

    def forward(self, steps: torch.Tensor) -> torch.Tensor:
        return self.out(steps)[:, self.order] * ~self.hidden


@pytest.mark.parametrize("place", ["cpu", "disk", None])
@pytest.mark.parametrize("is_empty", [False, True])
def test_whole_numbers_keep_the_dtype_of_the_model(tmp_path: Path, place: str | None, is_empty: bool) -> None:
    torch.manual_seed(0)
    expected = Masked()
    state = expected.state_dict()
    state.update(hidden=torch.tensor([0, 1, 1, 0], dtype=torch.uint8), order=torch.tensor([3, 1, 0, 2]).int())
    save_file(state, tmp_path / "model.safetensors")
    expected.load_state_dict(state)
    with init_empty_weights(include_buffers=True) if is_empty else contextlib.nullcontext():
        loaded = Masked()
    if place is None:
        load_checkpoint_in_model(loaded, tmp_path)
    else:
        load_checkpoint_and_dispatch(loaded, tmp_path, {"": place}, offload_buffers=True)
    assert (loaded.hidden.dtype, loaded.order.dtype) == (torch.bool, torch.int64)
    steps = torch.randn(3, 4)
    torch.testing.assert_close(loaded(steps), expected(steps), rtol=0, atol=0)


@pytest.mark.parametrize(
    "path", ["state_dict", "model_state_dict", "model", "module", "net", "model/state_dict", "checkpoint/model"]
)
def test_weights_inside_a_checkpoint_of_training(tmp_path: Path, path: str) -> None:
    model = net()
    outer, _, inner = path.partition("/")
    weights = {inner: model.state_dict(), "step": 5} if inner else model.state_dict()
    torch.save({outer: weights, "epoch": 3, "optimizer": {"state": {}, "lr": 0.1}}, tmp_path / "train.bin")
    loaded = load_checkpoint_and_dispatch(empty(), tmp_path / "train.bin", device_map={"": "cpu"})
    torch.testing.assert_close(loaded(words())["logits"], model(words())["logits"], rtol=0, atol=0)


def test_weights_that_could_be_either_are_named(tmp_path: Path) -> None:
    state = net().state_dict()
    cases = {
        "two.bin": ({"model": state, "state_dict": state}, ["'model'", "'state_dict'"]),
        "other.bin": ({"generator": state, "step": 1}, ["'generator'"]),
        "deep.bin": ({"a": {"model": state}, "b": {"model": state}}, ["['a']['model'] or ['b']['model']"]),
        "none.bin": ({"model": {}, "step": 1}, ["int"]),
        "names.bin": ({"model": {0: torch.ones(1)}}, ["dict"]),
    }
    for name, (content, words_found) in cases.items():
        torch.save(content, tmp_path / name)
        with pytest.raises(ConfigurationError) as error:
            load_checkpoint_in_model(empty(), tmp_path / name)
        assert all(word in str(error.value) for word in [name, *words_found]), error.value


def test_indexes_that_lead_elsewhere_are_refused(tmp_path: Path) -> None:
    save(net(), tmp_path / "model.safetensors")
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    index = folder / "index.json"
    for file in (
        "../model.safetensors",
        str(tmp_path / "model.safetensors"),
        "a/../../model.safetensors",
        "C:\\x",
        "..\\model.safetensors",
    ):
        index.write_text(json.dumps({"weight_map": {"scale": file}}))
        with pytest.raises(ConfigurationError, match="outside its directory"):
            load_checkpoint_in_model(empty(), folder)
    for content, message in (
        ({"weight_map": {"scale": "absent.safetensors"}}, r"missing files: \['absent.safetensors'\]"),
        ({"weight_map": {}}, "not a shard index"),
        ({"a": 3}, "not a shard index"),
        ([], "not a shard index"),
    ):
        index.write_text(json.dumps(content))
        with pytest.raises(ConfigurationError, match=message):
            load_checkpoint_in_model(empty(), folder)
    index.write_text("{")
    with pytest.raises(ConfigurationError, match="not a shard index"):
        load_checkpoint_in_model(empty(), folder)
    save(net(), folder / "part.safetensors")
    index.write_text(json.dumps({"absent": "part.safetensors"}))
    with pytest.raises(ConfigurationError, match="lacks tensors that its index lists"):
        load_checkpoint_in_model(empty(), folder)


def test_unclear_places_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="holds no weights"):
        load_checkpoint_in_model(empty(), tmp_path)
    for name in ("a.safetensors", "b.safetensors"):
        save(net(), tmp_path / name)
    with pytest.raises(ConfigurationError, match=r"\['a.safetensors', 'b.safetensors'\]"):
        load_checkpoint_in_model(empty(), tmp_path)
    for absent in (tmp_path / "absent", "absent.safetensors", "/no/such/folder"):
        with pytest.raises(ConfigurationError, match="does not exist"):
            load_checkpoint_in_model(empty(), absent)


def test_a_repository_is_found_in_the_cache_without_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    commit = "0" * 40
    repository = tmp_path / "models--someone--net"
    (repository / "blobs").mkdir(parents=True)
    (repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    save(net(), repository / "blobs" / "abc")
    (repository / "snapshots" / commit / "model.safetensors").symlink_to("../../blobs/abc")
    loaded = load_checkpoint_and_dispatch(empty(), "someone/net", device_map={"": "disk"})
    torch.testing.assert_close(loaded(words())["logits"], net()(words())["logits"])
    with pytest.raises(ConfigurationError, match="downloading it from the Hub failed"):
        load_checkpoint_in_model(empty(), "someone/other")


def test_a_state_dict_with_devices(tmp_path: Path) -> None:
    file = save(net(), tmp_path / "model.safetensors")
    loaded = load_state_dict(file, device_map={"embed": "disk", "blocks": "meta", "": "cpu"})
    assert loaded["embed.weight"].device.type == "cpu" and loaded["blocks.0.up.bias"].device.type == "meta"
    assert all(torch.equal(value, net().state_dict()[name]) for name, value in load_state_dict(file).items())


def test_sharding_follows_the_order_of_names() -> None:
    sizes = [6, 6, 2, 6, 2, 2]
    state = {str(index): torch.zeros(size, dtype=torch.uint8) for index, size in enumerate(sizes)}
    files, index = shard_checkpoint(state, 10)
    assert [[len(value) for value in part.values()] for part in files.values()] == [[6], [6, 2], [6, 2, 2]]
    assert list(files) == [f"pytorch_model-0000{number}-of-00003.bin" for number in (1, 2, 3)]
    assert index == {
        "metadata": {"total_size": 24},
        "weight_map": {name: file for file, part in files.items() for name in part},
    }
    assert shard_checkpoint(state, "1KB") == ({"pytorch_model.bin": state}, None)
    shared = torch.zeros(8, dtype=torch.uint8)
    files, _ = shard_checkpoint({"a": shared, "b": torch.zeros(8, dtype=torch.uint8), "c": shared}, 8)
    assert [list(part) for part in files.values()] == [["a", "c"], ["b"]]
    assert [len(part) for part in shard_checkpoint({"a": torch.zeros(99), "b": torch.zeros(1)}, 8)[0].values()] == [
        1,
        1,
    ]


def test_the_weights_of_an_offloaded_model_can_be_read_back(tmp_path: Path) -> None:
    model = net()
    file = save(model, tmp_path / "model.safetensors")
    loaded = load_checkpoint_and_dispatch(empty(), file, device_map={"": "disk"})
    found = get_state_dict_offloaded_model(loaded)
    assert list(found) == list(model.state_dict())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in found.items())
    assert found["head.weight"] is found["embed.weight"]
    with pytest.raises(ConfigurationError, match="have no values"):
        get_state_dict_offloaded_model(empty())


def test_loading_warns_of_nothing_when_all_fits(tmp_path: Path) -> None:
    file = save(net(), tmp_path / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", ResourceWarning)  # of another test's garbage
        load_checkpoint_and_dispatch(empty(), file, device_map={"": "disk"}, strict=True)


def test_written_weights_begin_at_cache_lines(tmp_path: Path) -> None:
    tensors = {f"{index}.weight": torch.rand(16, 3 + index) for index in range(9)}
    tensors |= {"a.odd": torch.arange(3, dtype=torch.int8), "b.wide": torch.rand(3, dtype=torch.float64)}
    path = tmp_path / "model.safetensors"
    for extra in range(0, 64, 7):
        with open(path, "wb") as file:
            write_safetensors({**tensors, "x" * extra: torch.ones(1)}, file)
        opened = SafetensorsFile(path)
        for name, entry in opened.entries.items():
            assert entry.start % (64 if entry.nbytes % 64 == 0 else entry.dtype.itemsize) == 0, name
        found = load_file(path)
        assert all(torch.equal(found[name], value) for name, value in tensors.items())


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="a terminal is needed")
def test_a_long_load_shows_a_bar_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = save(net(), tmp_path / "model.safetensors")
    monkeypatch.setattr(loading, "_BAR_DELAY", 0)

    def shown(stream: Any, delay: float) -> None:
        monkeypatch.setattr(loading, "_BAR_DELAY", delay)
        monkeypatch.setattr(sys, "stderr", stream)
        load_checkpoint_in_model(net(), file)
        stream.flush()

    pipe = io.StringIO()
    shown(pipe, 0)
    assert not pipe.getvalue(), "not a terminal"
    import fcntl
    import termios

    reader, writer = os.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("4H", 24, 100, 0, 0))
    with os.fdopen(writer, "w") as terminal:
        shown(terminal, 1000)
        assert not select.select([reader], [], [], 0.2)[0], "a short load"
        shown(terminal, 0)
        assert select.select([reader], [], [], 60)[0] and b"Loading weights: " in os.read(reader, 2**16)
    os.close(reader)


def test_a_first_load_imports_only_what_it_uses(tmp_path: Path) -> None:
    """Imports were most of the time of a process's first load: states, options and stores among them."""
    file = str(tmp_path / "m.safetensors")
    save_file(nn.Linear(2, 2).state_dict(), file)
    code = f"""
import sys
import torch
from safetensors.torch import save_file
before = set(sys.modules)
from accel_bigmodel import load_checkpoint_and_dispatch
with torch.device("meta"):
    model = torch.nn.Linear(2, 2)
load_checkpoint_and_dispatch(model, {file!r}, device_map={{"": "cpu"}})(torch.ones(2))
imported = {{name for name in set(sys.modules) - before if not name.startswith("accel_bigmodel")}}
print(*sorted(imported))
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    imported = done.stdout.split()
    assert "accel_state.errors" in imported
    unused = ("accel_state.options", "accel_state.state.partial", "accel_state.collectives", "accel_state.environments")
    unused += ("accel_state.storage.transfer", "accel_state.secrets", "accel_state.imports", "packaging", "psutil")
    assert [name for name in imported if name.startswith(unused)] == []
