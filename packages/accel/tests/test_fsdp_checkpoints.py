"""States of sharded models: every state-dict type, to every strategy, on any number of ranks; and what must not happen
to them.
"""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_nets import BLOCKS, Net, batches, loss_of
from safetensors.torch import load_file
from windows import copied

from accel import Accelerator, ProjectConfiguration
from accel.fsdp.merge import merge_fsdp_weights
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_checkpoint import writer
from accel_checkpoint.manifest import record_file
from accel_checkpoint.names import CheckpointError
from accel_checkpoint.sharded.metadata import read_metadata
from accel_launch.cli import main
from accel_state import AcceleratorState
from accel_state.env import patch_environment
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

pytestmark = pytest.mark.timeout(600)

SAVERS: dict[str, dict[str, Any] | None] = {
    "v1 full": {**BLOCKS},
    "v1 sharded": {**BLOCKS, "state_dict_type": "SHARDED_STATE_DICT"},
    "v1 safetensors": {**BLOCKS, "state_dict_type": "SHARDED_STATE_DICT", "sharded_state_format": "safetensors"},
    "v1 local": {**BLOCKS, "state_dict_type": "LOCAL_STATE_DICT"},
    "v1 flat": {**BLOCKS, "use_orig_params": False, "state_dict_type": "SHARDED_STATE_DICT"},
    "v1 flat full": {**BLOCKS, "use_orig_params": False},
    "v2": {**BLOCKS, "fsdp_version": 2},
    "v2 safetensors": {**BLOCKS, "fsdp_version": 2, "sharded_state_format": "safetensors"},
    "v2 full": {**BLOCKS, "fsdp_version": 2, "state_dict_type": "FULL_STATE_DICT", "activation_checkpointing": True},
    "ddp": None,
}
LOADERS = {2: ["v1 full", "v1 flat", "v2", "ddp"], 4: ["v2", "ddp"], 1: ["ddp"]}


class Run:
    """A training run, with two groups of parameters in its optimizer."""

    def __init__(self, settings: dict[str, Any] | None, seed: int, groups: bool) -> None:
        plugin = None if settings is None else FullyShardedDataParallelPlugin(**settings)
        AcceleratorState._reset_state()  # without settings, an Accelerator shares the strategy of the one before
        self.accelerator = Accelerator(fsdp_plugin=plugin)
        torch.manual_seed(seed)
        model = Net()
        biases = [parameter for name, parameter in model.named_parameters() if name.endswith("bias")]
        others = [parameter for name, parameter in model.named_parameters() if not name.endswith("bias")]
        parameters: Any = (
            [{"params": biases, "weight_decay": 0.0}, {"params": others}] if groups else model.parameters()
        )
        optimizer = torch.optim.AdamW(parameters, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)

    def train(self, chunks: tuple[torch.Tensor, ...]) -> list[float]:
        losses = []
        for tokens in chunks:
            own = tokens[self.accelerator.process_index :: self.accelerator.num_processes]
            loss = loss_of(self.model, own)
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(self.accelerator.reduce(loss.detach(), "mean").item())
        return losses

    def weights(self) -> dict[str, torch.Tensor]:
        return copied(self.accelerator.get_state_dict(self.model))


def has_groups(name: str) -> bool:
    return "flat" not in name  # which merges all parameters into one group


def digested_late(run: Run, folder: str) -> set[str]:
    """The files that this rank reads once more to describe them, in a save."""
    names: set[str] = set()

    def record(path: Path) -> Any:
        names.add(path.name)
        return record_file(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "record_file", record)
        run.accelerator.save_state(folder)
    return names


