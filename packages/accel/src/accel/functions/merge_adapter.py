"""Merges a LoRA adapter of PEFT into the weights of its base model, without loading the model.

A merged weight is ``W + scale * B @ A`` (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models",
https://arxiv.org/abs/2106.09685), in the order of operations of PEFT's ``merge_and_unload``. The tensors of one output
file are in memory at a time; the base and the adapter are mapped from their files.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from accel_bigmodel.checkpoint.files import checkpoint_files
from accel_bigmodel.checkpoint.tensor_files import CheckpointFile, open_file
from accel_state import PartialState
from accel_state.errors import ConfigurationError, require
from accel_state.paths import as_location, as_path
from accel_state.storage.transfer import written_directory

from ..core.weights_io import check_shard_size, is_weights_file, save_model_weights

ADAPTER_CONFIG: Final = "adapter_config.json"
DTYPES: Final = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}

# Keys of adapter_config.json that do not change how weights are merged, or that are read here. PEFT adds new ones with
# new kinds of adapters, so all others have to be empty.
_KNOWN: Final = frozenset(
    (
        *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying"),
        *("eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern"),
        *("layers_to_transform", "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_core"),
        *("modules_to_save", "peft_type", "peft_version", "qalora_group_size", "r", "rank_pattern", "revision"),
        *("runtime_config", "target_modules", "task_type", "use_rslora"),
    )
)
_KEEPS_BASE: Final = (True, False, "gaussian", "orthogonal", "eva")
"""Values of ``init_lora_weights`` that leave the base weights as they are."""
_COPIED: Final = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".py")
"""Files of the base that are no weights: configurations, tokenizers, templates."""
_PREFIX: Final = "base_model.model."


def merge_adapter_weights(
    base: str | os.PathLike[str],
    adapter: str | os.PathLike[str],
    output_path: str | os.PathLike[str],
    dtype: str | torch.dtype | None = None,
    max_shard_size: int | str = "10GB",
) -> list[str]:
    """Merge a LoRA adapter into its base model, and write a model that ``from_pretrained`` loads.

    The base may be in 4 bits (bitsandbytes): its weights are dequantized one by one, and the result is not quantized.
    At most one output file is in memory at a time. In a script on several processes the main one works, and all wait
    for it.

    Args:
        base: the directory of the base model, as ``save_pretrained`` writes it.
        adapter: the directory of the adapter, as PEFT's ``save_pretrained`` writes it.
        output_path: the directory to write to, or a URL.
        dtype: "float16", "bfloat16" or "float32" for all weights; None keeps those of the base. A weight in 4 bits is
            given the one that it was quantized from.
        max_shard_size: largest file in bytes, or as text such as "10GB".

    Returns:
        The names of the files with weights.

    Raises:
        ConfigurationError: the adapter is of another kind, or does not fit the base.
    """
    state = PartialState()
    check_shard_size(max_shard_size)
    wanted = dtype if dtype is None or isinstance(dtype, torch.dtype) else DTYPES.get(dtype)
    if dtype is not None and wanted not in DTYPES.values():
        raise ConfigurationError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}. Leave it out to keep the base's.")
    source, low_rank = as_path("base", base), as_path("adapter", adapter)
    target = as_location("output_path", output_path)
    if isinstance(target, Path) and target.resolve() in (source.resolve(), low_rank.resolve()):
        raise ConfigurationError(f"output_path={target} would overwrite what is merged. Give another directory.")
    written: list[str] = []
    if state.is_main_process:
        merge = _Merge(source, low_rank, wanted)
        with written_directory(target, is_weights_file) as folder:
            written = save_model_weights(merge.outputs(), folder, max_shard_size, True, merge.read)
            _copy_the_rest(source, folder, merge.config, wanted)
    state.wait_for_everyone()
    return written


class _Tensors:
    """The tensors of a checkpoint, by name."""

    def __init__(self, place: Path) -> None:
        self._files: dict[str, CheckpointFile] = {}
        for path, names in checkpoint_files(place).items():
            file = open_file(path)
            self._files |= dict.fromkeys(names or file.names(), file)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def names(self) -> list[str]:
        return list(self._files)

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self._files[name].shape(name))

    def dtype(self, name: str) -> torch.dtype:
        return self._files[name].dtype(name)

    def read(self, name: str) -> torch.Tensor:
        return self._files[name].tensors((name,))[name]


@dataclass
class _LowRank:
    """The two factors of the change of a weight.

    Attributes:
        first: the name of A, of shape (rank, in).
        second: the name of B, of shape (out, rank).
        scale: of their product.
        transposed: whether the weight has the shape (in, out).
    """

    first: str
    second: str
    scale: float
    transposed: bool


class _Merge:
    """What each weight of the merged model is made of."""

    def __init__(self, base: Path, adapter: Path, dtype: torch.dtype | None) -> None:
        self.base, self.adapter, self.dtype = _Tensors(_existing(base)), _Tensors(_existing(adapter)), dtype
        self.config: dict[str, Any] = _read_json(base / "config.json")
        self.settings: dict[str, Any] = _read_json(adapter / ADAPTER_CONFIG)
        _check_settings(self.settings, adapter / ADAPTER_CONFIG)
        self.four_bit: dict[str, list[str]] = self._find_four_bit(base)
        self.low_rank: dict[str, _LowRank] = {}
        self.replaced: dict[str, str] = {}
        self._match(adapter)

    def outputs(self) -> dict[str, torch.Tensor]:
        """Return the tensors to write, on the meta device."""
        statistics = {name for names in self.four_bit.values() for name in names}
        found = {}
        for name in self.base.names():
            if name not in statistics:
                shape, dtype = self._described(name)
                found[name] = torch.empty(shape, dtype=self._target(dtype), device="meta")
        return found

    def read(self, names: list[str]) -> dict[str, torch.Tensor]:
        """Return the merged values of some tensors."""
        return {name: self._merged(name) for name in names}

    def _merged(self, name: str) -> torch.Tensor:
        kept = self.adapter.read(self.replaced[name]) if name in self.replaced else self._base_weight(name)
        if name not in self.low_rank:
            return kept.to(self._target(kept.dtype if name in self.replaced else self._described(name)[1]))
        part = self.low_rank[name]
        # PEFT computes in float32 on CPUs, in the order (B @ A) * scale, and adds before it rounds.
        first, second = (self.adapter.read(item) for item in (part.first, part.second))
        precision = torch.promote_types(torch.float32, first.dtype)
        change = (second.to(precision) @ first.to(precision)).mul_(part.scale)
        merged = (kept + (change.T if part.transposed else change)).to(self._target(self._described(name)[1]))
        if not torch.isfinite(merged).all():
            raise ConfigurationError(
                f"{name} would have values that are not finite. Merge an adapter of an earlier step, or use a dtype "
                "with a larger range (bfloat16 or float32)."
            )
        return merged

    def _target(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if self.dtype is None or not dtype.is_floating_point else self.dtype

    # -- weights in 4 bits -------------------------------------------------------------------------------------------

    def _find_four_bit(self, base: Path) -> dict[str, list[str]]:
        """Return the weights in 4 bits, with the names of what describes each."""
        names, found = self.base.names(), {}
        for name in names:
            weight, mark, _ = name.partition(".quant_state.bitsandbytes__")
            if mark:
                found[weight] = [other for other in names if other.startswith(f"{weight}.")]
        quantized = self.config.get("quantization_config")
        if quantized and not found:
            raise ConfigurationError(
                f"{base} is quantized with {quantized.get('quant_method')!r}, which cannot be dequantized here. Give "
                "the base as it was before quantization, or one in 4 bits of bitsandbytes."
            )
        return found

    def _described(self, name: str) -> tuple[torch.Size, torch.dtype]:
        """Shape and dtype of a weight of the base, as it is in the merged model."""
        if name not in self.four_bit:
            return self.base.shape(name), self.base.dtype(name)
        state = self._quant_state(name)
        return torch.Size(state.shape), state.dtype

    def _quant_state(self, name: str) -> Any:
        functional = require("bitsandbytes.functional", purpose="a base in 4 bits", install="bitsandbytes")
        return functional.QuantState.from_dict(
            {item: self.base.read(item) for item in self.four_bit[name]}, device=torch.device("cpu")
        )

    def _base_weight(self, name: str) -> torch.Tensor:
        if name not in self.four_bit:
            return self.base.read(name)
        functional = require("bitsandbytes.functional", purpose="a base in 4 bits", install="bitsandbytes")
        weight: torch.Tensor = functional.dequantize_4bit(self.base.read(name), self._quant_state(name))
        return weight

    # -- the adapter's tensors ---------------------------------------------------------------------------------------

    def _match(self, adapter: Path) -> None:
        for name in self.adapter.names():
            if not name.startswith(_PREFIX):
                raise ConfigurationError(f"{adapter} has a tensor {name}, which no LoraModel of PEFT saves.")
            module, kind = _module_and_kind(name.removeprefix(_PREFIX))
            if kind in ("lora_A", "lora_embedding_A"):
                self._add(module, name, kind == "lora_embedding_A")
            elif kind == "":
                self._replace(module, name)
            elif kind not in ("lora_B", "lora_embedding_B") or name.replace("_B", "_A") not in self.adapter:
                raise ConfigurationError(
                    f"{adapter} has {name}, and only low-rank factors can be merged. Merge it with PEFT's "
                    "merge_and_unload()."
                )
        if not self.low_rank and not self.replaced:
            raise ConfigurationError(f"{adapter} has no low-rank factors, so there is nothing to merge.")

    def _add(self, module: str, first: str, embedding: bool) -> None:
        weight, second = f"{module}.weight", first.replace("_A", "_B")
        self._require(weight, first)
        shape, rows = self._described(weight)[0], self.adapter.shape(first)
        if second not in self.adapter or len(rows) != 2:
            raise ConfigurationError(f"{first} is no factor of a linear layer: it has {len(rows)} dimensions.")
        product = torch.Size((self.adapter.shape(second)[0], rows[1]))
        fits = [transposed for transposed in (False, True) if (product[::-1] if transposed else product) == shape]
        if not fits:
            raise ConfigurationError(
                f"{first} changes a weight of shape {tuple(product)}, but {weight} of the base has {tuple(shape)}. "
                "Give the base that the adapter was trained on."
            )
        given = embedding or bool(self.settings.get("fan_in_fan_out"))
        if len(fits) == 1 and given != fits[0] and not embedding:
            # PEFT decides by layer and saves the last decision, which square layers of a mixed model do not tell.
            for name in self.adapter.names():
                other = name.replace("_A", "_B")
                if ".lora_A." in name and self.adapter.shape(name)[1] == self.adapter.shape(other)[0]:
                    raise ConfigurationError(
                        f"fan_in_fan_out={given} of the adapter does not fit {weight}, so it is unknown whether {name} "
                        "is transposed. Merge this adapter with PEFT's merge_and_unload()."
                    )
        if embedding:
            self._refuse_tied(weight)
        scale = _scale(self.settings, module, rows[0])
        self.low_rank[weight] = _LowRank(first, second, scale, fits[0] if len(fits) == 1 else given)

    def _replace(self, module: str, name: str) -> None:
        """Replace a tensor that was trained itself: one of ``modules_to_save``, or a bias."""
        self._require(module, name)
        if self.adapter.shape(name) != self._described(module)[0]:
            raise ConfigurationError(
                f"{name} has shape {tuple(self.adapter.shape(name))}, but {module} of the base has "
                f"{tuple(self._described(module)[0])}. Resize the base and save it first."
            )
        if len(self.adapter.shape(name)) == 2:
            self._refuse_tied(module)
        self.replaced[module] = name

    def _require(self, weight: str, name: str) -> None:
        if weight not in self.base:
            raise ConfigurationError(
                f"{name} belongs to {weight}, which the base does not have. Give the base that the adapter was trained "
                "on, saved with save_pretrained by the version of Transformers that the adapter was trained with; "
                "weights of tied embeddings are saved under one name only."
            )

    def _refuse_tied(self, weight: str) -> None:
        if self.config.get("tie_word_embeddings") is not False:
            raise ConfigurationError(
                f"the adapter changes {weight}, and the embeddings of the base may be tied: the change would apply to "
                "the output layer too, which was trained without it. Save the base with tie_word_embeddings=False and "
                "weights of their own."
            )


def _module_and_kind(name: str) -> tuple[str, str]:
    """``a.q_proj.lora_A.weight`` is a factor of ``a.q_proj``; a name without a kind is that of a whole tensor."""
    found = re.fullmatch(r"(.+)\.(lora_(?:embedding_)?[A-Z]|lora_\w+?)(?:\.(weight|bias))?", name)
    if found is None:
        return name.replace(".base_layer.", "."), ""
    return found[1], f"{found[2]}.bias" if found[3] == "bias" else found[2]


def _scale(settings: Mapping[str, Any], module: str, rank: int) -> float:
    patterns = settings.get("alpha_pattern") or {}
    pattern = next((key for key in patterns if re.match(rf"(.*\.)?({key})$", module)), None)
    alpha = float(settings["lora_alpha"] if pattern is None else patterns[pattern])
    return alpha / math.sqrt(rank) if settings.get("use_rslora") else alpha / rank


def _check_settings(settings: Mapping[str, Any], path: Path) -> None:
    kind = settings.get("peft_type")
    if kind != "LORA" or "lora_alpha" not in settings:
        raise ConfigurationError(f"{path} has peft_type={kind!r}, and only adapters of LoRA are merged ('LORA').")
    initial = settings.get("init_lora_weights", True)
    used = {key: value for key, value in settings.items() if value and key not in _KNOWN}
    if initial not in _KEEPS_BASE:
        used["init_lora_weights"] = initial  # the base weights were changed when the adapter was created
    if used:
        key, value = next(iter(used.items()))
        raise ConfigurationError(
            f"{path} has {key}={value!r}, which is not supported. Merge this adapter with PEFT's merge_and_unload()."
        )


def _existing(folder: Path) -> Path:
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is not a directory. Give one that save_pretrained has written.")
    return folder


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}. Give a directory of save_pretrained.") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} is a {type(content).__name__}, not a dictionary.")
    return content


def _copy_the_rest(base: Path, folder: Path, config: dict[str, Any], dtype: torch.dtype | None) -> None:
    """Copy what a model needs besides its weights, and write its configuration without quantization."""
    for path in base.iterdir():
        if path.suffix in _COPIED and path.name != ADAPTER_CONFIG and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    written = {key: value for key, value in config.items() if key != "quantization_config"}
    if dtype is not None:
        for key in {"dtype", "torch_dtype"} & set(written) or {"torch_dtype"}:
            written[key] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
