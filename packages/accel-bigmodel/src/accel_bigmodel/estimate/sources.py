"""Finding the sizes of a model by its name."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_state.errors import ConfigurationError

from . import hub
from .headers import files_of, read_headers, size_of_tensors
from .model import ModelSize

LIBRARIES = ("transformers", "timm", "safetensors")


def model_size(name: str, library_name: str | None = None, trust_remote_code: bool = False) -> ModelSize:
    """The sizes of a model, from its configuration or the headers of its files; no weights are read or downloaded.

    Args:
        name: a directory, a ``.safetensors`` file, the index of a sharded checkpoint, or a Hub repository.
        library_name: "transformers" and "timm" build the model from its configuration on the meta device;
            "safetensors" reads the headers of its files. None: detect.
        trust_remote_code: run model code that comes with the model.

    Raises:
        ConfigurationError: model not found, or its sizes cannot be determined.
        MissingDependencyError: the library is not installed.
    """
    if library_name is not None and library_name not in LIBRARIES:
        raise ConfigurationError(f"library_name={library_name!r} is not one of {', '.join(LIBRARIES)}.")
    path = Path(name)
    if path.exists():
        return _local(name, path, library_name, trust_remote_code)
    return _timm(name, None) if library_name == "timm" else _on_hub(name, library_name, trust_remote_code)


def config_path(name: str) -> Path | None:
    """The ``config.json`` of a directory or repository, or None if it has none."""
    path = Path(name)
    if path.is_dir():
        return path / "config.json" if (path / "config.json").is_file() else None
    if path.is_file():
        return path if path.name == "config.json" else None
    return hub.config_of(name)


def _local(name: str, path: Path, library_name: str | None, trust_remote_code: bool) -> ModelSize:
    config = config_path(name)
    files = [] if config == path else files_of(path)
    content = hub.read_config(config) if config is not None else None
    library = library_name or _detect_library(content, bool(files))
    if library == "safetensors" and files:
        return size_of_tensors(name, read_headers(files))
    if library is None or config is None or content is None:
        raise ConfigurationError(
            f"{name}: found neither a config.json of a transformers or timm model nor a .safetensors file. Give a "
            "directory with one of them, or the file."
        )
    return _timm(name, content) if library == "timm" else _transformers(name, config, trust_remote_code)


def _on_hub(name: str, library_name: str | None, trust_remote_code: bool) -> ModelSize:
    if library_name == "safetensors":
        return size_of_tensors(name, hub.tensors_of(name))
    config = hub.config_of(name)
    content = hub.read_config(config) if config is not None else None
    library = library_name or _detect_library(content, True)
    if library == "transformers" and config is not None:
        return _transformers(name, config, trust_remote_code)
    if library == "timm" or (library == "safetensors" and hub.library_of(name) == "timm"):
        return _timm(name, content)
    return size_of_tensors(name, hub.tensors_of(name))


def _detect_library(config: Mapping[str, Any] | None, has_safetensors: bool) -> str | None:
    """The library to use: file headers serve where the model's own library is not installed."""
    for key, library in (("model_type", "transformers"), ("architecture", "timm")):
        if config is not None and key in config:
            is_missing = importlib.util.find_spec(library) is None
            return "safetensors" if is_missing and has_safetensors else library
    return "safetensors" if has_safetensors else None


def _transformers(name: str, config: Path, trust_remote_code: bool) -> ModelSize:
    import torch

    from .meta_model import build_transformers, size_of_model

    return size_of_model(name, "transformers", build_transformers(config, trust_remote_code, torch.device("meta")))


def _timm(name: str, config: Mapping[str, Any] | None) -> ModelSize:
    from .meta_model import build_timm, size_of_model

    return size_of_model(name, "timm", build_timm(name, config))
