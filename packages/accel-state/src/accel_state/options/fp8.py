"""FP8 training settings that the launcher passes to the processes."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

from ..env import str_to_bool
from .declaration import OptionGroup, option

BACKENDS = ("native", "ao", "te", "msamp")

_fp8 = functools.partial(
    option,
    section="fp8_config",
    prefix="fp8_",
    prefixed_keys=False,
    env_prefix="ACCELERATE_FP8_",
    exported=True,
    asked_when={"mixed_precision": ("fp8",)},
)


def parse_override(text: str) -> tuple[bool, bool, bool]:
    """Read which of fprop, dgrad and wgrad compute in higher precision: one boolean for all ("false"), or three."""
    entries = text.strip("()[] ").split(",")
    if len(entries) not in (1, 3):
        raise ValueError(
            f"{text!r} is neither true or false, nor three of them for fprop, dgrad and wgrad, such as false,false,true"
        )
    flags = [bool(str_to_bool(entry)) for entry in entries]
    return (flags[0], flags[0], flags[0]) if len(flags) == 1 else (flags[0], flags[1], flags[2])


def checked(name: str, value: Any) -> Any:
    """Check a setting that was passed in code; those that are not fields of FP8Options are returned unchanged."""
    known = {opt.field for opt in FP8Options.options()}
    return FP8Options.declaration(name).check(name, value) if name in known else value


@dataclass(frozen=True)
class FP8Options(OptionGroup):
    """Settings of ``mixed_precision="fp8"``; a configuration file holds them in the section ``fp8_config``."""

    title = "8-bit floating point"
    description = "Used with --mixed_precision fp8. A recipe given in the script takes precedence."
    used_with: ClassVar[tuple[str, Any] | None] = ("mixed_precision", "fp8")

    backend: str | None = _fp8(
        choices=BACKENDS,
        help="FP8 implementation. Left out, the best one that the device and the installed packages support.",
        question="Which FP8 implementation should be used?",
    )
    use_autocast_during_eval: bool = _fp8(
        False, help="Compute in FP8 in evaluation mode too (native, te); metrics are usually better without it."
    )
    margin: int = _fp8(
        0, minimum=0, maximum=32, help="Headroom of the scales above the largest value, in powers of two (native, te)."
    )
    interval: int = _fp8(1, minimum=1, help="Number of forward passes between two updates of the scales (native, te).")
    fp8_format: str = _fp8(
        "HYBRID",
        choices=("HYBRID", "E4M3", "E5M2"),
        help="HYBRID: E4M3 in the forward pass and E5M2 for gradients; E4M3: E4M3 everywhere.",
    )
    amax_history_len: int = _fp8(
        1024,
        minimum=1,
        maximum=1_000_000,
        other_keys=("fp8_config.amax_history_length",),
        help="Length of the history of absolute maxima (amax) for delayed scaling (native, te).",
    )
    amax_compute_algo: str = _fp8(
        "most_recent",
        choices=("max", "most_recent"),
        other_keys=("fp8_config.amax_compute_algorithm",),
        help="Which entry of the amax history sets a delayed scale (native, te).",
    )
    override_linear_precision: tuple[bool, bool, bool] = _fp8(
        (False, False, False),
        kind=str,
        parser=parse_override,
        metavar="BOOL,BOOL,BOOL",
        help="Whether fprop, dgrad and wgrad compute in higher precision (native, te).",
    )
    opt_level: str = _fp8(
        "O2",
        choices=("O1", "O2"),
        other_keys=("fp8_config.optimization_level",),
        help="Optimization level of MS-AMP: how much it keeps in FP8 (msamp).",
    )
    enable_fsdp_float8_all_gather: bool = _fp8(
        True, alone=False, help="All-gather the shards of FSDP 2 in FP8 (ao, recipe tensorwise)."
    )
    pad_inner_dim: bool = _fp8(True, alone=False, help="Pad inner matrix dimensions to multiples of 16 (ao).")
    use_mxfp8_block_scaling: bool = _fp8(
        False, help="Use one scale per block of 32 elements (MXFP8), on devices that support it (te)."
    )
    scaling: str = _fp8(
        "delayed",
        choices=("delayed", "dynamic", "rowwise"),
        help="delayed: scales from the amax history; dynamic: from the current tensor; rowwise: one per row (native).",
    )
    ao_recipe: str = _fp8(
        "tensorwise", choices=("tensorwise", "rowwise", "rowwise_with_gw_hp"), help="Float8 recipe of torchao (ao)."
    )
