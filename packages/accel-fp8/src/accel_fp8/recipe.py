"""What is computed in 8 bits, and how: the settings of every back end in one place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from accel_state.errors import ConfigurationError
from accel_state.options.fp8 import FP8Options, checked

LayerFilter = Callable[[nn.Module, str], bool]


@dataclass(frozen=True)
class FP8Recipe:
    """How a model computes in 8-bit floating point. A back end reads the settings that are its own.

    Args:
        backend: "native", "ao" (torchao), "te" (Transformer Engine) or "msamp" (MS-AMP); None takes the best one here.
        fp8_format: "HYBRID" is E4M3 forward and E5M2 for gradients, "E4M3" is that one throughout (native, te). No back
            end trains in "E5M2" alone; the name is known because configurations hold it, and refused where it would be
            used.
        margin: powers of two of room that scales leave above the largest value (native with delayed scaling, te).
        interval: forward passes between two computations of the scales (native with delayed scaling, te).
        amax_history_len: how many of the last largest values a delayed scale remembers (native, te).
        amax_compute_algo: which of them it follows: the "max" or the "most_recent" one (native, te).
        override_linear_precision: whether (fprop, dgrad, wgrad) compute in higher precision (native, te).
        use_autocast_during_eval: compute in 8 bits in evaluation mode too (native, te).
        scaling: "delayed" (scales from a history, kept in the state dict), "dynamic" (from the tensor itself) or
            "rowwise" (dynamic, one for each row) (native).
        module_filter_func: called with a layer and its name; False keeps it in high precision. By default the first and
            the last linear layer are kept, and those with a dimension that is no multiple of 16 (native, ao).
        config: a ``torchao.float8.Float8LinearConfig``, which says all that torchao can be told (ao).
        ao_recipe: "tensorwise", "rowwise" or "rowwise_with_gw_hp", where there is no ``config`` (ao).
        pad_inner_dim: pad the inner dimension of products to a multiple of 16 (ao).
        enable_fsdp_float8_all_gather: gather the shards of FSDP 2 in 8 bits; only with "tensorwise" (ao).
        use_mxfp8_block_scaling: a scale for each block of 32 elements, where the device can (te).
        opt_level: "O1" or "O2" (msamp).

    Raises:
        ConfigurationError: a value that is not allowed.
    """

    backend: str | None = None
    fp8_format: str = "HYBRID"
    margin: int = 0
    interval: int = 1
    amax_history_len: int = 1024
    amax_compute_algo: str = "most_recent"
    override_linear_precision: tuple[bool, bool, bool] = (False, False, False)
    use_autocast_during_eval: bool = False
    scaling: str = "delayed"
    module_filter_func: LayerFilter | None = None
    config: Any = None
    ao_recipe: str = "tensorwise"
    pad_inner_dim: bool = True
    enable_fsdp_float8_all_gather: bool = True
    use_mxfp8_block_scaling: bool = False
    opt_level: str = "O2"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                object.__setattr__(self, field.name, checked(field.name, value))
        if self.module_filter_func is not None and not callable(self.module_filter_func):
            raise ConfigurationError(
                f"module_filter_func={self.module_filter_func!r} cannot be called. Give a function of a layer and its "
                "name."
            )

    @classmethod
    def from_environment(cls, **overrides: Any) -> FP8Recipe:
        """The launcher's settings, with those of the caller on top.

        Args:
            **overrides: fields; None leaves one to the launcher.

        Raises:
            ConfigurationError: a variable, or an override, holds what is not allowed.
        """
        options = FP8Options.from_environment()
        known = {field.name for field in fields(cls)}
        launched = {opt.field: getattr(options, opt.field) for opt in options.options() if opt.field in known}
        return cls(**{**launched, **{name: value for name, value in overrides.items() if value is not None}})
