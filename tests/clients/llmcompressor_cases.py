"""llmcompressor's `oneshot` on models in memory, with device maps, and with layers on the disk."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.offload import load_offloaded_model
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from harness import Cases, files, weights
from interface_cases import missing_imports
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from loguru import logger
from safetensors.torch import load_file
from tiny_models import TOKENS, load, saved, spread
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

cases = Cases()
logger.remove()
LENGTH, SAMPLES = 16, 8
IGNORE = ["lm_head", "re:.*gate$"]  # the router of a mixture of experts, too


def in_groups(*targets: str) -> dict[str, QuantizationScheme]:
    """4-bit weights in groups of 32; those of the schemes with names are wider than these models."""
    args = QuantizationArgs(num_bits=4, group_size=32, strategy="group")
    return {"group_0": QuantizationScheme(targets=list(targets), weights=args)}


RECIPES: dict[str, Callable[[], Any]] = {
    "rtn": lambda: QuantizationModifier(targets="Linear", scheme="W8A8", ignore=IGNORE),
    "fp8": lambda: QuantizationModifier(targets="Linear", scheme="FP8_DYNAMIC", ignore=IGNORE),
    "fp8_static": lambda: QuantizationModifier(targets="Linear", scheme="FP8", ignore=IGNORE),
    "gptq": lambda: GPTQModifier(config_groups=in_groups("Linear"), ignore=IGNORE),
    "smoothquant": lambda: [
        SmoothQuantModifier(smoothing_strength=0.8),
        GPTQModifier(targets="Linear", scheme="W8A8", ignore=IGNORE),
    ],
    "sparsegpt": lambda: SparseGPTModifier(sparsity=0.5, mask_structure="2:4", targets=["Linear"], ignore=IGNORE),
    "wanda": lambda: WandaPruningModifier(sparsity=0.5, targets=["Linear"], ignore=IGNORE),
    "awq": lambda: [AWQModifier(), QuantizationModifier(config_groups=in_groups("Linear"), ignore=IGNORE)],
}
DISK = {"offload_folder": lambda path: str(path.parent / "offload"), "offload_buffers": True}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cpu": {"device_map": lambda path: dict.fromkeys(spread(path), "cpu")},
    "disk": {"device_map": {"": "disk"}, **DISK},
    "alternate": {"device_map": spread, **DISK},
    "auto": {"device_map": "auto", "max_memory": {"cpu": "120KB"}, **DISK},
}


def data(count: int = SAMPLES) -> DataLoader[Any]:
    """The calibration samples."""
    rows = torch.randint(3, 120, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    samples = [{"input_ids": row, "attention_mask": torch.ones(LENGTH, dtype=torch.long)} for row in rows]
    return DataLoader(samples, batch_size=2)  # type: ignore[arg-type]


def tokenizer() -> PreTrainedTokenizerFast:
    """Asked for, and not used: the data are numbers."""
    words = Tokenizer(WordLevel({"<pad>": 0, "<unk>": 1}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>")


def placed(path: Path, options: dict[str, Any], offloaded: bool = False) -> Any:
    given = {key: value(path) if callable(value) else value for key, value in options.items()}
    if not offloaded:
        return load(path, **given)
    with load_offloaded_model():
        return AutoModelForCausalLM.from_pretrained(path, **given).eval()


@torch.no_grad()
def compressed(model: Any, recipe: str, folder: Path, **options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a model computes after `oneshot`, after it was saved and once it is loaded again; and what was written."""
    torch.manual_seed(0)
    oneshot(
        model=model,
        recipe=RECIPES[recipe](),
        dataset=data(),
        processor=tokenizer(),
        num_calibration_samples=SAMPLES,
        max_seq_length=LENGTH,
        **options,
    )
    outputs = [model(TOKENS).logits]
    values = weights(dict(model.state_dict()))
    model.save_pretrained(folder)
    outputs.append(model(TOKENS).logits)
    again = AutoModelForCausalLM.from_pretrained(folder).eval()
    outputs.append(again(TOKENS).logits)
    written = {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}
    configuration = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    result = {
        "outputs": outputs,
        "values": values,
        "files": files(folder),
        "written": weights(written),
        "quantization": configuration.get("quantization_config"),
        "recipe": hashlib.sha256((folder / "recipe.yaml").read_bytes()).hexdigest()[:12],
        "map": {name: str(place) for name, place in getattr(model, "hf_device_map", {}).items()},
    }
    return result, written


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Bit by bit: a float8 has no comparison."""
    as_bytes = [{name: value.contiguous().view(torch.uint8) for name, value in state.items()} for state in (one, other)]
    return one.keys() == other.keys() and all(torch.equal(as_bytes[0][name], as_bytes[1][name]) for name in one)


def add(recipe: str, model: str, place: str, label: str = "", offloaded: bool = False, **options: Any) -> None:
    def case(folder: Path) -> Any:
        path = saved(folder, model)
        result, written = compressed(placed(path, PLACEMENTS[place], offloaded), recipe, folder / "out", **options)
        _, plain = compressed(placed(path, {}), recipe, folder / "plain", **options)
        return {**result, "equal to the model in memory": [equal(written, plain)]}

    cases.add("_".join(filter(None, ("oneshot", place, recipe, model, label))), case, (1,))


for _place in PLACEMENTS:
    for _recipe in RECIPES:
        add(_recipe, "llama", _place)
    for _recipe in ("rtn", "gptq"):
        add(_recipe, "mixtral", _place)
        add(_recipe, "llama_tied", _place)
        add(_recipe, "llama_tied", _place, "untied", tie_word_embeddings=False)
    add("gptq", "llama", _place, "basic", pipeline="basic")
    add("gptq", "llama", _place, "offloaded", offloaded=True)
    add("smoothquant", "mixtral", _place, "offloaded", offloaded=True)


@cases((1,))
def llmcompressor_imports(folder: Path) -> Any:
    return missing_imports("llmcompressor compressed_tensors auto_round")
