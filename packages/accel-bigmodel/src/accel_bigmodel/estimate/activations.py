"""Measuring the memory of activations on a model of fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from accel_state.errors import ConfigurationError

from .._torch_compat import FakeTensorMode, on_meta, storage_key
from .meta_model import build_transformers

_AUTOCAST = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def measure_activations(model: nn.Module, run: Callable[[], Any]) -> int:
    """Return bytes that a forward saves for the backward, without the weights.

    Each storage that autograd saves counts once, however many views of it are saved. Works on real and fake tensors.

    Args:
        model: the model, whose parameters and buffers do not count.
        run: calls the model.
    """
    weights = {storage_key(tensor) for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        key = storage_key(tensor)
        if key not in weights:
            saved.setdefault(key, tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    del result
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def activations_of_config(
    config_path: Path,
    batch_size: int,
    sequence_length: int,
    mixed_precision: str = "no",
    trust_remote_code: bool = False,
) -> int:
    """Return bytes of activations of a transformers model for one batch, measured with fake tensors.

    The model runs in training mode, with the dropout of its configuration and torch's CPU attention, which keeps no
    matrix of attention weights unless there is dropout on it. If the attention of a GPU keeps none in that case
    either, the result is an upper bound.
    """
    if mixed_precision not in _AUTOCAST:
        raise ConfigurationError(f"mixed_precision={mixed_precision!r} is not one of {', '.join(_AUTOCAST)}.")
    dtype = _AUTOCAST[mixed_precision]
    # Built on the meta device, where weights are not initialised; the fake tensors then claim to be on the CPU.
    model = build_transformers(config_path, trust_remote_code, on_meta()).train()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu")
        inputs = example_inputs(model, batch_size, sequence_length)

        def run() -> Any:
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                return model(**inputs)

        try:
            return measure_activations(model, run)
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            raise ConfigurationError(
                f"cannot measure the activations of {type(model).__name__}, because it does not run on tensors without "
                f"values: {error}. Leave out --batch_size for the estimate without activations."
            ) from error


def example_inputs(model: Any, batch_size: int, sequence_length: int) -> dict[str, torch.Tensor]:
    """Return a batch for a transformers model that takes tokens, or images of one size."""
    main, config = str(getattr(model, "main_input_name", "")), model.config
    if main == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        return {main: torch.zeros(batch_size, getattr(config, "num_channels", 3), config.image_size, config.image_size)}
    if main != "input_ids":
        raise ConfigurationError(
            f"cannot measure the activations of {type(model).__name__}: it takes {main or 'unknown inputs'}, not "
            "tokens or images of one size. Leave out --batch_size for the estimate without activations."
        )
    tokens = {main: torch.zeros(batch_size, sequence_length, dtype=torch.int64)}
    if getattr(config, "is_encoder_decoder", False):
        tokens["decoder_input_ids"] = torch.zeros(batch_size, sequence_length, dtype=torch.int64)
    if getattr(config, "use_cache", False):
        config.use_cache = False
    return tokens