def save_all(folder: str, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        run = Run(SAVERS[name], 0, has_groups(name))
        run.train(batches(8)[:4])
        run.accelerator.save_state(f"{folder}/{name}")
        if name == "v2":
            found["late"] = digested_late(run, f"{folder}/late")
        run.accelerator.save_state(f"{folder}/{name} later", blocking=False)
        losses = run.train(batches(8)[4:])
        run.accelerator.wait_for_save()
        found[name] = losses, run.weights()
        run.accelerator.free_memory()
    return found


def load_all(folder: str, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    found: dict[tuple[str, str], Any] = {}
    for name, into in pairs:
        run = Run(SAVERS[into], 9, has_groups(name) and has_groups(into))
        try:
            run.accelerator.load_state(f"{folder}/{name}")
            found[name, into] = run.train(batches(8)[4:]), run.weights()
        except CheckpointError as error:
            found[name, into] = str(error)
        run.accelerator.free_memory()
    return found


def contents(folder: Path) -> dict[str, bytes]:
    """All files, but those that say when they were written."""
    files = {path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()}
    return {name: b"" if name.endswith((".json", ".metadata")) else path.read_bytes() for name, path in files.items()}


@pytest.mark.slow
# Eight ways of saving, twice, and seven of loading each on three sizes of worlds.
def test_every_state_loads_into_every_strategy_on_any_number_of_ranks(tmp_path: Path) -> None:
    saved = run_world(save_all, 2, str(tmp_path), list(SAVERS), timeout=250)[0]
    assert saved["late"] == {".metadata"}, "what a rank has written, nobody reads again to describe it"
    shutil.rmtree(tmp_path / "late")
    for name in SAVERS:
        assert contents(tmp_path / name) == contents(tmp_path / f"{name} later"), (
            f"{name}: blocking=False writes the same bytes"
        )
    assert {name for name in contents(tmp_path / "v2") if "fsdp" in name or "optimizer" in name} == {
        *(
            f"{stem}_0/{file}"
            for stem in ("pytorch_model_fsdp", "optimizer")
            for file in (".metadata", "__0_0.distcp", "__1_0.distcp")
        )
    }
    for world, loaders in LOADERS.items():
        pairs = [(name, into) for name in SAVERS for into in loaders if has_groups(name) == has_groups(into)]
        for (name, into), found in run_world(load_all, world, str(tmp_path), pairs, timeout=250)[0].items():
            check_loaded(name, into, world, found, saved[name])


def check_loaded(name: str, into: str, world: int, found: Any, saved: Any) -> None:
    what = f"{name} into {into} on {world} ranks"
    if name == "v1 local" and (world != 2 or into == "ddp"):
        assert "LOCAL_STATE_DICT" in found, what
        return
    losses, weights = found
    # On as many ranks the same numbers are added in the same order.
    tolerance = 0 if world == 2 else 1e-4
    torch.testing.assert_close(losses, saved[0], rtol=0, atol=tolerance, msg=lambda text: f"{what}: {text}")
    for key, value in saved[1].items():
        torch.testing.assert_close(
            weights[key], value, rtol=0, atol=tolerance, msg=lambda text, key=key: f"{what}, {key}: {text}"
        )


def one_save(folder: str, kind: str = "SHARDED_STATE_DICT") -> dict[str, torch.Tensor]:
    run = Run({**BLOCKS, "fsdp_version": 2, "state_dict_type": kind}, 0, True)
    run.train(batches(8)[:2])
    run.accelerator.save_state(folder)
    return run.weights()


def try_loading(folder: str, broken: list[str]) -> list[str]:
    run = Run({**BLOCKS, "fsdp_version": 2}, 5, True)
    before, found = run.weights(), []
    for name in broken:
        with pytest.raises((CheckpointError, ConfigurationError)) as caught:
            run.accelerator.load_state(f"{folder}/{name}")
        found.append(str(caught.value))
    assert all(torch.equal(value, before[name]) for name, value in run.weights().items()), "nothing has been changed"
    return found


class Attack:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("executed"),))


