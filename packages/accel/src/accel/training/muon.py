"""Muon (``torch.optim.Muon``) on several ranks: each matrix is orthogonalised once, by one of them.

Momentum is element-wise, so each rank updates that of the part it holds. Orthogonalising needs the full matrix: its
parts are sent to the rank that owns it, and the parts of the result are sent to all ranks that hold them. Matrices are
distributed by their work, the heaviest first to the rank with the least.

Jordan et al., "Muon: An optimizer for hidden layers in neural networks", https://kellerjordan.github.io/posts/muon/
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.optim import Optimizer

from accel_state.collectives.header import Call
from accel_state.errors import ConfigurationError

from .._torch_compat import muon_rate, orthogonalised
from ..contract.strategy import Strategy
from ..core.local_part import local
from ..core.unwrap import clean_name, extract_model_from_parallel

Part = tuple[int, tuple[int, ...], tuple[int, ...]]
"""The number of a matrix, and the part of it: where it begins, and its size."""

Parts = dict[Part, torch.Tensor]
Transfer = tuple[int, int, Part]  # from a rank, to a rank
Settings = dict[str, Any]  # of a parameter group

AT_ONCE = 2**27
"""Elements of the matrices that are exchanged at once: 256 MiB in bfloat16, on all ranks together."""

HEADS: Final = frozenset(
    ("lm_head", "embed_out", "head", "output", "classifier", "score", "qa_outputs", "logits", "to_logits", "unembed")
)
"""Names of linear layers outside of blocks whose outputs are logits."""


def is_muon(optimizer: Any) -> bool:
    """Return True if an optimizer is torch's Muon, or by its name another implementation of it."""
    return isinstance(optimizer, Optimizer) and "muon" in type(optimizer).__name__.lower()


def spread(optimizer: Optimizer, strategy: Strategy, models: Sequence[nn.Module]) -> None:
    """Let the ranks of a strategy share the work of a Muon optimizer.

    Args:
        optimizer: is changed if it is torch's own and there are several ranks.
        strategy: of the Accelerator.
        models: the prepared models, those that will be prepared included.

    Raises:
        ConfigurationError: the strategy has not been compared with one process, or it shards matrices and the optimizer
            is another implementation than torch's.
    """
    collectives = strategy.matrix_collectives
    if type(optimizer) is getattr(torch.optim, "Muon", None):
        if collectives.world_size > 1:
            SpreadMuon(optimizer, strategy, models)
    elif strategy.shards_parameters:
        raise ConfigurationError(
            f"{type(optimizer).__module__}.{type(optimizer).__qualname__} would orthogonalise the shards that "
            f"{type(strategy).__name__} gives each rank instead of whole matrices. Use torch.optim.Muon (torch 2.9 or "
            "newer), whose matrices are gathered, or DDP."
        )


def check_hidden(optimizers: Iterable[Any], models: Iterable[nn.Module]) -> None:
    """Refuse parameters that Muon is not for.

    Raises:
        ConfigurationError: a Muon optimizer has an embedding, a head or a parameter that is no matrix.
    """
    chosen: set[int] = set()
    for item in optimizers:
        optimizer = getattr(item, "optimizer", item)
        if type(optimizer) is getattr(torch.optim, "Muon", None):
            for group in optimizer.param_groups:
                chosen.update(map(id, group["params"]))
    for model in models if chosen else ():
        inner = extract_model_from_parallel(model, keep_torch_compile=False)
        for kind, name, parameter in _not_hidden(inner):
            if id(parameter) in chosen:
                raise ConfigurationError(
                    f"Muon was given {name}, {kind} of shape {tuple(parameter.shape)}. It orthogonalises the matrices "
                    "of hidden layers; give embeddings, heads, biases and norms to another optimizer, such as "
                    "torch.optim.AdamW, and pass both to prepare()."
                )


def refuse_alone(optimizers: Iterable[Any], what: str) -> None:
    """Refuse Muon where a rank may step without the others: raise ConfigurationError, which says ``what`` allows it."""
    if any(is_muon(getattr(item, "optimizer", item)) for item in optimizers):
        raise ConfigurationError(
            f"{what} cannot be used with Muon, whose ranks compute each update together. Leave it out, or use another "
            "optimizer, such as torch.optim.AdamW."
        )


def _not_hidden(model: Any) -> Iterable[tuple[str, str, torch.Tensor]]:
    """Yield what is given to AdamW when hidden matrices are given to Muon: kind, name and parameter."""
    tables = [item for item in model.modules() if isinstance(item, (nn.Embedding, nn.EmbeddingBag))]
    shapes = {tuple(table.weight.shape) for table in tables}
    last = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    repeated = tuple(
        f"{name}." for name, item in model.named_modules() if isinstance(item, (nn.ModuleList, nn.Sequential)) and name
    )
    for name, module in model.named_modules():
        weight = module._parameters.get("weight")
        if weight is None:
            continue
        label = clean_name(f"{name}.weight" if name else "weight")
        # The model's own linear layer, outside of blocks, called or shaped like a head.
        is_own = isinstance(module, nn.Linear) and name and not name.startswith(repeated)
        is_named = name.rpartition(".")[2] in HEADS
        if module in tables:
            yield "an embedding", label, weight
        elif module is last or (is_own and (is_named or tuple(weight.shape) in shapes)):
            yield "the output layer", label, weight
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            yield "a vector", clean_name(name), parameter


