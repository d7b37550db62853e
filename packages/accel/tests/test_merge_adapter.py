"""Adapters merged into their base on disk are what PEFT merges in memory, and what the model computed with them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from mesh_runs import BATCH, BLOCKS, accelerator_for, batches
from safetensors.torch import load_file, save_file
from torch import nn
from transformers_5 import needs_transformers_5

from accel import Accelerator
from accel.commands.merge_weights import run
from accel.utils import merge_adapter_weights
from accel_state import context
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the models are transformers'"),
    pytest.mark.timeout(400),
]
needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is in the clients' environment")
needs_bitsandbytes = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes packs the base")

TOKENS = torch.arange(24).view(2, 12) % 29
SETTINGS: dict[str, Any] = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "init_lora_weights": True}
LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def llama(dtype: torch.dtype = torch.float32, hidden: int = 16, inner: int = 24) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 29, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)).to(dtype)


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=29, n_positions=16, n_embd=16, n_layer=2, n_head=2, tie_word_embeddings=False)
    return GPT2LMHeadModel(config)


class Adapted(nn.Module):
    """A layer with the low-rank change that an adapter describes."""

    def __init__(self, base: nn.Module, first: torch.Tensor, second: torch.Tensor, scale: float) -> None:
        super().__init__()
        self.base, self.first, self.second, self.scale = base, first, second, scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        change = (x.float() @ self.first.float().T) @ self.second.float().T
        return self.base(x) + (change * self.scale).to(x.dtype)


def adapt(model: Any, folder: Path, names: tuple[str, ...], scale: float, **settings: Any) -> dict[str, torch.Tensor]:
    """Give layers random factors, and save these as PEFT does; returns them by the name in the file."""
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    rank = settings.get("r", SETTINGS["r"])
    for name, layer in list(model.named_modules()):
        if name.rpartition(".")[2] not in names:
            continue
        rows, columns = layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.shape[::-1]
        first, second = (torch.randn(shape, generator=generator) / 4 for shape in ((rank, columns), (rows, rank)))
        tensors[f"base_model.model.{name}.lora_A.weight"] = first
        tensors[f"base_model.model.{name}.lora_B.weight"] = second
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, Adapted(layer, first, second, scale))
    write_adapter(folder, tensors, **settings)
    return tensors


def write_adapter(folder: Path, tensors: dict[str, torch.Tensor], **settings: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({**SETTINGS, **settings}))


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


def loaded(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


@needs_transformers_5
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("rank_stabilised", [False, True])
def test_a_merged_model_computes_what_the_adapted_one_did(kind: str, rank_stabilised: bool, tmp_path: Path) -> None:
    model, names = (llama(), LINEAR) if kind == "llama" else (gpt2(), ("c_attn", "c_proj", "c_fc"))
    model.save_pretrained(tmp_path / "base", max_shard_size="4KB")
    scale = 6 / 3**0.5 if rank_stabilised else 2.0
    adapt(model, tmp_path / "adapter", names, scale, use_rslora=rank_stabilised, fan_in_fan_out=kind == "gpt2")
    written = merge_adapter_weights(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged", max_shard_size="4KB")
    assert len(written) > 3 and written[-1] == "model.safetensors.index.json"
    torch.testing.assert_close(logits(loaded(tmp_path / "merged")), logits(model), rtol=1e-5, atol=1e-5)


@needs_transformers_5
def test_the_command_converts_and_copies_what_a_model_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "base")
    for name in ("tokenizer.json", "adapter_config.json"):
        (tmp_path / "base" / name).write_text("{}")
    tensors = adapt(model, tmp_path / "adapter", ("q_proj",), 5.0, alpha_pattern={r"layers\.1\.self_attn\.q_proj": 15})
    merged = tmp_path / "merged"
    assert (
        run([str(tmp_path / "base"), str(merged), "--adapter", str(tmp_path / "adapter"), "--dtype", "bfloat16"]) == 0
    )
    assert capsys.readouterr().out == f"{merged}/model.safetensors\n"
    assert (merged / "tokenizer.json").exists() and not (merged / "adapter_config.json").exists()
    found, base = load_file(merged / "model.safetensors"), load_file(tmp_path / "base" / "model.safetensors")
    assert found.keys() == base.keys() and {value.dtype for value in found.values()} == {torch.bfloat16}
    for number, scale in enumerate((2.0, 5.0)):
        name = f"model.layers.{number}.self_attn.q_proj"
        first, second = (tensors[f"base_model.model.{name}.lora_{part}.weight"] for part in "AB")
        expected = (base[f"{name}.weight"] + second @ first * scale).bfloat16()
        assert torch.equal(found[f"{name}.weight"], expected), number
    assert torch.equal(found["lm_head.weight"], base["lm_head.weight"].bfloat16())
    assert loaded(merged).dtype == torch.bfloat16


@needs_transformers_5
def test_weights_that_were_trained_themselves_replace_those_of_the_base(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path / "base")
    head, table = torch.randn(29, 16), (torch.randn(3, 29), torch.randn(16, 3))
    prefix = "base_model.model.model.embed_tokens"
    tensors = {"base_model.model.lm_head.weight": head}
    tensors |= {f"{prefix}.lora_embedding_A": table[0], f"{prefix}.lora_embedding_B": table[1]}
    write_adapter(tmp_path / "adapter", tensors, modules_to_save=["lm_head"])
    merge_adapter_weights(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    merged = loaded(tmp_path / "merged")
    assert torch.equal(merged.lm_head.weight, head)
    changed = model.model.embed_tokens.weight + (table[1] @ table[0]).T * 2
    torch.testing.assert_close(merged.model.embed_tokens.weight, changed, rtol=1e-6, atol=1e-6)


# -- a base in 4 bits ------------------------------------------------------------------------------------------------


def quantized(folder: Path, nested: bool) -> Any:
    """A model in 4 bits, on disk as Transformers saves it; returns it with its weights dequantized."""
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    model = llama(hidden=64, inner=128)
    model.save_pretrained(folder / "base")
    state = model.state_dict()
    for name, layer in model.named_modules():
        if name.rpartition(".")[2] in LINEAR:
            packed, description = quantize_4bit(layer.weight.data, quant_type="nf4", compress_statistics=nested)
            layer.weight.data = dequantize_4bit(packed, description)
            state[f"{name}.weight"] = packed
            state |= {f"{name}.weight.{key}": value for key, value in description.as_dict(packed=True).items()}
    save_file(state, folder / "base" / "model.safetensors")
    path = folder / "base" / "config.json"
    quantization = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": quantization}))
    return model


@needs_bitsandbytes
@pytest.mark.skipif(find_spec("accelerate") is None, reason="Transformers needs it to load weights in 4 bits")
def test_files_in_4_bits_are_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    llama(hidden=64, inner=128).save_pretrained(tmp_path / "whole")
    settings = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path / "whole", quantization_config=settings, device_map="cpu", dtype=torch.float32
    )
    theirs.save_pretrained(tmp_path / "theirs")
    quantized(tmp_path, nested=True)
    expected, found = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "base"))
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


@needs_transformers_5
@needs_bitsandbytes
@pytest.mark.parametrize("nested", [False, True])
def test_a_base_in_4_bits_becomes_a_model_that_is_not_quantized(nested: bool, tmp_path: Path) -> None:
    model = quantized(tmp_path, nested)
    adapt(model, tmp_path / "adapter", LINEAR, 2.0)
    merge_adapter_weights(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    merged = loaded(tmp_path / "merged")
    assert not hasattr(merged.config, "quantization_config")
    torch.testing.assert_close(logits(merged), logits(model), rtol=1e-5, atol=1e-5)


# -- PEFT itself -----------------------------------------------------------------------------------------------------


def tuned(model: Any, **settings: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(2)
    return get_peft_model(model, LoraConfig(r=4, lora_alpha=7, init_lora_weights=False, **settings))


CASES: list[tuple[str, torch.dtype, dict[str, Any]]] = [
    ("llama", torch.float32, {"target_modules": list(LINEAR), "rank_pattern": {"q_proj": 2}}),
    ("llama", torch.bfloat16, {"target_modules": "all-linear", "alpha_pattern": {"layers.1.mlp.up_proj": 3}}),
    ("llama", torch.float16, {"target_modules": ["v_proj"], "use_rslora": True}),
    # PEFT rounds the change of an embedding in 16 bits before it adds it.
    ("llama", torch.float32, {"target_modules": ["v_proj", "embed_tokens"], "use_rslora": True}),
    ("llama", torch.float32, {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    ("gpt2", torch.float32, {"target_modules": ["c_attn", "c_proj"], "bias": "lora_only"}),
    ("gpt2", torch.bfloat16, {"target_modules": ["c_fc"], "bias": "all", "fan_in_fan_out": True}),
]


@needs_peft
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}, {case[1]}, {', '.join(case[2])}")
def test_merged_weights_have_the_bits_of_peft(case: tuple[str, torch.dtype, dict[str, Any]], tmp_path: Path) -> None:
    from peft import PeftModel

    kind, dtype, settings = case
    model = (llama() if kind == "llama" else gpt2()).to(dtype)
    model.save_pretrained(tmp_path / "base")
    adapted = tuned(model, **settings)
    for name, parameter in adapted.named_parameters():
        if "modules_to_save" in name or ("bias" in name and parameter.requires_grad):
            parameter.data.normal_()
    adapted.save_pretrained(tmp_path / "adapter")
    merge_adapter_weights(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
    expected = PeftModel.from_pretrained(loaded(tmp_path / "base"), tmp_path / "adapter").merge_and_unload()
    found = loaded(tmp_path / "merged").state_dict()
    for name, value in expected.state_dict().items():
        assert torch.equal(found[name], value), name


def train_sharded(folder: Path, sizes: dict[str, int] | None, four_bit: bool) -> None:
    """Three steps; the adapter is gathered alone, and saved as PEFT does."""
    from transformers import AutoModelForCausalLM

    placed = {"device_map": "cpu"} if four_bit else {}
    model = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float32, **placed)
    model = tuned(model, target_modules=list(LINEAR))
    optimizer: Any = torch.optim.AdamW([item for item in model.parameters() if item.requires_grad], lr=1e-2, eps=1e-4)
    accelerator = Accelerator(cpu=True) if sizes is None else accelerator_for(sizes, BLOCKS)
    model, optimizer = accelerator.prepare(model, optimizer)
    ranks = accelerator.strategy.data_collectives
    for tokens in batches(3).split(BATCH):
        part = tokens.chunk(ranks.world_size)[ranks.rank]
        accelerator.backward(model(input_ids=part, labels=part).loss)
        optimizer.step()
        optimizer.zero_grad()
    inner = accelerator.unwrap_model(model)
    adapter = {
        name: (item.full_tensor() if hasattr(item, "full_tensor") else item).detach()
        for name, item in inner.named_parameters()
        if item.requires_grad
    }
    if accelerator.is_main_process:
        inner.save_pretrained(folder / f"adapter {sizes}", state_dict=adapter)
    accelerator.wait_for_everyone()
    merge_adapter_weights(folder / "base", folder / f"adapter {sizes}", folder / f"merged {sizes}")


@needs_peft
@needs_bitsandbytes
@pytest.mark.slow  # worlds of 2 and 4 ranks that import transformers and PEFT
@pytest.mark.parametrize("four_bit", [False, True])
def test_an_adapter_trained_under_fsdp_is_merged_as_one_of_one_process(four_bit: bool, tmp_path: Path) -> None:
    if four_bit:
        quantized(tmp_path, nested=True)
    else:
        llama(hidden=64, inner=128).save_pretrained(tmp_path / "base")
    with context.isolated():
        train_sharded(tmp_path, None, four_bit)
    expected = loaded(tmp_path / "merged None").state_dict()
    for world in (2, 4):
        run_world(train_sharded, world, tmp_path, {"dp_shard_size": world}, four_bit, timeout=300)
        found = loaded(tmp_path / f"merged {{'dp_shard_size': {world}}}").state_dict()
        for name, value in expected.items():
            torch.testing.assert_close(
                found[name], value, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name} {text}"
            )


# -- memory ----------------------------------------------------------------------------------------------------------

MEMORY = """
import sys, threading, time, re
from pathlib import Path
from accel.utils import merge_adapter_weights

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

