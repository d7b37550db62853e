"""Activation checkpointing: the activations of a unit are computed again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from accel_state.errors import ConfigurationError

from .._torch_compat import checkpoint_wrappers, checkpointed_module, selective_contexts
from ..core.kept_results import KeptKinds, KeptResults, is_computing
from ..core.unwrap import clean_name, is_peft_model
from .activation_offload import offload_inputs

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]
"""Returns the contexts of the forward pass of a unit and of its recomputation."""


_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class CheckpointingSettings(Protocol):
    """What is computed again: the plugin of FSDP, or a handler."""

    @property
    def activation_checkpointing_mode(self) -> str: ...

    @property
    def activation_checkpointing_every(self) -> int: ...

    @property
    def activation_checkpointing_offload(self) -> bool: ...


# Operators whose results the mode "selective" keeps: they take nearly all of the time of a block, and a part of its
# memory. Prefixes, because attention has an operator for each kernel.
_KEPT = (
    *("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm", "aten::_grouped_mm"),
    *("aten::_scaled_grouped_mm", "aten::convolution", "aten::_scaled_dot_product_", "flex_attention"),
)


def checkpoint_units(
    model: nn.Module,
    units: Sequence[nn.Module],
    settings: CheckpointingSettings,
    sharded: Sequence[nn.Module] = (),
) -> None:
    """Wrap units in a checkpoint, in place, as the settings say; units that have one already stay as they are.

    ``sharded`` are the modules that fully_shard is called on, some of which may be inside of units.
    """
    if not units:
        raise ConfigurationError(
            "activation_checkpointing wraps the units of auto_wrap_policy, and there are none. Set auto_wrap_policy to "
            "transformer_based_wrap or size_based_wrap."
        )
    apply, checkpoint_wrapper = checkpoint_wrappers()
    in_order = units[::-1]  # inner ones come first
    chosen = {id(unit) for unit in in_order[:: settings.activation_checkpointing_every]} - set(checkpoints_in(model))
    mode = settings.activation_checkpointing_mode
    alone = {id(module) for module in sharded}

    def wrap(module: nn.Module) -> nn.Module:
        module.register_forward_pre_hook(_without_cache, with_kwargs=True)
        contexts: Contexts | None = None
        if mode != "full":
            has_sharded = any(id(inner) in alone for inner in module.modules() if inner is not module)
            kept = _kept_in(module) if mode == "selective" else ()
            contexts = partial(_keeping, kept, has_sharded, KeptKinds(gathers=mode == "collectives"))
        norms = [part for part in module.modules() if isinstance(part, _BATCH_NORMS) and part.track_running_stats]
        if norms:
            contexts = partial(_with_statistics_of_one_pass, norms, contexts)
        wrapped = checkpoint_wrapper(module, **({} if contexts is None else {"context_fn": contexts}))
        return offload_inputs(wrapped) if settings.activation_checkpointing_offload else wrapped

    apply(model, checkpoint_wrapper_fn=wrap, check_fn=lambda module: id(module) in chosen)
    if is_peft_model(model):
        peft_model: Any = model
        peft_model.save_pretrained = partial(_save_pretrained, peft_model)


def _save_pretrained(model: Any, *args: Any, **kwargs: Any) -> None:
    """Save the adapters without checkpoints: PEFT selects and saves weights by the names of modules."""
    state = kwargs.get("state_dict")
    if state is not None:
        kwargs["state_dict"] = {clean_name(name): value for name, value in state.items()}
    with _without_checkpoints(model):
        type(model).save_pretrained(model, *args, **kwargs)


@contextmanager
def _without_checkpoints(model: nn.Module) -> Iterator[None]:
    """Replace checkpoints by the modules inside, until the block ends."""
    wrappers = {id(wrapper) for wrapper in checkpoints_in(model).values()}
    places = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent._modules.items()
        if id(child) in wrappers
    ]
    for parent, name, child in places:
        inner: Any = child
        while (below := checkpointed_module(inner)) is not None:
            inner = below
        parent._modules[name] = inner
    try:
        yield
    finally:
        for parent, name, child in places:
            parent._modules[name] = child


def _keeping(
    kept: tuple[str, ...], has_sharded: bool, kinds: KeptKinds
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a unit that keeps the results of some operators, and of collectives.

    Args:
        kept: the operators.
        has_sharded: whether fully_shard was called on modules inside of the unit.
        kinds: the collectives.
    """
    keep = partial(_keep, kept)
    if torch.compiler.is_compiling():  # compiled graphs take contexts of torch only, and keep no other results
        if has_sharded:
            return selective_contexts(keep, partial(_is_one_of, kept))
        return create_selective_checkpoint_contexts(keep)

    def counts(operator: Any) -> bool:
        return not is_computing() and (not has_sharded or _is_one_of(kept, operator))

    forward, again = selective_contexts(keep, counts) if kept else (nullcontext(), nullcontext())
    results = KeptResults(kinds)
    return results.recorded(forward), _Repeated(partial(results.reused, again))


