"""The precision that a DeepSpeed configuration computes in."""

from __future__ import annotations

from typing import Any

from accel_state.errors import ConfigurationError

from .nested import AUTO, get

# DeepSpeed computes in bf16 beside layers in 8 bits.
_SECTIONS = {"fp16": "fp16", "bf16": "bf16", "fp8": "bf16", "no": None}


def enabled(config: dict[str, Any]) -> str | None:
    """The precision that the configuration enables, if it does."""
    return next((name for name in ("fp16", "bf16") if get(config, f"{name}.enabled") is True), None)


def settle(config: dict[str, Any], mixed_precision: str, name: str) -> None:
    """Enter a precision, in place, where the configuration leaves it open; "no" leaves it to the configuration.

    Args:
        config: the configuration.
        mixed_precision: "no", "fp16", "bf16" or "fp8".
        name: where the configuration comes from, for messages.

    Raises:
        ConfigurationError: the configuration enables another one, or this one is not known.
    """
    if mixed_precision not in _SECTIONS:
        raise ConfigurationError(f"mixed_precision={mixed_precision!r} is not one of {', '.join(_SECTIONS)}.")
    wanted, now = _SECTIONS[mixed_precision], enabled(config)
    if wanted is not None and now not in (None, wanted):
        raise ConfigurationError(
            f"mixed_precision={mixed_precision!r}, but {name} has {now}.enabled: true. Leave mixed_precision out (or "
            f'--mixed_precision), or write "{AUTO}" there.'
        )
    if wanted is not None and get(config, f"{wanted}.enabled") is False:
        raise ConfigurationError(
            f'mixed_precision={mixed_precision!r}, but {name} has {wanted}.enabled: false. Leave one of them out, or write "{AUTO}" there.'
        )
    target = wanted if wanted is not None else now
    if target is not None:
        section = config.setdefault(target, {"enabled": True, "auto_cast": True} if target == "fp16" else {"enabled": True})
        section["enabled"] = True
    for other in ("fp16", "bf16"):
        if other != target:
            config.setdefault(other, {})["enabled"] = False
