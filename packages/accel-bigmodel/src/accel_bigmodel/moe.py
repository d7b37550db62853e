"""Memory for the experts of mixture-of-experts models whose weights are offloaded."""

from __future__ import annotations

from torch import nn

from accel_state.errors import ConfigurationError, check_type
from accel_state.humanize import convert_bytes

from .device_map.memory import memory_bytes
from .hooks.attach import align_hooks
from .hooks.experts import RoutedExpertsHook


def cache_experts(model: nn.Module, max_memory: int | float | str) -> int:
    """Keep the experts that were used last in memory, in a model with offloaded mixture-of-experts layers.

    Offloaded layers read only the experts that their router chose. By default they release them after the forward;
    with a cache each layer keeps as many as fit, on the device where it runs, and reads only those that are missing. A
    forward that needs more experts than that, such as a long prompt, holds all of them for the duration of the layer.

    Args:
        model: a dispatched model.
        max_memory: memory for the experts of all layers together: bytes, or text such as "8GB". 0 removes the cache.

    Returns:
        How many experts each layer keeps.

    Raises:
        ConfigurationError: the model has no offloaded mixture-of-experts layers, or the memory is less than one expert
            for each.
    """
    check_type(model, nn.Module, "cache_experts", "Pass a dispatched model: a torch.nn.Module.")
    hooks = [hook for module in model.modules() for hook in align_hooks(module) if isinstance(hook, RoutedExpertsHook)]
    hooks = [hook for hook in hooks if hook.slots]
    if not hooks:
        raise ConfigurationError(
            f"{type(model).__name__} has no offloaded mixture-of-experts layers: map them to the disk (or, with an "
            "accelerator, to the CPU). Layers are recognized by stacked weights, num_experts, and a forward that takes "
            "top_k_index, as in Transformers 5."
        )
    budget = memory_bytes(max_memory, "max_memory", "give bytes, text such as '8GB', or 0")
    sizes = [[weight.expert_nbytes for weight in hook.expert_weights().values()] for hook in hooks]
    counts = [next(iter(hook.expert_weights().values())).shape[0] for hook in hooks]
    one_of_each = sum(map(sum, sizes))
    experts = min(int(budget // one_of_each), max(counts))
    if budget and not experts:
        raise ConfigurationError(
            f"max_memory={max_memory!r} is less than one expert of each of the {len(hooks)} layers: at least "
            f"{convert_bytes(one_of_each)} ({one_of_each} bytes), or 0 for no cache"
        )
    for hook, count in zip(hooks, counts, strict=True):
        hook.set_capacity(min(experts, count))
    return experts
