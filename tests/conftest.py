"""What the examples import: a server imports it once, and their ranks are forked from it (see forks.py)."""

from __future__ import annotations

from accel_state.testing import preload

preload(
    *("accel.accelerator", "accel.strategies.ddp", "accel.strategies.fsdp2", "accel.strategies.mesh"),
    *("sklearn.datasets", "sklearn.model_selection"),
    # Of torch, the first optimizer of a process imports it.
    "torch._dynamo",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("llama", "gpt2", "bert")),
    "preloaded_deepspeed",
)
