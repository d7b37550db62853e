"""Settings of FP8 training for all back ends."""

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
    """How a model computes in 8-bit floating point. Each back end reads only its settings, named in parentheses.

    Args:
        backend: "native", "ao" (torchao), "te" (Transformer Engine) or "msamp" (MS-AMP); None selects the best one for
            the device.
        fp8_format: "HYBRID" (E4M3 forward, E5M2 for gradients) or "E4M3" (native, te). "E5M2" is accepted in
            configurations, but no back end trains with it.
        margin: powers of two of headroom that scales leave above the largest value (native with delayed scaling, te).
        interval: forward passes between two updates of the scales (native with delayed scaling, te).
        amax_history_len: number of recent largest values that delayed scaling stores (native, te).
        amax_compute_algo: the value in the history that determines the scale: "max" or "most_recent" (native, te).
        override_linear_precision: whether (fprop, dgrad, wgrad) compute in higher precision (native, te).
        use_autocast_during_eval: compute in 8 bits in evaluation mode too (native, te).
        scaling: "delayed" (scales from a history, stored in the state dict), "dynamic" (from the tensor itself) or
            "rowwise" (dynamic, one scale per row) (native).
        module_filter_func: called with a layer and its name; False keeps it in high precision. The default excludes the
            first and the last linear layer, and those with a dimension that is not a multiple of 16 (native, ao).
        config: a ``torchao.float8.Float8LinearConfig``, which overrides the other settings of ao (ao).
        ao_recipe: "tensorwise", "rowwise" or "rowwise_with_gw_hp", without ``config`` (ao).
        pad_inner_dim: pad the inner dimension of products to a multiple of 16 (ao).
        enable_fsdp_float8_all_gather: all-gather the shards of FSDP 2 in 8 bits; only with "tensorwise" (ao).
        use_mxfp8_block_scaling: one scale per block of 32 elements, on devices that support it (te).
        opt_level: "O1" or "O2" (msamp).

    Raises:
        ConfigurationError: a value is not allowed.
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
                f"module_filter_func={self.module_filter_func!r} is not callable. Pass a function of a layer and its "
                "name."
            )

    @classmethod
    def from_environment(cls, **overrides: Any) -> FP8Recipe:
        """Return the launcher's settings, overridden by the caller's.

        Args:
            **overrides: fields; None keeps the launcher's setting.

        Raises:
            ConfigurationError: a variable or an override is not allowed.
        """
        options = FP8Options.from_environment()
        known = {field.name for field in fields(cls)}
        settings = {opt.field: getattr(options, opt.field) for opt in options.options() if opt.field in known}
        return cls(**settings | {name: value for name, value in overrides.items() if value is not None})
