"""A model that custom_model_provider_function builds, under the names of its own parameters."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from accel_state.errors import ConfigurationError

from .._megatron_compat import data_parallel_wrappers, parallel_state
from ..layers import blocked_keys
from ..plugin import MegatronLMPlugin
from ..weights import ByRank, Weight, global_tensors, shard_group, split_dim, weight
from .base import Batch, Decoder


class Provided(Decoder):
    """A model of the user's; its weights are those that the provider gave it.

    Args:
        model: what was passed to ``prepare``. Its parameters are those of the optimizer, and its config is used by
            generation and datasets; its weights are not used.
        plugin: the settings.
    """

    takes_weights = False

    def __init__(self, model: Any, plugin: MegatronLMPlugin) -> None:
        for name in ("encoder_seq_length", "decoder_seq_length"):
            if getattr(plugin, name) is not None:
                raise ConfigurationError(
                    f"{name}={getattr(plugin, name)}: the lengths of a model of custom_model_provider_function are "
                    "those of its batches. Leave it out, and pad in custom_get_batch_function."
                )
        self.plugin = plugin
        kind = type(model).__name__
        self.hf: Any | SimpleNamespace = getattr(model, "config", None) or SimpleNamespace(model_type=kind)
        self.causal: bool = False
        self.limit: int | None = None

    @property
    def max_length(self) -> int | None:
        return self.limit

    @property
    def generates(self) -> bool:
        return self.causal

    pads_batches = returns_logits = generates

    # -- building ----------------------------------------------------------------------------------------------------

    def provide(self, config: Any, vp_size: int | None) -> list[nn.Module]:
        """Return this rank's chunks of the model, wrapped if custom_prepare_model_function wraps them."""
        function, prepare = self.plugin.custom_model_provider_function, self.plugin.custom_prepare_model_function
        assert function is not None
        provider = _with_stage(function, config)
        if prepare is not None:
            built = prepare(provider)
            source = "custom_prepare_model_function"
        else:
            built = [provider(vp_stage=None if vp_size is None else stage) for stage in range(vp_size or 1)]
            source = "custom_model_provider_function"
        chunks = list(built) if isinstance(built, (list, tuple, nn.ModuleList)) else [built]
        if len(chunks) != (vp_size or 1):
            raise ConfigurationError(
                f"{source} returned {len(chunks)} parts of the model, and this rank has {vp_size or 1} (of "
                "num_layers_per_virtual_pipeline_stage). Return one module, or a list of that many."
            )
        for chunk in chunks:
            if not isinstance(chunk, nn.Module) or not hasattr(bare(chunk), "config"):
                raise ConfigurationError(
                    f"{source} returned a {type(chunk).__name__}. Return a model of Megatron-core, such as GPTModel: a "
                    "module with set_input_tensor and a TransformerConfig as `config`."
                )
        return chunks

    def describe(self, chunks: Sequence[nn.Module]) -> None:
        """Learn from the model how it is called, and the names of its parameters on all ranks. A collective call."""
        from megatron.core.enums import ModelType
        from megatron.core.models.gpt import GPTModel

        for chunk in chunks:
            if not hasattr(chunk, "model_type"):  # the schedules read it
                chunk.model_type = ModelType.encoder_or_decoder
        self.causal = all(isinstance(chunk, GPTModel) or _is_mamba(chunk) for chunk in chunks)
        self.limit = getattr(chunks[0], "max_sequence_length", None)
        self.vocab_size: int = getattr(chunks[-1], "vocab_size", 0)
        plugin = self.plugin
        custom = (plugin.custom_train_step_class, plugin.custom_get_batch_function)
        if not self.causal and not any(custom):
            raise ConfigurationError(
                f"custom_model_provider_function built a {type(chunks[0]).__name__}, and only a GPTModel or a "
                "MambaModel is called without further settings. Set custom_train_step_class, or "
                "custom_get_batch_function and custom_loss_function."
            )
        gated = bool(getattr(chunks[0].config, "gated_linear_unit", False))
        own: dict[str, tuple[Any, ...]] = {}
        for chunk in chunks:
            for name, tensor in global_tensors(chunk, buffers=True):
                own[name] = self._description(name, tensor)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        merged = {name: item for names in everyone for name, item in names.items()}
        self.dtypes: dict[Any, Any] = {name: item[0] for name, item in merged.items()}
        self.trained: set[Any] = {name for name, item in merged.items() if item[1]}
        self.dimensions: dict[Any, Any] = {name: item[2] for name, item in merged.items()}
        self.pairs: list[Weight] = [_pair(name, item[3], gated) for name, item in sorted(merged.items())]

    @staticmethod
    def _description(name: str, tensor: torch.Tensor) -> tuple[Any, ...]:
        expert = not getattr(tensor, "allreduce", True)
        if expert and ".local_experts." not in name and parallel_state.get_expert_model_parallel_world_size() > 1:
            raise ConfigurationError(
                f"{name} holds several experts in one matrix, whose numbers over the ranks are unknown. Build the "
                "model with moe_grouped_gemm=False, or set expert_model_parallel_size=1."
            )
        trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        split = getattr(tensor, "tensor_model_parallel", False)
        dim = tensor.partition_dim if split else None  # type: ignore[attr-defined]
        # A loss scale needs what is saved to be float32; numbers of other kinds are kept.
        dtype = torch.float32 if tensor.is_floating_point() else tensor.dtype
        return dtype, trained, tensor.ndim, (dim, shard_group(tensor).size())

    def weights(self) -> Any:
        return iter(self.pairs)

    # -- calling -----------------------------------------------------------------------------------------------------

    def inputs(self, batch: Batch) -> Batch:
        """Return the arguments of a causal model; others, and further ones, go to the train step as they are."""
        if not self.causal or "input_ids" not in batch:
            return dict(batch)
        known = ("input_ids", "labels", "attention_mask", "position_ids")
        made = super().inputs({name: batch[name] for name in known if name in batch})
        return {**{name: value for name, value in batch.items() if name not in known}, **made}

    position_embedding = "of the model"  # any position_ids are passed on

    def call(self, model: nn.Module, batch: Batch) -> Any:
        mask, labels = batch.get("attention_mask"), batch.get("labels")
        return model(
            batch["input_ids"],
            batch["position_ids"],
            None if mask is None else blocked_keys(mask),
            labels=None if labels is None else labels.clamp(min=0),
        )

    def weigh(self, batch: Batch) -> torch.Tensor:
        return super().weigh(batch) if "labels" in batch else torch.ones(1)

    def shape(self, batch: Batch) -> tuple[int, int]:
        for name in ("input_ids", "tokens"):
            if name in batch:
                return super().shape({"input_ids": batch[name]})
        first = next(iter(batch.values()))
        return first.shape[0], self.plugin.seq_length or (first.shape[1] if first.ndim > 1 else 1)


