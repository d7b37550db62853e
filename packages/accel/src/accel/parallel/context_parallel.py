"""Attention over sequences that ranks share: torch's ring, with kernels for the CPU too, and refusals of what it would
compute wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional

from accel_state import get_logger
from accel_state.errors import ConfigurationError

from .sequence_inputs import Call, Part

Kernel = Callable[..., Any]


def _repeat_heads(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    repeats = query.shape[1] // tensor.shape[1]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=1)


def _add_heads(gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The inverse of repeating: the gradient of a head is the sum of those of its copies."""
    return gradient if gradient.shape == like.shape else gradient.unflatten(1, (like.shape[1], -1)).sum(2)


def _forward_kernel(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **settings: Any) -> Any:
    # Heads are repeated here and not earlier, so that the ring carries every key and value once.
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return kernel(query, _repeat_heads(key, query), _repeat_heads(value, query), **settings)


def _backward_kernel(
    *, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **settings: Any
) -> tuple[torch.Tensor, ...]:
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    of_query, of_key, of_value = kernel(
        query=query, key=_repeat_heads(key, query), value=_repeat_heads(value, query), **settings
    )
    return of_query, _add_heads(of_key, key), _add_heads(of_value, value)


def _templates() -> tuple[Kernel, Kernel]:
    """Torch's ring, which it uses with kernels of accelerators only."""
    try:
        from torch.distributed.tensor.experimental._context_parallel import _attention
    except ImportError as error:
        raise ConfigurationError(
            f"context parallelism on the CPU needs torch 2.10 or newer, and this is {torch.__version__}. Upgrade "
            "torch, or set cp_size=1."
        ) from error
    return _attention._templated_ring_attention, _attention._templated_ring_attention_backward


class _RingOnCPU(torch.autograd.Function):
    """Torch's ring with the CPU's flash kernels: its own dispatcher does not know them."""

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
        ctx.group, ctx.settings = group, {"is_causal": is_causal, "dropout_p": 0.0, "scale": scale}
        out, logsumexp = forward(group, 2, _forward_kernel, query=query, key=key, value=value, **ctx.settings)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _, backward = _templates()
        query, key, value, out, logsumexp = ctx.saved_tensors
        found = backward(
            ctx.group,
            2,
            _backward_kernel,
            grad_out=gradients[0].contiguous(),
            grad_out_name="grad_out",
            query=query,
            key=key,
            value=value,
            out=out,
            logsumexp=logsumexp,
            **ctx.settings,
        )
        return *found, None, None, None


class RingAttention:
    """Stands for ``scaled_dot_product_attention`` while ranks share sequences.

    Args:
        mesh: the ranks that share a sequence.
        inner: the function that torch's ``context_parallel`` has put in its place.

    Attributes:
        calls: how often it has been called.
        closed: whether the block in which it may be used has ended.
    """

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
        """Causal attention of this rank's queries to the keys and values of the whole sequences: shapes ``[B, H, length
        / cp, D]``.

        Raises:
            ConfigurationError: a mask, dropout, or attention that is not causal.
        """
        self.calls += 1
        _check_call(query, key, attn_mask, dropout_p, is_causal)
        if query.device.type == "cpu":
            out: torch.Tensor = _RingOnCPU.apply(query, key, value, self.mesh.get_group(), is_causal, scale)
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
                "backward was called after the block of maybe_context_parallel: the backward pass sends keys and "
                "values around too, and "
                "needs the block. Call accelerator.backward(loss) inside of it."
            )


def _check_call(
    query: torch.Tensor, key: torch.Tensor, attn_mask: torch.Tensor | None, dropout_p: float, is_causal: bool
) -> None:
    advice = "Train this model with cp_size=1, or with sp_size, which shares the heads instead."
    if attn_mask is not None:
        raise ConfigurationError(
            f"scaled_dot_product_attention got a mask of shape {tuple(attn_mask.shape)} where ranks share sequences; "
            "the ring computes "
            f"causal attention without a mask. Leave padding at the end and attention_mask out. {advice}"
        )
    if not is_causal or query.shape[2] != key.shape[2]:
        raise ConfigurationError(
            f"scaled_dot_product_attention got is_causal={is_causal} with {query.shape[2]} queries and {key.shape[2]} "
            "keys where ranks "
            f"share sequences; the ring computes causal attention of a sequence to itself. {advice}"
        )
    if dropout_p:
        raise ConfigurationError(
            f"scaled_dot_product_attention got dropout_p={dropout_p} where ranks share sequences; the ring has no "
            "dropout. Set the model's "
            "attention dropout to 0 (attention_dropout, attn_pdrop)."
        )


