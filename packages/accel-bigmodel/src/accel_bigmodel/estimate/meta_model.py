"""A model built from its configuration, without memory for its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from accel_state.errors import ConfigurationError, require

from ..sizes import compute_module_sizes, get_max_layer_size
from .model import ModelSize


def size_of_model(name: str, source: str, model: nn.Module) -> ModelSize:
    """The sizes of a model; a layer is a block of which it has several, or a module without submodules."""
    sizes = compute_module_sizes(model)
    largest, names = get_max_layer_size(list(model.named_children()), sizes, sorted(_blocks(model)))
    parameters = list(model.parameters())
    values, whole = sum(item.numel() for item in parameters), sum(item.numel() for item in parameters if item.ndim < 2)
    return ModelSize(name, source, values, sizes.get("", 0), largest, names[0] if names else "", whole)


def _blocks(model: nn.Module) -> set[str]:
    declared = {name for module in model.modules() for name in getattr(module, "_no_split_modules", None) or ()}
    counts = Counter(type(module).__name__ for module in model.modules())
    return {name for name in declared if counts[name] > 1}


def build_transformers(config_path: Path, trust_remote_code: bool, where: AbstractContextManager[Any]) -> nn.Module:
    """A model of transformers, of the class that AutoModel takes for a configuration.

    Args:
        config_path: its ``config.json``.
        trust_remote_code: run model code that lies beside the configuration.
        where: a context in which tensors take no memory (``torch.device("meta")``).

    Raises:
        ConfigurationError: it needs code of its own that was not trusted, or the configuration is of no model.
        MissingDependencyError: transformers is not installed.
    """
    transformers = require("transformers", purpose=f"the model of {config_path}", install="transformers")
    try:
        config = transformers.AutoConfig.from_pretrained(str(config_path.parent), trust_remote_code=trust_remote_code)
        with where:
            return transformers.AutoModel.from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError, ImportError) as error:
        raise ConfigurationError(_cannot_build(config_path, error)) from error


def _cannot_build(config_path: Path, error: Exception) -> str:
    text = " ".join(str(error).split())
    if "trust_remote_code" in text:
        return (
            f"the model of {config_path} needs Python code that comes with it. Read that code, then pass "
            "--trust_remote_code to run it; or "
            "pass --library_name safetensors to read the sizes from the headers of its files."
        )
    return (
        f"transformers cannot build the model of {config_path}: {text[:300]}. If its files are safetensors, pass "
        "--library_name safetensors."
    )


def build_timm(name: str, config: Mapping[str, Any] | None) -> nn.Module:
    """A model of timm on the meta device.

    Args:
        name: its name, with or without "timm/".
        config: its ``config.json``, which names the architecture.

    Raises:
        ConfigurationError: timm has no such model.
        MissingDependencyError: timm is not installed.
    """
    timm = require("timm", purpose=f"the model {name}", install="timm")
    architecture = str((config or {}).get("architecture") or name.removeprefix("timm/"))
    try:
        with torch.device("meta"):
            return timm.create_model(architecture, pretrained=False)
    except RuntimeError as error:
        raise ConfigurationError(
            f"timm has no model {architecture!r}: {error}. timm.list_models() lists all of them."
        ) from error
