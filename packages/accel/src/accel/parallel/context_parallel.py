"""Context parallelism: torch's ring attention, with kernels for every device, and errors where it would be wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from accel_state import get_logger
from accel_state.errors import ConfigurationError

from .._torch_compat import has_ring_kernels, set_rotate_method
from .attention_checks import window_of_layer
from .axis_settings import TorchContextParallelConfig
from .documents import FLEX_BLOCK, Documents, are_packed_positions
from .ring_kernels import Ring, repeat_heads
from .sequence_collectives import gather
from .sequence_inputs import SequenceCalls, SequenceShard, gather_shards

logger: Final = get_logger(__name__)


class RingAttention:
    """Replaces ``scaled_dot_product_attention`` while sequences are split."""

    def __init__(self, mesh: DeviceMesh, inner: Callable[..., torch.Tensor]) -> None:
        self.mesh = mesh
        self.inner = inner
        self.calls: int = 0
        self.closed = False
        self.shard: SequenceShard | None = None
        self._window: int | None = None
        self._in_layer = False

    def layer(self, inner: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Return Transformers' function of an attention layer, which calls this object: it knows the layer's window.

        The mask that the layer is given is that of a shard, in which windows are others.
        """
        shard = self.shard
        if shard is None or not shard.has_windows:
            return inner(module, *args, **kwargs)
        self._window, self._in_layer = window_of_layer(module, kwargs.get("sliding_window"), shard.length), True
        if self._window is not None:
            args, kwargs = args[:3], {**kwargs, "attention_mask": None}
        try:
            return inner(module, *args, **kwargs)
        finally:
            self._window, self._in_layer = None, False

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        """Causal attention of this rank's queries to all keys and values: shapes ``[B, H, length / cp, D]``."""
        self.calls += 1
        _check_call(query, key, attn_mask, dropout_p, is_causal)
        shard, width = self.shard, value.shape[-1]
        documents = None if shard is None else self._documents(shard)
        if shard is not None and documents is not None:
            # The ring computes whole blocks, of which a mask would need a kernel of its own. So keys and values of all
            # ranks are gathered as one tensor, and their gradients are summed where they come from.
            assert shard.order is not None
            both = gather(torch.cat([key, value], -1).transpose(1, 2), self.mesh, shard.length).transpose(1, 2)
            keys, values = both.split([key.shape[-1], width], -1)
            positions, order = shard.positions.to(query.device), shard.order.to(query.device)
            out = documents.attend(query, keys, values, positions, order, scale, self._window)
        else:
            is_latent = query.shape[-1] != width  # multi-head latent attention: zeros fill up what is shorter
            if is_latent:
                scale = query.shape[-1] ** -0.5 if scale is None else scale
                size = max(query.shape[-1], width)
                query, key, value = (functional.pad(part, (0, size - part.shape[-1])) for part in (query, key, value))
            out = self._round(query, key, value, is_causal, scale)
            out = out[..., :width] if is_latent else out
        if out.requires_grad:
            out.register_hook(self._check_open)
        return out

    def _documents(self, shard: SequenceShard) -> Documents | None:
        if shard.has_windows and not self._in_layer:
            raise ConfigurationError(
                f"the model has windows (sliding_window) that are shorter than sequences of {shard.length} positions, "
                "and calls scaled_dot_product_attention without saying so, so each token would attend to all before "
                "it. Use shorter sequences, or cp_size=1."
            )
        documents = shard.documents or shard.undivided
        if documents is None and self._window is not None:
            documents = shard.windowed or Documents(shard.positions.new_zeros(1, shard.length))
            shard.windowed = documents
        return documents

    def _round(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float | None
    ) -> torch.Tensor:
        if not has_ring_kernels(query.device.type) or _sums_are_padded(query):
            out: torch.Tensor = Ring.apply(query, key, value, self.mesh.get_group(), is_causal, scale)
            return out
        from torch.nn.attention import SDPBackend, sdpa_kernel

        key, value = repeat_heads(key, query), repeat_heads(value, query)
        # Only the kernels that the ring supports: others would attend to this rank's shard, without an error.
        unknown = {"ERROR", "MATH", "OVERRIDEABLE"}
        with sdpa_kernel([backend for name, backend in SDPBackend.__members__.items() if name not in unknown]):
            return self.inner(query, key, value, is_causal=is_causal, scale=scale)

    def _check_open(self, gradient: torch.Tensor) -> None:
        if self.closed:
            raise ConfigurationError(
                "backward was called after the block of maybe_context_parallel, but it sends keys and values too. Call "
                "accelerator.backward(loss) inside the block."
            )