@contextmanager
def _fused_kernels() -> Iterator[None]:
    """Only kernels that the ring knows: the others would attend to this rank's part, in silence."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    unknown = {"ERROR", "MATH", "OVERRIDEABLE"}
    with sdpa_kernel([backend for name, backend in SDPBackend.__members__.items() if name not in unknown]):
        yield


@contextmanager
def ring_attention(mesh: DeviceMesh) -> Iterator[RingAttention]:
    """Put ring attention in the place of ``torch.nn.functional.scaled_dot_product_attention``, inside torch's own
    ``context_parallel``.
    """
    inner = functional.scaled_dot_product_attention
    ring = RingAttention(mesh, inner)
    functional.scaled_dot_product_attention = ring
    try:
        yield ring
    finally:
        functional.scaled_dot_product_attention = inner
        ring.closed = True


logger = get_logger(__name__)

ROTATIONS = ("allgather", "alltoall")


class ContextParallel:
    """Shares sequences among the ranks of one mesh axis, with torch's ``context_parallel``.

    Args:
        mesh: the axis, of one dimension.
        rotation: how keys and values get around: "allgather" (all at once, and the memory of whole keys and values) or
            "alltoall" (one neighbour's at a time).

    Raises:
        ConfigurationError: a rotation that is not known.
    """

    def __init__(self, mesh: DeviceMesh, rotation: str = "allgather") -> None:
        if rotation not in ROTATIONS:
            raise ConfigurationError(
                f"cp_comm_strategy={rotation!r} is not one of {', '.join(ROTATIONS)}. Set it in "
                "TorchContextParallelConfig."
            )
        self.mesh = mesh
        self.rotation = rotation
        self.part: Part | None = None
        self._called = ""
        self._warned = False

    def adapt(self, model: nn.Module) -> None:
        """Have a model told, at each call in a block, which positions of the sequences it gets."""
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def _before_forward(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Any] | None:
        if self.part is None:
            return None
        self._called = type(model).__name__
        return Call(model, args, kwargs, self.part).fit()

    def _warn_without_attention(self, ring: RingAttention) -> None:
        if self._called and not ring.calls and not self._warned:
            self._warned = True
            logger.warning(
                "%s has not called torch.nn.functional.scaled_dot_product_attention in a block of "
                "maybe_context_parallel. If it computes "
                "attention in another way, each rank attended to its own part of the sequences only.",
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
        """Cut the buffers to this rank's part of the sequences, and compute attention over whole ones.

        Args:
            buffers: tensors with a dimension of whole sequences, equal on the ranks of the axis. In the block each
                holds this rank's part.
            seq_dims: that dimension of each.
            no_restore: those of them that keep the part after the block.

        Raises:
            ConfigurationError: no buffers, sequences that cannot be divided, a block within a block, or a torch without
                rings.
        """
        chosen = self._checked(buffers, seq_dims, no_restore)
        kept = {id(tensor) for tensor in no_restore or ()}
        wholes = [tensor.data for tensor, _ in chosen]
        length = wholes[0].shape[chosen[0][1]]
        positions = torch.arange(length, device=wholes[0].device)
        # Torch cuts in place, in the memory of the tensor. Another tensor may be a view of the same: it cuts copies.
        parts = [whole.clone(memory_format=torch.contiguous_format) for whole in wholes]
        with self._shared([positions, *parts], [0, *(dim for _, dim in chosen)]) as ring:
            for (tensor, _), part in zip(chosen, parts, strict=True):
                tensor.data = part.clone()
            del parts
            known = [
                (tensor, whole)
                for (tensor, _), whole in zip(chosen, wholes, strict=True)
                if not tensor.is_floating_point()
            ]
            self.part, self._called = Part(length, positions, self.mesh.size(), known), ""
            try:
                yield
                self._warn_without_attention(ring)
            finally:
                self.part = None
                for (tensor, _), whole in zip(chosen, wholes, strict=True):
                    if id(tensor) not in kept:
                        tensor.data = whole

    @contextmanager
    def _shared(self, parts: list[torch.Tensor], seq_dims: list[int]) -> Iterator[RingAttention]:
        try:
            from torch.distributed.tensor.experimental import context_parallel
            from torch.distributed.tensor.experimental._attention import set_rotate_method
        except ImportError as error:
            raise ConfigurationError(
                f"context parallelism needs torch 2.7 or newer, and this is {torch.__version__}. Upgrade torch, or "
                "set cp_size=1."
            ) from error
        set_rotate_method(self.rotation)
        shared = context_parallel(self.mesh, buffers=parts, buffer_seq_dims=seq_dims, no_restore_buffers=set(parts))
        with shared, ring_attention(self.mesh) as ring:
            yield ring

    def _checked(
        self,
        buffers: Sequence[torch.Tensor] | None,
        seq_dims: Sequence[int] | None,
        no_restore: set[torch.Tensor] | None,
    ) -> list[tuple[torch.Tensor, int]]:
        if self.part is not None:
            raise ConfigurationError(
                "maybe_context_parallel was entered within its own block. One block holds forward and backward of a "
                "step."
            )
        if not buffers:
            raise ConfigurationError(
                "maybe_context_parallel got no buffers, so there is nothing to share. Pass "
                "buffers=[batch['input_ids'], batch['labels']] "
                "and buffer_seq_dims=[1, 1]."
            )
        if len(buffers) != len(seq_dims or ()):
            raise ConfigurationError(
                f"maybe_context_parallel got {len(buffers)} buffers and {len(seq_dims or ())} buffer_seq_dims. Give "
                "one dimension for each."
            )
        ids = [id(tensor) for tensor in buffers]
        if len(set(ids)) != len(ids):
            raise ConfigurationError(
                "buffers holds the same tensor twice. Name it once; labels=input_ids in the call is fine."
            )
        strange = [tuple(tensor.shape) for tensor in no_restore or () if id(tensor) not in set(ids)]
        if strange:
            raise ConfigurationError(
                f"no_restore_buffers has tensors (shapes {strange}) that are not in buffers. Name them in both."
            )
        chosen = [
            (tensor, _dim_of(tensor, dim)) for tensor, dim in zip(buffers, cast("Sequence[int]", seq_dims), strict=True)
        ]
        self._check_lengths([tensor.shape[dim] for tensor, dim in chosen])
        return chosen

    def _check_lengths(self, lengths: list[int]) -> None:
        size = self.mesh.size()
        if len(set(lengths)) > 1:
            raise ConfigurationError(
                f"buffers have sequences of {lengths} positions, and a block has one length. Cut them equally, or "
                "check buffer_seq_dims."
            )
        if lengths[0] % (2 * size):
            raise ConfigurationError(
                f"sequences of {lengths[0]} positions cannot be shared by cp_size={size} ranks, each of which takes "
                "two equal pieces. "
                f"Pad them to a multiple of {2 * size}, for example with pad_to_multiple_of={2 * size} in the collator."
            )

    def unshard(self, tensor: torch.Tensor, seq_dim: int) -> torch.Tensor:
        """Whole sequences again, in order, on every rank of the axis; without a gradient.

        Args:
            tensor: this rank's part, for example logits ``[B, length / cp, vocabulary]``.
            seq_dim: the dimension of the sequence.
        """
        own = tensor.detach().contiguous()
        parts = [torch.empty_like(own) for _ in range(self.mesh.size())]
        dist.all_gather(parts, own, group=self.mesh.get_group())
        order = torch.cat(
            [
                positions_of(rank, self.mesh.size(), own.shape[seq_dim] * self.mesh.size())
                for rank in range(self.mesh.size())
            ]
        )
        return torch.cat(parts, dim=seq_dim).index_select(seq_dim, order.argsort().to(tensor.device))


def positions_of(rank: int, size: int, length: int) -> torch.Tensor:
    """The positions of a sequence that a rank gets: a piece from the front and its mirror image, so that causal work is
    equal.
    """
    pieces = torch.arange(length).chunk(2 * size)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


def _dim_of(tensor: torch.Tensor, dim: int) -> int:
    if tensor.requires_grad or isinstance(tensor, nn.Parameter):
        raise ConfigurationError(
            f"a buffer of shape {tuple(tensor.shape)} requires gradients, and buffers are cut in place. Name inputs, "
            "labels and tables of "
            "positions; parameters stay whole."
        )
    if not -tensor.ndim <= dim < tensor.ndim:
        raise ConfigurationError(
            f"buffer_seq_dims has {dim} for a buffer of shape {tuple(tensor.shape)}. Give the dimension of the "
            "sequence."
        )
    return dim % tensor.ndim