def watch():
    while not ended.is_set():
        peaks.append(anonymous())
        time.sleep(0.002)

merge_adapter_weights(sys.argv[1], sys.argv[2], sys.argv[3] + "/first", max_shard_size=2**23)  # imports everything
ended, peaks, before = threading.Event(), [], anonymous()
thread = threading.Thread(target=watch)
thread.start()
merge_adapter_weights(sys.argv[1], sys.argv[2], sys.argv[3] + "/second", max_shard_size=2**23)
ended.set()
thread.join()
print(max(peaks) - before)
"""


@pytest.mark.slow  # writes 128 MiB twice in a process of its own, whose memory is measured
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from Linux's /proc")
def test_a_merge_takes_the_memory_of_one_file(tmp_path: Path) -> None:
    layers, width = 32, 1024  # 4 MiB each, two in a file
    (tmp_path / "base").mkdir()
    weights = {f"layers.{number}.weight": torch.randn(width, width) for number in range(layers)}
    save_file(weights, tmp_path / "base" / "model.safetensors")
    (tmp_path / "base" / "config.json").write_text("{}")
    factors = {
        f"base_model.model.layers.{number}.lora_{part}.weight": torch.randn(shape) / 64
        for number in range(layers)
        for part, shape in (("A", (4, width)), ("B", (width, 4)))
    }
    write_adapter(tmp_path / "adapter", factors, r=4)
    words = [sys.executable, "-c", MEMORY, *(str(tmp_path / name) for name in ("base", "adapter", "out"))]
    # What is freed goes back to the system at once, so that only what is in use is counted.
    exact = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    peak = int(subprocess.run(words, check=True, timeout=190, capture_output=True, text=True, env=exact).stdout)
    # A file, and the weight that is merged with its change: a tenth of the model.
    assert peak < 2**23 + 4 * 4 * width**2, peak
    assert peak > 2**22, "less than one weight: the measurement is wrong"


# -- what is refused -------------------------------------------------------------------------------------------------


def pair(name: str, rows: int = 16, columns: int = 16) -> dict[str, torch.Tensor]:
    prefix = f"base_model.model.{name}"
    return {f"{prefix}.lora_A.weight": torch.ones(3, columns), f"{prefix}.lora_B.weight": torch.ones(rows, 3)}


PROJECTION = "model.layers.0.self_attn.q_proj"
REFUSED: list[tuple[dict[str, torch.Tensor], dict[str, Any], str]] = [
    (pair(PROJECTION), {"peft_type": "LOHA"}, "peft_type='LOHA'"),
    (pair(PROJECTION), {"use_dora": True}, "use_dora=True.*merge_and_unload"),
    (pair(PROJECTION), {"something_new": {"a": 1}}, "something_new"),
    (pair(PROJECTION), {"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
    (pair("model.layers.9.self_attn.q_proj"), {}, r"layers\.9.*which the base does not have"),
    (pair(PROJECTION, 32), {}, r"shape \(32, 16\), but .* has \(16, 16\)"),
    (pair("model.layers.0.mlp.up_proj", 24), {"fan_in_fan_out": True}, None),
    (pair("model.layers.0.mlp.up_proj", 24) | pair(PROJECTION), {"fan_in_fan_out": True}, "unknown .*q_proj"),
    ({"base_model.model.lm_head.weight": torch.ones(30, 16)}, {}, r"lm_head\.weight has shape \(30, 16\).*Resize"),
    ({"other.weight": torch.ones(1)}, {}, "no LoraModel of PEFT"),
    ({f"base_model.model.{PROJECTION}.lora_B.weight": torch.ones(16, 3)}, {}, "only low-rank factors"),
    ({f"base_model.model.{PROJECTION}.lora_B.bias": torch.ones(16)}, {}, "only low-rank factors"),
    ({name: value * 1e30 for name, value in pair(PROJECTION).items()}, {}, "not finite"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_would_be_merged_wrongly_is_refused(number: int, tmp_path: Path) -> None:
    tensors, settings, match = REFUSED[number]
    llama().save_pretrained(tmp_path / "base")
    write_adapter(tmp_path / "adapter", tensors, **settings)
    if match is None:
        merge_adapter_weights(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")
        return
    with pytest.raises(ConfigurationError, match=match):
        merge_adapter_weights(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")


def test_bases_that_cannot_be_merged_into_are_refused(tmp_path: Path) -> None:
    def merge(output: str = "merged", **settings: Any) -> None:
        merge_adapter_weights(tmp_path / "base", tmp_path / "adapter", tmp_path / output, **settings)

    with pytest.raises(ConfigurationError, match="is not a directory"):
        merge()
    llama().save_pretrained(tmp_path / "base")
    write_adapter(tmp_path / "adapter", pair(PROJECTION))
    with pytest.raises(ConfigurationError, match="dtype='float8' is not one of float16"):
        merge(dtype="float8")
    with pytest.raises(ConfigurationError, match="would overwrite"):
        merge("base")
    config = json.loads((tmp_path / "base" / "config.json").read_text())
    path = tmp_path / "base" / "config.json"
    path.write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ConfigurationError, match="quantized with 'gptq'"):
        merge()
    path.write_text(json.dumps({**config, "tie_word_embeddings": True}))
    write_adapter(tmp_path / "adapter", {"base_model.model.lm_head.weight": torch.ones(29, 16)})
    with pytest.raises(ConfigurationError, match="may be tied"):
        merge()
    path.write_text("[]")
    with pytest.raises(ConfigurationError, match="is a list"):
        merge()


@pytest.mark.parametrize("flags", [["--dtype", "float16"], ["--adapter", "a", "--remove_checkpoint_dir"]])
def test_flags_that_do_not_belong_together_are_refused(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["somewhere", *flags])
    assert "--adapter" in capsys.readouterr().err
