"""Inputs of a causal language model on a shard of each sequence: positions, mask, labels and the token count."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakTensorKeyDictionary

from accel_state.errors import ConfigurationError

from .._torch_compat import FakeTensor
from ..core.unwrap import is_compiled_wrapper
from .attention_checks import BOUNDARIES, DOCUMENT_ARGUMENTS, check_attention, check_layers
from .documents import Documents
from .late_checks import LateChecks

IGNORED = -100

_PADDING: Any = WeakTensorKeyDictionary()
"""This rank's part of the mask that a call was made with, by the mask of ones that attention got in its place."""


def shift_labels(labels: torch.Tensor, ignore_index: int = IGNORED) -> torch.Tensor:
    """Return the label of each position's prediction, which is the next token: ``[..., length]``.

    The last position has none.

    Shift labels before sequences are split: a shard's last position predicts the first token of another shard.

    Args:
        labels: the tokens, ``[..., length]``.
        ignore_index: the label that losses leave out.
    """
    return torch.cat([labels[..., 1:], torch.full_like(labels[..., :1], ignore_index)], dim=-1)


def gather_shards(tensor: torch.Tensor, mesh: DeviceMesh, dim: int) -> torch.Tensor:
    """Return the shards of all ranks of an axis, concatenated along a dimension, without a gradient."""
    local = tensor.detach().contiguous()
    shards = [torch.empty_like(local) for _ in range(mesh.size())]
    dist.all_gather(shards, local, group=mesh.get_group())
    return torch.cat(shards, dim)


