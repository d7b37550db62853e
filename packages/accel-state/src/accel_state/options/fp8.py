"""Training in 8-bit floating point, as the launcher hands it to the processes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from ..env import str_to_bool
from ..errors import ConfigurationError
from .option import OptionGroup, option

BACKENDS = ("native", "ao", "te", "msamp")
FORMATS = ("HYBRID", "E4M3", "E5M2")
AMAX_ALGORITHMS = ("max", "most_recent")
SCALINGS = ("delayed", "dynamic", "rowwise")
OPT_LEVELS = ("O1", "O2")
AO_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
MAX_MARGIN = 32
MAX_HISTORY = 1_000_000

_CHOICES = {
    "backend": BACKENDS,
    "fp8_format": FORMATS,
    "amax_compute_algo": AMAX_ALGORITHMS,
    "scaling": SCALINGS,
    "opt_level": OPT_LEVELS,
    "ao_recipe": AO_RECIPES,
}
_RANGES = {"margin": (0, MAX_MARGIN), "interval": (1, None), "amax_history_len": (1, MAX_HISTORY)}
_SWITCHES = ("use_autocast_during_eval", "pad_inner_dim", "enable_fsdp_float8_all_gather", "use_mxfp8_block_scaling")

_FP8: Mapping[str, tuple[Any, ...]] = {"mixed_precision": ("fp8",)}


def parse_override(text: str) -> tuple[bool, bool, bool]:
    """Which of fprop, dgrad and wgrad compute in higher precision.

    Args:
        text: one word for all three ("false"), or three words with commas between them, in brackets or not.

    Raises:
        ConfigurationError: (a ValueError) a word is neither true nor false.
        ValueError: there are neither one nor three words.
    """
    words = text.strip("()[] ").split(",")
    if len(words) not in (1, 3):
        raise ValueError(
            f"{text!r} is neither true or false, nor three of them for fprop, dgrad and wgrad, such as false,false,true"
        )
    flags = [bool(str_to_bool(word)) for word in words]
    return (flags[0], flags[0], flags[0]) if len(flags) == 1 else (flags[0], flags[1], flags[2])


def checked(name: str, value: Any) -> Any:
    """A setting that was given in code, as it is meant: a word in its own spelling, one switch for three as three.

    Args:
        name: field of :class:`FP8Options`; a setting that is none of them is returned as it is.
        value: what was given.

    Raises:
        ConfigurationError: it is not allowed; the message says what is.
    """
    if name in _CHOICES:
        return _word(name, value, _CHOICES[name])
    if name in _RANGES:
        return _number(name, value, *_RANGES[name])
    if name in _SWITCHES and not isinstance(value, bool):
        raise ConfigurationError(f"{name}={value!r} is neither True nor False.")
    return _three_switches(value) if name == "override_linear_precision" else value


def _word(name: str, value: Any, choices: tuple[str, ...]) -> str:
    words = {choice.lower(): choice for choice in choices}
    if not isinstance(value, str) or value.lower() not in words:
        raise ConfigurationError(f"{name}={value!r} is not one of {', '.join(choices)}.")
    return words[value.lower()]


def _number(name: str, value: Any, least: int, most: int | None) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least or (most is not None and value > most):
        allowed = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigurationError(f"{name}={value!r} is not an integer {allowed}.")
    return value


def _three_switches(value: Any) -> tuple[bool, bool, bool]:
    switches = (value,) * 3 if isinstance(value, bool) else tuple(value) if isinstance(value, (tuple, list)) else ()
    if len(switches) != 3 or not all(isinstance(switch, bool) for switch in switches):
        raise ConfigurationError(
            f"override_linear_precision={value!r} is not three of True or False, for fprop, dgrad and wgrad, nor one "
            "for all of them."
        )
    return switches[0], switches[1], switches[2]


def _number_up_to(name: str, least: int, most: int) -> Any:
    def parse(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) <= most:
            raise ValueError(f"{text!r} is not an integer from {least} to {most}, which {name} must be")
        return int(text)

    return parse


def _fp8(default: Any, field: str, *old_names: str, **declaration: Any) -> Any:
    """An option of this group: flag, variable and key follow from its field."""
    short = field.removeprefix("fp8_")
    return option(
        default,
        name=f"fp8_{short}",
        env=f"ACCELERATE_FP8_{short.upper()}",
        key=f"fp8_config.{field}",
        other_keys=[f"fp8_config.{name}" for name in old_names],
        exported=True,
        asked_when=_FP8,
        **declaration,
    )


@dataclass(frozen=True)
class FP8Options(OptionGroup):
    """What ``mixed_precision="fp8"`` computes with, and how; in a file they stand in the section ``fp8_config``."""

    title: ClassVar[str] = "8-bit floating point"
    description: ClassVar[str] = "Used with --mixed_precision fp8. A recipe in the script wins over these."

    backend: str | None = _fp8(
        None,
        "backend",
        kind=str,
        choices=BACKENDS,
        help="What computes in 8 bits; left out, the best that device and environment support.",
        question="What should compute in 8 bits (FP8)?",
    )
    use_autocast_during_eval: bool = _fp8(
        False,
        "use_autocast_during_eval",
        kind=bool,
        help="Compute in 8 bits in evaluation mode too (native, te); metrics are generally better without.",
    )
    margin: int = _fp8(
        0,
        "margin",
        kind=int,
        parser=_number_up_to("the margin", 0, MAX_MARGIN),
        help="Powers of two of room that scales leave above the largest value (native, te).",
    )
    interval: int = _fp8(
        1,
        "interval",
        kind=int,
        minimum=1,
        help="Forward passes between two computations of the scales (native, te).",
    )
    fp8_format: str = _fp8(
        "HYBRID",
        "fp8_format",
        kind=str,
        choices=FORMATS,
        help="HYBRID: E4M3 forward and E5M2 for gradients; E4M3: that one throughout.",
    )
    amax_history_len: int = _fp8(
        1024,
        "amax_history_len",
        "amax_history_length",
        kind=int,
        parser=_number_up_to("the length of the history", 1, MAX_HISTORY),
        help="How many of the last largest values a delayed scale remembers (native, te).",
    )
    amax_compute_algo: str = _fp8(
        "most_recent",
        "amax_compute_algo",
        "amax_compute_algorithm",
        kind=str,
        choices=AMAX_ALGORITHMS,
        help="Which of them a delayed scale follows (native, te).",
    )
    override_linear_precision: tuple[bool, bool, bool] = _fp8(
        (False, False, False),
        "override_linear_precision",
        kind=str,
        parser=parse_override,
        metavar="BOOL,BOOL,BOOL",
        help="Whether fprop, dgrad and wgrad compute in higher precision (native, te).",
    )
    opt_level: str = _fp8(
        "O2",
        "opt_level",
        "optimization_level",
        kind=str,
        choices=OPT_LEVELS,
        help="How much MS-AMP keeps in 8 bits (msamp).",
    )
    enable_fsdp_float8_all_gather: bool = _fp8(
        True,
        "enable_fsdp_float8_all_gather",
        kind=bool,
        alone=False,
        help="Gather the shards of FSDP 2 in 8 bits (ao, recipe tensorwise).",
    )
    pad_inner_dim: bool = _fp8(
        True,
        "pad_inner_dim",
        kind=bool,
        alone=False,
        help="Pad the inner dimension of products to a multiple of 16 (ao).",
    )
    use_mxfp8_block_scaling: bool = _fp8(
        False,
        "use_mxfp8_block_scaling",
        kind=bool,
        help="Give blocks of 32 elements a scale of their own, where the device can (te).",
    )
    scaling: str = _fp8(
        "delayed",
        "scaling",
        kind=str,
        choices=SCALINGS,
        help="delayed: scales from a history; dynamic: from the tensor itself; rowwise: one for each row (native).",
    )
    ao_recipe: str = _fp8(
        "tensorwise",
        "ao_recipe",
        kind=str,
        choices=AO_RECIPES,
        help="Which of torchao's recipes to train with (ao).",
    )
