"""Checkpoints of dist_checkpointing are converted both ways without a difference, and Megatron-core loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matrix
import pytest
import torch
from safetensors.torch import load_file

from accel_megatron.command import run
from accel_megatron.optimizer_file import MOMENTS
from accel_megatron.torch_dist import slots
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

NAMES = ["gpt2", "qwen3", "mixtral", "megatron-bert", "t5", "t5-gated"]


def save(name: str, folder: Path, optimizer: bool = False) -> dict[str, torch.Tensor]:
    """Save a model with Transformers, and the state of its AdamW after two steps; returns the weights in the files."""
    model = matrix.create(name)
    if optimizer:
        adam = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
        for batch in matrix.batches(name, 2, model.config.vocab_size):
            model(**batch).loss.backward()
            adam.step()
            adam.zero_grad()
        folder.mkdir(parents=True)
        torch.save(adam.state_dict(), folder / "optimizer.bin")
    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def convert(*arguments: Any) -> None:
    assert run(["convert", *map(str, arguments)]) == 0


@pytest.mark.parametrize("name", NAMES)
def test_both_ways(tmp_path: Path, name: str) -> None:
    expected = save(name, tmp_path / "source", optimizer=True)
    options = ["--format=torch_dist", "--optimizer", "--make_vocab_size_divisible_by=8"]
    convert(tmp_path / "source", tmp_path / "megatron", *options)
    assert (tmp_path / "megatron" / "iter_0000002" / ".metadata").is_file()
    convert(tmp_path / "megatron", tmp_path / "back", "--config", tmp_path / "source", "--optimizer")
    found = files_of(tmp_path / "back")
    assert set(found) == set(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    before, after = (
        torch.load(tmp_path / folder / "optimizer.bin", weights_only=True) for folder in ("source", "back")
    )
    names = [name for name, _ in matrix.create(name).named_parameters()]
    (group,) = before["param_groups"]
    # With and without weight decay, as in Megatron-LM.
    assert sorted(name for group in after["param_groups"] for name in group["param_names"]) == sorted(names)
    for other in after["param_groups"]:
        assert {key: other[key] for key in ("lr", "betas", "eps")} == {
            key: group[key] for key in ("lr", "betas", "eps")
        }
        for number, key in zip(other["params"], other["param_names"], strict=True):
            old, new = before["state"][names.index(key)], after["state"][number]
            assert new["step"] == old["step"] == 2
            assert all(torch.equal(new[moment], old[moment]) for moment in MOMENTS)


def test_where_parameters_are_saved() -> None:
    """Layers and experts are stacked, or saved one by one by older and by other versions."""
    keys = [
        (slot.key, slot.index) for slot in slots("decoder.layers.3.mlp.experts.local_experts.1.linear_fc2.weight", 4, 2)
    ]
    assert keys == [
        ("decoder.layers.mlp.experts.experts.linear_fc2.weight", (3, 1)),
        ("decoder.layers.3.mlp.experts.experts.linear_fc2.weight", (1,)),
        ("decoder.layers.mlp.experts.experts.1.linear_fc2.weight", (3,)),
        ("decoder.layers.3.mlp.experts.experts.1.linear_fc2.weight", ()),
    ]
    first = next(slots("encoder.layers.0.input_layernorm.bias", 2, 1))
    assert first.key == "encoder.layers.self_attention.linear_qkv.layer_norm_bias"


def test_what_is_refused(tmp_path: Path) -> None:
    save("llama", tmp_path / "source")

    def attempt(*arguments: Any) -> str:
        with pytest.raises(ConfigurationError) as caught:
            convert(*arguments)
        return str(caught.value)

    source, target = tmp_path / "source", tmp_path / "megatron"
    assert "has no optimizer.bin" in attempt(source, target, "--optimizer", "--format=torch_dist")
    assert "have no names" in attempt(source, target, "--optimizer")
    matrix.create("t5").config.save_pretrained(tmp_path / "t5")
    assert "Megatron-LM has no pipeline of T5" in attempt(tmp_path / "t5", target, "--pp_degree=2")
    convert(source, target, "--format=torch_dist")
    folder = target / "release"
    assert "has no state exp_avg" in attempt(folder, tmp_path / "back", "--config", source, "--optimizer")
    matrix.create("qwen3").config.save_pretrained(tmp_path / "other")
    assert "has no decoder.layers.0.self_attention.q_layernorm" in attempt(
        folder, tmp_path / "unused", "--config", tmp_path / "other"
    )
    (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    assert "has the format zarr" in attempt(folder, tmp_path / "unused", "--config", source)


def load_and_save(directory: str, cases: list[tuple[str, dict[str, Any], bool]]) -> Any:
    """Load converted checkpoints with Megatron-core, double everything, and save it; the parameters that differ."""
    import torch.distributed as dist
    from core_models import CoreModel

    from accel_megatron.testing import cuda_on_cpu

    cuda_on_cpu()
    wrong = {}
    for name, options, saves in cases:
        model = CoreModel(name, **options)
        folder = Path(directory, name)
        weights = load_file(folder / "source" / "model.safetensors")
        state = matrix.create(name).state_dict()
        if name == "mixtral":  # whose files have other names
            from transformers import AutoModelForCausalLM

            state = AutoModelForCausalLM.from_pretrained(folder / "source").state_dict()
        else:
            state.update(weights)
            for alias, tied in (("lm_head.weight", "transformer.wte.weight"), ("lm_head.weight", "shared.weight")):
                if alias in state and tied in weights and alias not in weights:
                    state[alias] = weights[tied]
        # The distributed optimizer cannot load without Transformer Engine or Apex: it saves what a step has made.
        distributed = options.get("distributed")
        model.load(str(folder / "megatron" / "iter_0000002"), optimizer=not distributed)
        half = options.get("half")
        wrong[name] = model.different({key: value.bfloat16() if half else value for key, value in state.items()})
        if distributed:
            model.optimizer.reload_model_params()
            for parameter in model.model.parameters():
                parameter.main_grad.fill_(1e-3)
            model.optimizer.step()
        elif saves:
            with torch.no_grad():
                for parameter in model.model.parameters():
                    parameter.mul_(2)
                for optimizer in getattr(model.optimizer, "chained_optimizers", [model.optimizer]):
                    for group in optimizer.optimizer.param_groups:
                        for parameter in group["params"]:
                            if half:
                                parameter.mul_(2)
                            for moment in MOMENTS:
                                optimizer.optimizer.state[parameter][moment].mul_(2)
        if saves:
            if dist.get_rank() == 0:
                (folder / "saved").mkdir()
            dist.barrier()
            model.save(str(folder / "saved"))
    return wrong


# Megatron-core starts processes to write a checkpoint, which takes about 10 s each.
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_with_megatron_core(tmp_path: Path) -> None:
    cases: list[tuple[str, dict[str, Any], bool]] = [
        ("qwen3", {"tp": 2}, True),
        ("llama", {"tp": 1, "half": True}, True),
        ("mistral", {"tp": 2, "half": True, "distributed": True}, True),
        ("mixtral", {"tp": 1, "ep": 2}, True),
        ("gpt2", {"tp": 1}, False),
        ("megatron-bert", {"tp": 2}, False),
        ("t5", {"tp": 2}, False),
    ]
    for name, sizes, _ in cases:
        save(name, tmp_path / name / "source", optimizer=True)
        options = ["--format=torch_dist", "--optimizer", "--make_vocab_size_divisible_by=1"]
        options.append(f"--expert_model_parallel_size={sizes.get('ep', 1)}")
        convert(tmp_path / name / "source", tmp_path / name / "megatron", *options)
    for wrong in run_world(load_and_save, 2, str(tmp_path), cases, timeout=380):
        assert wrong == {name: [] for name, _, _ in cases}
    for name, sizes, saves in cases:
        if not saves:
            continue
        source, back = tmp_path / name / "source", tmp_path / name / "back"
        convert(tmp_path / name / "saved", back, "--config", source, "--optimizer")
        expected, found = files_of(source), files_of(back)
        if "distributed" in sizes:
            assert all((found[key] - expected[key].bfloat16() + 1e-3).abs().max() < 5e-5 for key in expected)
            state = torch.load(back / "optimizer.bin", weights_only=True)["state"].values()
            assert len({float(value) for item in state for value in item["exp_avg"].unique()}) == 1
            continue
        assert all(torch.equal(found[key], 2 * expected[key]) for key in expected), name
        before, after = (torch.load(folder / "optimizer.bin", weights_only=True) for folder in (source, back))
        names = [key for key, _ in matrix.create(name).named_parameters()]
        for group in after["param_groups"]:
            assert group["lr"] == 1e-3
            for number, key in zip(group["params"], group["param_names"], strict=True):
                old, new = before["state"][names.index(key)], after["state"][number]
                assert new["step"] == 2
                assert all(torch.equal(new[moment], 2 * old[moment]) for moment in MOMENTS), (name, key)