def test_damaged_and_malicious_shards_are_refused_and_change_nothing(tmp_path: Path) -> None:
    run_world(one_save, 2, str(tmp_path / "good"), timeout=250)
    shards, table = "pytorch_model_fsdp_0/__1_0.distcp", "pytorch_model_fsdp_0/.metadata"
    metadata = read_metadata(tmp_path / "good/pytorch_model_fsdp_0")
    for place in metadata.storage_data.values():
        place.relative_path = "../../secret.distcp"
    changes = {
        "flipped": (shards, lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:]),
        "cut": (shards, lambda data: data[:-10]),
        "malicious": (table, lambda _: pickle.dumps(Attack())),
        "outside": (table, lambda _: pickle.dumps(metadata)),
        "not a table": (table, lambda _: pickle.dumps({"a": 1})),
        "no table": (table, None),
    }
    for name, (file, change) in changes.items():
        for with_manifest in (True, False):
            copy = tmp_path / f"{name}{'' if with_manifest else ' unlisted'}"
            shutil.copytree(tmp_path / "good", copy)
            data = (copy / file).read_bytes()
            (copy / file).unlink() if change is None else (copy / file).write_bytes(change(data))
            if not with_manifest:
                (copy / "accel_manifest.json").unlink()
    broken = [*changes, *(f"{name} unlisted" for name in changes)]
    messages = run_world(try_loading, 2, str(tmp_path), broken, timeout=250)[0]
    assert not list(tmp_path.rglob("executed")) and not Path("executed").exists()
    for name, message in zip(broken[: len(changes)], messages, strict=False):
        assert changes[name][0].rsplit("/", 1)[1] in message, f"{name} names the file: {message}"


@pytest.mark.parametrize(
    ("value", "message"),
    [(Attack(), "cannot be read"), ({"a": 1}, "it does not hold checkpoint metadata"), (None, "has no .metadata")],
    ids=["malicious", "other", "missing"],
)
def test_a_table_of_contents_runs_no_code(value: Any, message: str, tmp_path: Path) -> None:
    if value is not None:
        (tmp_path / ".metadata").write_bytes(pickle.dumps(value))
    with pytest.raises(CheckpointError, match=message):
        read_metadata(tmp_path)
    assert not Path("executed").exists()


def test_merging_gives_the_files_that_everybody_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expected = run_world(one_save, 2, str(tmp_path / "saved"), timeout=250)[0]
    assert merge_fsdp_weights(tmp_path / "saved", tmp_path / "whole") == ["model.safetensors"]
    merged = load_file(tmp_path / "whole/model.safetensors")
    assert set(merged) == set(expected)
    assert all(torch.equal(merged[name], value) for name, value in expected.items())
    shards = tmp_path / "saved/pytorch_model_fsdp_0"
    written = merge_fsdp_weights(shards, tmp_path / "small", max_shard_size=400)
    assert "model.safetensors.index.json" in written and len(written) > 3
    several = {
        name: value
        for file in written
        if file.endswith("safetensors")
        for name, value in load_file(tmp_path / "small" / file).items()
    }
    assert all(torch.equal(several[name], value) for name, value in expected.items())
    assert (
        main(["merge-weights", str(shards), str(tmp_path / "bin"), "--unsafe_serialization", "--remove_checkpoint_dir"])
        == 0
    )
    assert capsys.readouterr().out.strip() == f"{tmp_path}/bin/pytorch_model.bin"
    assert all(
        torch.equal(torch.load(tmp_path / "bin/pytorch_model.bin")[name], value) for name, value in expected.items()
    )
    assert not shards.exists()
    with pytest.raises(ConfigurationError, match="pytorch_model_fsdp_0"):
        merge_fsdp_weights(tmp_path / "saved", tmp_path / "again")


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(4)
    return GPT2LMHeadModel(GPT2Config(vocab_size=23, n_positions=9, n_embd=8, n_layer=2, n_head=2))


