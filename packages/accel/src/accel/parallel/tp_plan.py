"""Which modules of a model are sharded along the tensor-parallel axis, and how."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from accel_state.errors import ConfigurationError

from ..core.unwrap import extract_model_from_parallel
from .tp_adapters import BASE, base_of, copied, plan_with_adapters
from .tp_layers import Columns, Heads, Rows, Style, VocabularyRows, is_in_blocks, is_linear

_STYLES: Mapping[str, Callable[[], Style | None]] = {
    "colwise": Columns,
    "packed_colwise": lambda: Columns(pieces=2),
    "colwise_gather_output": lambda: Columns(gathers=True),
    "colwise_rep": lambda: Columns(gathers=True),
    "rowwise": Rows,
    "rowwise_split_input": lambda: Rows(splits=True),
    "rowwise_rep": lambda: Rows(splits=True),
    "embedding_rowwise": VocabularyRows,
    "replicated_with_grad_allreduce": Heads,
    "replicate": lambda: None,
}
"""The names of styles in the plans of Transformers, newer and older ones."""

TensorParallelPlan = dict[str, Any]
"""A :class:`Style`, or a ``ParallelStyle`` of torch, for each module's name."""


@dataclass(frozen=True)
class _BlockShape:
    """A kind of block, by the names of its layers."""

    columns: tuple[str, ...]  # layers that are sharded column-wise
    rows: tuple[str, ...]  # candidates for the layer that is sharded row-wise
    attention: bool = False  # whether it is attention, which must be sharded by heads
    fused: int = 1  # number of matrices in a layer of ``columns``


_SHAPES = (
    _BlockShape(("q_proj", "k_proj", "v_proj"), ("o_proj", "out_proj"), attention=True),
    _BlockShape(("wq", "wk", "wv"), ("wo",), attention=True),
    _BlockShape(("c_attn",), ("c_proj",), attention=True, fused=3),
    _BlockShape(("gate_proj", "up_proj"), ("down_proj",)),
    _BlockShape(("up_proj",), ("down_proj",)),
    _BlockShape(("w1", "w3"), ("w2",)),
    _BlockShape(("c_fc",), ("c_proj",)),
    _BlockShape(("fc1",), ("fc2",)),
)

_QUERY_HEADS = ("num_heads", "n_head", "n_heads", "num_attention_heads")
_HEADS = (*_QUERY_HEADS, "num_key_value_heads", "n_kv_heads", "num_kv_heads")
# Attributes of such a block that must be those of one rank: heads, and the width of each of the fused matrices.
_PER_RANK = (*_HEADS, "n_local_heads", "n_local_kv_heads", "split_size", "all_head_size")


def plan_of(
    model: nn.Module, given: Mapping[str, Any] | None, size: int, distributed: Collection[str] = ()
) -> tuple[TensorParallelPlan, bool]:
    """Return the plan of a model: the user's, the model's own, or one derived from the shape of its blocks.

    ``distributed`` names parameters that another axis shards (experts), and their modules: the model's own plan for
    them is left out.
    """
    model = extract_model_from_parallel(model)
    own = _without(getattr(model, "_tp_plan", None) or {}, distributed)
    if given is not None:
        plan = _resolve(model, given, must_match=True)
    elif own:
        # PEFT's models wrap the module that the plan belongs to, after the beginning of the names in it.
        owners = (
            (name, item) for name, item in model.named_modules() if inspect.getattr_static(item, "_tp_plan", None)
        )
        path, inner = next(owners, ("", model))
        prefix = f"{path}." if path else ""
        plan = {f"{prefix}{name}": style for name, style in _resolve(inner, own, must_match=False).items()}
        config = getattr(model, "config", None)
        text = getattr(config, "get_text_config", lambda: config)()
        for heads in ("num_attention_heads", "num_key_value_heads"):
            _check_heads(type(model).__name__, heads, getattr(text, heads, None), size)
    else:
        plan = dict(_derived(model, size))
    if not plan:
        raise ConfigurationError(
            f"{type(model).__name__} has no plan for tensor parallelism, and no blocks of a known shape (q_proj, "
            "k_proj, v_proj, o_proj; gate_proj, up_proj, down_proj; c_attn, c_fc, c_proj; ...). Pass one: "
            "ParallelismConfig(tp_handler=TorchTensorParallelConfig(plan={'layers.*.q_proj': 'colwise', ...}))."
        )
    return plan_with_adapters(model, _with_ties(model, plan)), given is None and not own


