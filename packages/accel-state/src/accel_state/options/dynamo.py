"""Settings of torch.compile that the launcher passes to the processes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ..enums import DynamoBackend
from .declaration import OptionGroup, option

_COMPILED = {"dynamo_backend": tuple(name for name in DynamoBackend.list() if name != "NO")}
_dynamo = functools.partial(
    option, section="dynamo_config", prefix="dynamo_", env_prefix="ACCELERATE_DYNAMO_", exported=True
)


@dataclass(frozen=True)
class DynamoOptions(OptionGroup):
    """How models are compiled. A value of None means "not set"."""

    title = "compilation"
    description = "How torch.compile compiles the models that the script prepares."

    backend: str | None = _dynamo(
        choices=DynamoBackend.list(),
        other_keys=("dynamo_backend",),
        synonyms={"torhchxla_trace_once": "TORCHXLA_TRACE_ONCE"},
        metavar="BACKEND",
        help="Backend of torch.compile. NO, the default, turns compilation off.",
        question="Which backend of torch.compile should be used (NO turns compilation off)?",
        suggested="NO",
    )
    mode: str | None = _dynamo(
        choices=("default", "reduce-overhead", "max-autotune"),
        help="Mode of torch.compile: what it optimizes for.",
        question="Which mode do you want to use?",
        asked_when=_COMPILED,
        suggested="default",
    )
    use_fullgraph: bool | None = _dynamo(
        help="Raise an error if a model cannot be compiled as a single graph.",
        question="Must the whole model compile as a single graph?",
        asked_when=_COMPILED,
        suggested=False,
    )
    use_dynamic: bool | None = _dynamo(
        help="Compile for dynamic shapes, which change from batch to batch.",
        question="Do shapes change from batch to batch?",
        asked_when=_COMPILED,
        suggested=False,
    )
    use_regional_compilation: bool | None = _dynamo(
        help="Compile the repeated blocks of a model instead of the whole model, which shortens compilation.",
        question="Should only the repeated blocks of a model be compiled (starts much faster)?",
        asked_when=_COMPILED,
        suggested=False,
    )
