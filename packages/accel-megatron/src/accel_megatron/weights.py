"""Names and layouts of weights: Transformers' full tensors, and the parts that the ranks of Megatron-core hold.

A :class:`Weight` pairs names of both and says how one becomes the other. All transforms are permutations,
concatenations and padding, so they are exact in both directions, and apply to optimizer states too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn

from accel_checkpoint.names import CheckpointError
from accel_state.errors import AccelError, ConfigurationError

from ._megatron_compat import parallel_state

Tensors = list[torch.Tensor]


class Same:
    """One tensor, unchanged."""

    def to_megatron(self, tensors: Tensors) -> Tensors:
        """Megatron-core's full tensors from those of Transformers."""
        return tensors

    def from_megatron(self, tensors: Tensors) -> Tensors:
        """Convert Megatron-core's full tensors to Transformers'."""
        return tensors


class Transposed(Same):
    """A matrix that is stored the other way round (Conv1D)."""

    def to_megatron(self, tensors: Tensors) -> Tensors:
        return [tensors[0].t().contiguous()]

    from_megatron = to_megatron


@dataclass(frozen=True)
class QKV(Same):
    """Query, key and value projections, which Megatron-core stores by group of heads: queries, key, value."""

    heads: int
    groups: int  # groups of heads that share a key and a value

    def to_megatron(self, tensors: Tensors) -> Tensors:
        query, tail = tensors[0], tensors[0].shape[1:]
        size = query.shape[0] // self.heads
        parts = [query.reshape(self.groups, self.heads // self.groups * size, *tail)]
        parts += [tensor.reshape(self.groups, size, *tail) for tensor in tensors[1:]]
        return [torch.cat(parts, 1).reshape(-1, *tail)]

    def from_megatron(self, tensors: Tensors) -> Tensors:
        fused, tail = tensors[0], tensors[0].shape[1:]
        size = fused.shape[0] // (self.heads + 2 * self.groups)
        fused = fused.reshape(self.groups, -1, *tail)
        parts = fused.split([self.heads // self.groups * size, size, size], 1)
        return [part.reshape(-1, *tail) for part in parts]


@dataclass(frozen=True)
class FusedQKV(Same):
    """A matrix of queries, then keys, then values; ``transposed`` where it is stored the other way round (GPT-2)."""

    heads: int
    transposed: bool = False

    def to_megatron(self, tensors: Tensors) -> Tensors:
        fused = tensors[0].t() if self.transposed and tensors[0].ndim == 2 else tensors[0]
        return QKV(self.heads, self.heads).to_megatron(list(fused.chunk(3)))

    def from_megatron(self, tensors: Tensors) -> Tensors:
        fused = torch.cat(QKV(self.heads, self.heads).from_megatron(tensors))
        return [fused.t().contiguous() if self.transposed and fused.ndim == 2 else fused]


@dataclass(frozen=True)
class KV(Same):
    """Key and value projections of cross attention, by head."""

    heads: int

    def to_megatron(self, tensors: Tensors) -> Tensors:
        rows, columns = tensors[0].shape
        parts = [tensor.reshape(self.heads, rows // self.heads, columns) for tensor in tensors]
        return [torch.cat(parts, 1).reshape(2 * rows, columns)]

    def from_megatron(self, tensors: Tensors) -> Tensors:
        columns = tensors[0].shape[1]
        by_head = tensors[0].reshape(self.heads, 2, -1, columns)
        return [by_head[:, index].reshape(-1, columns) for index in (0, 1)]


class Concatenated(Same):
    """The gate and the up projection of a gated MLP, one after the other."""

    def to_megatron(self, tensors: Tensors) -> Tensors:
        return [torch.cat(tensors)]

    def from_megatron(self, tensors: Tensors) -> Tensors:
        return list(tensors[0].chunk(2))


class Unstacked(Same):
    """Experts in one tensor, which Megatron-core stores one by one."""

    def to_megatron(self, tensors: Tensors) -> Tensors:
        return list(tensors[0].unbind())

    def from_megatron(self, tensors: Tensors) -> Tensors:
        return [torch.stack(tensors)]


@dataclass(frozen=True)
class ByRank(Same):
    """A matrix that tensor parallelism splits in a way of its own: Transformers' side has the parts, (ranks, *part)."""

    dim: int
    ranks: int

    def to_megatron(self, tensors: Tensors) -> Tensors:
        if tensors[0].shape[0] != self.ranks:
            raise ConfigurationError(
                f"weights of shape {tuple(tensors[0].shape)} are {tensors[0].shape[0]} parts that tensor parallelism "
                f"split in a way of their model, and this run has tp_degree={self.ranks}. Load them at the tp_degree "
                "that they were saved at."
            )
        return [torch.cat(tensors[0].unbind(), self.dim)]

    def from_megatron(self, tensors: Tensors) -> Tensors:
        return [torch.stack(tensors[0].chunk(self.ranks, self.dim))]


@dataclass(frozen=True)
class Weight:
    """Weights of a Transformers model, and the same weights in Megatron-core.

    Attributes:
        names: in Transformers.
        targets: in Megatron-core, with layers and experts numbered over all ranks.
        transform: how one becomes the other.
        blocks: number of parts of a target, each of which is split over the tensor-parallel ranks on its own: 2 for a
            gate and an up projection in one matrix.
        rows: number of rows without the padding of the vocabulary; None for a weight that is not padded.
    """

    names: tuple[str, ...]
    targets: tuple[str, ...]
    transform: Same = field(default_factory=Same)
    blocks: int = 1
    rows: int | None = None


def weight(
    names: str | Sequence[str], targets: str | Sequence[str], transform: Same | None = None, **options: Any
) -> Weight:
    """Shorthand for :class:`Weight`."""
    one = (names,) if isinstance(names, str) else tuple(names)
    other = (targets,) if isinstance(targets, str) else tuple(targets)
    return Weight(one, other, transform or Same(), **options)


def aliases_of(model: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter, by its id; several of a tied one."""
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    return aliases


def shard_group(parameter: torch.Tensor) -> Any:
    """Return the ranks that hold the parts of a parameter: those of tensor parallelism, or of the experts' own."""
    if getattr(parameter, "allreduce", True):
        return parallel_state.get_tensor_model_parallel_group()
    return parallel_state.get_expert_tensor_parallel_group()


def is_split(parameter: torch.Tensor) -> bool:
    """Return True if the ranks of :func:`shard_group` hold different parts of a parameter."""
    return bool(getattr(parameter, "tensor_model_parallel", False)) and shard_group(parameter).size() > 1


def split_dim(target: str) -> int | None:
    """Return the dimension that tensor parallelism splits a parameter along; None if all ranks have it whole."""
    if re.search(r"(linear_qkv|linear_q|linear_kv|linear_fc1|word_embeddings|output_layer)\.(weight|bias)$", target):
        return 0
    return 1 if re.search(r"(linear_proj|linear_fc2)\.weight$", target) else None


def part_of(full: torch.Tensor, pair: Weight, dim: int | None, ranks: int, rank: int, rows: int) -> torch.Tensor:
    """Return a rank's part of a full tensor, which is padded to ``rows`` rows if the pair is one of vocabulary."""
    if pair.rows is not None and rows > full.shape[0]:
        full = torch.cat([full, full.new_zeros(rows - full.shape[0], *full.shape[1:])])
    if dim is None or ranks == 1:
        return full
    blocks = pair.blocks if dim == 0 else 1
    return torch.cat([block.chunk(ranks, dim)[rank] for block in full.chunk(blocks, dim)], dim)


def cut(parameter: torch.Tensor, full: torch.Tensor, pair: Weight) -> torch.Tensor:
    """Return this rank's part of a full tensor."""
    dim, ranks, rank = None, 1, 0
    if is_split(parameter):
        group, dim = shard_group(parameter), parameter.partition_dim  # type: ignore[attr-defined]
        ranks, rank = group.size(), group.rank()
    rows = 0 if pair.rows is None else parameter.shape[0] * ranks
    full = part_of(full, pair, dim, ranks, rank, rows)
    if full.shape != parameter.shape:
        raise ConfigurationError(
            f"{', '.join(pair.names)} gives a tensor of shape {tuple(full.shape)} for {', '.join(pair.targets)} of "
            f"shape {tuple(parameter.shape)}. Check the sizes in the model's config and the mapping."
        )
    return full


def join(parts: Sequence[torch.Tensor], dim: int, pair: Weight) -> torch.Tensor:
    """Return the full tensor from the parts of all ranks, without padding."""
    full = parts[0]
    if len(parts) > 1:
        blocks = pair.blocks if dim == 0 else 1
        rows = [part.chunk(blocks, dim) for part in parts]
        full = torch.cat([torch.cat([row[i] for row in rows], dim) for i in range(blocks)], dim)
    return full if pair.rows is None else full[: pair.rows]


def global_tensors(chunk: nn.Module, buffers: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of a model chunk, with layers and experts numbered over all ranks.

    An output layer that shares the embedding's weights has the embedding's name.

    Args:
        chunk: the model, without wrappers.
        buffers: add the buffers of its state dict.
    """
    layers: dict[str, tuple[str, Any]] = {
        f"{name}.{index}.": (f"{name}.{layer.layer_number - 1}.", layer)
        for name, stack in chunk.named_modules()
        if isinstance(stack, nn.ModuleList) and re.search(r"(^|\.)layers$", name)
        for index, layer in enumerate(cast("Any", stack))
        if hasattr(layer, "layer_number")
    }
    shared = getattr(chunk, "share_embeddings_and_output_weights", False)
    seen: set[int] = set()
    tensors: Iterable[tuple[str, torch.Tensor]] = chunk.named_parameters(remove_duplicate=False)
    if buffers:
        saved = chunk.state_dict()
        tensors = [*tensors, *((name, tensor) for name, tensor in chunk.named_buffers() if name in saved)]
    for name, tensor in tensors:
        if id(tensor) in seen:
            continue
        seen.add(id(tensor))
        full = name
        owner: Any = None
        found = re.match(r"(?:.*?\.)?layers\.\d+\.", name)
        if found and found[0] in layers:
            prefix, owner = layers[found[0]]
            full = prefix + name[found.end() :]
        if owner is not None and ".local_experts." in full:
            before, number, after = re.split(r"local_experts\.(\d+)", full)
            full = f"{before}local_experts.{owner.mlp.local_expert_indices[int(number)]}{after}"
        if shared and re.fullmatch(r"(lm_head\.)?output_layer\.weight", name):
            full = "embedding.word_embeddings.weight"
        yield full, tensor


class ParameterTable:
    """Which rank holds which parameter, and the exchange of their values between ranks.

    Creating one is a collective call.
    """

    def __init__(
        self, chunks: Sequence[nn.Module], pairs: Sequence[Weight], device: torch.device, buffers: bool = False
    ) -> None:
        self.device: torch.device = device
        self.rank: int = dist.get_rank()
        self.local: dict[str, list[Any]] = {}
        for chunk in chunks:
            for name, parameter in global_tensors(chunk, buffers):
                self.local.setdefault(name, []).append(parameter)
        self.pairs: dict[str, Weight] = {target: pair for pair in pairs for target in pair.targets}
        self.weights: list[Weight] = list(pairs)
        own = {}
        for name, parameters in self.local.items():
            split = is_split(parameters[0])
            ranks = tuple(dist.get_process_group_ranks(shard_group(parameters[0]))) if split else (self.rank,)
            dim = parameters[0].partition_dim if split else 0
            own[name] = (ranks, dim, tuple(parameters[0].shape))
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        self.owners: dict[str, tuple[tuple[int, ...], int, tuple[int, ...]]] = {}
        for names in everyone:
            for name, owner in names.items():
                self.owners.setdefault(name, owner)

    def check(self, unmapped: Sequence[str]) -> None:
        """Raise ConfigurationError unless every parameter of every rank has a mapping."""
        missing = sorted(name for name in self.owners if name not in self.pairs and name not in unmapped)
        absent = sorted(target for target in self.pairs if target not in self.owners)
        if missing or absent:
            raise ConfigurationError(
                f"the mapping of this architecture has no weights for {', '.join(missing[:5]) or 'nothing'}, and names "
                f"{', '.join(absent[:5]) or 'nothing'} that the model does not have. Correct `weights` of the mapping."
            )

    @torch.no_grad()
    def load(
        self,
        read: Callable[[str], torch.Tensor],
        put: Callable[[nn.Parameter, torch.Tensor], None],
        wanted: Callable[[Weight], bool] = lambda pair: True,
    ) -> None:
        """Give every parameter of this rank its part of the full tensors that ``read`` returns by name."""
        for pair in self.weights:
            if not wanted(pair) or not any(target in self.local for target in pair.targets):
                continue
            full = pair.transform.to_megatron([read(name) for name in pair.names])
            for target, tensor in zip(pair.targets, full, strict=True):
                for parameter in self.local.get(target, ()):
                    put(parameter, cut(parameter, tensor, pair))

    @torch.no_grad()
    def collect(
        self, value: Callable[[nn.Parameter], torch.Tensor], wanted: Callable[[Weight], bool] = lambda pair: True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors by name, on the host of rank 0; other ranks get none. Every rank must exhaust the iterator.

        Args:
            value: this rank's part, for a parameter of this rank, in float32. All ranks call it for the same
                parameters in the same order.
            wanted: the weights to collect.
        """
        for pair in self.weights:
            if not wanted(pair):
                continue
            held = {target: value(self.local[target][0]) for target in pair.targets if target in self.local}
            full = [self._full(target, held, pair) for target in pair.targets]
            if self.rank == 0:
                yield from zip(pair.names, pair.transform.from_megatron(full), strict=True)  # type: ignore[arg-type]

    def _full(self, target: str, held: dict[str, torch.Tensor], pair: Weight) -> torch.Tensor | None:
        ranks, dim, shape = self.owners[target]
        full = None
        if self.rank in ranks:
            part = held[target].float().contiguous()
            parts = [part]
            if len(ranks) > 1:
                parts = [torch.empty_like(part) for _ in ranks]
                dist.all_gather(parts, part, group=shard_group(self.local[target][0]))
            if self.rank in (0, ranks[0]):
                full = join(parts, dim, pair).contiguous()
        if 0 in ranks:
            return None if full is None else full.cpu()
        if self.rank == ranks[0]:
            assert full is not None
            dist.send(full, 0)
        elif self.rank == 0:
            size = list(shape)
            if len(ranks) > 1:
                size[dim] *= len(ranks)
            if pair.rows is not None:
                size[0] = pair.rows
            received = torch.empty(size, device=self.device)
            dist.recv(received, ranks[0])
            return received.cpu()
        return None


def check_parts(
    table: ParameterTable,
    read: Callable[[str], Any],
    shapes: Mapping[str, torch.Size],
    path: Path,
    wanted: Callable[[Weight], bool] = lambda pair: True,
) -> None:
    """Raise CheckpointError if full tensors do not have the parts that this rank holds; no tensor is read.

    Args:
        table: the parameters.
        read: returns a full tensor by its name.
        shapes: the shapes of full tensors by name, where they are known.
        path: the file, for messages.
        wanted: the weights to check.
    """

    def read_shape(name: str) -> torch.Tensor:
        value = read(name)
        found = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        expected = shapes.get(name)
        if not isinstance(value, torch.Tensor) or value.shape != (expected or value.shape):
            raise CheckpointError(
                f"{path}: {name} is {found}, not {expected or 'a tensor'}. Choose another checkpoint."
            )
        return value.to("meta")

    def compare(parameter: nn.Parameter, part: torch.Tensor) -> None:
        if part.shape != parameter.shape:
            raise ValueError(f"{tuple(part.shape)} instead of {tuple(parameter.shape)}")

    try:
        table.load(read_shape, compare, wanted)
    except AccelError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} does not fit the model ({type(error).__name__}: {error}). Load it into the model that was saved."
        ) from error
