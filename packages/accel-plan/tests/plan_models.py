"""A small Llama, whose shape the tests change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHAPE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 176,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}


def write_llama(folder: Path, **changed: Any) -> str:
    """Write its config.json, and return the folder's path."""
    folder.mkdir(exist_ok=True, parents=True)
    (folder / "config.json").write_text(json.dumps({**SHAPE, **changed}))
    return str(folder)
