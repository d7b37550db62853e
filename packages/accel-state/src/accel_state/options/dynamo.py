"""torch.compile, as the launcher hands it to the processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..enums import DynamoBackend
from .option import OptionGroup, option

_COMPILED = {"dynamo_backend": tuple(name for name in DynamoBackend.list() if name != "NO")}


@dataclass(frozen=True)
class DynamoOptions(OptionGroup):
    """How models are compiled. Every value is None where nobody set it."""

    title: ClassVar[str] = "compilation"
    description: ClassVar[str] = "torch.compile of the models that the script prepares."

    backend: str | None = option(
        None,
        name="dynamo_backend",
        kind=str,
        choices=DynamoBackend.list(),
        env="ACCELERATE_DYNAMO_BACKEND",
        exported=True,
        key="dynamo_config.dynamo_backend",
        other_keys=("dynamo_backend",),
        synonyms={"torhchxla_trace_once": "TORCHXLA_TRACE_ONCE"},
        metavar="BACKEND",
        help="Back end of torch.compile; NO, or left out, compiles nothing.",
        question="Which back end of torch.compile should be used (NO compiles nothing)?",
        suggested="NO",
    )
    mode: str | None = option(
        None,
        name="dynamo_mode",
        kind=str,
        choices=("default", "reduce-overhead", "max-autotune"),
        env="ACCELERATE_DYNAMO_MODE",
        exported=True,
        key="dynamo_config.dynamo_mode",
        help="What torch.compile optimises for.",
        question="Which mode do you want to use?",
        asked_when=_COMPILED,
        suggested="default",
    )
    use_fullgraph: bool | None = option(
        None,
        name="dynamo_use_fullgraph",
        kind=bool,
        env="ACCELERATE_DYNAMO_USE_FULLGRAPH",
        exported=True,
        key="dynamo_config.dynamo_use_fullgraph",
        help="Fail where a model cannot be compiled as one graph.",
        question="Must the whole model be one graph?",
        asked_when=_COMPILED,
        suggested=False,
    )
    use_dynamic: bool | None = option(
        None,
        name="dynamo_use_dynamic",
        kind=bool,
        env="ACCELERATE_DYNAMO_USE_DYNAMIC",
        exported=True,
        key="dynamo_config.dynamo_use_dynamic",
        help="Compile for shapes that change from batch to batch.",
        question="Do shapes change from batch to batch?",
        asked_when=_COMPILED,
        suggested=False,
    )
    use_regional_compilation: bool | None = option(
        None,
        name="dynamo_use_regional_compilation",
        kind=bool,
        env="ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION",
        exported=True,
        key="dynamo_config.dynamo_use_regional_compilation",
        help="Compile the repeated blocks of a model rather than all of it.",
        question="Should repeated blocks be compiled on their own (much faster to start)?",
        asked_when=_COMPILED,
        suggested=False,
    )
