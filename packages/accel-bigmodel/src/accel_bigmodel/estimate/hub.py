"""Files of a repository on the Hub, or of its cache on this machine."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accel_state.errors import ConfigurationError

from .headers import Tensors, files_of, read_headers


def config_of(repository: str) -> Path | None:
    """The ``config.json`` of a repository, or None if it has none.

    Raises:
        ConfigurationError: there is no such repository, or it is not in the cache and the Hub cannot be reached.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    with _explained(repository):
        try:
            return Path(hf_hub_download(repository, "config.json"))
        except LocalEntryNotFoundError:  # which is an EntryNotFoundError too, and says that the Hub did not answer
            raise
        except EntryNotFoundError:
            return None


def tensors_of(repository: str) -> Tensors:
    """(type, shape) of every tensor of a repository: from cached files, or a few bytes of those on the Hub.

    Raises:
        ConfigurationError: it has no safetensors files, or cannot be reached.
    """
    from huggingface_hub import get_safetensors_metadata, try_to_load_from_cache

    for name in ("model.safetensors.index.json", "model.safetensors"):
        cached = try_to_load_from_cache(repository, name)
        if isinstance(cached, str):
            return read_headers(files_of(Path(cached)))
    with _explained(repository):
        metadata = get_safetensors_metadata(repository)
    return {
        name: (str(info.dtype), tuple(info.shape))
        for file in metadata.files_metadata.values()
        for name, info in file.tensors.items()
    }


def library_of(repository: str) -> str | None:
    """The library that a repository names, or None where it names none or the Hub cannot be asked."""
    from huggingface_hub import model_info

    try:
        with _explained(repository):
            name = model_info(repository).library_name
    except ConfigurationError:
        return None
    return None if name is None else str(name)


def read_config(path: Path) -> dict[str, Any]:
    """A ``config.json``.

    Raises:
        ConfigurationError: it is not one.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigurationError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} holds a {type(content).__name__}; the configuration of a model is an object.")
    return content


@contextlib.contextmanager
def _explained(repository: str) -> Iterator[None]:
    from huggingface_hub import errors

    try:
        yield
    except errors.HFValidationError as error:
        raise ConfigurationError(
            f"{repository!r} is neither a folder or file of this machine nor the name of a repository on the Hub "
            "(owner/name)."
        ) from error
    except errors.GatedRepoError as error:
        raise ConfigurationError(
            f"{repository!r} is gated: ask for access on its page, then log in with `hf auth login`."
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigurationError(
            f"the Hub has no repository {repository!r}, or it is private. Check the name; log in with `hf auth login` "
            "for a private one."
        ) from error
    except errors.NotASafetensorsRepoError as error:
        raise ConfigurationError(
            f"{repository!r} has no safetensors files. Give --library_name transformers or timm to learn its size "
            "from its configuration."
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, errors.HfHubHTTPError, OSError) as error:
        raise ConfigurationError(_unreachable(repository, error)) from error
    except Exception as error:
        # Failures of the connection come as exceptions of whichever HTTP library this version of huggingface_hub uses.
        if type(error).__module__.split(".")[0] not in {"httpx", "httpcore", "requests", "urllib3"}:
            raise
        raise ConfigurationError(_unreachable(repository, error)) from error


def _unreachable(repository: str, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return (
        f"{repository!r} is not in the local cache, and the Hub cannot be reached ({reason}). Connect to the network, "
        "set HF_HUB_OFFLINE=0 "
        "if it is 1, or give a local folder or a .safetensors file."
    )
