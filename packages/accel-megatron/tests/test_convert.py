"""Checkpoints of Megatron-LM and of Transformers are converted into each other without a difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matrix
import pytest
import torch
from safetensors.torch import load_file

from accel_megatron.command import run
from accel_megatron.layout import sizes_for
from accel_megatron.rank_files import FILE, folder_name
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

CASES: list[tuple[str, list[str]]] = [
    ("gpt2", ["--tp_degree=2", "--pp_degree=2", "--make_vocab_size_divisible_by=8"]),
    ("gpt_neox", ["--tp_degree=4"]),
    ("llama", ["--tp_degree=2", "--pp_degree=2", "--num_layers_per_virtual_pipeline_stage=1"]),
    ("mistral", ["--pp_degree=4"]),
    ("qwen2", ["--pp_degree=2", "--decoder_last_pipeline_num_layers=1"]),
    ("qwen3", ["--tp_degree=2"]),
    ("mixtral", ["--tp_degree=2", "--pp_degree=2", "--expert_model_parallel_size=2"]),
    ("megatron-bert", ["--tp_degree=2", "--pp_degree=2"]),
    ("t5", ["--tp_degree=2"]),
    ("t5-gated", ["--tp_degree=4"]),
]


def saved(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """The weights of a model that Transformers has saved."""
    matrix.create(name).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize(("name", "sizes"), CASES, ids=[name for name, _ in CASES])
def test_both_ways(tmp_path: Path, name: str, sizes: list[str]) -> None:
    source, megatron, back = tmp_path / "source", tmp_path / "megatron", tmp_path / "back"
    expected = saved(name, source)
    assert run(["convert", str(source), str(megatron), *sizes]) == 0
    assert run(["convert", str(megatron), str(back), "--config", str(source), "--max_shard_size=100KB"]) == 0
    index = json.loads((back / "model.safetensors.index.json").read_text(encoding="utf-8"))
    assert len(set(index["weight_map"].values())) > 1
    found = files_of(back)
    # Transformers writes only one of two tied weights.
    assert set(found) == set(expected)
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    loaded = type(matrix.create(name)).from_pretrained(back).state_dict()
    original = matrix.create(name).state_dict()
    assert all(torch.equal(loaded[key], original[key]) for key in original)


def compare_with_megatron(folder: str) -> list[Any]:
    """The names and tensors of this rank's model that a converted file does not have, for several models."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from accel_megatron.testing import cuda_on_cpu

    cuda_on_cpu()
    different: list[Any] = []
    for name, sizes, plugin in REAL:
        run = matrix.Run(name, **plugin)
        path = Path(folder, name, "megatron")
        if dist.get_rank() == 0:
            saved(name, Path(folder, name, "source"))
            convert([str(Path(folder, name, "source")), str(path), *sizes, "--make_vocab_size_divisible_by=1"])
        dist.barrier()
        used = sizes_for(run.model.architecture, plugin["tp_degree"], plugin["pp_degree"], 1)
        tp, pp = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_pipeline_model_parallel_rank()
        content = torch.load(path / "release" / folder_name(used, tp, pp, 0) / FILE, weights_only=False)["model"]
        chunk = run.model.chunks[0]
        while hasattr(chunk, "module"):
            chunk = chunk.module
        own = {key: value for key, value in chunk.named_parameters()}
        different += sorted(set(own) ^ set(content))
        different += [key for key in own if key in content and not torch.equal(own[key].detach(), content[key])]
        run.close()
    return different


def convert(arguments: list[str]) -> None:
    run(["convert", *arguments])


REAL: list[tuple[str, list[str], dict[str, Any]]] = [
    (name, ["--tp_degree=2", "--pp_degree=2"], {"tp_degree": 2, "pp_degree": 2})
    for name in ("gpt2", "qwen2", "megatron-bert")
]


# Four ranks.
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_files_have_the_tensors_of_the_ranks(tmp_path: Path) -> None:
    assert run_world(compare_with_megatron, 4, str(tmp_path), timeout=280) == [[]] * 4


def test_layers_of_transformer_engine(tmp_path: Path) -> None:
    expected = saved("llama", tmp_path / "source")
    run(["convert", str(tmp_path / "source"), str(tmp_path / "megatron"), "--dtype", "bfloat16"])
    file = tmp_path / "megatron" / "release" / "mp_rank_00" / FILE
    content = torch.load(file, weights_only=False)
    for layer in range(4):
        start = f"decoder.layers.{layer}."
        for norm, fused in (("input_layernorm", "self_attention.linear_qkv"), ("pre_mlp_layernorm", "mlp.linear_fc1")):
            content["model"][f"{start}{fused}.layer_norm_weight"] = content["model"].pop(f"{start}{norm}.weight")
    torch.save(content, file)
    (tmp_path / "source" / "config.json").rename(tmp_path / "megatron" / "config.json")
    run(["convert", str(tmp_path / "megatron"), str(tmp_path / "back")])
    found = files_of(tmp_path / "back")
    assert all(torch.equal(found[key], expected[key].bfloat16()) for key in expected)
    assert json.loads((tmp_path / "back" / "config.json").read_text(encoding="utf-8"))["dtype"] == "bfloat16"


def test_what_is_refused(tmp_path: Path) -> None:
    saved("llama", tmp_path / "source")
    source = str(tmp_path / "source")

    def attempt(*arguments: str) -> str:
        with pytest.raises(ConfigurationError) as caught:
            run(["convert", *arguments])
        return str(caught.value)

    assert "tp_degree=4 does not divide the 2 key-value heads" in attempt(source, "new", "--tp_degree=4")
    assert "4 layers of the llama cannot be split over pp_degree=3" in attempt(source, "new", "--pp_degree=3")
    assert "is not empty" in attempt(source, source)
    assert "float8 is not one of float32" in attempt(source, "new", "--dtype", "float8")
    run(["convert", source, str(tmp_path / "megatron"), "--tp_degree=2"])
    assert "has no config.json" in attempt(str(tmp_path / "megatron"), "other")
    (tmp_path / "megatron" / "release" / "mp_rank_00" / FILE).rename(tmp_path / "moved.pt")
    assert "lacks the file of tensor-parallel rank 0" in attempt(
        str(tmp_path / "megatron"), "other", "--config", source
    )
