"""Loads models of Transformers in every placement, and prints a line for each; test_model_architectures.py runs it.

    python tests/model_architectures.py [model ...]

Each model is made from a configuration and saved by ``save_pretrained`` in several shards. Logits, and tokens of
``generate`` with every kind of cache, are compared with those of the model in memory. Lines are JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import accel_compat
from accel_bigmodel import cache_experts, init_empty_weights, load_checkpoint_and_dispatch

accel_compat.install()  # from_pretrained(device_map=...) imports accelerate

import transformers  # noqa: E402
from transformers import PreTrainedModel  # noqa: E402

TOKENS = torch.arange(24).view(2, 12) * 5 % 120 + 3
WORDS = {"vocab_size": 128, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
HEADS = {"num_key_value_heads": 2}

Maker = Callable[[], PreTrainedModel]


def maker(name: str, kind: str, **settings: Any) -> Maker:
    config = getattr(transformers, f"{name}Config")(**settings)
    return lambda: getattr(transformers, f"{name}{kind}")(config).eval()


MODELS: dict[str, Maker] = {
    "Llama": maker("Llama", "ForCausalLM", **WORDS, **SIZES, **HEADS),
    "GPT-2": maker("GPT2", "LMHeadModel", **WORDS, n_embd=64, n_layer=3, n_head=4, n_positions=64),
    "GPT-NeoX": maker("GPTNeoX", "ForCausalLM", **WORDS, **SIZES),
    "T5": maker(
        "T5", "ForConditionalGeneration", vocab_size=128, d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
    ),
    "BERT": maker("Bert", "ForMaskedLM", vocab_size=128, **SIZES),
    "Mixtral": maker("Mixtral", "ForCausalLM", **WORDS, **SIZES, **HEADS, num_local_experts=4, num_experts_per_tok=2),
    "Qwen2-MoE": maker(
        "Qwen2Moe", "ForCausalLM", **WORDS, **SIZES, **HEADS, num_experts=8, num_experts_per_tok=3,
        moe_intermediate_size=48, shared_expert_intermediate_size=96,
    ),
    "Gemma": maker("Gemma", "ForCausalLM", **WORDS, **SIZES, **HEADS, head_dim=16),
    "Phi": maker("Phi", "ForCausalLM", **WORDS, **SIZES),
    "Whisper": maker(
        "Whisper", "ForConditionalGeneration", **WORDS, d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, num_mel_bins=16,
        max_source_positions=32, max_target_positions=32, decoder_start_token_id=1, begin_suppress_tokens=None,
    ),
    "ViT": maker("ViT", "ForImageClassification", **SIZES, image_size=32, patch_size=8, num_labels=5),
}  # fmt: skip
WITH_CACHES = ("Llama", "GPT-2", "Mixtral", "Qwen2-MoE", "T5")
CACHES = ("dynamic", "static", "offloaded", "quantized")


def inputs(name: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    if name == "ViT":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator)}
    if name == "Whisper":
        features = torch.randn(2, 16, 64, generator=generator)
        return {"input_features": features, "decoder_input_ids": TOKENS[:, :5]}
    return {"input_ids": TOKENS, **({"decoder_input_ids": TOKENS[:, :5]} if name == "T5" else {})}


def placements(model: PreTrainedModel) -> dict[str, dict[str, str]]:
    """Device maps: all in memory, all on the disk, every other layer on the disk."""
    units: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{unit}.") for unit in units)
        if not inside and (type(module).__name__ in (model._no_split_modules or ()) or not list(module.children())):
            units += [name] if next(module.parameters(), None) is not None else []
        elif not inside:  # parameters of a module that is split, such as the class token of ViT
            units += [f"{name}.{key}".lstrip(".") for key, _ in module.named_parameters(recurse=False)]
    tied = {name.rpartition(".")[0] for pair in (model.all_tied_weights_keys or {}).items() for name in pair}
    mixed = {unit: "disk" if index % 2 and unit not in tied else "cpu" for index, unit in enumerate(units)}
    return {"cpu": {"": "cpu"}, "disk": {"": "disk"}, "mixed": {"": "cpu", **mixed}}


def loaded(make: Maker, folder: Path, device_map: dict[str, str]) -> Iterator[tuple[str, PreTrainedModel]]:
    with init_empty_weights():
        model = make()
    yield (
        "load_checkpoint_and_dispatch",
        load_checkpoint_and_dispatch(model, folder, device_map=device_map, offload_folder=folder / "offload"),
    )
    options = {"device_map": device_map, "offload_folder": folder / "more"}
    yield "from_pretrained", type(model).from_pretrained(folder, **options).eval()


def generate(model: PreTrainedModel, cache: str) -> list[list[int]]:
    """Tokens that a model generates with a kind of cache."""
    if cache == "dynamic":
        return model.generate(TOKENS, max_new_tokens=8, do_sample=False).tolist()
    options = {"cache_implementation": cache}
    if cache == "quantized":
        options["cache_config"] = {"backend": "fp8"}  # the back end that requires no other library
    return model.generate(TOKENS, max_new_tokens=8, do_sample=False, **options).tolist()


def with_caches(name: str, plain: PreTrainedModel, model: PreTrainedModel) -> dict[str, str]:
    """How the tokens of a model compare with those of the model in memory, for each kind of cache."""
    results = {}
    for cache in CACHES:
        try:
            expected = generate(plain, cache)
        except (ImportError, ValueError, NotImplementedError, RuntimeError, AssertionError) as error:
            results[cache] = f"not possible in memory: {type(error).__name__}: {str(error).splitlines()[0][:90]}"
            continue
        results[cache] = "equal" if generate(model, cache) == expected else "DIFFERENT"
    return results


def compared(logits: torch.Tensor, expected: torch.Tensor) -> dict[str, bool]:
    """Last bits may depend on the address of a mapped weight."""
    close = torch.allclose(logits, expected, rtol=1e-4, atol=1e-5)
    return {"equal": close, "to the bit": torch.equal(logits, expected)}


@torch.no_grad()
def main(names: list[str]) -> None:
    for name in names:
        torch.manual_seed(0)
        plain = MODELS[name]()
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            plain.save_pretrained(folder, max_shard_size="100KB")
            shards = len(list(folder.glob("*.safetensors")))
            expected = plain(**inputs(name)).logits
            for placement, device_map in placements(plain).items():
                for loader, model in loaded(MODELS[name], folder, device_map):
                    on_disk = sum(parameter.is_meta for parameter in model.parameters())
                    result = {"model": name, "placement": placement, "loader": loader, "shards": shards}
                    result |= {"on disk": on_disk, "tensors": len(list(model.parameters()))}
                    result |= compared(model(**inputs(name)).logits, expected)
                    if placement == "mixed" and name in WITH_CACHES and loader != "from_pretrained":
                        result["generate"] = with_caches(name, plain, model)
                    print(json.dumps(result), flush=True)
            if hasattr(plain.config, "num_experts_per_tok"):
                cache_experts(model, "200KB")
                result = {"model": name, "placement": "experts cached", "loader": loader, "shards": shards}
                result |= {"on disk": on_disk, "tensors": len(list(model.parameters()))}
                result |= compared(model(**inputs(name)).logits, expected)
                print(json.dumps({**result, "generate": with_caches(name, plain, model)}), flush=True)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    main(sys.argv[1:] or list(MODELS))
