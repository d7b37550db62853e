"""Finds the part of a model in which hidden states can be sharded along the sequence between tensor-parallel layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from accel_bigmodel.pipeline.stage import SkippedModule

from .tp_layers import Columns, Heads, Rows

_OTHER_DROPOUTS = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


class UnsupportedModelError(Exception):
    """Why a model's hidden states stay whole."""


@dataclass
class BlockStructure:
    """What a block of a model consists of.

    Attributes:
        sharded: modules that contain column-wise layers and the row-wise layer after them.
        columns: the column-wise layers that each of them calls.
        inline: the column-wise layers that the block itself calls.
        rows: the row-wise layers.
        norms: modules with parameters that compute each position by itself, outside of ``sharded``.
        dropouts: dropout modules, wherever they are.
    """

    block: nn.Module
    sharded: list[nn.Module] = field(default_factory=list)
    columns: dict[nn.Module, list[nn.Module]] = field(default_factory=dict)
    inline: list[nn.Module] = field(default_factory=list)
    rows: list[nn.Module] = field(default_factory=list)
    norms: list[nn.Module] = field(default_factory=list)
    dropouts: list[nn.Module] = field(default_factory=list)


def find_structure(model: nn.Module, plan: Mapping[str, Any]) -> list[BlockStructure]:
    """Return the blocks of a model, in order.

    Args:
        model: the model, before its layers are sharded.
        plan: the style of each module that is sharded.

    Raises:
        UnsupportedModelError: the model has no list of blocks, or a block has another structure.
    """
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        raise UnsupportedModelError("it has an encoder and a decoder")
    modules = dict(model.named_modules())
    lists = {_list_of(name, modules) for name, style in plan.items() if isinstance(style, Rows)}
    if len(lists) != 1 or None in lists:
        raise UnsupportedModelError("its row-wise layers are not in one nn.ModuleList or nn.ModuleDict of blocks")
    path = lists.pop()
    structures = []
    for index, block in enumerate(modules[str(path)].children()):
        if not isinstance(block, SkippedModule):  # a block of another stage of a pipeline
            structures.append(_structure(f"{path}.{index}", block, modules, plan))
    return structures


def _list_of(name: str, modules: Mapping[str, nn.Module]) -> str | None:
    """Return the name of the outermost list that contains a module, or of a dictionary of blocks of one class."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        prefix = ".".join(parts[:count])
        kinds = [type(child) for child in modules[prefix].children()]
        is_alike = isinstance(modules[prefix], nn.ModuleDict) and len(kinds) > 1 and len(set(kinds)) == 1
        if is_alike or isinstance(modules[prefix], nn.ModuleList):
            return prefix
    return None


def caller_of(name: str, modules: Mapping[str, nn.Module]) -> str:
    """Return the name of the module whose forward calls a module: containers have no forward."""
    while name and type(modules[name := name.rpartition(".")[0]]).forward is nn.Module.forward:
        pass
    return name


def _structure(
    name: str, block: nn.Module, modules: Mapping[str, nn.Module], plan: Mapping[str, Any]
) -> BlockStructure:
    found = BlockStructure(block)
    inside = {key: item for key, item in modules.items() if key.startswith(f"{name}.")}
    callers = {caller_of(key, modules) for key in inside if isinstance(plan.get(key), Rows)}
    if not callers:
        raise UnsupportedModelError(f"{name} has no row-wise layer")
    if block._parameters:
        raise UnsupportedModelError(f"{name} has parameters of its own")
    for key, value in vars(block).items():
        if "dropout" in key and isinstance(value, float) and value > 0:
            raise UnsupportedModelError(f"{name} drops activations outside of a module ({key}={value})")
    found.sharded = [modules[key] for key in callers if key != name]
    for key, module in inside.items():
        style = plan.get(key)
        holder = next((caller for caller in callers - {name} if key.startswith(f"{caller}.")), None)
        if isinstance(style, Rows) and not style.splits:
            found.rows.append(module)
        elif isinstance(style, Columns) and not style.gathers and caller_of(key, modules) in callers:
            layers = found.inline if holder is None else found.columns.setdefault(modules[holder], [])
            layers.append(module)
        elif isinstance(module, nn.Dropout):
            found.dropouts.append(module)
        elif isinstance(style, Heads) and holder is not None:
            continue
        elif style is not None or isinstance(module, _OTHER_DROPOUTS):
            raise UnsupportedModelError(f"{key} is a {type(module).__name__} with the style {style!r}")
        elif any(True for _ in module.parameters(recurse=False)):
            if not _is_norm(module) or holder is not None:
                raise UnsupportedModelError(f"{key}, a {type(module).__name__}, is not sharded")
            found.norms.append(module)
    return found


def _is_norm(module: nn.Module) -> bool:
    """Return True if a module normalises each position by itself."""
    named = type(module).__name__.endswith(("RMSNorm", "LayerNorm"))
    vectors = all(parameter.ndim == 1 for parameter in module.parameters(recurse=False))
    return (isinstance(module, (nn.LayerNorm, nn.RMSNorm)) or named) and vectors
