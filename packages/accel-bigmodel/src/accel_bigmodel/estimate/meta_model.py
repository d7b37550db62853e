"""Building a model from its configuration, without memory for its weights."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_state.errors import ConfigurationError, require

from .._torch_compat import on_meta
from ..sizes import compute_module_sizes, get_max_layer_size, named_tensors
from .model import ModelSize


def size_of_model(name: str, source: str, model: nn.Module) -> ModelSize:
    """Return the sizes of a model in float32, whatever its dtype.

    A layer is a block that must not be split, or a module without submodules.
    """
    floating = {name: torch.float32 for name, tensor in named_tensors(model) if tensor.is_floating_point()}
    sizes = compute_module_sizes(model, special_dtypes=floating)
    declared: set[str] = set()
    for module in model.modules():
        declared.update(getattr(module, "_no_split_modules", None) or ())
    largest, names = get_max_layer_size(list(model.named_children()), sizes, sorted(declared))
    parameters = sum(item.numel() for item in model.parameters())
    whole = sum(item.numel() for item in model.parameters() if item.ndim < 2)
    return ModelSize(name, source, parameters, sizes.get("", 0), largest, names[0] if names else "", whole)


def build_transformers(config_path: Path, trust_remote_code: bool, where: AbstractContextManager[Any]) -> nn.Module:
    """Build a transformers model in float32, of the class that AutoModel selects for a configuration."""
    transformers = require("transformers", purpose=f"the model of {config_path}", install="transformers")
    try:
        # Most configurations name the dtype of their files; "auto" and 8-bit ones are not dtypes to build a model in.
        config = transformers.AutoConfig.from_pretrained(
            str(config_path.parent), trust_remote_code=trust_remote_code, dtype="float32"
        )
        with where:
            model = transformers.AutoModel.from_config(config, trust_remote_code=trust_remote_code)
        return nn.Module.float(model)  # parts with configurations of their own; Transformers' float() refuses some
    except (ValueError, KeyError, OSError, ImportError) as error:
        reason = " ".join(str(error).split())
        if "trust_remote_code" in reason:
            raise ConfigurationError(
                f"the model of {config_path} needs Python code that comes with it. Read that code, then pass "
                "--trust_remote_code to run it; or pass --library_name safetensors to read the sizes from file headers."
            ) from error
        raise ConfigurationError(
            f"transformers cannot build the model of {config_path}: {reason[:300]}. If its files are safetensors, pass "
            "--library_name safetensors."
        ) from error


def build_timm(name: str, config: Mapping[str, Any] | None) -> nn.Module:
    """Return a timm model on the meta device."""
    timm = require("timm", purpose=f"the model {name}", install="timm")
    architecture = str((config or {}).get("architecture") or name.removeprefix("timm/"))
    try:
        with on_meta():
            return timm.create_model(architecture, pretrained=False)
    except RuntimeError as error:
        raise ConfigurationError(
            f"timm has no model {architecture!r}: {error}. timm.list_models() lists all of them."
        ) from error