@dataclass
class _Batch:
    """Matrices that are exchanged at once.

    Attributes:
        matrices: their numbers.
        own: those that this rank orthogonalises, with all their parts.
        to_owners: how parts of the momentum reach the ranks that orthogonalise.
        to_holders: how parts of the results reach the ranks that hold them.
    """

    matrices: list[int]
    own: dict[int, list[Part]]
    to_owners: list[Transfer]
    to_holders: list[Transfer]


def _matrices(
    parameters: list[torch.Tensor], models: Sequence[nn.Module]
) -> tuple[list[str], list[torch.Size], torch.Size | None]:
    """Describe matrices that have gradients.

    Returns:
        Their names with the number of the model; the shapes of whole ones as they are saved (a rank may hold a fused
        one in another); and the shape of one that belongs to no model.
    """
    from ..core.fused_dtensor import packed_shapes

    known: dict[int, tuple[str, torch.Size]] = {}
    for number, prepared in enumerate(models):
        model = extract_model_from_parallel(prepared, keep_torch_compile=False)
        packed = packed_shapes(model)
        for name, weight in model.named_parameters():
            label = clean_name(name)
            known[id(weight)] = f"{label} of model {number}", packed.get(label, weight.shape)
    strange = next((item.shape for item in parameters if id(item) not in known), None)
    found = [known.get(id(item), (f"a matrix of no model, {tuple(item.shape)}", item.shape)) for item in parameters]
    return [name for name, _ in found], [shape for _, shape in found], strange


