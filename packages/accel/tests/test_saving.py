"""Saving weights and objects: what is read back is what was there, and a reader never sees half a file."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import nn
from torch.utils.data import DataLoader

from accel import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, ProjectConfiguration
from accel.utils import extract_model_from_parallel, id_tensor_storage, is_compiled_module, load, save
from accel_bigmodel.checkpoint.safetensors_file import SafetensorsFile
from accel_checkpoint.atomic_file import write_atomically
from accel_state import ConfigurationError
from accel_state.imports import is_package_available
from accel_state.safetensors_writer import clean_state_dict_for_safetensors
from accel_state.testing import run_world

needs_deepspeed = pytest.mark.skipif(not is_package_available("deepspeed"), reason="needs DeepSpeed")


class Tied(nn.Module):
    """An embedding whose weight is also that of the output layer, a view, and a buffer."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(10, 4)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = torch.tanh(block(x))
        out: torch.Tensor = self.head(self.norm(x))
        return out


IDS = torch.arange(10)


def outputs(model: nn.Module) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        out: torch.Tensor = model(IDS)
    return out


def test_ties_and_values_survive(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Tied())
    accelerator.save_model(model, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["model.safetensors"]
    other = Tied(seed=1)
    load_model(other, tmp_path / "model.safetensors", strict=True)
    assert other.head.weight is other.embedding.weight and torch.equal(outputs(other), outputs(model))
    assert torch.equal(other.norm.running_var, model.norm.running_var)


def read_index(folder: Path, suffix: str) -> dict[str, Any]:
    index: dict[str, Any] = json.loads((folder / f"{suffix}.index.json").read_text())
    return index


@pytest.mark.parametrize("safe", [True, False])
def test_large_models_are_split_with_an_index(tmp_path: Path, safe: bool) -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Tied())
    accelerator.save_model(model, tmp_path, max_shard_size=100, safe_serialization=safe)
    name = "model.safetensors" if safe else "pytorch_model.bin"
    index = read_index(tmp_path, name)
    loaded = {}
    for file in set(index["weight_map"].values()):
        shard = load(tmp_path / file)
        assert all(index["weight_map"][key] == file for key in shard)
        loaded.update(shard)
    missing, unexpected = Tied(seed=1).load_state_dict(loaded, strict=False)
    assert not unexpected and set(missing) <= {"head.weight", "embedding.weight"} and len(missing) <= 1
    assert len(set(index["weight_map"].values())) > 3
    accelerator.save_model(model, tmp_path, safe_serialization=safe)
    assert os.listdir(tmp_path) == [name], "shards of the earlier save were left to be mixed with this one"


def test_saved_names_are_those_of_the_model() -> None:
    accelerator = Accelerator(cpu=True, dynamo_backend="eager")
    model = accelerator.prepare(Tied())
    assert is_compiled_module(model) and set(accelerator.get_state_dict(model)) == set(Tied().state_dict())
    compiled_first = accelerator.prepare(torch.compile(Tied(), backend="eager"))
    assert set(accelerator.get_state_dict(compiled_first)) == set(Tied().state_dict())
    inner = Tied()
    inner.blocks[0] = torch.compile(inner.blocks[0], backend="eager")
    assert set(accelerator.get_state_dict(accelerator.prepare(inner))) == set(Tied().state_dict())


def names_on_ranks() -> tuple[list[bool], bool]:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Tied())
    compiled_after = torch.compile(model, backend="eager")
    before = accelerator.prepare(torch.compile(Tied(), backend="eager"))
    expected = set(Tied().state_dict())
    same = [set(accelerator.get_state_dict(m)) == expected for m in (model, compiled_after, before)]
    unwrapped = [
        accelerator.unwrap_model(m, keep_torch_compile=keep)
        for m in (model, compiled_after, before)
        for keep in (True, False)
    ]
    kinds = [is_compiled_module(m) for m in unwrapped]
    assert torch.equal(outputs(unwrapped[2]), outputs(unwrapped[3])) and type(unwrapped[5]) is Tied
    assert set(accelerator.get_state_dict(model, unwrap=False)) == {f"module.{name}" for name in expected}
    return same, kinds == [False, False, True, False, True, False]