def padding_of(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return what a model's mask says about padding: of split sequences, the mask that the user passed."""
    return mask if mask is None else _PADDING.get(mask, mask)


@dataclass
class SequenceShard:
    """This rank's shard of the sequences of a batch."""

    length: int  # positions of a full sequence
    positions: torch.Tensor  # the positions that this rank has, ``[length / size]``
    size: int  # number of ranks that a sequence is split over
    # pairs of a sharded tensor and the full one
    tensors: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    mask: torch.Tensor | None = None  # of ones, which corrected calls pass on
    tables: list[torch.Tensor] = field(default_factory=list)  # shards that may be tables of positions
    # buffers that are positions, if they count up along a dimension
    counts: list[tuple[torch.Tensor, int]] = field(default_factory=list)
    # the positions of all ranks, one rank after the other, ``[length]``; None if they are in order
    order: torch.Tensor | None = None
    documents: Documents | None = None  # that are packed into the sequences, once a call has said so
    # the name under which calls pass them on to attention; None if attention takes them from here
    documents_argument: str | None = None
    # one document, for calls without any, where ranks have other positions than the ring's kernels need
    undivided: Documents | None = None
    windowed: Documents | None = None  # one document, for layers that attend to windows of it
    has_windows: bool = False  # whether some layers do
    counted: torch.Tensor | None = None  # positions that were made here, so that they need no checks

    def pack(self, documents: Documents) -> None:
        """Attend within documents from here on.

        Raises:
            ConfigurationError: other documents have been set. Attention that is computed again in the backward pass of
                an earlier call would take them for its own.
        """
        known = self.documents
        if known is not None and not (known.ids.shape == documents.ids.shape and known.ids.equal(documents.ids)):
            raise ConfigurationError(
                "the model was called with other documents packed into the same split batch. Use a block of "
                "maybe_context_parallel, or a batch of the split loader, for each."
            )
        self.documents = known or documents

    def full(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return the full tensor of a shard; the tensor itself if it has the full length; None if it is not known."""
        if tensor.shape[-1] == self.length:
            return tensor
        return next((full for shard, full in self.tensors if shard is tensor), None)

    def of(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return tensor.index_select(dim, self.positions.to(tensor.device))

    def mask_for(self, tokens: torch.Tensor) -> torch.Tensor:
        # Without a mask of ones, Transformers takes positions with gaps for several packed sequences.
        if self.mask is None or self.mask.shape != tokens.shape[:2] or self.mask.device != tokens.device:
            self.mask = torch.ones(tokens.shape[:2], dtype=torch.long, device=tokens.device)
        return self.mask


def _takes_positions(module: nn.Module) -> bool:
    if is_compiled_wrapper(module):
        return False  # its forward has the signature of the model inside
    names = inspect.signature(module.forward).parameters
    return "position_ids" in names and ("input_ids" in names or "inputs_embeds" in names)


class SequenceCalls:
    """Corrects the calls of a model with shards of sequences: positions, mask, labels and the number of tokens.

    The calls of every module inside the model whose forward takes tokens and their positions are corrected, so
    wrappers (PEFT, ``torch.compile``, a user's own) may pass them on in any form.

    Args:
        model: the model, which gets hooks.
        attention: the name of the only attention in Transformers that computes over full sequences.
        shard_of: the shard that the tensors of a call belong to; None if sequences are not split in this call.
    """

    def __init__(
        self,
        model: nn.Module,
        attention: str,
        shard_of: Callable[[nn.Module, list[torch.Tensor]], SequenceShard | None],
    ) -> None:
        check_layers(model)
        self._attention, self._shard_of = attention, shard_of
        self._shard: SequenceShard | None = None
        self._labels: torch.Tensor | None = None  # of the call, until a corrected module gets them
        self._corrected = False
        self._checks = LateChecks()
        self._had_positions = False  # a call has had them in its buffers
        recognised = [module for module in model.modules() if _takes_positions(module)]
        self._recognised = sorted({type(module).__name__ for module in recognised})
        # Hooks run outside of compiled code: they compare tensors by identity, and read values.
        enter, correct, leave = (torch.compiler.disable(hook) for hook in (self._enter, self._correct, self._leave))
        model.register_forward_pre_hook(enter, with_kwargs=True)
        for module in recognised:
            module.register_forward_pre_hook(correct, with_kwargs=True)
        model.register_forward_hook(leave, always_call=True)

    @property
    def packed(self) -> bool:
        """True if a call is going on whose sequences consist of documents."""
        return self._shard is not None and self._shard.documents is not None

    def _enter(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        passed = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
        shard = self._shard = self._shard_of(model, passed)
        if shard is None:
            return
        labels = _bound(model, args, kwargs).get("labels")
        self._labels = labels if any(labels is tensor for tensor, _ in shard.tensors) else None
        self._corrected = False
        self._checks.drop()
        # The first tensor of a call is what is computed on, not a table.
        if not (self._recognised or any(table is not passed[0] for table in shard.tables)):
            self._require_positions(model, shard)

    def _require_positions(self, model: nn.Module, shard: SequenceShard) -> None:
        def error() -> ConfigurationError:
            return ConfigurationError(
                f"{type(model).__name__}.forward takes no input_ids and position_ids, so it cannot be told which "
                f"{len(shard.positions)} of the {shard.length} positions of each sequence this rank has. Pass "
                "positions, or a table of them such as rotary angles, in buffers with their sequence dimension; shift "
                "labels with accel.utils.shift_labels before the split."
            )

        if not shard.counts:
            raise error()
        counted = [(whole.long().diff(dim=dim) == 1).all() for whole, dim in shard.counts]
        # The first time at once, because a model that needs positions may fail in its forward with another error.
        self._checks.refuse_if(~torch.stack(counted).any(), error, now=not self._had_positions)
        self._had_positions = True

    def _correct(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self._shard is None:
            return None
        self._corrected = True
        call = ShardedCall(module, args, kwargs, self._shard, self._attention, self._checks)
        if call.has_labels:
            self._labels = None
        return call.correct()

    def _leave(self, model: nn.Module, args: Any, output: Any) -> None:
        shard, labels = self._shard, self._labels
        self._shard = self._labels = None
        if shard is None or output is None:  # without an output, an error is on its way
            self._checks.drop()
            return
        self._checks.settle()
        if not self._recognised:
            return
        if not self._corrected:
            raise ConfigurationError(
                f"{type(model).__name__}.forward called none of the modules that take input_ids and position_ids "
                f"({', '.join(self._recognised)}), so its positions are those of the shard. Call one of them, or set "
                "cp_size=1 and sp_size=1."
            )
        if labels is not None:
            raise ConfigurationError(
                f"{type(model).__name__}.forward computes a loss from labels that were split before they were shifted, "
                "so each shard loses the label at its end. Shift them with accel.utils.shift_labels before the split, "
                "and pass them by another name (shift_labels)."
            )


def _bound(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, as far as they have one."""
    signature = inspect.signature(module.forward)
    kinds = {parameter.kind: name for name, parameter in signature.parameters.items()}
    if is_compiled_wrapper(module) or inspect.Parameter.VAR_POSITIONAL in kinds:
        return dict(kwargs)
    try:
        bound = dict(signature.bind_partial(*args, **kwargs).arguments)
    except TypeError:  # the call itself raises it
        return dict(kwargs)
    others = bound.pop(kinds.get(inspect.Parameter.VAR_KEYWORD, ""), {})
    return {**bound, **others}


class ShardedCall:
    """The arguments of a model's call on a shard of sequences, and their correction."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        shard: SequenceShard,
        attention: str,
        checks: LateChecks,
    ) -> None:
        self.model: nn.Module = model
        self.shard: SequenceShard = shard
        self.attention: str = attention
        self.checks: LateChecks = checks
        parameters = inspect.signature(model.forward).parameters
        self._names = set(parameters)
        self._takes_anything = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values())
        self._arguments = _bound(model, args, kwargs)

    @property
    def has_labels(self) -> bool:
        return self._tensor("labels") is not None

    def correct(self) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments to call the model with; None if they may stay as they are."""
        config = getattr(self.model, "config", None)
        if hasattr(config, "_attn_implementation"):
            self.shard.has_windows |= check_attention(config, self.shard.length, self.attention)
        tokens = self._tokens()
        if tokens is None:
            return None
        if "use_cache" in self._names:
            # The keys of a shard are of no use in generation, and activation checkpointing would add them twice.
            self._arguments["use_cache"] = False
        self._set_positions(tokens)
        if "attention_mask" in self._names:
            self._set_mask(tokens)
        self._set_labels()
        return (), self._arguments

    def _tensor(self, name: str) -> torch.Tensor | None:
        value = self._arguments.get(name)
        return value if isinstance(value, torch.Tensor) else None

    def _tokens(self) -> torch.Tensor | None:
        local = len(self.shard.positions)
        for name in ("input_ids", "inputs_embeds"):
            tokens = self._tensor(name)
            if tokens is not None and tokens.ndim > 1 and tokens.shape[1] != local:
                raise ConfigurationError(
                    f"{name} has {tokens.shape[1]} positions, and this rank has {local} of the {self.shard.length} of "
                    "each sequence. Pass the tensor in buffers, with its sequence dimension in buffer_seq_dims."
                )
            if tokens is not None:
                return tokens
        return None

    def _set_positions(self, tokens: torch.Tensor) -> None:
        given = self._tensor("position_ids")
        bounded = self._take_boundaries(tokens)
        if given is None:
            whole = None if bounded is None else bounded.positions().expand(tokens.shape[0], -1)
            positions = self.shard.positions.to(tokens.device).expand(tokens.shape[0], -1)
            self._arguments["position_ids"] = positions if whole is None else self.shard.of(whole)
        elif given is not self.shard.counted and (
            self.shard.mask is None or self._tensor("attention_mask") is not self.shard.mask
        ):
            self._read_positions(given)  # not again in a module inside
        documents, argument = self.shard.documents, self.shard.documents_argument
        if documents is not None and argument is not None:
            if not self._takes_anything:
                raise _packed(f"arguments of {type(self.model).__name__}, which passes none on, mark", self.shard)
            self._arguments[argument] = documents

    def _take_boundaries(self, tokens: torch.Tensor) -> Documents | None:
        """Return the documents by their boundaries, for kernels that take those.

        Each rank's attention gets documents.
        """
        marks = [name for name in DOCUMENT_ARGUMENTS if self._arguments.get(name) is not None]
        if not marks:
            return None
        given = [self._tensor(name) for name in BOUNDARIES if name in marks]
        # Collators also number the documents, for layers that scan sequences; attention does not look at it.
        unknown = [name for name in marks if name not in (*BOUNDARIES, "seq_idx")]
        if unknown or not given or None in given or self._tensor("attention_mask") is not None:
            raise _packed(f"{(unknown or marks)[0]} marks", self.shard)
        first = given[0]
        assert first is not None
        if tokens.shape[0] != 1 or any(other is not None and not torch.equal(first, other) for other in given):
            raise _packed(f"{marks} of {tokens.shape[0]} sequences, or with other values for keys, mark", self.shard)
        try:
            documents = Documents.of_boundaries(first.to(tokens.device), self.shard.length)
        except ValueError as error:
            raise ConfigurationError(
                f"{marks[0]} has the boundaries of documents: {error}. Pass the number of tokens before each document, "
                "and before the end, of the whole sequence."
            ) from error
        numbers, changes = self._tensor("seq_idx"), documents.ids.diff(dim=-1) != 0
        if numbers is not None and not torch.equal(numbers.diff(dim=-1) != 0, changes.to(numbers.device)):
            raise _packed("seq_idx, which does not change where cu_seq_lens_q has boundaries, marks", self.shard)
        self.shard.pack(documents)
        for name in (*BOUNDARIES, "max_length_q", "max_length_k", "seq_idx"):
            self._arguments.pop(name, None)
        return documents

    def _read_positions(self, given: torch.Tensor) -> None:
        """Take positions that start again for documents, as Transformers does; refuse those that cannot be told."""
        full = self.shard.full(given)
        positions = self.shard.positions.to(given.device) if full is None else None
        values = given if full is None else full
        mask = self._tensor("attention_mask")
        whole_mask = None if mask is None else self.shard.full(mask)
        steps = values.diff(dim=-1)
        if positions is None:
            expected = torch.ones_like(steps)
        elif values.shape[-1] == len(positions):
            expected = positions.diff().expand_as(steps)
        else:
            raise ConfigurationError(
                f"position_ids of shape {tuple(given.shape)} have neither this rank's {len(positions)} positions nor "
                f"the {self.shard.length} of a sequence. Pass the tensor in buffers."
            )
        wrong = steps != expected if values.ndim < 3 else steps < 0  # with a third axis: of images, which may repeat
        if whole_mask is not None and whole_mask.ndim == 2 and whole_mask.shape == values.shape:
            wrong = wrong & whole_mask[:, 1:].bool()  # positions of padding do not matter
        if full is not None and values.ndim == 2 and mask is None and not isinstance(wrong, FakeTensor):
            # Only scripts that pass positions wait for the device.
            if bool(wrong.any()):
                self.shard.pack(Documents.of_positions(values))
            return
        self.checks.refuse_if(
            wrong.any(),
            lambda: _packed(f"position_ids {values.reshape(-1, values.shape[-1])[0].tolist()[:16]} mark", self.shard),
        )

    def _set_mask(self, tokens: torch.Tensor) -> None:
        mask, ones = self._tensor("attention_mask"), self.shard.mask_for(tokens)
        self._arguments["attention_mask"] = ones
        if mask is ones:  # of an outer module's call, which has been corrected
            return
        _PADDING.pop(ones, None)
        if mask is not None:
            full, shape = self.shard.full(mask), tuple(mask.shape)
            if full is None or full.ndim != 2:
                raise _hiding_mask(shape)
            self.checks.refuse_if((full[:, 1:] > full[:, :-1]).any() | (full > 1).any(), lambda: _hiding_mask(shape))
            _PADDING[ones] = self.shard.of(full)

    def _set_labels(self) -> None:
        labels, shifted = self._tensor("labels"), self._tensor("shift_labels")
        if labels is None:
            return
        if labels.ndim < 2:
            raise ConfigurationError(
                f"labels of shape {tuple(labels.shape)} have one value for each sequence, and no rank has a full "
                "sequence. Train models that predict tokens, or use cp_size=1 and sp_size=1."
            )
        self._check_loss()
        full = self.shard.full(labels if shifted is None else shifted)
        if shifted is None:
            if full is None:
                raise ConfigurationError(
                    "labels were split before they were shifted, so each shard loses the label at its end. Pass the "
                    "same tensor in buffers, or pass shift_labels, made with accel.utils.shift_labels before the "
                    "split."
                )
            full = shift_labels(full)
            self._arguments["shift_labels"] = self._arguments["labels"] = self.shard.of(full)
        if full is not None and self._arguments.get("num_items_in_batch") is None:
            # Gradients are averaged over ranks. If each divides its sum by this, the average is the mean over all
            # labels of the batch.
            self._arguments["num_items_in_batch"] = (full != IGNORED).sum().clamp(min=1) / self.shard.size

    def _check_loss(self) -> None:
        """Refuse models whose loss cannot be given labels that are already shifted, and their number."""
        kind = getattr(self.model, "loss_type", None)
        # Models of Transformers use the causal loss unless they name another.
        if getattr(self.model, "loss_function", None) is None or kind not in (None, "ForCausalLM"):
            raise ConfigurationError(
                f"{type(self.model).__name__} computes a loss from labels"
                f"{f' ({kind})' if kind else ''} that is a mean over this rank's tokens, and not over those of the "
                "batch. Compute the loss outside of the model: call it without labels, and divide the sum of the "
                "losses of this rank's tokens by the number of tokens of the batch."
            )


def _packed(what: str, shard: SequenceShard) -> ConfigurationError:
    return ConfigurationError(
        f"{what} several documents packed into a sequence of {shard.length} positions, in a way that attention over "
        "split sequences does not know, which would let each attend to those before it. Pass position_ids that start "
        "again with each document, in buffers and without attention_mask."
    )


def _hiding_mask(shape: tuple[int, ...]) -> ConfigurationError:
    return ConfigurationError(
        f"attention_mask of shape {shape} hides more than padding at the end (or was not in buffers). With split "
        "sequences, attention is causal and has no mask: pad on the right, and leave attention_mask out."
    )
