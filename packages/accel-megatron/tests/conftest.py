from __future__ import annotations

import sys
from pathlib import Path

from accel_state.testing import preload

sys.path.insert(0, str(Path(__file__).parent))

# What most ranks of these tests import, which takes each of them five seconds: a server imports it once, and ranks are
# forked from it.
_MODELS = ("bert", "gpt2", "gpt_neox", "llama", "megatron_bert", "mistral", "mixtral", "qwen2", "qwen3", "t5")
preload(
    *("accel.accelerator", "accel_megatron.engine", "accel_megatron.checkpoint", "accel_megatron._test_imports"),
    *(f"megatron.core.{name}" for name in ("models.gpt", "optimizer", "distributed", "dist_checkpointing")),
    *(f"transformers.models.{name}.modeling_{name}" for name in _MODELS),
)
