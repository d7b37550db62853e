"""Simulates one rank of a large world in a single process: a fake process group, and tensors without memory."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from accel_state import PartialState, context, env
from accel_state.collectives.single import Collectives, ReduceOp
from accel_state.errors import ConfigurationError

from ._torch_compat import (
    FakeTensor,
    FakeTensorMode,
    TorchDispatchMode,
    desugars_itself,
    efficient_attention,
    fake_store,
    forget_device_meshes,
    unset_fake_temporarily,
)


class ReplicatedModel(nn.Module):
    """Broadcasts buffers before the forward, and all-reduces gradients in the backward, of passes that synchronise.

    It all-reduces each parameter separately; DDP uses buckets, which send the same bytes in fewer calls. Like DDP it
    holds a second copy of all gradients, or views of it as gradients. Other settings of DDP do not change the number of
    bytes.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__()
        self.module = module
        self.group = process_group
        self.broadcast_buffers = broadcast_buffers
        self.as_views = gradient_as_bucket_view
        self.synchronises: bool = True
        self.buckets: dict[torch.Tensor, torch.Tensor] = {}
        for parameter in module.parameters():
            if parameter.requires_grad:
                self.buckets[parameter] = torch.empty_like(parameter, requires_grad=False)
                parameter.register_post_accumulate_grad_hook(self._reduce)

    def _reduce(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        bucket = self.buckets[parameter]
        if self.as_views and gradient is not bucket:
            bucket.copy_(gradient)
            parameter.grad = gradient = bucket
        if self.synchronises:
            dist.all_reduce(gradient, group=self.group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.broadcast_buffers and self.synchronises:
            for buffer in self.module.buffers():
                dist.broadcast(buffer, group=self.group, group_src=0)
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients without reducing them."""
        self.synchronises = False
        try:
            yield
        finally:
            self.synchronises = True


T = TypeVar("T")

# What a launcher sets, which must not leak from the shell into the simulated rank.
_RANK_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "MEGATRON_LM_")


class LocalCollectives(Collectives):
    """Collectives that assume that every rank has this rank's values.

    An all-reduce is one of the simulated group, so that a :class:`~accel_plan.record.Recorder` counts it.
    """

    def __init__(self, group: Any = None) -> None:
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.device: torch.device = torch.device("cpu")
        self._group = group

    def over(self, group: Any) -> Collectives:
        return LocalCollectives(group)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp = "sum") -> torch.Tensor:
        dist.all_reduce(tensor, group=self._group)  # without values, every operation is the same
        return tensor

    def all_gather(self, tensor: torch.Tensor, operation: str = "all_gather") -> torch.Tensor:
        return tensor.detach().unsqueeze(0).expand(self.world_size, *tensor.shape)

    def all_gather_object(self, obj: T) -> list[T]:
        return [obj] * self.world_size

    def scatter_object(self, objects: Sequence[Any] | None, source: int = 0) -> Any:
        if objects is None:
            raise ConfigurationError(f"rank {self.rank} cannot simulate receiving an object from rank {source}.")
        return objects[self.rank]


_MANY_CHUNKS = 64


class SharedChunks(TorchFunctionMode):
    """Splits tensors without memory into chunks of which equal ones are the same object.

    Sharding over 4,096 ranks splits each parameter into 4,096 chunks and keeps one. Without values, they differ in
    their shapes only, so two objects suffice.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.chunk, torch.Tensor.chunk) and isinstance(args[0], FakeTensor):
            # A mode does not apply in a backward pass, which it called: few chunks are made as there, so that what
            # selective checkpointing computes again is what it did.
            count = args[1] if len(args) > 1 else kwargs["chunks"]
            if count > _MANY_CHUNKS:
                return _shared_chunks(*args, **kwargs)
        return func(*args, **kwargs)


def _shared_chunks(tensor: torch.Tensor, chunks: int, dim: int = 0) -> tuple[torch.Tensor, ...]:
    size = tensor.size(dim)
    chunk_size = max(-(-size // chunks), 1)
    count, rest = divmod(size, chunk_size)
    parts = [tensor.narrow(dim, 0, chunk_size)] * count if count else []
    if rest or not size:
        parts.append(tensor.narrow(dim, count * chunk_size, rest))
    return tuple(parts)


@contextmanager
def simulated_rank(
    rank: int, world_size: int, local_world_size: int, variables: Mapping[str, str]
) -> Iterator[PartialState]:
    """Make this process a rank of a larger world, whose collectives return at once."""
    if dist.is_initialized():
        raise ConfigurationError("accel plan cannot run in a process that already has a process group.")
    rank_variables = {
        "RANK": rank,
        "WORLD_SIZE": world_size,
        "LOCAL_RANK": rank % local_world_size,
        "LOCAL_WORLD_SIZE": local_world_size,
        "GROUP_RANK": rank // local_world_size,
        "GROUP_WORLD_SIZE": world_size // local_world_size,
    }
    kept = {
        name: value
        for name, value in env.all_variables().items()
        if name not in _RANK_VARIABLES and not name.startswith(_PREFIXES)
    }
    with ExitStack() as stack:
        stack.enter_context(env.clear_environment())
        variables = {**kept, **variables, **rank_variables, "ACCELERATE_USE_CPU": "true"}  # type: ignore[dict-item]
        stack.enter_context(env.patch_environment(**variables))
        stack.enter_context(context.isolated())
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=fake_store())
        stack.callback(dist.destroy_process_group)
        forget_device_meshes()
        state = PartialState(cpu=True)
        state.collectives = LocalCollectives()
        stack.enter_context(_patched(_mask_replacements()))
        yield state


@contextmanager
def _patched(replacements: Sequence[tuple[Any, str, Any]]) -> Iterator[None]:
    originals = [(target, name, getattr(target, name)) for target, name, _ in replacements]
    for target, name, value in replacements:
        setattr(target, name, value)
    try:
        yield
    finally:
        for target, name, value in originals:
            setattr(target, name, value)


def _mask_replacements() -> list[tuple[Any, str, Any]]:
    """Let Transformers skip the attention mask as it does for unpadded inputs; it cannot see that without values."""
    try:
        masks = importlib.import_module("transformers.masking_utils")
    except ImportError:
        return []

    def assume_unpadded(original: Any) -> Any:
        return lambda padding_mask=None, *args, **kwargs: original(None, *args, **kwargs)

    names = [name for name in ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa") if hasattr(masks, name)]
    replaced = [(masks, name, assume_unpadded(getattr(masks, name))) for name in names]
    if hasattr(masks, "find_packed_sequence_indices"):
        replaced.append((masks, "find_packed_sequence_indices", lambda position_ids: None))
    return replaced


@contextmanager
def attention_of_gpus() -> Iterator[None]:
    """Let attention take the kernels of GPUs, where tensors without memory take the CPU's.

    Without a mask, a GPU has no fused kernel for float32 with fewer heads of keys than of queries, so that it keeps all
    scores; and it has one for values of another width than keys (DeepSeek-V3's), which a CPU has not.
    """
    original = functional.scaled_dot_product_attention

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        **rest: Any,
    ) -> torch.Tensor:
        kind = query.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
        settings = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, **rest}
        has_all_heads = query.shape[-3] == key.shape[-3]
        if attn_mask is None and has_all_heads and query.shape[-1] != value.shape[-1]:
            inputs = (tensor.to(dtype) for tensor in (query, key, value))
            result: torch.Tensor = efficient_attention(*inputs, None, True, dropout_p, is_causal, scale=scale)[0]
            return result
        if dtype is torch.float32 and not has_all_heads:
            with sdpa_kernel(SDPBackend.MATH):
                return original(query, key, value, **settings)
        return original(query, key, value, **settings)

    with _patched([(functional, "scaled_dot_product_attention", attend)]):
        yield


class _GroupedProducts(TorchDispatchMode):
    """Grouped products (of experts) of any dtype: without values, torch takes bfloat16 only; with them, float32 too."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(map(desugars_itself, types)):
            return NotImplemented
        if func.name() != "aten::_grouped_mm" or args[0].dtype == torch.bfloat16:
            return func(*args, **(kwargs or {}))
        result = func(*(one.bfloat16() for one in args[:2]), *args[2:], **(kwargs or {}))
        return torch.empty_strided(result.shape, result.stride(), dtype=args[0].dtype, device=result.device)


@contextmanager
def without_memory() -> Iterator[None]:
    """Create tensors without memory and values in the block, except those of device meshes."""
    original = DeviceMesh.__init__

    def init(self: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        with unset_fake_temporarily():
            original(self, *map(_real_ranks, args), **{name: _real_ranks(value) for name, value in kwargs.items()})

    modes = FakeTensorMode(allow_non_fake_inputs=True), _GroupedProducts(), SharedChunks()
    with ExitStack() as stack:
        for mode in modes:
            stack.enter_context(mode)
        stack.enter_context(_patched([(DeviceMesh, "__init__", init)]))
        yield


def _real_ranks(value: Any) -> Any:
    """``init_device_mesh`` numbers the ranks in a tensor, which has no values in :func:`without_memory`."""
    return torch.arange(value.numel(), dtype=value.dtype).view(value.shape) if isinstance(value, FakeTensor) else value
