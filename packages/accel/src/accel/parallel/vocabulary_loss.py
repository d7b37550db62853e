"""Cross entropy on logits that are sharded along the vocabulary, without gathering them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from accel_state.errors import ConfigurationError

from .sequence_inputs import IGNORED, shift_labels
from .tp_collectives import share_of


@dataclass(frozen=True)
class Vocabulary:
    """How a vocabulary is sharded: over the ranks of ``mesh``, or not at all."""

    size: int  # tokens of the whole vocabulary
    mesh: DeviceMesh | None = None

    @property
    def share(self) -> tuple[int, int]:
        """Offset and number of this rank's tokens."""
        return (0, self.size) if self.mesh is None else share_of(self.size, self.mesh)

    def all_reduce(self, x: torch.Tensor, operation: Any = dist.ReduceOp.SUM) -> torch.Tensor:
        if self.mesh is not None:
            dist.all_reduce(x, operation, group=self.mesh.get_group())
        return x


def causal_lm_loss(
    output: Any,
    labels: torch.Tensor,
    *,
    num_items: torch.Tensor | float | None = None,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    shifted: bool = False,
) -> torch.Tensor:
    """Return the mean cross entropy of next tokens in float32, in one process and where logits are sharded.

    With ``tp_size``, pass the output of the model and not its logits: reading ``output.logits`` gathers them.

    Args:
        output: of a causal language model, or logits ``[..., length, vocabulary]``, which may be a DTensor that is
            sharded along the vocabulary.
        labels: the tokens, ``[..., length]``.
        num_items: number of labels that the sum is divided by; None: those of this batch.
        ignore_index: the label that is left out.
        label_smoothing: share of the target that is spread over the vocabulary, as in ``torch.nn.CrossEntropyLoss``.
        z_loss: factor of the squared logarithm of the softmax's denominator, which is added for each label (PaLM uses
            1e-4).
        shifted: whether ``labels`` are already those of the next position.

    Raises:
        ConfigurationError: ``label_smoothing`` is not from 0 to 1, ``z_loss`` is negative, or a DTensor is sharded in
            another way.
    """
    check_settings(label_smoothing, z_loss)
    logits, vocabulary = shard_of(output)
    target = (labels if shifted else shift_labels(labels, ignore_index)).reshape(-1).to(logits.device)
    losses: torch.Tensor = _CrossEntropy.apply(
        logits.flatten(0, -2), target, vocabulary, ignore_index, label_smoothing, z_loss
    )
    return divide_by_items(losses.sum(), target, num_items, ignore_index)


def check_settings(label_smoothing: float, z_loss: float) -> None:
    """Raise a ConfigurationError for a value that no loss can have."""
    if not 0 <= label_smoothing <= 1:
        raise ConfigurationError(f"label_smoothing={label_smoothing} must be from 0 to 1.")
    if z_loss < 0:
        raise ConfigurationError(f"z_loss={z_loss} must not be negative.")


def divide_by_items(
    total: torch.Tensor, target: torch.Tensor, num_items: torch.Tensor | float | None, ignore_index: int
) -> torch.Tensor:
    """Return a sum of losses divided by a number of labels, or else by that of the batch."""
    count = (target != ignore_index).sum() if num_items is None else num_items
    return total / (count.to(total.device) if isinstance(count, torch.Tensor) else count)


def shard_of(output: Any) -> tuple[torch.Tensor, Vocabulary]:
    """Return this rank's logits of an output, and how they are sharded."""
    vocabulary = getattr(output, "accel_vocabulary", None)
    if vocabulary is not None:
        return dict(output.items())["logits"], vocabulary
    logits = output if isinstance(output, torch.Tensor) else output.logits
    size = logits.shape[-1]
    if not isinstance(logits, DTensor):
        return logits, Vocabulary(size)
    if logits.placements != (Shard(logits.ndim - 1),):
        raise ConfigurationError(
            f"logits are a DTensor with the placements {logits.placements}, and the loss is computed where they are "
            "sharded along the vocabulary: ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)."
        )
    return logits.to_local(), Vocabulary(size, logits.device_mesh)


class _CrossEntropy(torch.autograd.Function):
    """The loss of each label, in float32; 0 for those that are left out.

    With the logits x of a position, the label t, the smoothing e, the factor z and log Z = log sum exp x:
    (1 - e) (log Z - x_t) + e (log Z - mean x) + z (log Z)^2.
    """

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        vocabulary: Vocabulary,
        ignore_index: int,
        smoothing: float,
        z_loss: float,
    ) -> torch.Tensor:
        begin, size = vocabulary.share
        x = logits.float()
        highest = x.amax(-1) if size else x.new_full(target.shape, -torch.inf)
        highest = vocabulary.all_reduce(highest, dist.ReduceOp.MAX)
        is_here = (target >= begin) & (target < begin + size)
        own = torch.where(is_here, target - begin, 0)
        picked = x.gather(-1, own.unsqueeze(-1)).squeeze(-1) if size else x.new_zeros(target.shape)
        total = torch.zeros_like(highest) if not smoothing else x.sum(-1)
        sums = torch.stack([(x - highest.unsqueeze(-1)).exp().sum(-1), torch.where(is_here, picked, 0), total])
        exponentials, of_target, total = vocabulary.all_reduce(sums)
        log_z = highest + exponentials.log()
        losses = log_z - (1 - smoothing) * of_target + z_loss * log_z.square()
        if smoothing:
            losses = losses - smoothing * total / vocabulary.size
        kept = target != ignore_index
        ctx.save_for_backward(logits, log_z, own, is_here, kept)
        ctx.settings = vocabulary.size, size, smoothing, z_loss
        return torch.where(kept, losses, 0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        logits, log_z, own, is_here, kept = ctx.saved_tensors
        tokens, size, smoothing, z_loss = ctx.settings
        gradient = (logits.float() - log_z.unsqueeze(-1)).exp_()
        if z_loss:
            gradient *= (1 + 2 * z_loss * log_z).unsqueeze(-1)
        if smoothing:
            gradient -= smoothing / tokens
        if size:
            gradient.scatter_add_(-1, own.unsqueeze(-1), is_here.float().mul_(smoothing - 1).unsqueeze(-1))
        gradient *= torch.where(kept, gradients[0], 0).unsqueeze(-1)
        return gradient.to(logits.dtype), None, None, None, None, None
