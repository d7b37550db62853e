"""Files of a Hub repository, or of its local cache."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accel_state.errors import ConfigurationError

from .headers import TensorHeaders, files_of, read_headers


def config_of(repository: str) -> Path | None:
    """The ``config.json`` of a repository, or None if it has none."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    with _hub_errors(repository):
        try:
            return Path(hf_hub_download(repository, "config.json"))
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
    with _hub_errors(repository):
        metadata = get_safetensors_metadata(repository)
    tensors = {}
    for file in metadata.files_metadata.values():
        tensors.update({name: (str(info.dtype), tuple(info.shape)) for name, info in file.tensors.items()})
    return tensors


def library_of(repository: str) -> str | None:
    """The library that a repository declares, or None if it declares none or the Hub is unreachable."""
    from huggingface_hub import model_info

    try:
        with _hub_errors(repository):
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


@contextlib.contextmanager
def _hub_errors(repository: str) -> Iterator[None]:
    """Map the errors of huggingface_hub to ours."""
    from huggingface_hub import errors

    unreachable = (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError, OSError)
    try:
        yield
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
        if not isinstance(error, unreachable) and library not in {"httpx", "httpcore", "requests", "urllib3"}:
            raise
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigurationError(
            f"{repository!r} is not in the local cache, and the Hub cannot be reached ({reason}). Connect to the "
            "network, set HF_HUB_OFFLINE=0 if it is 1, or give a local directory or a .safetensors file."
        ) from error
