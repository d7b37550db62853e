"""Context parallelism: torch's ring attention, with kernels for every device, and errors where it would be wrong."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from accel_state import get_logger
from accel_state.errors import ConfigurationError

from .._torch_compat import has_ring_kernels, ring_attention_templates, set_rotate_method
from .sequence_inputs import SequenceCalls, SequenceShard, gather_shards

logger = get_logger(__name__)

Kernel = Callable[..., Any]


def _repeat_heads(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    repeats = query.shape[1] // tensor.shape[1]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=1)


def _add_heads(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The gradient of a head that was repeated: the sum of the gradients of its copies."""
    return gradient if gradient.shape == like.shape else gradient.unflatten(1, (like.shape[1], -1)).sum(2)


def _cpu_forward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **settings: Any) -> Any:
    # Heads are repeated here, not earlier, so that the ring sends every key and value once.
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, _repeat_heads(key, query), _repeat_heads(value, query), **settings)


def _cpu_backward(
    *, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **settings: Any
) -> tuple[torch.Tensor, ...]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    of_query, of_key, of_value = kernel(
        query=query, key=_repeat_heads(key, query), value=_repeat_heads(value, query), **settings
    )
    return of_query, _add_heads(of_key, key), _add_heads(of_value, value)


def _scores(query: torch.Tensor, key: torch.Tensor, is_causal: bool, scale: float | None) -> torch.Tensor:
    """Scaled scores ``[B, H, queries, keys]`` in float32; queries and keys of a causal block are at the same places."""
    scores = query.float() @ _repeat_heads(key, query).float().mT
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if not is_causal:
        return scores
    return scores.masked_fill(torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1), float("-inf"))


def _plain_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool, scale: float | None, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention, and the logarithms of its sums, of products: for devices without a fused kernel."""
    scores = _scores(query, key, is_causal, scale)
    out = scores.softmax(-1) @ _repeat_heads(value, query).float()
    return out.to(query.dtype), scores.logsumexp(-1)


def _plain_backward(
    *,
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    is_causal: bool,
    scale: float | None,
    **_: Any,
) -> tuple[torch.Tensor, ...]:
    """Gradients of a block of which the whole row's sums are known: Dao et al., FlashAttention, appendix B.2."""
    gradient = grad_out.float()
    weights = (_scores(query, key, is_causal, scale) - logsumexp.unsqueeze(-1)).exp()
    of_value = weights.mT @ gradient
    of_weights = gradient @ _repeat_heads(value, query).float().mT
    of_scores = weights * (of_weights - (gradient * out.float()).sum(-1, keepdim=True))
    of_scores = of_scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    of_query = of_scores @ _repeat_heads(key, query).float()
    of_key = of_scores.mT @ query.float()
    return (
        of_query.to(query.dtype),
        _add_heads(of_key, key).to(key.dtype),
        _add_heads(of_value, value).to(value.dtype),
    )


def _kernels(device_type: str) -> tuple[Kernel, Kernel]:
    return (_cpu_forward, _cpu_backward) if device_type == "cpu" else (_plain_forward, _plain_backward)


def _templates() -> tuple[Kernel, Kernel]:
    """Torch's ring, forward and backward, which torch itself uses with its fused kernels only."""
    try:
        return ring_attention_templates()
    except ImportError as error:
        raise ConfigurationError(
            "context parallelism on a device without torch's fused attention, such as the CPU, needs torch 2.10 or "
            f"newer, and this is {torch.__version__}. Upgrade torch, or set cp_size=1."
        ) from error


