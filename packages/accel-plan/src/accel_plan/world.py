"""One process that takes itself for a rank of many: torch's fake process group, and tensors without memory."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from accel_state import PartialState, context, env
from accel_state.collectives.single import Collectives
from accel_state.errors import ConfigurationError

T = TypeVar("T")

# What a launcher sets for one rank, and a shell may hold for another.
_RANK_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")


class AloneCollectives(Collectives):
    """Every rank has what this one has: nothing is sent.

    Args:
        rank: the rank to be.
        world_size: the number of ranks there would be.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device("cpu")

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().unsqueeze(0).expand(self.world_size, *tensor.shape)

    def all_gather_object(self, obj: T) -> list[T]:
        return [obj] * self.world_size

    def scatter_object(self, objects: Sequence[Any] | None, source: int = 0) -> Any:
        if objects is None:
            raise ConfigurationError(f"rank {self.rank} alone cannot know what rank {source} would scatter.")
        return objects[self.rank]


class EqualParts(TorchFunctionMode):
    """Cuts tensors without memory into parts, of which equal ones are one object.

    Sharding over 4,096 ranks cuts each parameter into as many parts and keeps one of them. Tensors without values
    differ by their shapes only, so two are made, and not 4,096.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.chunk, torch.Tensor.chunk) and isinstance(args[0], FakeTensor):
            return _parts(*args, **kwargs)
        return func(*args, **kwargs)


def _parts(tensor: torch.Tensor, chunks: int, dim: int = 0) -> tuple[torch.Tensor, ...]:
    size = tensor.size(dim)
    each = max(-(-size // chunks), 1)
    full, rest = divmod(size, each)
    parts = [tensor.narrow(dim, 0, each)] * full if full else []
    return (*parts, *([tensor.narrow(dim, full * each, rest)] if rest or not size else []))


@contextmanager
def pretended_rank(
    rank: int, world_size: int, local_world_size: int, variables: Mapping[str, str]
) -> Iterator[PartialState]:
    """A block in which this process is a rank of many, whose collectives return at once.

    Args:
        rank: the rank to be.
        world_size: the number of ranks.
        local_world_size: ranks on each node.
        variables: what the launcher would hand to the process.

    Raises:
        ConfigurationError: this process is in a group of its own already.
    """
    if dist.is_initialized():
        raise ConfigurationError("accel plan needs a process of its own: this one is in a process group already.")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    places = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank % local_world_size,
        "LOCAL_WORLD_SIZE": local_world_size,
        "GROUP_RANK": rank // local_world_size,
        "GROUP_WORLD_SIZE": world_size // local_world_size,
    }
    with ExitStack() as stack:
        kept = {name: value for name, value in env.all_variables().items() if _is_kept(name)}
        stack.enter_context(env.clear_environment())
        stack.enter_context(env.patch_environment(**{**kept, **variables, **places, "ACCELERATE_USE_CPU": "true"}))
        stack.enter_context(context.isolated())
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        state = PartialState(cpu=True)
        state.collectives = AloneCollectives(rank, world_size)
        stack.enter_context(_stand_ins())
        yield state


@contextmanager
def _stand_ins() -> Iterator[None]:
    """What needs memory or other ranks, replaced by what sends the same and needs neither."""
    from torch.distributed import pipelining

    from accel.parallel import mesh, pipeline, pipeline_split
    from accel.strategies import ddp, mesh_pp

    from .replica import Replica
    from .stages import share_loss, watched_stage

    def along(device: torch.device, group: Any = None) -> Collectives:
        return AloneCollectives(dist.get_rank(group), dist.get_world_size(group))

    replaced: list[tuple[Any, str, Any]] = [(ddp, "DistributedDataParallel", Replica)]
    replaced += [(module, "TorchCollectives", along) for module in (mesh, mesh_pp)]
    # A comparison of stages with the whole needs values.
    replaced += [
        (pipelining, "PipelineStage", watched_stage()),
        (pipeline_split.Stages, "check", lambda stages, example: None),
    ]
    replaced += [(pipeline.Pipeline, "_share", share_loss), *_mask_stand_ins()]
    before = [(module, name, getattr(module, name)) for module, name, _ in replaced]
    for module, name, value in replaced:
        setattr(module, name, value)
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _mask_stand_ins() -> list[tuple[Any, str, Any]]:
    """Transformers looks at values to see that nothing is hidden, and makes a mask of all pairs of tokens where it
    cannot.
    """
    if (
        importlib.util.find_spec("transformers") is None
        or importlib.util.find_spec("transformers.masking_utils") is None
    ):
        return []
    masks = importlib.import_module("transformers.masking_utils")

    def unpadded(original: Any) -> Any:
        def ignore(padding_mask: Any = None, *args: Any, **kwargs: Any) -> Any:
            return original(None, *args, **kwargs)

        return ignore

    names = [name for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa") if hasattr(masks, name)]
    replaced = [(masks, name, unpadded(getattr(masks, name))) for name in names]
    if hasattr(masks, "find_packed_sequence_indices"):
        replaced.append((masks, "find_packed_sequence_indices", lambda position_ids: None))
    return replaced


def _is_kept(name: str) -> bool:
    return name not in _RANK_VARIABLES and not name.startswith(_PREFIXES)


@contextmanager
def without_memory() -> Iterator[None]:
    """A block in which tensors have shapes and types, and neither memory nor values."""
    with FakeTensorMode(allow_non_fake_inputs=True), EqualParts(), _real_meshes():
        yield


@contextmanager
def _real_meshes() -> Iterator[None]:
    """Let meshes have values: which ranks they are made of is read from a tensor."""
    original = DeviceMesh.__init__

    def init(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        with unset_fake_temporarily():
            original(self, *map(_ranks, args), **{name: _ranks(value) for name, value in kwargs.items()})

    DeviceMesh.__init__ = init  # type: ignore[method-assign]
    try:
        yield
    finally:
        DeviceMesh.__init__ = original  # type: ignore[method-assign]


def _ranks(value: Any) -> Any:
    """``init_device_mesh`` counts the ranks in a tensor, here one without values; any other comes from outside and has
    them.
    """
    return torch.arange(value.numel(), dtype=value.dtype).view(value.shape) if isinstance(value, FakeTensor) else value
