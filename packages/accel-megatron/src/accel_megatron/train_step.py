"""Train steps: how a batch becomes the inputs of a model, and its output a loss, for scripts that replace parts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from accel_state import PartialState
from accel_state.errors import ConfigurationError

from ._megatron_compat import parallel_state
from .layers import blocked_keys

Batch = dict[str, torch.Tensor]


def avg_losses_across_data_parallel_group(losses: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the averages of losses over the data-parallel ranks."""
    averaged = torch.cat([loss.detach().reshape(1).float() for loss in losses])
    group = parallel_state.get_data_parallel_group()
    dist.all_reduce(averaged, group=group)
    return averaged / group.size()


def gather_across_data_parallel_groups(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensors of all data-parallel ranks, joined along the first dimension."""
    group = parallel_state.get_data_parallel_group()
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.detach().contiguous(), group=group)
    return torch.cat(parts)


def create_train_step(plugin: Any, model_type: str) -> AbstractTrainStep | None:
    """Return the user's train step, as the settings define it; None for that of the architecture."""
    kind, batch, loss = plugin.custom_train_step_class, plugin.custom_get_batch_function, plugin.custom_loss_function
    if kind is None and batch is None and loss is None:
        return None
    if kind is None:
        kind = {"t5": T5TrainStep, "megatron-bert": BertTrainStep}.get(model_type, GPTTrainStep)
    given = (plugin,) if _positional(kind) == 1 else (PartialState(), plugin)
    step: Any = kind(*given, **(plugin.custom_train_step_kwargs or {}))
    step.get_batch = batch or step.get_batch
    step.loss_func = loss or step.loss_func
    return step


def _positional(function: Callable[..., Any]) -> int:
    """Return how many arguments a function takes by position."""
    kinds = [item.kind for item in inspect.signature(function).parameters.values()]
    return sum(kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds)


class AbstractTrainStep:
    """The functions of a training step. Subclass one of GPTTrainStep, BertTrainStep and T5TrainStep.

    Args:
        name: what the step trains.
    """

    forward_step: Callable[..., Any]

    def __init__(self, name: str) -> None:
        self.name = name

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        """Return a function of the iterator over micro batches that returns the inputs of the model."""
        raise NotImplementedError

    def get_loss_func(self, accelerator: Any) -> Callable[..., Any]:
        """Return a function that returns the loss of a micro batch, and a dictionary of losses to report."""
        raise NotImplementedError

    def get_forward_step_func(self) -> Callable[..., Any]:
        """Return a function of the iterator and the model that returns the output and the loss function."""
        raise NotImplementedError


class _TrainStep(AbstractTrainStep):
    """Sets ``get_batch``, ``loss_func`` and ``forward_step`` from the methods, which subclasses may define without
    their arguments.
    """

    kind = ""

    def __init__(self, accelerator: Any, args: Any = None) -> None:
        super().__init__(self.kind)
        # Scripts also pass the settings only.
        self.accelerator: Any = PartialState() if args is None else accelerator
        self.args: Any = accelerator if args is None else args
        flag = bool(getattr(self.args, "megatron_dataset_flag", False))
        self.get_batch: Callable[..., Any] = self._make(self.get_batch_func, self.accelerator, flag)
        self.loss_func: Callable[..., Any] = self._make(self.get_loss_func, self.accelerator, True, None)
        self.forward_step: Callable[..., Any] = self._make(self.get_forward_step_func, True, True)

    @staticmethod
    def _make(method: Callable[..., Any], *given: Any) -> Callable[..., Any]:
        function: Callable[..., Any] = method(*given[: _positional(method)])
        return function


class GPTTrainStep(_TrainStep):
    """A step of a causal language model: the mean loss of the tokens of a micro batch."""

    kind = "gpt"

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        def get_batch(iterator: Iterator[Batch]) -> Any:
            batch = next(iterator)
            tokens, labels, mask = batch["input_ids"], batch["labels"], batch.get("attention_mask")
            if mask is not None:
                # With context parallelism the mask is that of all keys, and attention knows which tokens are here.
                mask = blocked_keys(mask) if mask.shape == tokens.shape else mask[:, None, None, :]
            return tokens, labels.clamp(min=0), (labels >= 0).float(), mask, batch["position_ids"]

        return get_batch

    def get_loss_func(self, accelerator: Any) -> Callable[..., Any]:
        def loss_func(loss_mask: torch.Tensor, output: torch.Tensor) -> Any:
            loss = (output.float() * loss_mask).sum() / loss_mask.sum().clamp(min=1)
            return loss, {"lm loss": loss.detach()}

        return loss_func

    def get_forward_step_func(self) -> Callable[..., Any]:
        def forward_step(iterator: Iterator[Batch], model: Any) -> Any:
            tokens, labels, loss_mask, attention_mask, position_ids = self.get_batch(iterator)
            output = model(tokens, position_ids, attention_mask, labels=labels)
            return output, partial(self.loss_func, loss_mask)

        return forward_step


class BertTrainStep(_TrainStep):
    """A step of Megatron-BERT: the mean losses of the masked words and of the next sentence."""

    kind = "bert"

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        def get_batch(iterator: Iterator[Batch]) -> Any:
            batch = next(iterator)
            labels, mask = batch["labels"], batch["attention_mask"]
            inputs = batch["input_ids"], batch["token_type_ids"], batch["next_sentence_label"]
            return *inputs, (labels >= 0).float(), labels.clamp(min=0), mask

        return get_batch

    def get_loss_func(  # type: ignore[override]
        self, accelerator: Any, pretraining_flag: bool, num_labels: Any
    ) -> Callable[..., Any]:
        if not pretraining_flag:
            raise ConfigurationError(
                "BertTrainStep trains masked words and the next sentence (pretraining_flag=True). Override "
                "get_loss_func for other losses."
            )

        def loss_func(loss_mask: torch.Tensor, sentence: torch.Tensor, output: Any) -> Any:
            words, following = output
            loss = (words.float() * loss_mask).sum() / loss_mask.sum().clamp(min=1)
            reported = {"lm loss": loss.detach()}
            if bool((sentence >= 0).any()):
                order = F.cross_entropy(following.float(), sentence, ignore_index=-100)
                loss, reported["sop loss"] = loss + order, order.detach()
            return loss, reported

        return loss_func

    def get_forward_step_func(  # type: ignore[override]
        self, pretraining_flag: bool, bert_binary_head: bool
    ) -> Callable[..., Any]:
        def forward_step(iterator: Iterator[Batch], model: Any) -> Any:
            tokens, types, sentence, loss_mask, labels, mask = self.get_batch(iterator)
            output = model(tokens, mask, tokentype_ids=types, lm_labels=labels)
            return output, partial(self.loss_func, loss_mask, sentence)

        return forward_step


class T5TrainStep(_TrainStep):
    """A step of T5: the mean loss of the decoder's tokens. Masks are True where attention is not allowed."""

    kind = "t5"

    def get_batch_func(self, accelerator: Any, megatron_dataset_flag: bool) -> Callable[..., Any]:
        def get_batch(iterator: Iterator[Batch]) -> Any:
            batch = next(iterator)
            labels, mask = batch["labels"], batch["attention_mask"][:, None, None, :]
            ids = batch["input_ids"], batch["decoder_input_ids"]
            return *ids, (labels >= 0).float(), labels.clamp(min=0), mask, None, mask

        return get_batch

    get_loss_func = GPTTrainStep.get_loss_func

    @staticmethod
    def attn_mask_postprocess(attention_mask: torch.Tensor) -> torch.Tensor:
        """Return the mask of self-attention of shape (N, 1, length, length), from one that is 1 at tokens."""
        present = attention_mask.bool()
        return ~(present[:, None, None, :] & present[:, None, :, None])

    @staticmethod
    def get_decoder_mask(seq_length: int, device: torch.device) -> torch.Tensor:
        """Return the mask of causal attention, of shape (1, length, length)."""
        return torch.ones(1, seq_length, seq_length, dtype=torch.bool, device=device).triu(1)

    @staticmethod
    def get_enc_dec_mask(attention_mask: torch.Tensor, dec_seq_length: int, device: torch.device) -> torch.Tensor:
        """Return the mask of cross attention of shape (N, 1, decoder length, encoder length)."""
        blocked = ~attention_mask.bool().to(device)
        return blocked[:, None, None, :].expand(-1, 1, dec_seq_length, -1)

    def get_forward_step_func(self) -> Callable[..., Any]:
        def forward_step(iterator: Iterator[Batch], model: Any) -> Any:
            encoder, decoder, loss_mask, labels, encoder_mask, decoder_mask, cross_mask = self.get_batch(iterator)
            output = model(encoder, decoder, encoder_mask, decoder_mask, cross_mask, lm_labels=labels)
            return output, partial(self.loss_func, loss_mask)

        return forward_step