def _without(plan: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return the entries of a plan of Transformers that match none of the names; patterns may begin below the model."""
    kept = {}
    for pattern, style in plan.items():
        anywhere = f"*.{pattern}"
        if not any(fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, anywhere) for name in names):
            kept[pattern] = style
    return kept


def _resolve(model: nn.Module, plan: Mapping[str, Any], must_match: bool) -> TensorParallelPlan:
    names = [name for name, _ in model.named_modules() if name]
    modules = dict(model.named_modules())
    styles: TensorParallelPlan = {}
    for pattern, given in plan.items():
        style = _style(pattern, given)
        matching = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
        if not matching and must_match:
            raise ConfigurationError(
                f"the plan names {pattern!r}, and {type(model).__name__} has no such module. Its modules are "
                f"{', '.join(names[:5])}, ..."
            )
        for name in matching:
            for inner, module in copied(name, modules[name]) if style is not None else ():
                _check_style(inner, module, style, given)
                styles[inner] = style
    return styles


def _style(pattern: str, given: Any) -> Any:
    if isinstance(given, (ParallelStyle, Style)):
        return given
    if given not in _STYLES:
        raise ConfigurationError(
            f"the plan shards {pattern!r} by {given!r}, which is not one of {', '.join(_STYLES)}, nor a ParallelStyle "
            "of torch. Pass a plan without it: TorchTensorParallelConfig(plan=...)."
        )
    return _STYLES[given]()


def _check_style(name: str, module: nn.Module, style: Any, given: Any) -> None:
    if isinstance(style, Style) and not style.fits(base_of(module)):
        raise ConfigurationError(
            f"the plan shards {name} by {given!r}, which does not support a {type(module).__name__}. Allowed: "
            f"{style.supported}."
        )
    if isinstance(style, ParallelStyle) and is_in_blocks(base_of(module)):
        raise ConfigurationError(
            f"the plan shards {name}, a layer with weights in 4 bits, by {type(style).__name__} of torch, which would "
            "cut its blocks. Use the name of a style: 'colwise' or 'rowwise'."
        )
    if given == "packed_colwise" and "gate_up" not in name:
        raise ConfigurationError(
            f"the plan shards {name} by 'packed_colwise', and the number of packed matrices is known for gate_up_proj "
            "only. Pass a plan without it, or with Columns(pieces=n) of accel.parallel.tp_layers."
        )


def _check_heads(where: str, name: str, heads: Any, size: int) -> None:
    if isinstance(heads, int) and heads % size:
        allowed = [str(n) for n in range(1, heads + 1) if heads % n == 0]
        raise ConfigurationError(
            f"tp_size={size} does not divide {name}={heads} of {where}: attention is sharded by heads. Allowed: "
            f"{', '.join(allowed)}."
        )


def _derived(model: nn.Module, size: int) -> Iterator[tuple[str, Style]]:
    for name, block in model.named_modules():
        shape = _shape_of(block)
        if shape is None:
            continue
        if shape.attention:
            _count_own_heads(name, block, size)
        prefix = f"{name}." if name else ""
        last = next(row for row in shape.rows if hasattr(block, row))
        yield from ((f"{prefix}{norm}", Heads()) for norm in _norms_of_heads(block, shape))
        yield from ((f"{prefix}{column}", Columns(pieces=shape.fused)) for column in shape.columns)
        yield f"{prefix}{last}", Rows()
    for name, module in model.named_children():
        if name in ("lm_head", "embed_out") and is_linear(base_of(module)):
            yield name, Columns(gathers=True)


def _norms_of_heads(block: nn.Module, shape: _BlockShape) -> Iterator[str]:
    """Return the names of modules in attention whose parameters are as wide as a head, and not as the block's input."""
    heads = next((getattr(block, key) for key in _QUERY_HEADS if isinstance(getattr(block, key, None), int)), None)
    first = base_of(getattr(block, shape.columns[0]))
    if not shape.attention or heads is None or not isinstance(first, nn.Linear):
        return
    width = first.out_features // shape.fused // heads
    for name, module in block.named_modules():
        shapes = {tuple(parameter.shape) for parameter in module.parameters(recurse=False)}
        if shapes == {(width,)} and width != first.in_features:
            yield name


def _shape_of(block: nn.Module) -> _BlockShape | None:
    children = dict(block.named_children())
    for shape in _SHAPES:
        last = next((row for row in shape.rows if row in children), None)
        if last is not None and all(is_linear(base_of(children.get(name))) for name in (*shape.columns, last)):
            return shape
    return None


def _count_own_heads(name: str, block: nn.Module, size: int) -> None:
    """Refuse heads that the ranks do not divide; :func:`count_parts` corrects their number in the block."""
    known = {key: getattr(block, key) for key in _HEADS if isinstance(getattr(block, key, None), int)}
    if not known:
        raise ConfigurationError(
            f"{name or 'the model'} is attention, but does not say how many heads it has ({', '.join(_HEADS)}), "
            "by which it would be sharded. Pass a plan: TorchTensorParallelConfig(plan=...)."
        )
    for key, heads in known.items():
        _check_heads(name, key, heads, size)


def count_parts(model: nn.Module, plan: TensorParallelPlan, size: int) -> None:
    """Set the numbers of heads in the attention blocks of a derived plan to those of one rank."""
    for name, block in model.named_modules():
        shape = _shape_of(block)
        first = "" if shape is None else f"{name}.{shape.columns[0]}".lstrip(".")
        if shape is not None and shape.attention and (first in plan or f"{first}{BASE}" in plan):
            for key in _PER_RANK:
                value = vars(block).get(key)
                if isinstance(value, int) and value % size == 0:
                    setattr(block, key, value // size)


def get_model_tp_size(model: nn.Module) -> int | None:
    """Return the number of ranks that a model's layers are sharded over; None without tensor parallelism.

    Args:
        model: any model, prepared by accel or loaded by Transformers with a plan.
    """
    meshes = (parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor))
    sizes = [mesh["tp"].size() for mesh in meshes if "tp" in (mesh.mesh_dim_names or ())]
    own = getattr(model, "tp_size", None)
    return sizes[0] if sizes else own


def _with_ties(model: nn.Module, plan: TensorParallelPlan) -> TensorParallelPlan:
    """Shard modules that share a parameter in the same way, or not at all."""
    holders: dict[int, list[str]] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(name)
    plan = dict(plan)
    for names in holders.values():
        planned = [name for name in names if name in plan]
        if len(names) == 1 or not planned:
            continue
        embeddings = [name for name in names if VocabularyRows().fits(modules[name])]
        if all(name in embeddings or _is_tied_head(plan.get(name), modules[name]) for name in names):
            # The columns of the output layer are the rows of the embedding.
            plan.update({name: VocabularyRows() for name in embeddings})
            plan.update({name: Columns(gathers=True) for name in names if name not in embeddings})
        elif len({repr(plan.get(name)) for name in names}) > 1:
            for name in planned:
                del plan[name]
    return plan


def _is_tied_head(style: Any, module: nn.Module) -> bool:
    plain = isinstance(module, nn.Linear) and module.bias is None
    return plain and (style is None or (isinstance(style, Columns) and style.pieces == 1 and style.gathers))
