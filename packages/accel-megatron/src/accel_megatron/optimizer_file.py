"""The states of torch's AdamW in an ``optimizer.bin``, by the names of the weights."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from accel.fsdp.checkpoint.files import on_disk
from accel_checkpoint.atomic_file import write_atomically
from accel_checkpoint.names import OPTIMIZER_NAME
from accel_checkpoint.safe_load import read as read_safely
from accel_state.errors import ConfigurationError

from .checkpoint import own_file
from .weights import aliases_of

FILE = f"{OPTIMIZER_NAME}.bin"
MOMENTS = ("exp_avg", "exp_avg_sq")
# The settings of a group, as torch's AdamW saves them, without those that have no effect on its result.
_SETTINGS = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01, "amsgrad": False, "maximize": False}
_FIXED = {"foreach": None, "capturable": False, "differentiable": False, "fused": None, "decoupled_weight_decay": True}


class OptimizerFile:
    """The states in the ``optimizer.bin`` of a folder.

    Args:
        folder: the folder.
        model: the Transformers model, whose parameters are in the order of the optimizer unless their names are known.
    """

    def __init__(self, folder: Path, model: Any) -> None:
        self.folder = folder
        if not (folder / FILE).is_file():
            raise ConfigurationError(f"--optimizer: {folder} has no {FILE}. Leave it out to convert the weights only.")
        saved = read_safely(folder / FILE, mapped=True)
        self.groups: list[dict[str, Any]] = saved["param_groups"]
        self.names: list[list[str]] = self._names(model)
        keys = [key for group in self.groups for key in group["params"]]
        flat = [name for group in self.names for name in group]
        self.state: dict[str, Any] = {name: saved["state"].get(key, {}) for name, key in zip(flat, keys, strict=True)}
        for tied in aliases_of(model).values():
            known = [name for name in tied if name in self.state]
            self.state.update({name: self.state[known[0]] for name in tied if known})

    def _names(self, model: Any) -> list[list[str]]:
        """Return the names of the parameters of each group."""
        own = self.folder / own_file(0)
        if own.is_file():
            found: list[list[str]] | None = read_safely(own).get("optimizer_names")
            if found is not None:
                return found
        if all(isinstance(key, str) for group in self.groups for key in group["params"]):
            return [list(group["params"]) for group in self.groups]
        if all("param_names" in group for group in self.groups):
            return [list(group["param_names"]) for group in self.groups]
        names = [name for name, _ in model.named_parameters()]
        counts = [len(group["params"]) for group in self.groups]
        if counts != [len(names)]:
            raise ConfigurationError(
                f"{self.folder / FILE} has states of {' + '.join(map(str, counts))} parameters by number, and the "
                f"model has {len(names)}: which is which is not known. Save it with Megatron-core, or with an "
                "optimizer that was created from model.named_parameters()."
            )
        return [names]

    def read(self, name: str, key: str) -> torch.Tensor:
        """Return a state of a weight."""
        entry = self.state.get(name) or {}
        if key not in entry:
            raise ConfigurationError(
                f"{self.folder / FILE} has no {key} of {name}. States of AdamW and Adam of all weights are converted; "
                "leave out --optimizer."
            )
        value: torch.Tensor = entry[key]
        return value

    @property
    def step(self) -> int:
        """The number of steps taken."""
        return int(max((entry["step"] for entry in self.state.values() if "step" in entry), default=0))

    def core_state(self, separate_experts: bool) -> dict[Any, Any]:
        """Return what dist_checkpointing keeps of the optimizer apart from the tensors.

        The optimizers of float32, of half precision, and the distributed one look for it in different places. Experts
        over several ranks have an optimizer of their own.
        """
        settings = {key: value for key, value in self.groups[0].items() if key in {**_SETTINGS, **_FIXED}}
        settings["lr"] = float(settings["lr"])
        decay = max(float(group["weight_decay"]) for group in self.groups)

        def state_of(experts: bool) -> dict[str, Any]:
            groups = [
                {
                    **_FIXED,
                    **settings,
                    "weight_decay": decay * factor,
                    "wd_mult": factor,
                    "lr_mult": 1.0,
                    "max_lr": settings["lr"],
                    "min_lr": None,
                    "is_expert_parallel": experts,
                    "is_decoupled_lr": False,
                    "default_config": True,
                    "step": float(self.step),
                }
                for factor in ((1.0,) if experts else (1.0, 0.0))  # experts have matrices only
            ]
            core = {"param_groups": groups, "state": {"common_step": torch.tensor(float(self.step))}}
            return {**core, "optimizer": core, "param_state_sharding_type": "fully_reshardable"}

        return {0: state_of(False), 1: state_of(True)} if separate_experts else state_of(False)


def write_optimizer(
    target: Path,
    groups: Sequence[dict[str, Any]],
    names: Iterable[tuple[str, int]],
    read: Callable[[str, str], torch.Tensor],
    step: int,
) -> str:
    """Write the state of torch's AdamW; returns the name of the file.

    Args:
        target: the folder.
        groups: those of Megatron-core's optimizer.
        names: the names of the parameters with their numbers of dimensions, in the order of the model.
        read: returns a state by the name of a parameter and that of the state.
        step: the number of steps taken.
    """
    settings = {key: groups[0].get(key, value) for key, value in _SETTINGS.items()}
    decays = {float(group["weight_decay"]) * group.get("wd_mult", 1.0) for group in groups}
    wanted: dict[float, list[str]] = {}
    for name, dims in names:  # Megatron-LM does not decay biases and norms
        wanted.setdefault(max(decays) if dims > 1 else min(decays), []).append(name)
    state: dict[int, dict[str, Any]] = {}
    saved = []
    for decay in sorted(wanted, reverse=True):
        first = len(state)
        for name in wanted[decay]:
            # In files that the system may drop from memory, so that a state of any size can be written.
            moments = {key: on_disk(read(name, key).float().contiguous()) for key in MOMENTS}
            state[len(state)] = {"step": torch.tensor(float(step)), **moments}
        numbers = list(range(first, len(state)))
        saved.append(
            {**settings, **_FIXED, "weight_decay": decay, "params": numbers, "param_names": list(wanted[decay])}
        )
    write_atomically(target / FILE, functools.partial(torch.save, {"state": state, "param_groups": saved}))
    return FILE