class _Repeated(AbstractContextManager[None]):
    """A context that every backward pass through the same graph enters."""

    def __init__(self, make: Callable[[], AbstractContextManager[None]]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._current = self._make()
        self._current.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._current.__exit__(*error)


def _with_statistics_of_one_pass(
    norms: Sequence[Any], contexts: Contexts | None
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Return the contexts of a unit with batch norms, which would count each batch twice."""
    if torch.compiler.is_compiling():  # compiled graphs change buffers once, and take such contexts only
        return contexts() if contexts is not None else create_selective_checkpoint_contexts([])
    forward, again = contexts() if contexts is not None else (nullcontext(), nullcontext())
    return forward, _Repeated(partial(_keeping_statistics, norms, again))


@contextmanager
def _keeping_statistics(norms: Sequence[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    former = [(norm, norm.momentum, norm.num_batches_tracked) for norm in norms]
    for norm in norms:
        norm.momentum, norm.num_batches_tracked = 0.0, None
    try:
        with inner:
            yield
    finally:
        for norm, momentum, count in former:
            norm.momentum, norm.num_batches_tracked = momentum, count


def _without_cache(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Take the keys and values of generation away from a block that is trained: recomputation would add them twice."""
    if not (module.training and torch.is_grad_enabled()):
        return None
    caches = [value for value in (*args, *kwargs.values()) if hasattr(value, "get_seq_length")]
    if not caches:
        return None
    layer = next((part.layer_idx for part in module.modules() if isinstance(getattr(part, "layer_idx", None), int)), 0)
    for cache in caches:
        length = cache.get_seq_length(layer)
        if length:
            raise ConfigurationError(
                f"activation_checkpointing=True: {type(module).__name__} is trained with {length} positions in its "
                "cache of keys and values (prefix tuning does that), and computing it again would add to them. Set "
                "activation_checkpointing=False."
            )

    def other(value: Any) -> Any:
        return None if any(value is cache for cache in caches) else value

    return tuple(map(other, args)), {name: other(value) for name, value in kwargs.items()}


def _kept_in(unit: nn.Module) -> tuple[str, ...]:
    """Return the operators whose results a unit keeps.

    Experts of Transformers with biases (GPT-OSS) add these to their grouped products in place, so that what was kept
    would be another result: those products are computed again.
    """
    biased = any(getattr(module, "has_bias", False) and hasattr(module, "num_experts") for module in unit.modules())
    return tuple(name for name in _KEPT if not (biased and name.endswith("grouped_mm")))


def _keep(
    kept: tuple[str, ...], context: SelectiveCheckpointContext, operator: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if _is_one_of(kept, operator) else CheckpointPolicy.PREFER_RECOMPUTE


def _is_one_of(kept: tuple[str, ...], operator: Any) -> bool:
    # An overload of an operator, or a higher-order operator such as flex_attention.
    name: str = operator.name() if isinstance(operator, torch._ops.OperatorBase) else str(operator)
    return name.startswith(kept)


def checkpoints_in(model: nn.Module) -> dict[int, nn.Module]:
    """Return the outermost checkpoint around each module that has one, by the module's id."""
    direct = {}
    for module in model.modules():
        inner = checkpointed_module(module)
        if inner is not None:
            direct[id(inner)] = module
    return {inner: direct.get(id(wrapper), wrapper) for inner, wrapper in direct.items()}