def _check_call(
    query: torch.Tensor, key: torch.Tensor, attn_mask: torch.Tensor | None, dropout_p: float, is_causal: bool
) -> None:
    advice = "Train this model with cp_size=1, or with sp_size, which splits the heads instead."
    if attn_mask is not None:
        compiled = " Transformers makes one inside a compiled model: compile its blocks only, with "
        compiled += "TorchDynamoPlugin(backend=..., use_regional_compilation=True)."
        raise ConfigurationError(
            f"scaled_dot_product_attention got a mask of shape {tuple(attn_mask.shape)} with split sequences; ring "
            "attention is causal and has no mask. Pad at the end, and leave attention_mask out."
            f"{compiled if 'torch._dynamo' in sys.modules else ''} {advice}"
        )
    if not is_causal or query.shape[2] != key.shape[2]:
        raise ConfigurationError(
            f"scaled_dot_product_attention got is_causal={is_causal} with {query.shape[2]} queries and {key.shape[2]} "
            f"keys with split sequences; ring attention is causal self-attention. {advice}"
        )
    if dropout_p:
        raise ConfigurationError(
            f"scaled_dot_product_attention got dropout_p={dropout_p} with split sequences; ring attention has no "
            "dropout. Set the model's attention dropout to 0 (attention_dropout, attn_pdrop)."
        )


def _sums_are_padded(query: torch.Tensor) -> bool:
    """Return True if the fused kernel for this dtype returns sums for more queries than it is given.

    The memory-efficient one, which float32 takes, pads them to a multiple of 32, and torch's ring cannot merge these
    with others. It computes a rank's part of a sequence, and halves of it.
    """
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else query.dtype
    return dtype not in (torch.float16, torch.bfloat16) and query.shape[-2] % 64 != 0


@contextmanager
def ring_attention(mesh: DeviceMesh) -> Iterator[RingAttention]:
    """Replace ``torch.nn.functional.scaled_dot_product_attention``, within torch's own ``context_parallel``."""
    inner = functional.scaled_dot_product_attention
    ring = RingAttention(mesh, inner)
    # Compiled models call it too, and must not compile it. (Importing the compiler takes half a second.)
    compiles = "torch._dynamo" in sys.modules
    functional.scaled_dot_product_attention = torch.compiler.disable(ring.__call__) if compiles else ring
    layers = getattr(sys.modules.get("transformers.modeling_utils"), "ALL_ATTENTION_FUNCTIONS", {})
    layer = layers.get("sdpa")
    if layer is not None:
        call = partial(ring.layer, layer)
        layers["sdpa"] = torch.compiler.disable(call) if compiles else call
    try:
        yield ring
    finally:
        functional.scaled_dot_product_attention = inner
        if layer is not None:
            layers["sdpa"] = layer
        ring.closed = True