class SpreadMuon:
    """Does the step of an optimizer before torch does, whose own step then finds no gradients.

    A step is a collective call: every rank must have gradients of the same matrices, which the ranks compare first.
    """

    def __init__(self, optimizer: Optimizer, strategy: Strategy, models: Sequence[nn.Module]) -> None:
        self._strategy = strategy
        self._collectives = strategy.matrix_collectives
        self._device = strategy.state.device
        self._models = models
        self._found: dict[tuple[int, ...], tuple[list[str], list[torch.Size], torch.Size | None]] = {}
        self._batches: dict[tuple[int, ...], list[_Batch]] = {}
        self._hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
        # torch rounds what it orthogonalises to this type (bfloat16) and returns it, so parts are sent in it.
        self._dtype = orthogonalised(torch.ones(1, 1), optimizer.defaults).dtype
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> tuple[Any, dict[str, Any]]:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = optimizer.param_groups
        work = [(item, group) for group in groups for item in group["params"] if item.grad is not None]
        self._update(optimizer, work)
        for parameter, _ in work:
            self._hidden.append((parameter, parameter.grad))
            parameter.grad = None
        return (optimizer, None if closure is None else lambda: loss), {}

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for parameter, gradient in self._hidden:
            parameter.grad = gradient
        self._hidden.clear()

    @torch.no_grad()
    def _update(self, optimizer: Optimizer, work: list[tuple[Any, Settings]]) -> None:
        key = tuple(id(parameter) for parameter, _ in work)
        if key not in self._found:
            self._found[key] = _matrices([parameter for parameter, _ in work], self._models)
        shapes = self._found[key][1]
        self._agree(optimizer, self._found[key])
        if key not in self._batches:
            self._batches[key] = self._plan(work, shapes)
        for batch in self._batches[key]:
            momenta: Parts = {}
            for matrix in batch.matrices:
                momenta |= _parts(matrix, _momentum(optimizer, *work[matrix]), shapes[matrix])
            arrived = self._moved(batch.to_owners, momenta)
            results: Parts = {}
            for matrix, parts in batch.own.items():
                whole = torch.empty(shapes[matrix], dtype=self._dtype, device=self._device)
                for part in parts:
                    whole[_slices(part)].copy_(arrived.pop(part))
                whole = orthogonalised(whole, work[matrix][1])
                results |= {part: whole[_slices(part)] for part in parts}
            returned = self._moved(batch.to_holders, results)
            for matrix in batch.matrices:
                parameter, settings = work[matrix]
                rate = float(settings["lr"])
                local(parameter).mul_(1 - rate * settings["weight_decay"])
                for part, view in _parts(matrix, parameter, shapes[matrix]).items():
                    view.add_(returned[part].to(view.device), alpha=-muon_rate(rate, settings, shapes[matrix]))

    def _agree(self, optimizer: Optimizer, found: tuple[list[str], list[torch.Size], torch.Size | None]) -> None:
        """Raise on every rank unless all have gradients of the same matrices, that were reduced.

        What is exchanged has a size that does not depend on them, so that ranks which differ do not wait forever.
        """
        names, _, strange = found
        chosen = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        for model in self._models:
            if any(id(parameter) in chosen for parameter in model.parameters()):
                self._strategy.check_reduced(model)
        rows = self._collectives.exchange_header(Call("Muon.step"), [Call("", options=repr(found)).digest])
        if any(row != rows[0] for row in rows):
            ranks = self._collectives.all_gather_object(names)
            shared = set(ranks[0]).intersection(*ranks)
            apart = [[name for name in own if name not in shared] for own in ranks]
            listed = "; ".join(f"rank {rank}: {', '.join(own[:3]) or 'none'}" for rank, own in enumerate(apart))
            what = f"Only some ranks have gradients of these: {listed}." if any(apart) else "Their order differs."
            raise ConfigurationError(
                f"Muon found gradients of other matrices on some ranks ({[len(own) for own in ranks]} matrices, by "
                f"rank). {what} Compute a loss that depends on the same matrices on every rank: add 0 * "
                "branch(x).sum() for a branch that a rank does not use. With DDP, DistributedDataParallelKwargs("
                "find_unused_parameters=True) does it."
            )
        if strange is not None:
            raise ConfigurationError(
                f"Muon has a matrix of shape {tuple(strange)} that belongs to no prepared model, so its "
                "gradients are not those of all ranks. Pass the model to prepare()."
            )

    def _plan(self, work: list[tuple[Any, Settings]], shapes: list[torch.Size]) -> list[_Batch]:
        parameters = [parameter for parameter, _ in work]
        for parameter, settings in work:
            if parameter.dtype == self._dtype and not settings["nesterov"]:
                # Rounding returns the momentum itself then, which torch 2.13 normalises in place.
                raise ConfigurationError(
                    f"Muon(nesterov=False) overwrites its momentum of matrices in {parameter.dtype} in one process, so "
                    "there is nothing to be equal to. Leave nesterov out, or keep the weights in float32."
                )
        held = [list(_parts(matrix, parameters[matrix], shape)) for matrix, shape in enumerate(shapes)]
        ranks = self._collectives.all_gather_object(held)
        costs = [min(shape) ** 2 * max(shape) for shape in shapes]
        load = [0] * len(ranks)
        batches: list[_Batch] = []
        size = AT_ONCE
        for matrix in sorted(range(len(shapes)), key=lambda matrix: -costs[matrix]):
            owner = load.index(min(load))
            load[owner] += costs[matrix]
            size += shapes[matrix].numel()
            if size > AT_ONCE:
                batches.append(_Batch([], {}, [], []))
                size = shapes[matrix].numel()
            batch, suppliers = batches[-1], dict[Part, int]()
            for rank in (*range(owner, len(ranks)), *range(owner)):  # of copies, the owner's own comes first
                for part in ranks[rank][matrix]:
                    suppliers.setdefault(part, rank)
            batch.matrices.append(matrix)
            batch.to_owners += [(supplier, owner, part) for part, supplier in suppliers.items()]
            batch.to_holders += [(owner, rank, part) for rank, parts in enumerate(ranks) for part in parts[matrix]]
            if owner == self._collectives.rank:
                batch.own[matrix] = list(suppliers)
        return batches

    def _moved(self, transfers: list[Transfer], parts: Parts) -> Parts:
        """Return the parts that this rank gets from the ranks, itself included."""
        here = self._collectives.rank
        outgoing: dict[int, list[torch.Tensor]] = {}
        incoming: dict[int, list[Part]] = {}
        moved: Parts = {}
        for source, target, part in transfers:
            if source == target == here:
                moved[part] = parts[part]
            elif source == here:
                outgoing.setdefault(target, []).append(parts[part].to(self._device, self._dtype).flatten())
            elif target == here:
                incoming.setdefault(source, []).append(part)
        buffers = {
            source: torch.empty(sum(map(_size, wanted)), dtype=self._dtype, device=self._device)
            for source, wanted in incoming.items()
        }
        self._collectives.exchange([(rank, torch.cat(flat)) for rank, flat in outgoing.items()], list(buffers.items()))
        for source, wanted in incoming.items():
            for part, flat in zip(wanted, buffers[source].split(list(map(_size, wanted))), strict=True):
                moved[part] = flat.view(part[2])
        return moved


def _momentum(optimizer: Optimizer, parameter: Any, settings: Settings) -> torch.Tensor:
    """Return what is orthogonalised, as this rank holds it; the momentum is updated."""
    gradient: torch.Tensor = parameter.grad
    state = optimizer.state[parameter]
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(gradient, memory_format=torch.preserve_format)
    buffer: torch.Tensor = state["momentum_buffer"]
    buffer.lerp_(gradient, 1 - settings["momentum"])
    return gradient.lerp(buffer, settings["momentum"]) if settings["nesterov"] else buffer


def _parts(matrix: int, value: torch.Tensor, shape: torch.Size) -> Parts:
    """Return the parts of a matrix that this rank holds, in the same memory."""
    from accel_checkpoint.sharded.specs import regions

    from ..core.fused_dtensor import pack

    found = regions(pack(value.detach(), shape))
    return {(matrix, begin, tuple(view.shape)): view for begin, view in found if view.numel()}


def _slices(part: Part) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + size) for begin, size in zip(part[1], part[2], strict=True))


def _size(part: Part) -> int:
    return math.prod(part[2])