def test_wrapping_and_compiling_leave_no_mark_in_names() -> None:
    assert run_world(names_on_ranks, 2, timeout=120) == [([True, True, True], True)] * 2


def save_on_ranks(folder: str) -> list[str]:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(Tied())
    accelerator.save_model(model, folder)
    accelerator.save({"rank": torch.tensor(accelerator.process_index)}, Path(folder) / "object.pt")
    accelerator.wait_for_everyone()
    assert accelerator.load(Path(folder) / "object.pt")["rank"] == 0
    other = Tied(seed=1)
    load_model(other, Path(folder) / "model.safetensors")
    assert torch.equal(outputs(other), outputs(accelerator.unwrap_model(model)))
    return sorted(os.listdir(folder))


def test_one_rank_writes_for_all(tmp_path: Path) -> None:
    assert run_world(save_on_ranks, 2, str(tmp_path)) == [["model.safetensors", "object.pt"]] * 2


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "object.pt"
    save({"a": torch.ones(1)}, target)

    def breaks(name: str) -> None:
        Path(name).write_bytes(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(target, breaks)
    assert load(target)["a"] == 1 and os.listdir(tmp_path) == ["object.pt"]


def test_loading_runs_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return os.system, (f"touch {tmp_path}/pwned",)

    torch.save(Evil(), tmp_path / "evil.pt")
    with pytest.raises(Exception, match="[Ww]eights"):
        load(tmp_path / "evil.pt")
    assert not (tmp_path / "pwned").exists()


def test_safetensors_files_and_what_they_refuse(tmp_path: Path) -> None:
    shared = torch.arange(6.0)
    save(
        {"a": shared, "b": shared, "t": shared.view(2, 3).t(), "part": shared[:2]},
        tmp_path / "x.safetensors",
        safe_serialization=True,
    )
    loaded = load(tmp_path / "x.safetensors")
    assert loaded["a"].tolist() == shared.tolist() and loaded["t"].tolist() == shared.view(2, 3).t().tolist()
    assert loaded["part"].tolist() == [0, 1] and "b" not in loaded
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    for wrong, named in (({"a": 1}, "int"), ([1], "a list")):
        with pytest.raises(ConfigurationError, match=named):
            save(wrong, tmp_path / "y.safetensors", safe_serialization=True)
    assert not (tmp_path / "y.safetensors").exists()


def test_open_files_can_be_written_to(tmp_path: Path) -> None:
    for safe in (True, False):
        with open(tmp_path / "f", "wb") as file:
            save({"a": torch.ones(2)}, file, safe_serialization=safe)
        read = load_file(tmp_path / "f") if safe else torch.load(tmp_path / "f")
        assert read["a"].tolist() == [1, 1]


def test_what_cannot_be_saved_is_refused(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    with torch.device("meta"):
        empty = Tied()
    with pytest.raises(ConfigurationError, match="tensors have no values.*embedding.weight"):
        accelerator.save_model(empty, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match="is a file"):
        accelerator.save_model(Tied(), tmp_path / "file")
    with pytest.raises(ConfigurationError, match="item at index 1.*state_dict and load_state_dict"):
        accelerator.register_for_checkpointing(Tied(), object())
    assert not accelerator._custom_objects
    accelerator.register_for_checkpointing(Tied())
    assert len(accelerator._custom_objects) == 1


def test_storage_identity() -> None:
    a = torch.ones(4)
    assert id_tensor_storage(a) == id_tensor_storage(a[:2]) != id_tensor_storage(a.clone())
    assert set(clean_state_dict_for_safetensors({"a": a, "b": a})) == {"a"}


def test_unwrapping_reaches_submodules() -> None:
    outer = nn.Sequential(nn.DataParallel(nn.Linear(2, 2)), nn.ReLU())
    assert isinstance(extract_model_from_parallel(outer)[0], nn.DataParallel)
    assert isinstance(extract_model_from_parallel(outer, recursive=True)[0], nn.Linear)


def test_projects_know_their_folders(tmp_path: Path) -> None:
    assert Accelerator(cpu=True, project_dir=tmp_path).project_dir == tmp_path
    settings = ProjectConfiguration(project_dir="a")
    assert settings.logging_dir == "a" and ProjectConfiguration(project_dir="a", logging_dir="b").logging_dir == "b"
    assert Accelerator(cpu=True, project_dir="a", project_config=ProjectConfiguration()).logging_dir == "a"
    with pytest.raises(ConfigurationError, match="contradicts project_config"):
        Accelerator(cpu=True, project_dir="b", project_config=settings)


def test_safetensors_files_are_aligned_and_complete(tmp_path: Path) -> None:
    tensors = {
        "odd": torch.arange(3, dtype=torch.int8),
        "wide": torch.rand(5, 2, dtype=torch.float64),
        "half": torch.rand(7).to(torch.bfloat16),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 4),
        "flags": torch.tensor([True, False]),
        "transposed": torch.rand(3, 4).t(),
    }
    Accelerator(cpu=True).save(tensors, tmp_path / "tensors.safetensors", safe_serialization=True)
    content = (tmp_path / "tensors.safetensors").read_bytes()
    assert (8 + int.from_bytes(content[:8], "little")) % 64 == 0
    loaded = load_file(tmp_path / "tensors.safetensors")
    assert set(loaded) == set(tensors)
    assert all(
        loaded[name].dtype == tensors[name].dtype and torch.equal(loaded[name], tensors[name]) for name in tensors
    )
    accelerator = Accelerator(cpu=True)
    accelerator.save_model(nn.Sequential(*(nn.Linear(16, 16) for _ in range(6))), tmp_path / "m", max_shard_size="2KB")
    shards = [SafetensorsFile(path) for path in (tmp_path / "m").glob("*.safetensors")]
    assert len(shards) > 2
    assert all(entry.start % 64 == 0 for shard in shards for entry in shard.entries.values())


def test_a_type_that_safetensors_does_not_have(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"torch\.complex128.*safe_serialization=False"):
        Accelerator(cpu=True).save(
            {"z": torch.zeros(2, dtype=torch.complex128)}, tmp_path / "z", safe_serialization=True
        )
    assert not list(tmp_path.iterdir())


def test_a_model_with_an_empty_buffer(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    model = nn.Linear(2, 2)
    model.register_buffer("empty", torch.empty(0, 3))
    model = accelerator.prepare(model)
    accelerator.save_state(tmp_path / "state")
    expected = model.weight.detach().clone()
    nn.init.zeros_(model.weight)
    accelerator.load_state(tmp_path / "state")
    assert torch.equal(model.weight, expected)


def saved_by_hand(kind: str) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Errors of state_dict() of the user's own model after two steps, and what get_state_dict makes of it."""
    if kind == "zero 3":
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
        config = {"zero_optimization": zero, "gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": 2}
        plugin: Any = {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config)}
    elif kind:
        fsdp = FullyShardedDataParallelPlugin(fsdp_version=1, use_orig_params=kind != "fsdp 1 flat")
        plugin = {"fsdp_plugin": fsdp}
    else:
        plugin = {}
    accelerator = Accelerator(cpu=True, **plugin)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    samples: Any = torch.randn(8, 3, generator=torch.Generator().manual_seed(1))
    loader: Any = DataLoader(samples, batch_size=4 // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader)
    for batch in loader:
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    own, messages = accelerator.unwrap_model(model), []
    for module in [own, *([own[2]] if kind != "fsdp 1 flat" else []), *([model] if kind == "zero 3" else [])]:
        with pytest.raises(ConfigurationError) if kind else nullcontext() as caught:
            module.state_dict()
        messages += [str(caught.value)] if kind else []  # type: ignore[union-attr]
    return messages, {name: value.clone() for name, value in accelerator.get_state_dict(own).items()}


@pytest.mark.parametrize("kind", ["fsdp 1", "fsdp 1 flat", pytest.param("zero 3", marks=needs_deepspeed)])
def test_states_of_parts_of_weights_are_refused(kind: str) -> None:
    ((_, expected),) = run_world(saved_by_hand, 1, "")
    (messages, state), (others, nothing) = run_world(saved_by_hand, 2, kind, timeout=200)
    assert all("accelerator.get_state_dict(model)" in message for message in [*messages, *others])
    assert state.keys() == expected.keys() and not nothing
    for name, value in expected.items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-6)
