"""The memory of activations: counted on a model that runs without memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from accel_state.errors import ConfigurationError

from .meta_model import build_transformers

_AUTOCAST = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def measure_activations(model: nn.Module, run: Callable[[], Any]) -> int:
    """Bytes that a forward keeps for the backward, beside the weights.

    Every tensor that autograd saves is counted once for its memory, whichever views of it are saved. Works on real
    tensors, and on fake ones, which have no memory.

    Args:
        model: the model, whose parameters and buffers do not count.
        run: calls it.
    """
    own = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    saved: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        key = _storage(tensor)
        if key not in own and key not in saved:
            saved[key] = tensor.untyped_storage().nbytes()
            alive.append(tensor)
        return tensor

    with saved_tensors_hooks(count, lambda tensor: tensor):
        result = run()
    del result
    return sum(saved.values())


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def activations_of_config(
    config_path: Path,
    batch_size: int,
    sequence_length: int,
    mixed_precision: str = "no",
    trust_remote_code: bool = False,
) -> int:
    """Bytes of activations of a model of transformers for one batch, counted with fake tensors.

    The model runs in training mode, with the dropout of its configuration, and with the attention of this PyTorch on a
    CPU: that does not keep the matrix of attention weights, unless there is dropout on it. Where a GPU's attention
        keeps none then either,
    this is an upper bound.

    Args:
        config_path: its ``config.json``.
        batch_size: samples in a batch of one process.
        sequence_length: tokens in a sample.
        mixed_precision: "no", "bf16" or "fp16": autocast.
        trust_remote_code: run model code that comes with the model.

    Raises:
        ConfigurationError: the model takes other inputs than tokens or images, or cannot run on tensors without values.
    """
    if mixed_precision not in _AUTOCAST:
        raise ConfigurationError(f"mixed_precision={mixed_precision!r} is not one of {', '.join(_AUTOCAST)}.")
    dtype = _AUTOCAST[mixed_precision]
    # Built on the meta device, where weights are not initialised; fake tensors then say that they are on the CPU.
    model = build_transformers(config_path, trust_remote_code, torch.device("meta")).train()
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
                f"the activations of {type(model).__name__} cannot be counted, since it does not run on tensors "
                f"without values: {error}. "
                "Leave --batch_size out for the estimate without them."
            ) from error


def example_inputs(model: Any, batch_size: int, sequence_length: int) -> dict[str, torch.Tensor]:
    """A batch for a model of transformers that takes tokens, or images of one size.

    Args:
        model: the model, whose configuration is told to keep no cache.
        batch_size: samples in it.
        sequence_length: tokens in a sample.

    Raises:
        ConfigurationError: it takes other inputs.
    """
    main, config = str(getattr(model, "main_input_name", "")), model.config
    if main == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        return {main: torch.zeros(batch_size, getattr(config, "num_channels", 3), config.image_size, config.image_size)}
    if main != "input_ids":
        raise ConfigurationError(
            f"the activations of {type(model).__name__} cannot be counted: it takes {main or 'unknown inputs'}, not "
            "tokens or images of "
            "one size. Leave --batch_size out for the estimate without them."
        )
    tokens = {main: torch.zeros(batch_size, sequence_length, dtype=torch.int64)}
    if getattr(config, "is_encoder_decoder", False):
        tokens["decoder_input_ids"] = torch.zeros(batch_size, sequence_length, dtype=torch.int64)
    if getattr(config, "use_cache", False):
        config.use_cache = False
    return tokens
