"""The model of an estimate: a directory, a Hub repository or its local cache."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from accel_state.errors import ConfigurationError

from .model import ModelSize, TensorHeaders, files_of, read_headers, size_of_tensors

_CONNECT_SECONDS = 5.0


def config_of(repository: str) -> Path | None:
    """Return the ``config.json`` of a repository, or None if it has none."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    with _hub_errors(repository) as unreachable:
        try:
            return Path(hf_hub_download(repository, "config.json", local_files_only=unreachable is not None))
        except LocalEntryNotFoundError:  # a subclass of EntryNotFoundError that means the Hub did not answer
            raise
        except EntryNotFoundError:
            return None


def tensors_of(repository: str) -> TensorHeaders:
    """Dtype and shape of every tensor of a repository, from cached files or the headers of those on the Hub."""
    from huggingface_hub import get_safetensors_metadata, try_to_load_from_cache

    for name in ("model.safetensors.index.json", "model.safetensors"):
        cached = try_to_load_from_cache(repository, name)
        if isinstance(cached, str):
            return read_headers(files_of(Path(cached)))
    with _hub_errors(repository) as unreachable:
        if unreachable is not None:
            raise unreachable
        metadata = get_safetensors_metadata(repository)
    tensors = {}
    for file in metadata.files_metadata.values():
        tensors.update({name: (str(info.dtype), tuple(info.shape)) for name, info in file.tensors.items()})
    return tensors


def library_of(repository: str) -> str | None:
    """Return the library that a repository declares, or None if it declares none or the Hub is unreachable."""
    from huggingface_hub import model_info

    try:
        with _hub_errors(repository) as unreachable:
            if unreachable is not None:
                raise unreachable
            name = model_info(repository).library_name
    except ConfigurationError:
        return None
    return None if name is None else str(name)


def read_config(path: Path) -> dict[str, Any]:
    """Parse a ``config.json``."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} must contain a JSON object, not a {type(content).__name__}.")
    return content


def _connection_error() -> OSError | None:
    """Why no connection to the Hub can be opened; None if one can, or if that is for the Hub's client to find out.

    The client tries for half a minute.
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or getproxies():
        return None
    address = urlsplit(constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    try:
        socket.create_connection((address.hostname or "", port), _CONNECT_SECONDS).close()
    except OSError as error:
        return error
    return None


@contextlib.contextmanager
def _hub_errors(repository: str) -> Iterator[OSError | None]:
    """Map the errors of huggingface_hub to ours; yields why the Hub cannot be reached, if that is known already."""
    from huggingface_hub import constants, errors

    offline = (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError, OSError)
    unreachable = _connection_error()
    logger = logging.getLogger("huggingface_hub.utils._http")  # warns of every retry
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield unreachable
    except errors.HFValidationError as error:
        raise ConfigurationError(
            f"{repository!r} is neither a local file or directory nor the name of a Hub repository (owner/name)."
        ) from error
    except errors.GatedRepoError as error:
        raise ConfigurationError(
            f"{repository!r} is gated: request access on its page, then log in with `hf auth login`."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigurationError(
            f"the Hub has no repository {repository!r}, or it is private. Check the name; log in with `hf auth login` "
            "for a private one."
        ) from error
    except errors.NotASafetensorsRepoError as error:
        raise ConfigurationError(
            f"{repository!r} has no safetensors files. Give --library_name transformers or timm to read the sizes "
            "from its configuration."
        ) from error
    except Exception as error:
        # Connection errors come from the HTTP library that this version of huggingface_hub uses.
        library = type(error).__module__.split(".")[0]
        if not isinstance(error, offline) and library not in {"httpx", "httpcore", "requests", "urllib3"}:
            raise
        reason = str(unreachable or error).strip().partition("\n")[0] or type(error).__name__
        if constants.HF_HUB_OFFLINE:
            reason = "HF_HUB_OFFLINE is set"
        raise ConfigurationError(
            f"{repository!r} is not in the local cache, and the Hub cannot be reached ({reason}). Connect to the "
            f"network{', unset HF_HUB_OFFLINE,' if constants.HF_HUB_OFFLINE else ''} or give a local directory or a "
            ".safetensors file."
        ) from error
    finally:
        logger.setLevel(level)


LIBRARIES = ("transformers", "timm", "safetensors")


def model_size(name: str, library_name: str | None = None, trust_remote_code: bool = False) -> ModelSize:
    """Return the sizes of a model, from its configuration or the headers of its files.

    No weights are read or downloaded.

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
    """Return the ``config.json`` of a directory or repository, or None if it has none."""
    path = Path(name)
    if path.is_dir():
        return path / "config.json" if (path / "config.json").is_file() else None
    if path.is_file():
        return path if path.name == "config.json" else None
    return config_of(name)


def _local(name: str, path: Path, library_name: str | None, trust_remote_code: bool) -> ModelSize:
    config = config_path(name)
    files = [] if config == path else files_of(path)
    content = read_config(config) if config is not None else None
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
        return size_of_tensors(name, tensors_of(name))
    config = config_of(name)
    content = read_config(config) if config is not None else None
    library = library_name or _detect_library(content, True)
    if library == "transformers" and config is not None:
        return _transformers(name, config, trust_remote_code)
    if library == "timm" or (library == "safetensors" and library_of(name) == "timm"):
        return _timm(name, content)
    return size_of_tensors(name, tensors_of(name))


def _detect_library(config: Mapping[str, Any] | None, has_safetensors: bool) -> str | None:
    """Return the library to use: file headers serve where the model's own library is not installed."""
    for key, library in (("model_type", "transformers"), ("architecture", "timm")):
        if config is not None and key in config:
            is_missing = importlib.util.find_spec(library) is None
            return "safetensors" if is_missing and has_safetensors else library
    return "safetensors" if has_safetensors else None


def _transformers(name: str, config: Path, trust_remote_code: bool) -> ModelSize:
    from .._torch_compat import on_meta
    from .meta_model import build_transformers, size_of_model

    return size_of_model(name, "transformers", build_transformers(config, trust_remote_code, on_meta()))


def _timm(name: str, config: Mapping[str, Any] | None) -> ModelSize:
    from .meta_model import build_timm, size_of_model

    return size_of_model(name, "timm", build_timm(name, config))