def gpt2_saved(folder: str, version: int) -> dict[str, torch.Tensor]:
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, state_dict_type="SHARDED_STATE_DICT", sharded_state_format="safetensors"
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = gpt2()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    accelerator.backward(model(input_ids=torch.arange(8)[None], labels=torch.arange(8)[None]).loss)
    optimizer.step()
    accelerator.save_state(folder)
    return copied(accelerator.get_state_dict(model))


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
def test_from_pretrained_reads_safetensors_shards_as_they_are(tmp_path: Path, version: int) -> None:
    expected = run_world(gpt2_saved, 2, str(tmp_path / "saved"), version, timeout=250)[0]
    shards, initial = tmp_path / "saved/pytorch_model_fsdp_0", gpt2()
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json")
    assert {path.name for path in shards.iterdir()} == {".metadata", *files}
    initial.config.save_pretrained(shards)
    found = type(initial).from_pretrained(shards).state_dict()
    assert set(found) == set(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert not torch.equal(found["transformer.wte.weight"], initial.state_dict()["transformer.wte.weight"])
    merge_fsdp_weights(tmp_path / "saved", tmp_path / "whole")
    merged = load_file(tmp_path / "whole/model.safetensors")
    assert all(torch.equal(merged[name], expected[name]) for name in merged)


def test_the_format_of_shards_is_one_of_sharded_states() -> None:
    with pytest.raises(ConfigurationError, match=r"not of FULL_STATE_DICT"):
        FullyShardedDataParallelPlugin(sharded_state_format="safetensors")
    with pytest.raises(ConfigurationError, match=r"'zip' is not one of DCP, SAFETENSORS"):
        FullyShardedDataParallelPlugin(fsdp_version=2, sharded_state_format="zip")
    with patch_environment(FSDP_SHARDED_STATE_FORMAT="safetensors"):
        assert FullyShardedDataParallelPlugin(fsdp_version=2).sharded_state_format == "safetensors"


def torchs_own_reader(folder: str) -> dict[str, torch.Tensor]:
    """What torch.distributed.checkpoint itself finds in the folder."""
    from torch.distributed import checkpoint

    model = Net()
    state = {"model": model.state_dict()}
    checkpoint.load(state, checkpoint_id=f"{folder}/pytorch_model_fsdp_0")
    return state["model"]


def test_torch_reads_our_shards_and_we_read_torchs(tmp_path: Path) -> None:
    expected = run_world(one_save, 2, str(tmp_path / "saved"), timeout=250)[0]
    for found in run_world(torchs_own_reader, 2, str(tmp_path / "saved"), timeout=250):
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    run_world(torchs_own_writer, 2, str(tmp_path / "theirs"), timeout=250)
    merge_fsdp_weights(tmp_path / "theirs", tmp_path / "whole")
    merged = load_file(tmp_path / "whole/model.safetensors")
    torch.manual_seed(3)
    assert all(torch.equal(merged[name], value) for name, value in Net().state_dict().items())


def torchs_own_writer(folder: str) -> None:
    from torch.distributed import checkpoint

    torch.manual_seed(3)
    checkpoint.save({"model": Net().state_dict()}, checkpoint_id=f"{folder}/pytorch_model_fsdp_0")


def on_each_node(folder: str) -> None:
    rank = int(os.environ["RANK"])
    with patch_environment(LOCAL_RANK=0, LOCAL_WORLD_SIZE=1, GROUP_RANK=rank, GROUP_WORLD_SIZE=2):
        accelerator = Accelerator(
            fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2),
            project_config=ProjectConfiguration(save_on_each_node=True),
        )
        model = accelerator.prepare(Net())
        for save in (
            lambda: accelerator.save_state(f"{folder}/{rank}"),
            lambda: accelerator.save_model(model, f"{folder}/{rank} model"),
        ):
            with pytest.raises(ConfigurationError, match="of 2 nodes"):
                save()


def test_nodes_cannot_each_save_what_they_share(tmp_path: Path) -> None:
    run_world(on_each_node, 2, str(tmp_path), timeout=250, state=False)
    assert not list(tmp_path.iterdir())


def strangers(folder: str) -> None:
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model, other = Net(), Net()
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    accelerator.prepare(model, other, optimizer)
    with pytest.raises(ConfigurationError, match="optimizer 0 updates"):
        accelerator.save_state(folder)


def test_an_optimizer_of_two_models_has_no_names(tmp_path: Path) -> None:
    run_world(strangers, 2, str(tmp_path / "state"), timeout=250)
    assert not (tmp_path / "state").exists()
