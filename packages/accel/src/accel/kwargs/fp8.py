"""Settings of 8-bit floating point: one handler per backend, and an older one for all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, fields
from typing import Any, ClassVar

from torch import nn

from accel_state.errors import ConfigurationError
from accel_state.options.fp8 import FP8Options, checked

from .base import KwargsHandler


@dataclass
class FP8Kwargs(KwargsHandler):
    """Base class of the handlers of all backends; a field left at None takes the launcher's setting or its default."""

    backend_name: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        launched = FP8Options.from_environment()
        for field in fields(self):
            value = getattr(self, field.name)
            value = getattr(launched, field.name, None) if value is None else value
            setattr(self, field.name, None if value is None else checked(field.name, value))

    def recipe_settings(self) -> dict[str, Any]:
        """Return the settings by the names of ``accel_fp8.FP8Recipe``."""
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"backend": self.backend_name, **settings} if self.backend_name else settings


@dataclass
class _ScalingKwargs(FP8Kwargs):
    """What several backends take."""

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: str | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None


@dataclass
class NativeRecipeKwargs(_ScalingKwargs):
    """``mixed_precision="fp8"`` with torch's own 8-bit matrix products.

    Args:
        scaling: "delayed" (scales from a history), "dynamic" (from each tensor) or "rowwise" (from each row of it).
        fp8_format: "HYBRID" (E4M3 forward, E5M2 for gradients) or "E4M3".
        margin: headroom above the largest value, in powers of two (delayed).
        interval: forward passes between two updates of the scales (delayed).
        amax_history_len: length of the history of maximum absolute values (delayed).
        amax_compute_algo: "max" of the history, or the "most_recent" value (delayed).
        override_linear_precision: whether (fprop, dgrad, wgrad) compute in higher precision.
        use_autocast_during_eval: compute in 8 bits in evaluation mode too.
        module_filter_func: called with a layer and its name; False keeps it in high precision.

    Raises:
        ConfigurationError: an invalid value.
    """

    backend_name: ClassVar[str | None] = "native"

    scaling: str | None = None
    module_filter_func: Callable[[nn.Module, str], bool] | None = None


@dataclass
class AORecipeKwargs(FP8Kwargs):
    """``mixed_precision="fp8"`` with torchao.

    Args:
        config: a ``torchao.float8.Float8LinearConfig``, which overrides the other settings.
        module_filter_func: called with a layer and its name; False keeps it in high precision. By default the first and
            the last linear layer are kept.
        pad_inner_dim: pad the inner dimension of products to a multiple of 16.
        enable_fsdp_float8_all_gather: all-gather the shards of FSDP 2 in 8 bits.
        ao_recipe: "tensorwise", "rowwise" or "rowwise_with_gw_hp", without a ``config``.

    Raises:
        ConfigurationError: an invalid value.
    """

    backend_name: ClassVar[str | None] = "ao"

    config: Any = None
    module_filter_func: Callable[[nn.Module, str], bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None
    ao_recipe: str | None = None


@dataclass
class TERecipeKwargs(_ScalingKwargs):
    """``mixed_precision="fp8"`` with Transformer Engine.

    Args:
        use_autocast_during_eval: compute in 8 bits in evaluation mode too.
        margin: headroom above the largest value, in powers of two.
        interval: forward passes between two updates of the scales (older versions of Transformer Engine only).
        fp8_format: "HYBRID" or "E4M3".
        amax_history_len: length of the history of maximum absolute values.
        amax_compute_algo: "max" of the history, or the "most_recent" value.
        override_linear_precision: whether (fprop, dgrad, wgrad) compute in higher precision (older versions only).
        use_mxfp8_block_scaling: scale blocks of 32 elements separately.

    Raises:
        ConfigurationError: an invalid value.
    """

    backend_name: ClassVar[str | None] = "te"

    use_mxfp8_block_scaling: bool | None = None


@dataclass
class _OptLevelKwargs(FP8Kwargs):
    opt_level: str | None = None


@dataclass
class MSAMPRecipeKwargs(_OptLevelKwargs):
    """``mixed_precision="fp8"`` with MS-AMP, which is no longer maintained.

    Args:
        opt_level: "O1" (gradients and their reduction in 8 bits) or "O2" (the first state of Adam too).

    Raises:
        ConfigurationError: an invalid value.
    """

    backend_name: ClassVar[str | None] = "msamp"


@dataclass
class FP8RecipeKwargs(_ScalingKwargs, _OptLevelKwargs):
    """``mixed_precision="fp8"`` with any backend, and the settings of all of them.

    Args:
        opt_level: for "msamp"; see :class:`MSAMPRecipeKwargs`. For those without a line here see
            :class:`NativeRecipeKwargs`.
        use_mxfp8_block_scaling: for "te".
        backend: "native", "ao", "te" or "msamp", in any case; None takes the launcher's choice, or else the best one
            here.
        scaling: for "native".
        module_filter_func: for "native" and "ao".
        optimization_level: former name of ``opt_level``.

    Raises:
        ConfigurationError: an invalid value, or both names of one setting with different values.
    """

    use_mxfp8_block_scaling: bool | None = None
    backend: str | None = None
    scaling: str | None = None
    module_filter_func: Callable[[nn.Module, str], bool] | None = None
    optimization_level: InitVar[str | None] = None

    def __post_init__(self, optimization_level: str | None) -> None:
        if optimization_level is not None:
            if self.opt_level not in (None, optimization_level):
                raise ConfigurationError(
                    f"opt_level={self.opt_level!r} contradicts optimization_level={optimization_level!r}. Give one."
                )
            self.opt_level: str = optimization_level
        super().__post_init__()
