"""torch.compile: its settings, and compiling the repeated blocks of a model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

from accel_state.enums import REMOVED_DYNAMO_BACKENDS, DynamoBackend
from accel_state.errors import ConfigurationError, check_type
from accel_state.options import DynamoOptions

from ..kwargs.base import KwargsHandler
from .unwrap import is_compiled_module

_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Settings of torch.compile for prepared models. A field left at None takes the launcher's setting.

    Args:
        backend: back end of torch.compile; "NO" does not compile.
        mode: "default", "reduce-overhead" or "max-autotune".
        fullgraph: raise an error if a model cannot be compiled as one graph.
        dynamic: compile for changing shapes; None lets torch detect them.
        options: settings for the back end; not together with ``mode``.
        disable: do not compile, for debugging.
        use_regional_compilation: compile each repeated block on its own, which starts many times faster than compiling
            the full model.

    Raises:
        ConfigurationError: an unknown back end or mode.
    """

    backend: DynamoBackend | str | None = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        launched = DynamoOptions.from_environment()
        backend = launched.backend if self.backend is None else self.backend
        self.backend = DynamoBackend("NO" if backend is None else backend)
        if self.backend.value in REMOVED_DYNAMO_BACKENDS:
            known = [name for name in DynamoBackend.list() if name not in REMOVED_DYNAMO_BACKENDS]
            raise ConfigurationError(
                f"dynamo_backend={self.backend.value!r} is no longer in PyTorch. Allowed: {', '.join(known)}."
            )
        if self.mode is None and self.options is None:  # torch refuses a mode together with options
            self.mode = "default" if launched.mode is None else launched.mode
        self.fullgraph = bool(launched.use_fullgraph if self.fullgraph is None else self.fullgraph)
        self.dynamic = launched.use_dynamic if self.dynamic is None else self.dynamic
        regional = self.use_regional_compilation
        self.use_regional_compilation = bool(launched.use_regional_compilation if regional is None else regional)
        if self.mode is not None and self.mode not in _MODES:
            raise ConfigurationError(
                f"mode={self.mode!r} is not a mode of torch.compile. Allowed: {', '.join(_MODES)}."
            )

    @property
    def compiles(self) -> bool:
        """True if models are compiled."""
        return self.backend != DynamoBackend.NO and not self.disable

    def to_dict(self) -> dict[str, Any]:
        """Return all settings, with torch's name of the back end."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        values["backend"] = str(self.backend).lower()
        return values

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments for ``torch.compile`` that differ from its own defaults."""
        defaults = {"backend": "no", "mode": "default", "fullgraph": False, "disable": False}
        values = self.to_dict()
        del values["use_regional_compilation"]
        return {key: value for key, value in values.items() if value is not None and value != defaults.get(key)}


def dynamo_settings(backend: Any, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    """Return the settings of compilation."""
    if plugin is not None and backend is not None:
        raise ConfigurationError(
            "dynamo_backend and dynamo_plugin were both given. Put the back end into TorchDynamoPlugin(backend=...)."
        )
    if plugin is not None:
        check_type(plugin, TorchDynamoPlugin, "dynamo_plugin", f"Pass TorchDynamoPlugin(backend={plugin!r}).")
    return plugin or TorchDynamoPlugin(backend=backend)


def is_repeated_blocks(module: nn.Module) -> bool:
    """Return True if a module is a list of several modules of one class, such as the layers of a transformer."""
    return isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(block) for block in module}) == 1


def has_repeated_blocks(module: nn.Module) -> bool:
    """Return True if a module contains repeated blocks."""
    return any(is_repeated_blocks(child) for child in module.modules())


def compile_model(model: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile a model in place: its class and the names of its weights do not change."""
    if not is_compiled_module(model):
        model.compile(**compile_kwargs)
        model._accel_compile_kwargs = compile_kwargs  # type: ignore[assignment]
    return model


def compile_regions(module: nn.Module, **compile_kwargs: Any) -> nn.Module:
    """Compile a model in place, region by region: each repeated block, and the modules between them.

    The blocks of a list share their code, so torch compiles the first and reuses it for the others.

    Args:
        module: the model.
        **compile_kwargs: for ``torch.compile``.

    Returns:
        The given model.
    """
    for region in _regions(module):
        compile_model(region, **compile_kwargs)
    return module


compile_regions_fsdp2 = compile_regions


def compile_regions_deepspeed(module: nn.Module, **compile_kwargs: Any) -> None:
    """Compile regions as :func:`compile_regions` does, in place."""
    compile_regions(module, **compile_kwargs)


def _regions(module: nn.Module) -> Iterator[nn.Module]:
    if is_repeated_blocks(module):
        yield from module.children()
    elif not has_repeated_blocks(module):
        if not isinstance(module, nn.ModuleList):  # a list has no forward to compile
            yield module
        else:
            yield from module.children()
    else:
        for child in module.children():
            yield from _regions(child)


def has_compiled_regions(module: nn.Module) -> bool:
    """Return True if a submodule is compiled and the module as a whole is not."""
    return not is_compiled_module(module) and any(
        is_compiled_module(child) for child in module.modules() if child is not module
    )
