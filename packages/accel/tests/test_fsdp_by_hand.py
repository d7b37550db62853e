"""The parts of sharding that are functions of their own: one model or optimizer saved and loaded, and the steps of
version 2.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from fsdp_nets import BLOCKS, Block, Net, batches, loss_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from windows import assert_weights, copied

from accel import Accelerator, GradScalerKwargs
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.utils import (
    compile_regions_fsdp2,
    ensure_weights_retied,
    fsdp2_apply_ac,
    fsdp2_canonicalize_names,
    fsdp2_load_full_state_dict,
    fsdp2_prepare_model,
    fsdp2_switch_optimizer_parameters,
    get_fsdp2_grad_scaler,
    load_fsdp_model,
    load_fsdp_optimizer,
    model_has_dtensor,
    save_fsdp_model,
    save_fsdp_optimizer,
)
from accel_checkpoint.names import CheckpointError
from accel_state import PartialState
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

pytestmark = pytest.mark.timeout(600)


def build(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-6)


def train(accelerator: Accelerator, model: nn.Module, optimizer: Any, steps: int, skip: int = 0) -> None:
    for tokens in batches(skip + steps)[skip:]:
        accelerator.backward(loss_of(model, tokens[accelerator.process_index :: accelerator.num_processes]))
        optimizer.step()
        optimizer.zero_grad()


def plain(steps: int) -> dict[str, torch.Tensor]:
    """The weights after some steps of one process, in plain PyTorch."""
    model, optimizer = build()
    for tokens in batches(steps):
        loss_of(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


# The settings, whether torch.distributed.checkpoint writes, and the files that there are.
WHOLE = {"pytorch_model_fsdp.bin", "optimizer.bin"}
STEMS = ("pytorch_model_fsdp", "optimizer")
SHARDS = {f"{stem}_0/{file}" for stem in STEMS for file in (".metadata", "__0_0.distcp", "__1_0.distcp")}
SAVED: list[tuple[dict[str, Any], bool, set[str]]] = [
    ({"state_dict_type": "FULL_STATE_DICT"}, True, WHOLE),
    ({"state_dict_type": "SHARDED_STATE_DICT"}, True, SHARDS),
    ({"state_dict_type": "LOCAL_STATE_DICT"}, True, {f"{stem}_rank{rank}.bin" for stem in STEMS for rank in (0, 1)}),
    ({"state_dict_type": "SHARDED_STATE_DICT", "fsdp_version": 2}, True, SHARDS),
    (
        {"state_dict_type": "SHARDED_STATE_DICT", "fsdp_version": 2},
        False,
        {f"{stem}_0_rank{rank}.bin" for stem in STEMS for rank in (0, 1)},
    ),
    ({"state_dict_type": "FULL_STATE_DICT", "fsdp_version": 2}, True, WHOLE),
]


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def prepared(
    settings: dict[str, Any], seed: int = 0
) -> tuple[FullyShardedDataParallelPlugin, Accelerator, nn.Module, Any]:
    plugin = FullyShardedDataParallelPlugin(**BLOCKS, **settings)
    accelerator = Accelerator(fsdp_plugin=plugin)
    return plugin, accelerator, *accelerator.prepare(*build(seed))


def round_trip(folder: Path, settings: dict[str, Any], use_dcp: bool) -> dict[str, Any]:
    plugin, accelerator, model, optimizer = prepared(settings)
    train(accelerator, model, optimizer, 2)
    save_fsdp_model(plugin, accelerator, model, folder, use_dcp=use_dcp)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder, use_dcp=use_dcp)
    # The same again, over files that are there: they are replaced.
    save_fsdp_model(plugin, accelerator, model, folder, use_dcp=use_dcp)
    saved = files_in(folder)
    save_fsdp_model(plugin, accelerator, model, folder, model_index=1, use_dcp=use_dcp)
    train(accelerator, model, optimizer, 2, skip=2)
    going_on = copied(accelerator.get_state_dict(model))
    accelerator.free_memory()
    plugin, accelerator, model, optimizer = prepared(settings, seed=9)
    train(accelerator, model, optimizer, 1)
    load_fsdp_model(plugin, accelerator, model, folder, use_dcp=use_dcp)
    load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder, use_dcp=use_dcp)
    train(accelerator, model, optimizer, 2, skip=2)
    resumed = copied(accelerator.get_state_dict(model))
    load_fsdp_model(plugin, accelerator, model, folder, model_index=1, use_dcp=use_dcp)
    with pytest.raises(CheckpointError, match="has no weights of model 7"):
        load_fsdp_model(plugin, accelerator, model, folder, model_index=7)
    second = copied(accelerator.get_state_dict(model))
    accelerator.free_memory()
    return {"saved": saved, "going on": going_on, "resumed": resumed, "second": second}


def by_hand(folder: str) -> dict[str, Any]:
    """Everything that needs two ranks and nothing but its own Accelerator, in one process group."""
    root = Path(folder)
    found: dict[str, Any] = {
        "saved": [round_trip(root / str(n), settings, dcp) for n, (settings, dcp, _) in enumerate(SAVED)]
    }
    found["across"] = across(root)
    found["prepared"] = {checkpointing: prepared_by_hand(checkpointing) for checkpointing in (False, True)}
    found["switched"] = switched()
    found["loaded"] = loaded_from_rank_0()
    found["scales"] = scaled()
    found["compiled"] = compiled()
    refusals(root)
    return found


def across(root: Path) -> dict[str, torch.Tensor]:
    """What version 1 has written whole, version 2 loads in parts."""
    plugin, accelerator, model, _ = prepared({"fsdp_version": 2}, seed=5)
    load_fsdp_model(plugin, accelerator, model, root / "0")
    weights = copied(accelerator.get_state_dict(model))
    accelerator.free_memory()
    return weights


def prepared_by_hand(checkpointing: bool) -> dict[str, Any]:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, activation_checkpointing=checkpointing, **BLOCKS)
    accelerator = Accelerator(fsdp_plugin=plugin)
    model, optimizer = build()
    before = model_has_dtensor(model)
    optimizer = accelerator.prepare(optimizer)
    assert fsdp2_apply_ac(accelerator, model) is model
    checkpoints = sum(type(module).__name__.endswith("CheckpointWrapper") for module in model.modules())
    assert fsdp2_prepare_model(accelerator, model) is model and fsdp2_prepare_model(accelerator, model) is model
    assert sum(type(module).__name__.endswith("CheckpointWrapper") for module in model.modules()) == checkpoints
    train(accelerator, model, optimizer, 3)
    weights = {name: value.full_tensor() for name, value in model.state_dict().items() if hasattr(value, "full_tensor")}
    accelerator.free_memory()
    return {
        "dtensor": (before, model_has_dtensor(model)),
        "checkpoints": checkpoints,
        "weights": fsdp2_canonicalize_names(weights),
    }


def switched() -> dict[str, torch.Tensor]:
    """An optimizer that has stepped goes on with the parameters that fully_shard has made, without an Accelerator."""
    model, optimizer = build()
    first, *others = batches(3)
    loss_of(model, first).backward()
    optimizer.step()
    optimizer.zero_grad()
    before = {name: (parameter, parameter.data_ptr()) for name, parameter in model.named_parameters()}
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    new = dict(model.named_parameters())
    with pytest.raises(ConfigurationError, match=r"parameter 0 of.*\(shape \(11, 7\)\)"):
        fsdp2_switch_optimizer_parameters(optimizer, {})
    # By pointer, as the reference wants it, and by the parameter itself.
    mapping = {(old if name.endswith("bias") else pointer): new[name] for name, (old, pointer) in before.items()}
    fsdp2_switch_optimizer_parameters(optimizer, mapping)
    rank = PartialState().process_index
    for tokens in others:
        loss_of(model, tokens[rank::2]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in model.state_dict().items()
    }


def loaded_from_rank_0() -> list[dict[str, torch.Tensor]]:
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    rank, found = accelerator.process_index, []
    for on_meta in (False, True):
        with torch.device("meta" if on_meta else "cpu"):
            model = Net()
        for unit in (*model.blocks, model):
            fully_shard(unit, mesh=init_device_mesh("cpu", (2,)))
        whole = build(3)[0].state_dict() if rank == 0 else {}
        fsdp2_load_full_state_dict(accelerator, model, whole, cpu_offload=on_meta)
        assert model.head.weight is model.embedding.weight
        assert not any(value.is_meta for value in model.state_dict().values())
        loss_of(model, batches(1)[0]).backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        found.append({n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in model.state_dict().items()})
    whole.pop("blocks.0.norm.bias", None)
    with pytest.raises(ConfigurationError, match=r"rank 0 has blocks.0.norm.bias.*FSDPNet.*\(7,\)"):
        fsdp2_load_full_state_dict(accelerator, model, whole)
    accelerator.free_memory()
    return found


def scaled() -> tuple[float, float]:
    """Only rank 1 overflows; both leave the step out."""
    scaler = get_fsdp2_grad_scaler(init_scale=64.0)
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    if PartialState().process_index == 1:
        model.weight.grad._local_tensor.fill_(float("inf"))
    before = model.weight.full_tensor().detach().clone()
    scaler.expect(optimizer)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), (model.weight.full_tensor() - before).abs().max().item()


def compiled() -> dict[str, torch.Tensor]:
    model, optimizer = build()
    assert compile_regions_fsdp2(model, backend="eager") is model
    assert all(type(block) is Block and block._compiled_call_impl is not None for block in model.blocks)
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2, **BLOCKS))
    model, optimizer = accelerator.prepare(model, optimizer)
    train(accelerator, model, optimizer, 3)
    weights = copied(accelerator.get_state_dict(model))
    accelerator.free_memory()
    return weights


def refusals(root: Path) -> None:
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(), kwargs_handlers=[GradScalerKwargs()])
    plugin, (model, optimizer) = accelerator.strategy.settings, build()
    for wrong in (
        lambda: save_fsdp_model(plugin, accelerator, model, root / "x"),
        lambda: load_fsdp_model(plugin, accelerator, model, root / "0"),
        lambda: save_fsdp_optimizer(plugin, accelerator, optimizer, model, root / "x"),
        lambda: load_fsdp_optimizer(plugin, accelerator, optimizer, model, root / "0"),
    ):
        with pytest.raises(ConfigurationError, match="got a Net that is not sharded"):
            wrong()
    for needs_2 in (fsdp2_apply_ac, fsdp2_prepare_model):
        with pytest.raises(ConfigurationError, match="FSDP version 2.*FSDP1Strategy"):
            needs_2(accelerator, model)
    sharded = accelerator.prepare(model)
    # Libraries pass it always: it has no effect on a model that is not a PEFT model.
    save_fsdp_model(plugin, accelerator, sharded, root / "full", adapter_only=True)
    before = copied(accelerator.get_state_dict(sharded))
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.zero_()
    load_fsdp_model(plugin, accelerator, sharded, root / "full", adapter_only=True)
    assert_weights(accelerator.get_state_dict(sharded), before, tolerance=0)
    other = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    with pytest.raises(ConfigurationError, match="optimizer 0 updates"):
        save_fsdp_optimizer(plugin, accelerator, other, sharded, root / "x")
    assert not (root / "x").exists()
    accelerator.free_memory()


@pytest.mark.slow  # a dozen trainings in two ranks; the functions have fast tests one by one
def test_the_parts_of_sharding_by_hand(tmp_path: Path) -> None:
    found = run_world(by_hand, 2, str(tmp_path), timeout=250)[0]
    after_2, after_3, after_4 = plain(2), plain(3), plain(4)
    for (settings, use_dcp, files), got in zip(SAVED, found["saved"], strict=True):
        what = f"{settings}, use_dcp={use_dcp}"
        assert got["saved"] == files, what
        assert_weights(got["going on"], after_4, what)
        assert_weights(got["resumed"], got["going on"], what, tolerance=0)
        assert_weights(got["second"], after_2, what)
    assert_weights(found["across"], after_2)
    whole = {name: value for name, value in after_3.items() if name != "scale"}
    for checkpointing, got in found["prepared"].items():
        assert got["dtensor"] == (False, True) and got["checkpoints"] == 2, checkpointing
        assert_weights(got["weights"], whole)
    assert_weights(found["switched"], after_3)
    for got in found["loaded"]:
        assert_weights(got, build(3)[0].state_dict(), tolerance=0)
    assert found["scales"] == (32.0, 0.0)
    assert_weights(found["compiled"], after_3)


def test_names_without_the_marks_of_wrappers() -> None:
    marked = {"_fsdp_wrapped_module.a._checkpoint_wrapped_module.w": 1, "_orig_mod.b": 2, "c": 3}
    assert fsdp2_canonicalize_names(marked) == {"a.w": 1, "b": 2, "c": 3}


def test_tied_weights_stay_tied_when_modules_get_their_memory() -> None:
    def init(module: nn.Module) -> nn.Module:
        return module.to_empty(device="cpu", recurse=False)

    with torch.device("meta"):
        model, untied = Net(), Block()
    assert ensure_weights_retied(init, untied, "cpu") is init
    torn = Net()
    torn.load_state_dict(build(1)[0].state_dict())
    retying = ensure_weights_retied(init, model, torch.device("cpu"))
    for module in model.modules():
        assert retying(module) is module
    assert model.head.weight is model.embedding.weight and not model.head.weight.is_meta
    with torch.device("meta"):
        apart = Net()
    for module in apart.modules():
        init(module)
    assert apart.head.weight is not apart.embedding.weight, "which is what happens without it"


def adapters(folder: str) -> dict[str, Any]:
    from peft import LoraConfig, get_peft_model

    found: dict[str, Any] = {}
    for version in (1, 2):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_type="SHARDED_STATE_DICT", **BLOCKS)
        weights = []
        for seed in (0, 1):
            accelerator = Accelerator(fsdp_plugin=plugin)
            torch.manual_seed(0)
            net = Net()
            torch.manual_seed(seed)
            model = get_peft_model(net, LoraConfig(r=2, target_modules=["linear"], init_lora_weights=False))
            model = accelerator.prepare(model)
            target = f"{folder}/{version}"
            call = save_fsdp_model if seed == 0 else load_fsdp_model
            call(plugin, accelerator, model, target, adapter_only=True)
            weights.append(copied(accelerator.get_state_dict(model)))
            accelerator.free_memory()
        found[str(version)] = weights
    return found


def test_an_adapter_is_saved_on_its_own(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from accel_checkpoint.sharded.reader import tensors_in

    found = run_world(adapters, 2, str(tmp_path), timeout=250)[0]
    for version, (saved, loaded) in found.items():
        assert_weights(loaded, saved, version, tolerance=0)
        names = tensors_in(tmp_path / version / "pytorch_model_fsdp_0", "model")
        assert len(names) == 4 and all(name.endswith(("lora_A.weight", "lora_B.weight")) for name in names), list(names)
    assert "RANK" not in os.environ