class ContextParallel:
    """Splits sequences over the ranks of one mesh axis, with torch's ``context_parallel``."""

    def __init__(self, mesh: DeviceMesh, settings: TorchContextParallelConfig) -> None:
        self.mesh = mesh
        self.settings = settings
        self.shard: SequenceShard | None = None
        self._left_by_work = False  # whether the last block split sequences by the work of their documents
        self._called = ""
        self._warned = False

    def prepare_model(self, model: nn.Module) -> SequenceCalls:
        return SequenceCalls(model, "sdpa", self._shard_of)

    def _shard_of(self, model: nn.Module, passed: list[torch.Tensor]) -> SequenceShard | None:
        if self.shard is not None:
            self._called = type(model).__name__
        return self.shard

    @contextmanager
    def block(
        self,
        buffers: Sequence[torch.Tensor] | None,
        seq_dims: Sequence[int] | None,
        no_restore: set[torch.Tensor] | None,
    ) -> Iterator[None]:
        """Shard the buffers along their sequences, and compute attention over full ones."""
        dims = self._check_buffers(buffers, seq_dims, no_restore)
        buffers = buffers or ()
        kept = {id(tensor) for tensor in no_restore or ()}
        full = [tensor.data for tensor in buffers]
        length, size = full[0].shape[dims[0]], self.mesh.size()
        documents: Documents | None = None  # that positions among the buffers tell apart, if their work is balanced
        if self.settings.cp_balance == "documents":
            whole = (tensor for tensor, dim in zip(full, dims, strict=True) if dim == tensor.ndim - 1)
            documents = next((Documents.of_positions(one) for one in whole if are_packed_positions(one)), None)
        self._left_by_work = documents is not None
        if documents is not None:
            order = documents.split_evenly(size, FLEX_BLOCK if has_ring_kernels(full[0].device.type) else 1)
            positions = order[self.mesh.get_local_rank()].to(full[0].device)
            shards = [tensor.index_select(dim, positions) for tensor, dim in zip(full, dims, strict=True)]
            context: AbstractContextManager[RingAttention] = ring_attention(self.mesh)
        else:
            order = torch.stack([positions_of(rank, size, length) for rank in range(size)])
            positions = torch.arange(length, device=full[0].device)
            # Torch shards in place, in the memory of the tensor, of which another tensor may be a view: it gets copies.
            shards = [tensor.clone(memory_format=torch.contiguous_format) for tensor in full]
            context = self._context([positions, *shards], [0, *dims])
        with context as ring:
            for tensor, shard in zip(buffers, shards, strict=True):
                tensor.data = shard.clone()
            del shards
            self.shard, self._called = _shard_of_buffers(buffers, full, dims, positions, size), ""
            self.shard.order = order.flatten()
            if documents is not None:
                # The buffer may be something else than positions: only a call says whether there are documents.
                self.shard.undivided = Documents(positions.new_zeros(1, length))
            ring.shard = self.shard
            try:
                yield
                if self._called and not ring.calls and not self._warned:
                    self._warned = True
                    logger.warning(
                        "%s has not called torch.nn.functional.scaled_dot_product_attention in a block of "
                        "maybe_context_parallel. If it computes attention in another way, each rank attended to its "
                        "own shard of the sequences only.",
                        self._called,
                        main_process_only=True,
                    )
            finally:
                self.shard = None
                for tensor, data in zip(buffers, full, strict=True):
                    if id(tensor) not in kept:
                        tensor.data = data

    @contextmanager
    def _context(self, shards: list[torch.Tensor], seq_dims: list[int]) -> Iterator[RingAttention]:
        try:
            from torch.distributed.tensor.experimental import context_parallel

            set_rotate_method(str(self.settings.cp_comm_strategy))
        except ImportError as error:
            raise ConfigurationError(
                f"context parallelism needs torch 2.7 or newer, and this is {torch.__version__}. Upgrade torch, or "
                "set cp_size=1."
            ) from error
        context = context_parallel(self.mesh, buffers=shards, buffer_seq_dims=seq_dims, no_restore_buffers=set(shards))
        with context, ring_attention(self.mesh) as ring:
            yield ring

    def _check_buffers(
        self,
        buffers: Sequence[torch.Tensor] | None,
        seq_dims: Sequence[int] | None,
        no_restore: set[torch.Tensor] | None,
    ) -> list[int]:
        """Return the sequence dimension of each buffer, not negative."""
        if self.shard is not None:
            raise ConfigurationError(
                "maybe_context_parallel was entered within its own block. Use one block for forward and backward of a "
                "step."
            )
        if not buffers:
            raise ConfigurationError(
                "maybe_context_parallel got no buffers, so there is nothing to split. Pass "
                "buffers=[batch['input_ids'], batch['labels']] and buffer_seq_dims=[1, 1]."
            )
        if len(buffers) != len(seq_dims or ()):
            raise ConfigurationError(
                f"maybe_context_parallel got {len(buffers)} buffers and {len(seq_dims or ())} buffer_seq_dims. Pass "
                "one dimension for each."
            )
        ids = [id(tensor) for tensor in buffers]
        if len(set(ids)) != len(ids):
            raise ConfigurationError(
                "buffers holds the same tensor twice. Pass it once; labels=input_ids in the call is fine."
            )
        unknown = [tuple(tensor.shape) for tensor in no_restore or () if id(tensor) not in set(ids)]
        if unknown:
            raise ConfigurationError(
                f"no_restore_buffers has tensors (shapes {unknown}) that are not in buffers. Pass them in both."
            )
        dims = [_check_dim(tensor, dim) for tensor, dim in zip(buffers, seq_dims or (), strict=True)]
        lengths = [tensor.shape[dim] for tensor, dim in zip(buffers, dims, strict=True)]
        size = self.mesh.size()
        if len(set(lengths)) > 1:
            raise ConfigurationError(
                f"buffers have sequences of {lengths} positions, and must have one length. Pad or truncate them, or "
                "check buffer_seq_dims."
            )
        if lengths[0] % (2 * size):
            raise ConfigurationError(
                f"sequences of {lengths[0]} positions cannot be split over cp_size={size} ranks, each of which takes "
                f"two equal pieces. Pad them to a multiple of {2 * size}, for example with "
                f"pad_to_multiple_of={2 * size} in the collator."
            )
        return dims

    def unshard(self, tensor: torch.Tensor, seq_dim: int) -> torch.Tensor:
        """Return the full sequences, in order, on every rank of the axis, without a gradient."""
        if self.shard is None and self._left_by_work:
            raise ConfigurationError(
                "sequences were split by the work of their documents, which differs from batch to batch, so shards can "
                "be put together within the block of maybe_context_parallel only. Call this inside of it, or set "
                "cp_balance='length'."
            )
        full, size = gather_shards(tensor, self.mesh, seq_dim), self.mesh.size()
        if self.shard is not None and self.shard.order is not None and self.shard.length == full.shape[seq_dim]:
            order = self.shard.order
        else:
            order = torch.cat([positions_of(rank, size, full.shape[seq_dim]) for rank in range(size)])
        return full.index_select(seq_dim, order.argsort().to(tensor.device))