class ProvidedGroups:
    """Which group of the user's optimizer each parameter of a provided model belongs to."""

    def __init__(self, architecture: Provided, optimizer: torch.optim.Optimizer) -> None:
        decays = [bool(group.get("weight_decay")) for group in optimizer.param_groups]
        if len(decays) > 2 or (len(decays) == 2 and all(decays) == any(decays)):
            raise ConfigurationError(
                f"the optimizer has {len(decays)} groups of parameters, and which of them the parameters of a model of "
                "custom_model_provider_function belong to is unknown. Pass one group, or one with and one without "
                "weight_decay (for biases and norms), and set no_wd_decay_cond and scale_lr_cond for others."
            )
        self.of_target: dict[str, int | None] = {}
        self.names: list[list[str]] = [[] for _ in decays]
        for pair in architecture.pairs:
            name = pair.names[0]
            index = None
            if name in architecture.trained:
                index = 0 if len(decays) == 1 else decays.index(architecture.dimensions[name] > 1)
                self.names[index].append(name)
            self.of_target[name] = index
        self.first_name: dict[str, str] = {name: name for names in self.names for name in names}

    def trains(self, pair: Weight) -> bool:
        """Return True if the optimizer updates a weight."""
        return self.of_target[pair.targets[0]] is not None


def share_first_values(chunks: Sequence[nn.Module]) -> None:
    """Give the copies of a parameter on several ranks the value of the first of them. A collective call."""
    for chunk in chunks:
        for _, tensor in global_tensors(chunk, buffers=True):
            expert = not getattr(tensor, "allreduce", True)
            groups = [
                parallel_state.get_expert_data_parallel_group()
                if expert
                else parallel_state.get_data_parallel_group(with_context_parallel=True)
            ]
            if not getattr(tensor, "tensor_model_parallel", False):
                groups.insert(0, shard_group(tensor))
            for group in groups:
                if group.size() > 1:
                    dist.broadcast(tensor.data, dist.get_process_group_ranks(group)[0], group=group)


def bare(chunk: Any) -> Any:
    """Return a chunk without the wrappers of Megatron-core for data parallelism and half precision."""
    from megatron.core.transformer.module import Float16Module

    wrappers: Any = (*data_parallel_wrappers(), Float16Module)
    while isinstance(chunk, wrappers):
        chunk = chunk.module
    return chunk


def _with_stage(function: Callable[..., Any], config: Any) -> Callable[..., Any]:
    """Return the provider, called with the documented arguments that it takes, by default for this rank's stage."""
    parameters = inspect.signature(function).parameters
    takes_all = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values())

    @wraps(function)
    def provider(*args: Any, vp_stage: int | None = None, **given: Any) -> Any:
        where = {} if vp_stage is None else {"ignore_virtual": False, "vp_stage": vp_stage}
        documented = {
            "pre_process": parallel_state.is_pipeline_first_stage(**where),
            "post_process": parallel_state.is_pipeline_last_stage(**where),
            "add_encoder": True,
            "add_decoder": True,
            "vp_stage": vp_stage,
            "config": config,
        }
        by_position = list(parameters)[: len(args)]
        filled = {
            name: value
            for name, value in documented.items()
            if name not in by_position and (takes_all or name in parameters)
        }
        return function(*args, **{**filled, **given})

    return provider


def _pair(name: str, split: tuple[int | None, int], gated: bool) -> Weight:
    dim, ranks = split
    if dim is None or split_dim(name) == dim:
        return weight(name, name, blocks=2 if gated and ".linear_fc1." in name else 1)
    return weight(name, name, ByRank(dim, ranks))


def _is_mamba(chunk: nn.Module) -> bool:
    return type(chunk).__name__ == "MambaModel" and type(chunk).__module__.startswith("megatron.core.")
