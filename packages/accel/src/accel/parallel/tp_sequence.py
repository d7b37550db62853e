"""Sequence-parallel regions: hidden states between tensor-parallel layers are sharded along the sequence.

A region begins at the first block and ends after the last one. Inside, each rank has its rows of the hidden states, so
norms, residual connections and dropout use 1/n of the memory. The input of a sharded module is all-gathered, the output
of its row-wise layer reduce-scattered, which together send as many bytes as the all-reduce that they replace.

The length of the sequences is known from the first block's input. Recomputation in the backward pass may begin in any
block, so tensors that enter blocks are marked with the length.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional
from torch.utils.weak import WeakTensorKeyDictionary

from accel_state import get_logger
from accel_state.errors import ConfigurationError

from .._torch_compat import FakeTensor
from .async_products import OverlappedProducts
from .sequence_collectives import collectives_of_scatter, gather, join, rows_per_rank, split
from .sequence_structure import BlockStructure
from .tp_collectives import SharedInput, collectives_of_sum, shared
from .tp_layers import matrix_of, reduced_product

logger: Final = get_logger(__name__)

VERIFIED = frozenset(
    {
        "LlamaDecoderLayer",
        "MistralDecoderLayer",
        "Qwen2DecoderLayer",
        "Qwen3DecoderLayer",
        "GemmaDecoderLayer",
        "Gemma2DecoderLayer",
        "GPT2Block",
    }
)
"""Blocks of Transformers that are compared with one process in tests. Others are compared in their first forward."""

_MARK = "accel_sequence_length"


class SequenceRegion:
    """The state of a model's region, and the hooks that maintain it.

    Args:
        mesh: the tensor-parallel axis.
        blocks: the blocks of the model, in order.
        required: whether a model that the region does not support is an error.
        overlapped: computes products that overlap with their communication; None to compute them after it.
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        blocks: Sequence[BlockStructure],
        required: bool,
        overlapped: OverlappedProducts | None = None,
    ) -> None:
        self.mesh = mesh
        self._overlapped = overlapped
        self._columns = {module: layers for item in blocks for module, layers in item.columns.items()}
        self._gathered: torch.Tensor | None = None
        self._products: dict[nn.Module, torch.Tensor] = {}  # of the layers that are about to be called with it
        self._length: int | None = None
        self._required = required
        self._enabled = True
        self._suspended = False  # for a call that returns hidden states
        self._fresh = False  # whether a call of the model has not reached the first block yet
        self._marks: Any = WeakTensorKeyDictionary()
        self._first, self._last = blocks[0].block, blocks[-1].block
        self._unverified: set[nn.Module] = set()
        for item in blocks:
            kind = type(item.block)
            is_known = kind.__name__.removeprefix("FSDP") in VERIFIED and kind.__module__.startswith("transformers.")
            if not is_known:
                self._unverified.add(item.block)

    def attach(self, model: nn.Module, blocks: Sequence[BlockStructure]) -> None:
        """Add the hooks. The layers that are sharded get :meth:`input_of` and :meth:`reduce` from their styles."""
        model.register_forward_pre_hook(self._begin, with_kwargs=True)
        model.register_forward_hook(self._end, always_call=True)
        for item in blocks:
            item.block.register_forward_pre_hook(self._enter, with_kwargs=True)
            item.block.register_forward_hook(self._leave)
            for module in item.sharded:
                module.register_forward_pre_hook(self._gather_input, with_kwargs=True)
                if self._overlapped is not None:
                    module.register_forward_hook(self._check_products)
            for module in item.norms:
                module.forward = types.MethodType(_with_summed_gradients(self, module.forward), module)
            for module in item.dropouts:
                module.forward = types.MethodType(_same_dropout(self, module.forward), module)

    # What the layers of a block call

    @property
    def length(self) -> int:
        """Positions of the sequences in the forward that is under way; 0 if hidden states are whole."""
        if self._length is None and self._enabled:
            raise ConfigurationError(
                "a block is computed again in the backward pass, and how its hidden states are sharded along the "
                "sequence is not known. Checkpoint activations with use_reentrant=False, or set "
                "tp_sequence_parallel=False."
            )
        return self._length or 0

    @property
    def rows(self) -> int:
        """The positions of this rank, padding included."""
        return rows_per_rank(self.length, self.mesh)

    def is_shard(self, x: torch.Tensor) -> bool:
        """Return True if a tensor is this rank's rows of hidden states."""
        return bool(self.length) and x.ndim == 3 and x.shape[1] == self.rows

    def input_of(self, layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        """Return the input of a column-wise layer in a module whose input has been gathered.

        ``layer`` marks it otherwise.
        """
        return x if self.length else layer(x)

    def gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Return the input of a column-wise layer that a block calls itself."""
        return gather(x, self.mesh, self.length) if self.is_shard(self._noted(x)) else shared(x, self.mesh)

    def computed(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor | None:
        """Return the product of a column-wise layer without its bias, where its input was gathered together with it."""
        return self._products.pop(layer, None) if x is self._gathered else None

    def reduce(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks of the products of a row-wise layer."""
        if self._overlaps() and self._overlapped is not None:
            return self._overlapped.scattered(x, matrix_of(layer))
        length = x.shape[1]
        return reduced_product(
            layer, x, collectives_of_scatter(self.mesh, length) if self.length else collectives_of_sum(self.mesh)
        )

    def parameter(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a parameter that is used on this rank's rows."""
        return shared(parameter, self.mesh) if self.length and parameter.requires_grad else parameter

    # Hooks

    def _begin(self, model: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        config = getattr(model, "config", None)
        asked = kwargs.get("output_hidden_states")
        self._suspended = bool(getattr(config, "output_hidden_states", False) if asked is None else asked)
        self._fresh = True

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        self._suspended = self._fresh = False
        self._length = None

    def _enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = _hidden(args, kwargs)
        known = self._known(x)
        if block is not self._first:
            self._length = self.length if known is None else known
            self._mark(x, self._length)
        else:
            if known is None or self._fresh:
                splits = self._enabled and not self._suspended and x.ndim == 3 and x.shape[1] > 1
                known = x.shape[1] if splits else 0
                self._mark(x, known)
            self._fresh, self._length = False, known
            if known:
                x = split(x, self.mesh)
                self._mark(x, known)
                args, kwargs = _with_hidden(args, kwargs, x)
        if self.length and block in self._unverified and not self._verify(block, args, kwargs):
            args, kwargs = _with_hidden(args, kwargs, join(x, self.mesh, self.length))
            self._length = 0
        return args, kwargs

    def _leave(self, block: nn.Module, args: Any, output: Any) -> Any:
        if not self.length or block is not self._last:
            return None
        x = join(_output(output), self.mesh, self.length)
        return (x, *output[1:]) if isinstance(output, tuple) else x

    def _gather_input(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = self._noted(_hidden(args, kwargs))
        if not self.length:
            return None
        if not self.is_shard(x):
            raise ConfigurationError(
                f"{type(module).__name__} was called with hidden states of shape {tuple(x.shape)}, and each rank has "
                f"{self.rows} of {self.length} positions between layers. Set tp_sequence_parallel=False."
            )
        layers = self._columns.get(module)
        if layers is None or self._overlapped is None or not self._overlaps():
            return _with_hidden(args, kwargs, gather(x, self.mesh, self.length))
        self._gathered, *products = self._overlapped.gathered(x, [matrix_of(layer) for layer in layers])
        self._products = dict(zip(layers, products, strict=True))
        return _with_hidden(args, kwargs, self._gathered)

    def _overlaps(self) -> bool:
        """Return True if the ranks have equal parts of the sequence, as the overlapped products need."""
        return self._overlapped is not None and bool(self.length) and self.length % self.mesh.size() == 0

    def _check_products(self, module: nn.Module, args: Any, output: Any) -> None:
        self._gathered = None
        if self._products:
            raise ConfigurationError(
                f"enable_async_tp=True does not support {type(module).__name__}, which does not call all of its "
                "column-wise layers with its input. Leave it out."
            )

    # Marks

    def _mark(self, x: torch.Tensor, length: int) -> None:
        node: Any = x.grad_fn
        if node is not None:
            node.metadata[_MARK] = length
        elif not x.is_inference():
            self._marks[x] = length

    def _known(self, x: torch.Tensor) -> int | None:
        node: Any = x.grad_fn
        length: int | None = self._marks.get(x) if node is None else node.metadata.get(_MARK)
        return length

    def _noted(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor, after its length has become that of the forward under way, if it is marked with one."""
        known = self._known(x)
        self._length = self._length if known is None else known
        return x

    # Comparison with whole hidden states

    def _verify(self, block: nn.Module, args: Any, kwargs: dict[str, Any]) -> bool:
        """Return True if a block computes each position by itself outside of its sharded modules.

        Every rank of the axis must call it.
        """
        self._unverified.discard(block)
        x, length = _hidden(args, kwargs).detach(), self.length
        if isinstance(x, FakeTensor):
            return True
        kwargs = {**kwargs, **{name: None for name in ("past_key_values", "layer_past", "use_cache") if name in kwargs}}
        whole = join(x, self.mesh, length)
        try:
            with torch.no_grad(), _in_eval_mode(block):
                self._length = 0
                expected = _output(_call(block, args, kwargs, whole))
                self._length = length
                found = join(_output(_call(block, args, kwargs, x)), self.mesh, length)
        except (RuntimeError, ValueError, TypeError) as error:
            reason = f"it raised {type(error).__name__}: {error}"
        else:
            bound = 1e-4 if x.dtype in (torch.float32, torch.float64) else 3e-2
            same = found.shape == expected.shape and torch.allclose(
                found.float(), expected.float(), rtol=bound, atol=bound * float(expected.float().abs().max())
            )
            reason = "" if same else "its outputs differ"
        self._length = length
        if not reason:
            return True
        message = f"{type(block).__name__} does not compute the same from a part of each sequence: {reason}"
        if self._required:
            raise ConfigurationError(f"tp_sequence_parallel=True: {message}. Set tp_sequence_parallel=False.")
        logger.warning("%s. Its hidden states stay whole on every rank of tp.", message)
        self._enabled = False
        return False


def _hidden(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    x: torch.Tensor = args[0] if args else kwargs["hidden_states"]
    return x


def _with_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], x: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": x})


def _output(output: Any) -> torch.Tensor:
    x: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return x


def _call(block: nn.Module, args: Any, kwargs: dict[str, Any], x: torch.Tensor) -> Any:
    """Return the block's forward without its hooks, which have run."""
    args, kwargs = _with_hidden(args, kwargs, x)
    return block.forward(*args, **kwargs)


@contextmanager
def _in_eval_mode(block: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in block.modules()}
    block.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode


def _with_summed_gradients(region: SequenceRegion, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of a norm, whose parameters' gradients are summed over the ranks."""

    def norm(module: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        region._noted(x)
        if not region.length or not torch.is_grad_enabled():
            return forward(x, *args, **kwargs)
        own = module._parameters
        shadows = {name: None if item is None else region.parameter(item) for name, item in own.items()}
        module._parameters = shadows  # type: ignore[assignment]
        try:
            return forward(x, *args, **kwargs)
        finally:
            module._parameters = own

    return norm


def _same_dropout(region: SequenceRegion, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of a dropout, which drops from a shard what it would drop from full sequences."""

    def dropout(module: Any, x: torch.Tensor) -> Any:
        region._noted(x)
        if not (module.training and module.p) or not region.is_shard(x):
            return forward(x)
        full = functional.dropout(x.new_ones((x.shape[0], region.length, *x.shape[2:])), module.p)
        return x * split(full, region.mesh)

    return dropout


def region_inputs(
    region: SequenceRegion, item: BlockStructure, fallback: dict[nn.Module, Callable[[torch.Tensor], torch.Tensor]]
) -> dict[nn.Module, Callable[[torch.Tensor], torch.Tensor]]:
    """Return how the column-wise layers of a block mark their inputs.

    Args:
        fallback: how they do where hidden states are whole.
    """
    inputs: dict[nn.Module, Callable[[torch.Tensor], torch.Tensor]] = {}
    for holder in item.sharded:
        for layer in holder.modules():
            inputs[layer] = partial(region.input_of, fallback.get(layer) or partial(shared, mesh=region.mesh))
    if item.inline:
        inputs.update(dict.fromkeys(item.inline, SharedInput(item.block, region.mesh, region.gathered)))
    return inputs
