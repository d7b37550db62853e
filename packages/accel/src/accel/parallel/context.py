"""Context parallelism: ranks of the cp axis share each sequence, and pass keys and values around (ring attention)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from accel_state import get_logger
from accel_state.errors import ConfigurationError

from .causal import Call, Part
from .ring import RingAttention, ring_attention

logger = get_logger(__name__)

ROTATIONS = ("allgather", "alltoall")


class ContextParallel:
    """Shares sequences among the ranks of one mesh axis, with torch's ``context_parallel``.

    Args:
        mesh: the axis, of one dimension.
        rotation: how keys and values get around: "allgather" (all at once, and the memory of whole keys and values) or "alltoall" (one
            neighbour's at a time).

    Raises:
        ConfigurationError: a rotation that is not known.
    """

    def __init__(self, mesh: DeviceMesh, rotation: str = "allgather") -> None:
        if rotation not in ROTATIONS:
            raise ConfigurationError(
                f"cp_comm_strategy={rotation!r} is not one of {', '.join(ROTATIONS)}. Set it in TorchContextParallelConfig."
            )
        self.mesh = mesh
        self.rotation = rotation
        self.part: Part | None = None
        self._called = ""
        self._warned = False

    def adapt(self, model: nn.Module) -> None:
        """Have a model told, at each call in a block, which positions of the sequences it gets."""
        model.register_forward_pre_hook(self._before_forward, with_kwargs=True)

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        if self.part is None:
            return None
        self._called = type(model).__name__
        return Call(model, args, kwargs, self.part).fit()

    def _warn_without_attention(self, ring: RingAttention) -> None:
        if self._called and not ring.calls and not self._warned:
            self._warned = True
            logger.warning(
                "%s has not called torch.nn.functional.scaled_dot_product_attention in a block of maybe_context_parallel. If it computes "
                "attention in another way, each rank attended to its own part of the sequences only.",
                self._called,
                main_process_only=True,
            )

    @contextmanager
    def block(
        self, buffers: Sequence[torch.Tensor] | None, seq_dims: Sequence[int] | None, no_restore: set[torch.Tensor] | None
    ) -> Iterator[None]:
        """Cut the buffers to this rank's part of the sequences, and compute attention over whole ones.

        Args:
            buffers: tensors with a dimension of whole sequences, equal on the ranks of the axis. In the block each holds this rank's part.
            seq_dims: that dimension of each.
            no_restore: those of them that keep the part after the block.

        Raises:
            ConfigurationError: no buffers, sequences that cannot be divided, a block within a block, or a torch without rings.
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
            known = [(tensor, whole) for (tensor, _), whole in zip(chosen, wholes, strict=True) if not tensor.is_floating_point()]
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
                f"context parallelism needs torch 2.7 or newer, and this is {torch.__version__}. Upgrade torch, or set cp_size=1."
            ) from error
        set_rotate_method(self.rotation)
        shared = context_parallel(self.mesh, buffers=parts, buffer_seq_dims=seq_dims, no_restore_buffers=set(parts))
        with shared, ring_attention(self.mesh) as ring:
            yield ring

    def _checked(
        self, buffers: Sequence[torch.Tensor] | None, seq_dims: Sequence[int] | None, no_restore: set[torch.Tensor] | None
    ) -> list[tuple[torch.Tensor, int]]:
        if self.part is not None:
            raise ConfigurationError(
                "maybe_context_parallel was entered within its own block. One block holds forward and backward of a step."
            )
        if not buffers:
            raise ConfigurationError(
                "maybe_context_parallel got no buffers, so there is nothing to share. Pass buffers=[batch['input_ids'], batch['labels']] "
                "and buffer_seq_dims=[1, 1]."
            )
        if len(buffers) != len(seq_dims or ()):
            raise ConfigurationError(
                f"maybe_context_parallel got {len(buffers)} buffers and {len(seq_dims or ())} buffer_seq_dims. Give one dimension for each."
            )
        ids = [id(tensor) for tensor in buffers]
        if len(set(ids)) != len(ids):
            raise ConfigurationError("buffers holds the same tensor twice. Name it once; labels=input_ids in the call is fine.")
        strange = [tuple(tensor.shape) for tensor in no_restore or () if id(tensor) not in set(ids)]
        if strange:
            raise ConfigurationError(f"no_restore_buffers has tensors (shapes {strange}) that are not in buffers. Name them in both.")
        chosen = [(tensor, _dim_of(tensor, dim)) for tensor, dim in zip(buffers, cast("Sequence[int]", seq_dims), strict=True)]
        self._check_lengths([tensor.shape[dim] for tensor, dim in chosen])
        return chosen

    def _check_lengths(self, lengths: list[int]) -> None:
        size = self.mesh.size()
        if len(set(lengths)) > 1:
            raise ConfigurationError(
                f"buffers have sequences of {lengths} positions, and a block has one length. Cut them equally, or check buffer_seq_dims."
            )
        if lengths[0] % (2 * size):
            raise ConfigurationError(
                f"sequences of {lengths[0]} positions cannot be shared by cp_size={size} ranks, each of which takes two equal pieces. "
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
        order = torch.cat([positions_of(rank, self.mesh.size(), own.shape[seq_dim] * self.mesh.size()) for rank in range(self.mesh.size())])
        return torch.cat(parts, dim=seq_dim).index_select(seq_dim, order.argsort().to(tensor.device))


def positions_of(rank: int, size: int, length: int) -> torch.Tensor:
    """The positions of a sequence that a rank gets: a piece from the front and its mirror image, so that causal work is equal."""
    pieces = torch.arange(length).chunk(2 * size)
    return torch.cat([pieces[rank], pieces[2 * size - 1 - rank]])


def _dim_of(tensor: torch.Tensor, dim: int) -> int:
    if tensor.requires_grad or isinstance(tensor, nn.Parameter):
        raise ConfigurationError(
            f"a buffer of shape {tuple(tensor.shape)} requires gradients, and buffers are cut in place. Name inputs, labels and tables of "
            "positions; parameters stay whole."
        )
    if not -tensor.ndim <= dim < tensor.ndim:
        raise ConfigurationError(
            f"buffer_seq_dims has {dim} for a buffer of shape {tuple(tensor.shape)}. Give the dimension of the sequence."
        )
    return dim % tensor.ndim
