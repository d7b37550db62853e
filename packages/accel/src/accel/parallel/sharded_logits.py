"""Models of Transformers whose output layer is sharded: the loss is computed on sharded logits, which are gathered only
when they are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from accel_state.errors import ConfigurationError

from .sequence_inputs import IGNORED
from .tp_collectives import joined, share_of
from .vocabulary_loss import Vocabulary, causal_lm_loss

VERIFIED = frozenset(
    {
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "GemmaForCausalLM",
        "Gemma2ForCausalLM",
        "GPT2LMHeadModel",
        "Phi3ForCausalLM",
    }
)
"""Models that compute logits element by element from those of their output layer, and the standard loss from them. All
are compared with one process in tests."""


def find_sharded_head(model: nn.Module, is_gathered: Callable[[str], bool]) -> nn.Module | None:
    """Return the output layer of a causal language model, if its logits may stay sharded.

    Args:
        model: the model that is prepared. Of a model inside another one, other code may read the logits.
        is_gathered: whether the outputs of a module, by name, are sharded along the vocabulary and gathered.
    """
    if type(model).__name__ not in VERIFIED or not type(model).__module__.startswith("transformers."):
        return None
    language_model: Any = model
    head: nn.Module = language_model.get_output_embeddings()
    name = next((key for key, item in model.named_modules() if item is head), "")
    is_standard = getattr(language_model.loss_function, "__name__", "") == "ForCausalLMLoss"
    return head if is_standard and is_gathered(name) else None


class ShardedLogits:
    """Keeps the logits of a model sharded in training, and computes its loss from them."""

    def __init__(self, mesh: DeviceMesh, model: Any, head: Any) -> None:
        self.mesh = mesh
        self.vocabulary: Vocabulary = Vocabulary(int(head.weight.shape[0]), mesh)
        self._active = False
        self._kinds: dict[Any, Any] = {}  # classes of outputs
        self._original: Callable[..., Any] = model.loss_function
        model.loss_function = self._loss
        model.register_forward_pre_hook(self._begin, with_kwargs=True)

    def attach(self, model: nn.Module) -> None:
        """Let outputs gather their logits. Call it after ``fully_shard``, whose hooks need the tensors themselves."""
        model.register_forward_hook(self._end, always_call=True)

    def outputs(self, x: torch.Tensor) -> torch.Tensor:
        """Return what the output layer returns for this rank's columns."""
        return x if self._active else joined(x, self.mesh, self.vocabulary.size)

    def _begin(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        as_tuple = kwargs.get("return_dict", getattr(model.config, "return_dict", True)) is False
        self._active = model.training and torch.is_grad_enabled() and not as_tuple

    def _end(self, model: Any, args: Any, output: Any) -> Any:
        was_active, self._active = self._active, False
        if not was_active or output is None:  # without an output, an error is on its way
            return None
        kind = type(output)
        if kind not in self._kinds:
            self._kinds[kind] = _sharded_output(kind, self.vocabulary)
        return self._kinds[kind](**dict(output.items()))

    def _loss(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        vocab_size: int,
        num_items_in_batch: torch.Tensor | None = None,
        ignore_index: int = IGNORED,
        shift_labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        if not self._active:
            if shift_labels is not None:  # Transformers' losses before 4.50 have no such parameter
                kwargs["shift_labels"] = shift_labels
            return self._original(logits, labels, vocab_size, num_items_in_batch, ignore_index, **kwargs)
        if logits.shape[-1] != share_of(self.vocabulary.size, self.mesh)[1]:
            raise ConfigurationError(
                f"the loss got logits of {logits.shape[-1]} tokens, and this rank has "
                f"{share_of(self.vocabulary.size, self.mesh)[1]} of {self.vocabulary.size}. Set "
                "TorchTensorParallelConfig(loss_parallel=False)."
            )
        target = labels if shift_labels is None else shift_labels
        return causal_lm_loss(
            _Shard(logits, self.vocabulary),
            target,
            num_items=num_items_in_batch,
            ignore_index=ignore_index,
            shifted=shift_labels is not None,
        )


class _Shard(dict[str, Any]):
    """A shard of logits in the form of an output."""

    def __init__(self, logits: torch.Tensor, vocabulary: Vocabulary) -> None:
        super().__init__(logits=logits)
        self.accel_vocabulary = vocabulary


def _sharded_output(kind: Any, vocabulary: Vocabulary) -> Any:
    """Return a class of outputs of a model whose ``logits`` are gathered when they are read.

    FSDP and others take outputs apart and make new ones of their tensors, so how logits are sharded is part of the
    class.
    """

    def initialise(self: Any, *args: Any, **kwargs: Any) -> None:
        self.__dict__["_as_shard"] = True  # Transformers reads all fields of a new output
        kind.__init__(self, *args, **kwargs)
        del self.__dict__["_as_shard"]

    def read(self: Any) -> Any:
        shard = self.__dict__.get("_shard")
        if shard is None or "_as_shard" in self.__dict__:
            return shard
        if "_full" not in self.__dict__:
            self.__dict__["_full"] = joined(shard, vocabulary.mesh, vocabulary.size)  # type: ignore[arg-type]
        return self.__dict__["_full"]

    def write(self: Any, value: Any) -> None:
        self.__dict__["_shard"] = value
        self.__dict__.pop("_full", None)

    def item(self: Any, key: Any) -> Any:
        if isinstance(key, str):
            return read(self) if key == "logits" else kind.__getitem__(self, key)
        names = list(self.keys())[key]
        return self[names] if isinstance(names, str) else tuple(self[name] for name in names)

    def items(self: Any) -> list[tuple[str, Any]]:
        # Of what is held: an OrderedDict's own method would read each item.
        return [(name, dict.__getitem__(self, name)) for name in self]

    def values(self: Any) -> list[Any]:
        return [value for _, value in items(self)]

    members = {
        "items": items,
        "values": values,
        "__init__": initialise,
        "__getitem__": item,
        "__module__": kind.__module__,
        "logits": property(read, write),
        "accel_vocabulary": vocabulary,
    }
    return type(kind.__name__, (kind,), members)