class _Ring(torch.autograd.Function):
    """Torch's ring with kernels that its own dispatcher lacks."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: Any,
        is_causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        forward, _ = _templates()
        kernel, _ = _kernels(query.device.type)
        ctx.group, ctx.settings = group, {"is_causal": is_causal, "dropout_p": 0.0, "scale": scale}
        out, logsumexp = forward(group, 2, kernel, query=query, key=key, value=value, **ctx.settings)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _, backward = _templates()
        query, key, value, out, logsumexp = ctx.saved_tensors
        gradients_of_inputs = backward(
            ctx.group,
            2,
            _kernels(query.device.type)[1],
            grad_out=gradients[0].contiguous(),
            grad_out_name="grad_out",
            query=query,
            key=key,
            value=value,
            out=out,
            logsumexp=logsumexp,
            **ctx.settings,
        )
        return *gradients_of_inputs, None, None, None


class RingAttention:
    """Replaces ``scaled_dot_product_attention`` while sequences are split."""

    def __init__(self, mesh: DeviceMesh, inner: Callable[..., torch.Tensor]) -> None:
        self.mesh = mesh
        self.inner = inner
        self.calls = 0
        self.closed = False

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
        if not has_ring_kernels(query.device.type):
            out: torch.Tensor = _Ring.apply(query, key, value, self.mesh.get_group(), is_causal, scale)
        else:
            key, value = _repeat_heads(key, query), _repeat_heads(value, query)
            with _fused_kernels():
                out = self.inner(query, key, value, is_causal=is_causal, scale=scale)
        if out.requires_grad:
            out.register_hook(self._check_open)
        return out

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


@contextmanager
def _fused_kernels() -> Iterator[None]:
    """Only the kernels that the ring supports: others would attend to this rank's shard, without an error."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    unknown = {"ERROR", "MATH", "OVERRIDEABLE"}
    with sdpa_kernel([backend for name, backend in SDPBackend.__members__.items() if name not in unknown]):
        yield


@contextmanager
def ring_attention(mesh: DeviceMesh) -> Iterator[RingAttention]:
    """Replace ``torch.nn.functional.scaled_dot_product_attention``, within torch's own ``context_parallel``."""
    inner = functional.scaled_dot_product_attention
    ring = RingAttention(mesh, inner)
    # Compiled models call it too, and must not compile it. (Importing the compiler takes half a second.)
    compiles = "torch._dynamo" in sys.modules
    functional.scaled_dot_product_attention = torch.compiler.disable(ring.__call__) if compiles else ring
    try:
        yield ring
    finally:
        functional.scaled_dot_product_attention = inner
        ring.closed = True


class ContextParallel:
    """Splits sequences over the ranks of one mesh axis, with torch's ``context_parallel``."""

    def __init__(self, mesh: DeviceMesh, rotation: str = "allgather") -> None:
        self.mesh = mesh
        self.rotation = rotation
        self.shard: SequenceShard | None = None
        self._called = ""
        self._warned = False

    def prepare_model(self, model: nn.Module) -> None:
        SequenceCalls(model, "sdpa", self._shard_of)

    def _shard_of(self, model: nn.Module, passed: list[torch.Tensor]) -> SequenceShard | None:
        if self.shard is not None:
            self._called = type(model).__name__
        return self.shard

    def _warn_without_attention(self, ring: RingAttention) -> None:
        if self._called and not ring.calls and not self._warned:
            self._warned = True
            logger.warning(
                "%s has not called torch.nn.functional.scaled_dot_product_attention in a block of "
                "maybe_context_parallel. If it computes attention in another way, each rank attended to its own shard "
                "of the sequences only.",
                self._called,
                main_process_only=True,
            )

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
        length = full[0].shape[dims[0]]
        positions = torch.arange(length, device=full[0].device)
        # Torch shards in place, in the memory of the tensor, of which another tensor may be a view: it gets copies.
        shards = [tensor.clone(memory_format=torch.contiguous_format) for tensor in full]
        with self._context([positions, *shards], [0, *dims]) as ring:
            for tensor, shard in zip(buffers, shards, strict=True):
                tensor.data = shard.clone()
            del shards
            self.shard, self._called = _shard_of_buffers(buffers, full, dims, positions, self.mesh.size()), ""
            try:
                yield
                self._warn_without_attention(ring)
            finally:
                self.shard = None
                for tensor, data in zip(buffers, full, strict=True):
                    if id(tensor) not in kept:
                        tensor.data = data

    @contextmanager
    def _context(self, shards: list[torch.Tensor], seq_dims: list[int]) -> Iterator[RingAttention]:
        try:
            from torch.distributed.tensor.experimental import context_parallel

            set_rotate_method(self.rotation)
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
        """The sequence dimension of each buffer, not negative."""
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
        self._check_lengths([tensor.shape[dim] for tensor, dim in zip(buffers, dims, strict=True)])
        return dims

    def _check_lengths(self, lengths: list[int]) -> None:
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

    def unshard(self, tensor: torch.Tensor, seq_dim: int) -> torch.Tensor:
        """The full sequences, in order, on every rank of the axis, without a gradient."""
        full, size = gather_shards(tensor, self.mesh, seq_dim), self.mesh.size()
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
    """The positions of a rank: a piece from the front and its mirror image, so that ranks have equal causal work."""
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
