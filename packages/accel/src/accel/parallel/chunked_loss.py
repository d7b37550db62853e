"""An output layer and its cross entropy together, in chunks of tokens, so that all logits never exist at once."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from accel_state.errors import ConfigurationError

from .sequence_inputs import IGNORED, shift_labels
from .vocabulary_loss import check_settings, divide_by_items

_CHUNK = 2048


def chunked_causal_lm_loss(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    labels: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    chunk_size: int = _CHUNK,
    num_items: torch.Tensor | float | None = None,
    ignore_index: int = IGNORED,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    shifted: bool = False,
) -> torch.Tensor:
    """Return :func:`causal_lm_loss` of ``hidden @ weight.T + bias``, for vocabularies whose logits do not fit.

    Call it in the model's ``forward``, where DDP and FSDP see its weights. It computes the gradients in the forward
    pass, chunk by chunk, with the three products of the plain loss, and none twice. It holds the gradient of the
    weights in float32 from then on.

    Args:
        hidden: what the output layer gets, ``[..., length, D]``.
        weight: of the output layer, ``[vocabulary, D]``.
        labels: the tokens, ``[..., length]``. Of a part of a sequence (``cp_size``, ``sp_size``), shift them before it
            is split, and pass ``shifted=True``.
        bias: of the output layer, ``[vocabulary]``.
        chunk_size: tokens whose logits exist at once.
        num_items: number of labels that the sum is divided by; None: those of this batch.
        ignore_index: the label that is left out.
        label_smoothing: share of the target that is spread over the vocabulary, as in ``torch.nn.CrossEntropyLoss``.
        z_loss: factor of the squared logarithm of the softmax's denominator, which is added for each label.
        shifted: whether ``labels`` are already those of the next position.

    Raises:
        ConfigurationError: a value or a shape is not as described, or the weights are sharded.
    """
    check_settings(label_smoothing, z_loss)
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ConfigurationError(f"chunk_size={chunk_size!r} must be a positive number of tokens.")
    if isinstance(weight, DTensor) or isinstance(hidden, DTensor):
        raise ConfigurationError(
            "the weights of the output layer are sharded here. Call chunked_causal_lm_loss in the forward of the model "
            "that is prepared, where FSDP has gathered them. With tp_size, use causal_lm_loss on sharded logits."
        )
    if hidden.shape[:-1] != labels.shape or weight.shape[1:] != hidden.shape[-1:]:
        raise ConfigurationError(
            f"hidden {list(hidden.shape)}, weight {list(weight.shape)} and labels {list(labels.shape)} do not belong "
            "together. Pass [..., length, D], [vocabulary, D] and [..., length]."
        )
    target = (labels if shifted else shift_labels(labels, ignore_index)).reshape(-1).to(hidden.device)
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        hidden = hidden.to(torch.get_autocast_dtype(kind))
    if not torch.is_grad_enabled():  # which the function is not told, and would compute gradients
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    total: torch.Tensor = _ChunkedLoss.apply(
        hidden.flatten(0, -2), weight, bias, target, chunk_size, ignore_index, label_smoothing, z_loss
    )
    return divide_by_items(total, target, num_items, ignore_index)


class _ChunkedLoss(torch.autograd.Function):
    """The sum of the losses in float32, and the gradients of this sum.

    They are scaled in the backward pass only: in float16, those of a mean would be too small.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        target: torch.Tensor,
        chunk_size: int,
        ignore_index: int,
        smoothing: float,
        z_loss: float,
    ) -> torch.Tensor:
        wants_hidden, wants_weight, wants_bias, *_ = ctx.needs_input_grad
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        of_bias = torch.zeros_like(bias, dtype=torch.float32) if wants_bias and bias is not None else None
        matrix, total = weight.to(hidden.dtype), hidden.new_zeros((), dtype=torch.float32)
        for begin in range(0, len(target), chunk_size):
            rows = slice(begin, begin + chunk_size)
            logits = hidden[rows] @ matrix.t()
            if bias is not None:
                logits = logits + bias.to(logits.dtype)
            chunk = _Chunk(logits.float(), target[rows], ignore_index, smoothing, z_loss)
            del logits
            total += chunk.loss()
            if of_hidden is None and of_weight is None and of_bias is None:
                del chunk  # before the logits of the next chunk
                continue
            gradient, kept = chunk.gradient(), chunk.kept.unsqueeze(-1)
            given = gradient.to(hidden.dtype)
            if of_hidden is not None:
                of_hidden[rows] = torch.where(kept, given @ matrix, 0)
            if of_weight is not None:
                of_weight += given.t() @ torch.where(kept, hidden[rows], 0)
            if of_bias is not None:
                of_bias += chunk.kept.to(gradient.dtype) @ gradient
            del chunk, gradient, given
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        scaled = [
            None if gradient is None else (gradient * gradients[0]).to(dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*scaled, None, None, None, None, None)


class _Chunk:
    """The loss of some tokens, and its gradient, from one reading of their logits ``[tokens, vocabulary]``.

    With the logits x of a position, the label t, the smoothing e, the factor z and log Z = log sum exp x, a loss is
    (1 - e) (log Z - x_t) + e (log Z - mean x) + z (log Z)^2.
    """

    def __init__(
        self, logits: torch.Tensor, target: torch.Tensor, ignore_index: int, smoothing: float, z_loss: float
    ) -> None:
        self.kept = target != ignore_index
        self._smoothing, self._z_loss = smoothing, z_loss
        self._label = torch.where(self.kept, target, 0).unsqueeze(-1)
        self._log_p = logits.log_softmax(-1)  # torch reads and writes the logits once for it, and several for log Z
        # Of the first word for positions that are left out.
        self._log_z = (logits.gather(-1, self._label) - self._log_p.gather(-1, self._label)) if z_loss else None

    def loss(self) -> torch.Tensor:
        """Return the sum of the losses."""
        losses = (self._smoothing - 1) * self._log_p.gather(-1, self._label)
        if self._smoothing:
            losses = losses - self._smoothing * self._log_p.mean(-1, keepdim=True)
        if self._log_z is not None:
            losses = losses + self._z_loss * self._log_z.square()
        return torch.where(self.kept, losses.squeeze(-1), 0).sum()

    def gradient(self) -> torch.Tensor:
        """Return a loss's gradient with respect to its logits, in the memory of what the loss needs."""
        gradient = self._log_p.exp_()
        if self._log_z is not None:
            gradient *= 1 + 2 * self._z_loss * self._log_z
        if self._smoothing:
            gradient -= self._smoothing / gradient.shape[-1]
        return gradient.scatter_add_(-1, self._label, gradient.new_full(self._label.shape, self._smoothing - 1))
