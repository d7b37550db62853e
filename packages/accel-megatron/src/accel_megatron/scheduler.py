"""MegatronLMDummyScheduler: Megatron-core's own schedule of learning rate and weight decay."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from accel_state.errors import ConfigurationError

from .plugin import MegatronLMPlugin

_STYLES = ("constant", "linear", "cosine", "inverse-square-root")


class MegatronLMDummyScheduler:
    """Stands for Megatron-core's schedule until ``prepare``, which returns the schedule in its place.

    Args:
        optimizer: the optimizer.
        total_num_steps: number of optimizer steps; None takes the plugin's ``train_iters`` or ``train_samples``.
        warmup_num_steps: steps of the warm-up; 0 takes the plugin's settings.
        **kwargs: ignored, for scripts that pass more.
    """

    def __init__(
        self, optimizer: Any, total_num_steps: int | None = None, warmup_num_steps: int = 0, **kwargs: Any
    ) -> None:
        self.optimizer: Any = optimizer
        self.total_num_steps: int | None = total_num_steps
        self.warmup_num_steps: int = warmup_num_steps
        self.kwargs = kwargs

    def step(self) -> None:
        """Raise ConfigurationError: the schedule is created by ``prepare``."""
        raise ConfigurationError("MegatronLMDummyScheduler was not prepared. Pass it to prepare() with its optimizer.")

    def state_dict(self) -> dict[str, Any]:
        """Empty: there is no state before ``prepare``."""
        return {}


def build_scheduler(dummy: MegatronLMDummyScheduler, optimizer: Optimizer, plugin: MegatronLMPlugin) -> Any:
    """Megatron-core's schedule, which sets learning rate and weight decay of the user's optimizer."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    batch = plugin.global_batch_size or 1
    total = dummy.total_num_steps or plugin.lr_decay_iters or plugin.train_iters
    samples = plugin.lr_decay_samples or plugin.train_samples
    if total is None and samples is None:
        raise ConfigurationError(
            "MegatronLMDummyScheduler needs a length. Pass total_num_steps, or set train_iters or train_samples of "
            "MegatronLMPlugin."
        )
    steps = total if total is not None else -(-(samples or 0) // batch)
    warmup = dummy.warmup_num_steps or plugin.lr_warmup_iters or -(-(plugin.lr_warmup_samples or 0) // batch)
    if plugin.lr_warmup_fraction:
        warmup = int(plugin.lr_warmup_fraction * steps)
    first = optimizer.param_groups[0]
    constant = plugin.weight_decay_incr_style == "constant"
    start, end = plugin.start_weight_decay, plugin.end_weight_decay
    if constant:
        start = end = first["weight_decay"]
    if start is None or end is None:
        raise ConfigurationError(
            f"weight_decay_incr_style={plugin.weight_decay_incr_style!r} needs start_weight_decay and end_weight_decay."
        )
    if plugin.lr_decay_style not in _STYLES:
        raise ConfigurationError(f"lr_decay_style={plugin.lr_decay_style!r} is not one of {', '.join(_STYLES)}.")
    if not 0 <= warmup < steps:
        raise ConfigurationError(f"the warm-up of {warmup} steps must be shorter than the schedule of {steps} steps.")
    for group in optimizer.param_groups:
        group["max_lr"], group["min_lr"] = float(group["lr"]), plugin.min_lr
        if constant:
            group["start_wd"] = group["end_wd"] = group["weight_decay"]
        group["wd_mult"] = 1.0 if constant or group["weight_decay"] else 0.0
    schedule = OptimizerParamScheduler(
        optimizer,  # only its param_groups are used
        init_lr=0.0,
        max_lr=float(first["lr"]),
        min_lr=plugin.min_lr,
        lr_warmup_steps=warmup,
        lr_decay_steps=steps,
        lr_decay_style=plugin.lr_decay_style,
        start_wd=start,
        end_wd=end,
        wd_incr_steps=steps,
        wd_incr_style=plugin.weight_decay_incr_style,
    )
    return _Schedule(schedule, optimizer)


class _Schedule:
    """Megatron-core's schedule with the interface of torch's."""

    def __init__(self, schedule: Any, optimizer: Optimizer) -> None:
        self.schedule, self.optimizer = schedule, optimizer

    def step(self, *_: Any) -> None:
        """Advance by an optimizer step."""
        self.schedule.step(increment=1)

    def get_last_lr(self) -> list[float]:
        """Return the learning rates."""
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return where the schedule is."""
        state: dict[str, Any] = self.schedule.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a state of :meth:`state_dict`."""
        self.schedule.load_state_dict(state)
