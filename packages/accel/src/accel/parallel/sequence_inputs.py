"""What a causal language model must be told when a rank has a part of each sequence: positions, labels, and what a loss
is a mean of.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from accel_state.errors import ConfigurationError

IGNORED = -100


def shift_labels(labels: torch.Tensor, ignore_index: int = IGNORED) -> torch.Tensor:
    """The label of each position's prediction, which is the next token: ``[..., length]``, moved by one; the last has
    none.

    Do it before sequences are split: a part's last position predicts the first token of another part.

    Args:
        labels: the tokens, ``[..., length]``.
        ignore_index: the label that losses leave out.
    """
    return torch.cat([labels[..., 1:], torch.full_like(labels[..., :1], ignore_index)], dim=-1)


@dataclass
class Part:
    """This rank's part of the sequences of a batch.

    Attributes:
        length: positions of a whole sequence.
        positions: those of them that this rank has, ``[length / size]``.
        size: number of ranks that share a sequence.
        wholes: tensors that have been cut, each with what it was.
    """

    length: int
    positions: torch.Tensor
    size: int
    wholes: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def whole_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What a tensor was before it was cut; itself if it has the whole length; None if that is not known."""
        if tensor.shape[-1] == self.length:
            return tensor
        return next((whole for part, whole in self.wholes if part is tensor), None)

    def cut(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """This rank's part of a whole tensor."""
        return tensor.index_select(dim, self.positions.to(tensor.device))


class Call:
    """A call of a model on parts of sequences, to be put right.

    Args:
        model: the model.
        args: positional arguments of its forward.
        kwargs: the others.
        part: what this rank has of the sequences.
        attention: the implementation of attention that models of Transformers must use.
    """

    def __init__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], part: Part, attention: str = "sdpa"
    ) -> None:
        self.attention = attention
        signature = inspect.signature(model.forward)
        self.model = model
        self.part = part
        self.names = set(signature.parameters)
        self.takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())
        bound = signature.bind_partial(*args, **kwargs)
        extra = next(
            (one.name for one in signature.parameters.values() if one.kind is inspect.Parameter.VAR_KEYWORD), None
        )
        self.rest = next(
            (one.name for one in signature.parameters.values() if one.kind is inspect.Parameter.VAR_POSITIONAL), None
        )
        self.given = {name: value for name, value in bound.arguments.items() if name != extra}
        self.given.update(bound.arguments.get(extra, {}) if extra else {})

    def fit(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The arguments to call the model with; None if they may stay as they are.

        Raises:
            ConfigurationError: the model or an argument cannot be used on parts of sequences.
        """
        if self.rest is not None:
            return None
        config = getattr(self.model, "config", None)
        if hasattr(config, "_attn_implementation"):
            check_attention(config, self.part.length, self.attention)
        tokens = self._check_tokens()
        if tokens is None:
            return None
        if "use_cache" in self.names:
            # Of keys of a part nothing can be generated, and a block that is computed twice would add them twice.
            self.given["use_cache"] = False
        self._set_positions(tokens)
        self._set_mask(tokens)
        if hasattr(self.model, "loss_function"):
            self._set_labels()
        return (), self.given

    def _get(self, name: str) -> torch.Tensor | None:
        value = self.given.get(name)
        return value if isinstance(value, torch.Tensor) else None

    def _check_tokens(self) -> torch.Tensor | None:
        mine = len(self.part.positions)
        for name in ("input_ids", "inputs_embeds"):
            tokens = self._get(name)
            if tokens is not None and tokens.ndim > 1 and tokens.shape[1] != mine:
                raise ConfigurationError(
                    f"{name} has {tokens.shape[1]} positions, and this rank has {mine} of the {self.part.length} of "
                    "each sequence. Name "
                    "the tensor in buffers, with its sequence dimension in buffer_seq_dims."
                )
            if tokens is not None:
                return tokens
        return None

    def _set_positions(self, tokens: torch.Tensor) -> None:
        if "position_ids" in self.names and self.given.get("position_ids") is None:
            self.given["position_ids"] = self.part.positions.to(tokens.device).expand(tokens.shape[0], -1)

    def _set_mask(self, tokens: torch.Tensor) -> None:
        if "attention_mask" not in self.names:
            return
        mask = self._get("attention_mask")
        if mask is not None:
            whole = self.part.whole_of(mask)
            if whole is None or whole.ndim != 2 or bool((whole[:, 1:] > whole[:, :-1]).any()):
                raise ConfigurationError(
                    f"attention_mask of shape {tuple(mask.shape)} hides more than padding at the end (or was not cut "
                    "from a buffer). "
                    "Where ranks share sequences, attention is causal and has no mask: pad on the right, and leave "
                    "attention_mask out."
                )
        # Ones say that nothing is hidden. Without them Transformers takes positions with gaps for several sequences in
        # one.
        self.given["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)

    def _set_labels(self) -> None:
        labels, shifted = self._get("labels"), self._get("shift_labels")
        if labels is None:
            return
        if labels.ndim < 2:
            raise ConfigurationError(
                f"labels of shape {tuple(labels.shape)} are one for each sequence, and no rank has a whole sequence. "
                "Train models that "
                "predict tokens, or use cp_size=1 and sp_size=1."
            )
        # Transformers takes the causal loss where it knows no other.
        if getattr(self.model, "loss_type", None) not in (None, "ForCausalLM"):
            return
        whole = self.part.whole_of(labels if shifted is None else shifted)
        if shifted is None:
            if whole is None:
                raise ConfigurationError(
                    "labels were cut into parts, and the model would shift each part by itself, which loses the label "
                    "at its end. Name the "
                    "very tensor in buffers, or pass shift_labels, made with accel.utils.shift_labels before the cut."
                )
            whole = shift_labels(whole)
            self.given["shift_labels"] = self.part.cut(whole)
            self.given["labels"] = self.given["shift_labels"]
        if whole is not None and self.given.get("num_items_in_batch") is None:
            # Gradients are averaged over ranks: with each a sum over this, the average is the mean over all labels of
            # the batch.
            self.given["num_items_in_batch"] = (whole != IGNORED).sum().clamp(min=1) / self.part.size


def check_attention(config: Any, length: int, allowed: str) -> None:
    """Refuse a Transformers model whose attention would look at one rank's part only.

    Raises:
        ConfigurationError: another implementation than the allowed one, or a window of attention that is shorter than
            sequences.
    """
    if config._attn_implementation != allowed:
        raise ConfigurationError(
            f"attn_implementation={config._attn_implementation!r} attends to this rank's part of each sequence only. "
            "Load the model with "
            f"attn_implementation={allowed!r} (or model.set_attn_implementation({allowed!r}))."
        )
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if window is not None and window < length and (kinds is None or "sliding_attention" in kinds):
        raise ConfigurationError(
            f"sliding_window={window} is shorter than sequences of {length} positions, and shared ones are attended "
            "to as a whole. Use "
            f"sequences of at most {window}, or cp_size=1 and sp_size=1."
        )
