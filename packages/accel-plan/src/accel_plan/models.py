"""The model of a plan: from a name, a directory or a ``config.json``, on the meta device."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accel_state.errors import ConfigurationError, require


def _llama_3(hidden: int, layers: int, heads: int, intermediate: int) -> Mapping[str, Any]:
    """Dimensions: Llama Team, The Llama 3 Herd of Models, arXiv:2407.21783, table 3."""
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128256,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "intermediate_size": intermediate,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }


SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-3-8b": _llama_3(4096, 32, 32, 14336),
    "llama-3-70b": _llama_3(8192, 80, 64, 28672),
}
"""Built-in models, as the content of a ``config.json``."""


def model_config(name: str, trust_remote_code: bool = False) -> Any:
    """Return the Transformers configuration of a model."""
    transformers = require("transformers", purpose=f"the model {name}", install="transformers")
    if name in SHAPES:
        content = dict(SHAPES[name])
        return transformers.AutoConfig.for_model(content.pop("model_type"), **content)
    path = _config_path(name)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it contains a {type(content).__name__}, not an object")
        if "auto_map" in content and "model_type" in content:
            return transformers.AutoConfig.from_pretrained(str(path.parent), trust_remote_code=trust_remote_code)
        return transformers.AutoConfig.for_model(content.pop("model_type"), **content)
    except KeyError:
        raise ConfigurationError(f"{path} is not a Transformers model configuration: model_type is missing.") from None
    except (ValueError, TypeError, OSError) as error:
        raise ConfigurationError(f"{path} is not a Transformers model configuration: {_one_line(error)}") from None


def _config_path(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_file():
        return path
    if path.exists() or ("/" in name and not name.startswith((".", "~", "/"))):
        from accel_bigmodel.estimate.sources import config_path

        found = config_path(name)
        if found is None:
            raise ConfigurationError(
                f"--model {name}: it has no config.json. Give a directory or repository that has one."
            )
        return found
    raise ConfigurationError(
        f"--model {name}: not found. Allowed: {', '.join(SHAPES)}, a config.json, a directory that contains one, or a "
        "repository on the Hub (owner/name)."
    )


def build_model(config: Any, trust_remote_code: bool = False) -> Any:
    """Build the model of a configuration on the meta device, in training mode, with its first ``architectures`` class.

    Raises:
        ConfigurationError: Transformers cannot build it.
    """
    import torch
    import transformers

    config.use_cache = False
    architectures = getattr(config, "architectures", None) or [""]
    named = getattr(transformers, architectures[0], None) if architectures[0] else None
    try:
        with torch.device("meta"):
            if named is not None:
                model = named._from_config(config)
            elif type(config) in transformers.AutoModelForCausalLM._model_mapping:
                model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
            else:
                model = transformers.AutoModel.from_config(config, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, OSError, ImportError, TypeError, ZeroDivisionError) as error:
        raise ConfigurationError(f"Transformers cannot build the model: {_one_line(error)}") from error
    return model.train()


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
