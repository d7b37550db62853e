"""Cutting a model into the stages of a pipeline, at its list of blocks, without copying a parameter."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from accel_state.errors import ConfigurationError

# What a later stage is told of the batch, beside what the stage before it has computed.
_OF_BATCH = ("attention_mask", "position_ids")


class PassThrough(nn.Module):
    """Stands for a module of another stage: returns its input."""

    def forward(self, x: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        return x


class AddsNothing(nn.Module):
    """Stands for the table of positions of the first stage."""

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return torch.zeros((), device=positions.device)


class Blocks(nn.ModuleList):
    """Some blocks of a list, under the names (numbers) that they have in it.

    Args:
        whole: the list.
        kept: numbers of the blocks that are here.
    """

    def __init__(self, whole: nn.ModuleList, kept: Sequence[int]) -> None:
        super().__init__()
        self.length = len(whole)
        self._modules.update({str(number): whole[number] for number in kept})

    def __iter__(self) -> Iterator[nn.Module]:
        return (block for block in self._modules.values() if block is not None)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            wanted = {str(number) for number in range(self.length)[index]}
            return [block for name, block in self._modules.items() if name in wanted]
        return self._modules[str(range(self.length)[index])]


@dataclass(frozen=True)
class Cut:
    """Where a model is cut.

    Attributes:
        path: the name of the list of blocks, in parts: ("model", "layers").
        ranges: for each stage, the numbers of its blocks.
    """

    path: tuple[str, ...]
    ranges: tuple[range, ...]


def plan_cut(model: nn.Module, stages: int) -> Cut:
    """Where to cut a model into so many stages of as many blocks; earlier stages get one more where that does not come
    out even.

    Raises:
        ConfigurationError: there is no list of blocks, or it is too short; or something lies outside of it that no
            stage could have.
    """
    config = getattr(model, "config", None)
    kinds = sorted(set(getattr(config, "layer_types", None) or ()))
    if len(kinds) > 1:
        # Such models count their layers as they go through them, and would take those of a stage for the first ones.
        raise ConfigurationError(
            f"{type(model).__name__} has layers of several kinds ({', '.join(kinds)}), which stages of a pipeline "
            "cannot tell apart. "
            "Train it with pp_size=1."
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ConfigurationError(
            f"{type(model).__name__} has an encoder and a decoder, and a pipeline is one sequence of blocks. Train it "
            "with pp_size=1."
        )
    path, blocks = _find_blocks(model)
    if len(blocks) < stages:
        raise ConfigurationError(
            f"{type(model).__name__} has {len(blocks)} blocks ({'.'.join(path)}), fewer than the {stages} stages of "
            "the pipeline. "
            "Choose a smaller pp_size, or fewer stages_per_rank."
        )
    _check_loose_parameters(model, path)
    each, more = divmod(len(blocks), stages)
    sizes = [each + (number < more) for number in range(stages)]
    starts = [sum(sizes[:number]) for number in range(stages)]
    return Cut(path, tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True)))


def _find_blocks(model: nn.Module) -> tuple[tuple[str, ...], nn.ModuleList]:
    def weight(item: tuple[str, nn.ModuleList]) -> int:
        return sum(parameter.numel() for parameter in item[1].parameters())

    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1
    ]
    alike = [(name, module) for name, module in lists if len({type(block) for block in module}) == 1]
    if not alike:
        raise ConfigurationError(
            f"{type(model).__name__} has no nn.ModuleList of blocks of one class, where it could be cut into stages. "
            "Train it with "
            "pp_size=1."
        )
    name, blocks = max(alike, key=weight)
    return tuple(name.split(".")), blocks


def _check_loose_parameters(model: nn.Module, path: tuple[str, ...]) -> None:
    owner: nn.Module = model
    for step in path:
        loose = [*owner._parameters]
        if loose:
            raise ConfigurationError(
                f"{type(owner).__name__}.{loose[0]} is a parameter beside the blocks, and nothing says which stage "
                "needs it. Put it into "
                "a module of its own, or train with pp_size=1."
            )
        owner = getattr(owner, step)


class Stages:
    """The stages of a model: each of the model's own class, with a part of its modules.

    Args:
        model: the whole model.
        cut: where.
    """

    def __init__(self, model: nn.Module, cut: Cut) -> None:
        self.model = model
        self.cut = cut
        self.library = hasattr(model, "config") and hasattr(model, "base_model_prefix")

    def __len__(self) -> int:
        return len(self.cut.ranges)

    def part(self, numbers: Sequence[int]) -> nn.Module:
        """A model with the modules of some stages, under the names that they have in the whole one."""
        kept = [number for stage in numbers for number in self.cut.ranges[stage]]
        first, last = 0 in numbers, len(self) - 1 in numbers
        return self._shell(self.model, 0, kept, first, last)

    def stage(self, number: int) -> nn.Module:
        """A stage, whose forward takes the batch or what the stage before it returns, and returns what the next one
        takes.
        """
        shell = self.part([number])
        forward: Any = self._forward_of(shell, first=number == 0, last=number == len(self) - 1)
        wrapper: Any = self.model.__dict__.get("forward")
        if hasattr(wrapper, "outputs_to_fp32"):
            # Mixed precision: between stages, values are as they are between blocks.
            wrapper = copy.copy(wrapper)
            wrapper.forward, wrapper.outputs_to_fp32 = forward, wrapper.outputs_to_fp32 and number == len(self) - 1
            forward = wrapper
        shell.__dict__.pop("_original_forward", None)
        shell.forward = forward
        return shell

    def _shell(self, module: nn.Module, depth: int, kept: Sequence[int], first: bool, last: bool) -> nn.Module:
        """A module like the given one, without what belongs to other stages; it shares all that it keeps."""
        shell = copy.copy(module)
        for name in ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
            shell.__dict__[name] = copy.copy(module.__dict__[name])
        step = self.cut.path[depth]
        child = module._modules[step]
        assert child is not None
        in_front = True
        for name, other in list(module._modules.items()):
            if name == step:
                in_front = False
            elif other is not None and self._is_of_others(other, first if in_front else last):
                shell._modules[name] = self._substitute(module, other, in_front)
        ends = depth == len(self.cut.path) - 1
        shell._modules[step] = Blocks(child, kept) if ends else self._shell(child, depth + 1, kept, first, last)  # type: ignore[arg-type]
        return shell

    def _is_of_others(self, module: nn.Module, here: bool) -> bool:
        """Whether a module beside the blocks is needed on another stage only. What has no parameters may be needed on
        all.
        """
        return not here and (
            isinstance(module, nn.modules.dropout._DropoutNd) or any(True for _ in module.parameters())
        )

    def _substitute(self, owner: nn.Module, module: nn.Module, in_front: bool) -> nn.Module:
        tables = [child for child in owner.children() if isinstance(child, nn.Embedding)]
        # The first table is that of words; what a later one returns is added to it.
        return AddsNothing() if in_front and module in tables[1:] else PassThrough()

    def _forward_of(self, shell: nn.Module, first: bool, last: bool) -> Callable[..., torch.Tensor]:
        original = self.model.__dict__.get("_original_forward", self.model.forward)
        if getattr(original, "__self__", None) is not self.model:
            raise ConfigurationError(
                f"{type(self.model).__name__}.forward was replaced on the object, so its stages cannot use it. Put it "
                "into the class."
            )
        whole = types.MethodType(original.__func__, shell)
        if not self.library:
            return whole
        base = getattr(shell, str(shell.base_model_prefix))

        def forward(x: torch.Tensor, **batch: Any) -> torch.Tensor:
            given = {"use_cache": False, "input_ids" if first else "inputs_embeds": x}
            given.update(batch if first else {name: batch[name] for name in _OF_BATCH if name in batch})
            outputs = (whole if last else base)(**given)
            passed_on: torch.Tensor = outputs.logits if last else outputs.last_hidden_state
            return passed_on

        return forward

    def check(self, example: Mapping[str, Any] | Sequence[Any] | None) -> None:
        """Compare the stages, one after the other, with the whole model on an example.

        Args:
            example: what the model is called with; made up for models of Transformers.

        Raises:
            ConfigurationError: they compute something else, or there is no example.
        """
        device = next(self.model.parameters()).device
        if device.type == "meta":
            return
        positional, named = self._example(example, device)
        modes = {module: module.training for module in self.model.modules()}
        self.model.eval()
        stages = [self.stage(number).eval() for number in range(len(self))]
        with torch.no_grad():
            expected = self.model(*positional, **named)
            expected = getattr(expected, "logits", expected)
            x = positional[0] if positional else named.pop("input_ids")
            for stage in stages:
                x = stage(x, **named)
        for module, mode in modes.items():
            module.training = mode
        if x.shape != expected.shape or not torch.allclose(x, expected, rtol=1e-3, atol=1e-3):
            error = (
                f"by up to {(x - expected).abs().max().item():.3g}"
                if x.shape == expected.shape
                else f"in shape, {tuple(x.shape)}"
            )
            raise ConfigurationError(
                f"{type(self.model).__name__} computes something beside its blocks ({'.'.join(self.cut.path)}) that "
                "stages of a pipeline "
                f"do not: outputs differ {error}. Train it with pp_size=1."
            )

    def _example(self, example: Any, device: torch.device) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if example is None and self.library:
            words = self.model.config.get_text_config().vocab_size  # type: ignore[union-attr,operator]
            return (), {"input_ids": torch.arange(8, device=device).view(2, 4) % words}
        if example is None:
            raise ConfigurationError(
                f"{type(self.model).__name__} is no model of Transformers, so how it is called is not known. Give a "
                "small batch, with "
                "which its stages are compared with the whole: PipelineParallelConfig(example=(tokens,))."
            )
        if isinstance(example, Mapping):
            return (), dict(example)
        return tuple(example), {}
