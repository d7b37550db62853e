"""Settings of 8-bit floating point: one handler a back end, and the older one that serves for all."""

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
    """What the handlers of all back ends have in common: a field left at None takes the launcher's setting, or its
    default.
    """

    backend_name: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        launched = FP8Options.from_environment()
        for field in fields(self):
            value = getattr(self, field.name)
            value = getattr(launched, field.name, None) if value is None else value
            setattr(self, field.name, None if value is None else checked(field.name, value))

    def recipe_settings(self) -> dict[str, Any]:
        """The settings by the names of ``accel_fp8.FP8Recipe``."""
        settings = {field.name: getattr(self, field.name) for field in fields(self)}
        return {"backend": self.backend_name, **settings} if self.backend_name else settings


@dataclass
class NativeRecipeKwargs(FP8Kwargs):
    """``mixed_precision="fp8"`` with torch's own product of 8-bit matrices.

    Args:
        scaling: "delayed" (scales from a history), "dynamic" (from each tensor) or "rowwise" (from each row of it).
        fp8_format: "HYBRID" (E4M3 forward, E5M2 for gradients) or "E4M3".
        margin: powers of two of room above the largest value (delayed).
        interval: forward passes between two computations of the scales (delayed).
        amax_history_len: how many largest values are remembered (delayed).
        amax_compute_algo: "max" of them, or the "most_recent" one (delayed).
        override_linear_precision: whether (fprop, dgrad, wgrad) compute in higher precision.
        use_autocast_during_eval: compute in 8 bits in evaluation mode too.
        module_filter_func: called with a layer and its name; False keeps it in high precision.

    Raises:
        ConfigurationError: a value that is not allowed.
    """

    backend_name: ClassVar[str | None] = "native"

    scaling: str | None = None
    fp8_format: str | None = None
    margin: int | None = None
    interval: int | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_autocast_during_eval: bool | None = None
    module_filter_func: Callable[[nn.Module, str], bool] | None = None


@dataclass
class AORecipeKwargs(FP8Kwargs):
    """``mixed_precision="fp8"`` with torchao.

    Args:
        config: a ``torchao.float8.Float8LinearConfig``, which then says everything.
        module_filter_func: called with a layer and its name; False keeps it in high precision. By default the first and
            the last linear layer are kept.
        pad_inner_dim: pad the inner dimension of products to a multiple of 16.
        enable_fsdp_float8_all_gather: gather the shards of FSDP 2 in 8 bits.
        ao_recipe: "tensorwise", "rowwise" or "rowwise_with_gw_hp", where there is no ``config``.

    Raises:
        ConfigurationError: a value that is not allowed.
    """

    backend_name: ClassVar[str | None] = "ao"

    config: Any = None
    module_filter_func: Callable[[nn.Module, str], bool] | None = None
    pad_inner_dim: bool | None = None
    enable_fsdp_float8_all_gather: bool | None = None
    ao_recipe: str | None = None


@dataclass
class TERecipeKwargs(FP8Kwargs):
    """``mixed_precision="fp8"`` with Transformer Engine.

    Args:
        use_autocast_during_eval: compute in 8 bits in evaluation mode too.
        margin: powers of two of room above the largest value.
        interval: forward passes between two computations of the scales (older versions of Transformer Engine only).
        fp8_format: "HYBRID" or "E4M3".
        amax_history_len: how many largest values are remembered.
        amax_compute_algo: "max" of them, or the "most_recent" one.
        override_linear_precision: whether (fprop, dgrad, wgrad) compute in higher precision (older versions only).
        use_mxfp8_block_scaling: give blocks of 32 elements a scale of their own.

    Raises:
        ConfigurationError: a value that is not allowed.
    """

    backend_name: ClassVar[str | None] = "te"

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: str | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None


@dataclass
class MSAMPRecipeKwargs(FP8Kwargs):
    """``mixed_precision="fp8"`` with MS-AMP, which is not maintained any more.

    Args:
        opt_level: "O1" (gradients and their reduction in 8 bits) or "O2" (the first state of Adam too).

    Raises:
        ConfigurationError: a value that is not allowed.
    """

    backend_name: ClassVar[str | None] = "msamp"

    opt_level: str | None = None


@dataclass
class FP8RecipeKwargs(FP8Kwargs):
    """``mixed_precision="fp8"`` with any back end, and the settings of all of them in one place.

    Args:
        opt_level: for "msamp"; see :class:`MSAMPRecipeKwargs`.
        use_autocast_during_eval: see :class:`NativeRecipeKwargs` for this one and the others.
        margin: likewise.
        interval: likewise.
        fp8_format: likewise.
        amax_history_len: likewise.
        amax_compute_algo: likewise.
        override_linear_precision: likewise.
        use_mxfp8_block_scaling: for "te".
        backend: "native", "ao", "te" or "msamp", in any case; None takes the launcher's choice, or else the best one
            here.
        scaling: for "native".
        module_filter_func: for "native" and "ao".
        optimization_level: older name of ``opt_level``.

    Raises:
        ConfigurationError: a value that is not allowed, or both names of one setting with different values.
    """

    opt_level: str | None = None
    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: str | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
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
            self.opt_level = optimization_level
        super().__post_init__()