def _shard_of_buffers(
    buffers: Sequence[torch.Tensor],
    full: Sequence[torch.Tensor],
    dims: Sequence[int],
    positions: torch.Tensor,
    size: int,
) -> SequenceShard:
    shard = SequenceShard(full[0].shape[dims[0]], positions, size)
    for tensor, whole, dim in zip(buffers, full, dims, strict=True):
        if tensor.is_floating_point() or tensor.is_complex():
            shard.tables.append(tensor)
            continue
        shard.tensors.append((tensor, whole))
        shard.counts.append((whole, dim))
    return shard


def positions_of(rank: int, size: int, length: int) -> torch.Tensor:
    """Return a rank's positions: a piece from the front and its mirror image, so that ranks have equal causal work."""
    pieces = torch.arange(length).chunk(2 * size)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


def _check_dim(tensor: torch.Tensor, dim: int) -> int:
    if tensor.requires_grad or isinstance(tensor, nn.Parameter):
        raise ConfigurationError(
            f"a buffer of shape {tuple(tensor.shape)} requires gradients, and buffers are sharded in place. Pass "
            "inputs, labels and tables of positions, not parameters."
        )
    if not -tensor.ndim <= dim < tensor.ndim:
        raise ConfigurationError(
            f"buffer_seq_dims has {dim} for a buffer of shape {tuple(tensor.shape)}. Pass the dimension of the "
            "sequence."
        )
    return dim % tensor.ndim
