"""The settings of training with Megatron-core."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from accel_state.errors import ConfigurationError
from accel_state.options import MegatronOptions

SHARDING = ("optim", "optim_grads", "optim_grads_params")
"""What Megatron-core's FSDP can shard over the data-parallel ranks."""
_STRATEGY = "data_parallel_sharding_strategy"
_FSDP_NAMES = ("use_megatron_fsdp", "use_custom_fsdp")  # of DistributedDataParallelConfig; the second is deprecated
# Settings that Megatron-core's FSDP does not have, or computes wrong numbers with.
_FSDP_EXCLUDES = {
    "optimizer_cpu_offload": "The optimizer in host memory updates parameters that are not DTensors.",
    "use_precision_aware_optimizer": "The states of that optimizer are not those that checkpoints have.",
}
_FSDP_FIXED = {
    "grad_reduce_in_fp32": (True, "Sums over tensor-parallel ranks are lost otherwise."),
    "preserve_fp32_weights": (True, "The optimizer updates float32 weights."),
    "num_distributed_optimizer_instances": (1, "Groups of replicas are not supported."),
    "outer_dp_sharding_strategy": ("no_shard", "Groups of replicas are not supported."),
    "init_model_with_meta_device": (False, "The weights come from the model that prepare() gets."),
}
_NO_EFFECT = {
    "tensorboard_dir": 'Use Accelerator(log_with="tensorboard", project_dir=...).',
    "set_all_logging_options": "Use Accelerator(log_with=...).",
}
_SIZES = ("tp_degree", "pp_degree", "context_parallel_size", "expert_model_parallel_size")


@dataclass
class MegatronLMPlugin:
    """How models are trained with Megatron-core.

    A field that is left out takes the launcher's value (``--megatron_lm_...``, ``megatron_lm_config`` or a
    ``MEGATRON_LM_...`` variable), or the default given here.

    Args:
        tp_degree: tensor-parallel size (default 1).
        pp_degree: pipeline-parallel size: number of stages (default 1).
        use_custom_fsdp: Megatron-core's FSDP: shard parameters, gradients and optimizer states over the data-parallel
            ranks. ``other_megatron_args={"data_parallel_sharding_strategy": ...}``, "optim_grads_params" by default,
            takes "optim_grads" and "optim", too. It includes ``use_distributed_optimizer``, and excludes ``pp_degree``.
        overlap_cpu_optimizer_d2h_h2d: with ``optimizer_cpu_offload``, copy gradients and parameters while others are
            updated.
        no_load_optim: do not load optimizer states from a checkpoint.
        eod_mask_loss: Megatron datasets: no loss for end-of-document tokens.
        no_save_optim: do not save optimizer states in a checkpoint.
        optimizer_cpu_offload: keep AdamW's states in host memory, and update the parameters there: all, or the share
            ``other_megatron_args={"optimizer_offload_fraction": ...}``.
        use_precision_aware_optimizer: keep optimizer states in reduced precision; needs Transformer Engine.
        decoder_last_pipeline_num_layers: layers in the last stage, where it has fewer or more than the others.
        recompute_granularity: "full" or "selective".
        recompute_method: for "full": "uniform" or "block".
        recompute_num_layers: for "full": layers in a unit, or recomputed layers of a stage.
        attention_backend: "auto" only: attention is torch's scaled_dot_product_attention, which selects a kernel.
        expert_model_parallel_size: expert-parallel size (default 1).
        context_parallel_size: context-parallel size (default 1).
        attention_dropout: overrides the model's.
        hidden_dropout: overrides the model's.
        attention_softmax_in_fp32: compute the softmax in float32; torch's attention always does.
        expert_tensor_parallel_size: tensor-parallel size of experts; by default ``tp_degree``.
        calculate_per_token_loss: give every token of an accumulation window the same weight. By default every call of
            the model has the same weight, as with other strategies.
        use_rotary_position_embeddings: must be what the model has; an error otherwise.
        num_micro_batches: micro batches that a batch is split into (default 1). The loader's ``batch_size`` is that of
            a micro batch: prepared loaders return ``num_micro_batches`` times as many samples.
        gradient_clipping: clip the 2-norm of all gradients in every step (default 1.0; 0 turns it off).
        sequence_parallelism: split sequences over the tensor-parallel ranks between layers.
        recompute_activations: recompute attention in the backward pass (``recompute_granularity="selective"``).
        use_distributed_optimizer: shard optimizer states over the data-parallel ranks.
        pipeline_model_parallel_split_rank: first stage of T5's decoder; by default half of the stages.
        num_layers_per_virtual_pipeline_stage: interleave stages of this many layers.
        is_train_batch_min: with several loaders, take the micro batch size of the smallest one, not the largest.
        train_iters: number of steps, for MegatronLMDummyScheduler.
        train_samples: number of samples, instead.
        weight_decay_incr_style: "constant", "linear" or "cosine".
        start_weight_decay: weight decay at the start.
        end_weight_decay: weight decay at the end.
        lr_decay_style: "constant", "linear", "cosine" or "inverse-square-root".
        lr_decay_iters: steps of the decay.
        lr_decay_samples: samples of the decay.
        lr_warmup_iters: steps of the warm-up.
        lr_warmup_samples: samples of the warm-up.
        lr_warmup_fraction: share of the decay for the warm-up.
        min_lr: the lowest learning rate.
        consumed_samples: samples of training, validation and test data of Megatron-core's datasets to leave out,
            because earlier runs have used them.
        no_wd_decay_cond: ``cond(name, parameter)``: no weight decay for these parameters of Megatron-core.
        scale_lr_cond: ``cond(name, parameter)``: multiply the learning rate of these by ``lr_mult``.
        lr_mult: the factor.
        megatron_dataset_flag: batches come from Megatron-core's datasets.
        seq_length: sequence length of these datasets.
        encoder_seq_length: T5 and Megatron-BERT: pad the encoder's sequences to this length. By default batches have
            the lengths of the tokenizer.
        decoder_seq_length: T5: pad the decoder's sequences to this length.
        tensorboard_dir: not supported; use trackers.
        set_all_logging_options: not supported; use trackers.
        eval_iters: batches of an evaluation, for Megatron-core's datasets.
        eval_interval: steps between evaluations, for the same.
        return_logits: return logits with the loss in evaluation.
        custom_train_step_class: a subclass of GPTTrainStep, BertTrainStep or T5TrainStep.
        custom_train_step_kwargs: further arguments of its constructor.
        custom_model_provider_function: ``provide(pre_process, post_process)`` returns this rank's part of a model of
            Megatron-core, which is trained in place of the one that ``prepare`` gets. ``add_encoder``, ``add_decoder``,
            ``vp_stage`` and ``config`` (a TransformerConfig, where the sizes of the model are known) are passed to a
            function that takes them.
        custom_prepare_model_function: ``prepare(provider)`` returns the model, or a list of its parts if stages are
            interleaved: calls the provider, and may load weights into what it returns.
        custom_megatron_datasets_provider_function: ``provide(sizes)`` returns the training, validation and test data,
            for MegatronLMDummyDataLoader; a size of None is one epoch.
        custom_get_batch_function: ``get_batch(iterator)`` of the train step, in place of its own.
        custom_loss_function: ``loss_func(loss_mask, ..., output)`` of the train step, in place of its own.
        other_megatron_args: further fields of TransformerConfig, DistributedDataParallelConfig and OptimizerConfig of
            Megatron-core.

    Attributes:
        micro_batch_size: samples of a micro batch; None before a loader was prepared.
        global_batch_size: samples of a step over all data-parallel ranks; None before a loader was prepared.

    Raises:
        ConfigurationError: a value that is not allowed, or a field that Megatron-core no longer has.
    """

    tp_degree: int = None  # type: ignore[assignment]
    pp_degree: int = None  # type: ignore[assignment]
    use_custom_fsdp: bool | None = None
    overlap_cpu_optimizer_d2h_h2d: bool | None = None
    no_load_optim: bool | None = None
    eod_mask_loss: bool | None = None
    no_save_optim: bool | None = None
    optimizer_cpu_offload: bool | None = None
    use_precision_aware_optimizer: bool | None = None
    decoder_last_pipeline_num_layers: int | None = None
    recompute_granularity: str | None = None
    recompute_method: str | None = None
    recompute_num_layers: int | None = None
    attention_backend: Any = None
    expert_model_parallel_size: int = None  # type: ignore[assignment]
    context_parallel_size: int = None  # type: ignore[assignment]
    attention_dropout: float | None = None
    hidden_dropout: float | None = None
    attention_softmax_in_fp32: bool | None = None
    expert_tensor_parallel_size: int | None = None
    calculate_per_token_loss: bool | None = None
    use_rotary_position_embeddings: bool | None = None
    num_micro_batches: int = None  # type: ignore[assignment]
    gradient_clipping: float = None  # type: ignore[assignment]
    sequence_parallelism: bool | None = None
    recompute_activations: bool | None = None
    use_distributed_optimizer: bool | None = None
    pipeline_model_parallel_split_rank: int | None = None
    num_layers_per_virtual_pipeline_stage: int | None = None
    is_train_batch_min: Any = True
    train_iters: int | None = None
    train_samples: int | None = None
    weight_decay_incr_style: str = "constant"
    start_weight_decay: float | None = None
    end_weight_decay: float | None = None
    lr_decay_style: str = "linear"
    lr_decay_iters: int | None = None
    lr_decay_samples: int | None = None
    lr_warmup_iters: int | None = None
    lr_warmup_samples: int | None = None
    lr_warmup_fraction: float | None = None
    min_lr: float = 0
    consumed_samples: list[int] | None = None
    no_wd_decay_cond: Callable[..., bool] | None = None
    scale_lr_cond: Callable[..., bool] | None = None
    lr_mult: float = 1.0
    megatron_dataset_flag: bool = False
    seq_length: int | None = None
    encoder_seq_length: int | None = None
    decoder_seq_length: int | None = None
    tensorboard_dir: str | None = None
    set_all_logging_options: bool = False
    eval_iters: int = 100
    eval_interval: int = 1000
    return_logits: bool = False
    custom_train_step_class: Any = None
    custom_train_step_kwargs: dict[str, Any] | None = None
    custom_model_provider_function: Callable[..., Any] | None = None
    custom_prepare_model_function: Callable[..., Any] | None = None
    custom_megatron_datasets_provider_function: Callable[..., Any] | None = None
    custom_get_batch_function: Callable[..., Any] | None = None
    custom_loss_function: Callable[..., Any] | None = None
    other_megatron_args: dict[str, Any] | None = None
    micro_batch_size: int | None = field(default=None, init=False)
    global_batch_size: int | None = field(default=None, init=False)

    strategy: ClassVar[str] = "megatron"

    def __post_init__(self) -> None:
        launched = MegatronOptions.from_environment()
        for option in MegatronOptions.options():
            if getattr(self, option.field) is None:
                setattr(self, option.field, getattr(launched, option.field))
            else:
                setattr(self, option.field, option.check(option.field, getattr(self, option.field)))
        for name in ("expert_model_parallel_size", "context_parallel_size", "num_micro_batches"):
            setattr(self, name, getattr(self, name) or 1)
        for name, instead in _NO_EFFECT.items():
            if getattr(self, name):
                raise ConfigurationError(
                    f"MegatronLMPlugin({name}={getattr(self, name)!r}) is not supported. {instead}"
                )
        if self.custom_prepare_model_function is not None and self.custom_model_provider_function is None:
            raise ConfigurationError(
                "custom_prepare_model_function prepares what custom_model_provider_function builds. Set both."
            )
        if self.overlap_cpu_optimizer_d2h_h2d and not self.optimizer_cpu_offload:
            raise ConfigurationError(
                "overlap_cpu_optimizer_d2h_h2d=True overlaps the copies of optimizer_cpu_offload. Set both, or neither."
            )
        for name in ("encoder_seq_length", "decoder_seq_length"):
            length = getattr(self, name)
            if length is not None and (not isinstance(length, int) or length < 1):
                raise ConfigurationError(f"{name}={length!r} is not a number of tokens. Set a positive integer.")
        if self.attention_backend not in (None, "auto"):
            raise ConfigurationError(
                f"attention_backend={self.attention_backend!r}: attention is torch's scaled_dot_product_attention. "
                "Leave it out, and select kernels with torch.nn.attention.sdpa_kernel."
            )
        self._check_fsdp()
        if self.sequence_parallelism and self.tp_degree == 1:
            self.sequence_parallelism = False  # nothing to split over
        if self.num_layers_per_virtual_pipeline_stage is not None and self.pp_degree == 1:
            raise ConfigurationError(
                f"num_layers_per_virtual_pipeline_stage={self.num_layers_per_virtual_pipeline_stage} interleaves the "
                "stages of a pipeline, and pp_degree=1. Set pp_degree to 2 or more, or leave it out."
            )

    @property
    def sharding_strategy(self) -> str | None:
        """What Megatron-core's FSDP shards; None without it."""
        if not self.use_custom_fsdp:
            return None
        return str((self.other_megatron_args or {}).get(_STRATEGY, SHARDING[-1]))

    def _check_fsdp(self) -> None:
        other = self.other_megatron_args or {}
        if other.get("use_torch_fsdp2"):
            raise ConfigurationError(
                "other_megatron_args={'use_torch_fsdp2': True} is not supported: Megatron-core's finalize_model_grads "
                "cannot call that wrapper, which does not scale gradients either. Use use_custom_fsdp=True, or "
                "FullyShardedDataParallelPlugin without Megatron-core."
            )
        self.use_custom_fsdp = bool(self.use_custom_fsdp or any(other.get(name) for name in _FSDP_NAMES))
        strategy = self.sharding_strategy
        if strategy is None:
            if _STRATEGY in other:
                raise ConfigurationError(
                    f"other_megatron_args={{{_STRATEGY!r}: {other[_STRATEGY]!r}}} is a setting of Megatron-core's "
                    "FSDP. Set use_custom_fsdp=True, too, or leave it out."
                )
            return
        if strategy not in SHARDING:
            raise ConfigurationError(
                f"{_STRATEGY}={strategy!r} is not one of {', '.join(SHARDING)}. To shard nothing, leave "
                "use_custom_fsdp out."
            )
        problem = None
        if self.pp_degree > 1:
            problem = (
                f"pp_degree={self.pp_degree}: its ranks are data-parallel x tensor-parallel ones, without stages. Set "
                "pp_degree=1, or use use_distributed_optimizer=True, which shards optimizer states with stages"
            )
        for name, reason in _FSDP_EXCLUDES.items():
            if getattr(self, name):
                problem = f"{name}=True. {reason} Leave one of them out"
        for name, (value, reason) in _FSDP_FIXED.items():
            if other.get(name, value) != value:
                problem = f"other_megatron_args={{{name!r}: {other[name]!r}}}. {reason} Leave it out"
        if strategy == "optim" and other.get("overlap_grad_reduce"):
            problem = (
                f"overlap_grad_reduce=True and {_STRATEGY}='optim': Megatron-core adds a rank's own gradients to their "
                "sum over all ranks. Choose optim_grads, or leave overlap_grad_reduce out"
            )
        if problem is not None:
            raise ConfigurationError(f"use_custom_fsdp=True does not work with {problem}.")
        self.use_distributed_optimizer = True

    def virtual_stages(self, num_layers: int | None) -> int | None:
        """Return how many parts each rank has of a model whose stages are interleaved; None for one."""
        per_chunk = self.num_layers_per_virtual_pipeline_stage
        if per_chunk is None:
            return None
        if num_layers is None or num_layers % (per_chunk * self.pp_degree):
            raise ConfigurationError(
                f"num_layers_per_virtual_pipeline_stage={per_chunk} with pp_degree={self.pp_degree} needs a num_layers "
                f"that is a multiple of {per_chunk * self.pp_degree}, not {num_layers}. Set it in "
                "other_megatron_args={'num_layers': ...}."
            )
        chunks = num_layers // (per_chunk * self.pp_degree)
        self.check_interleaving(chunks)
        return chunks if chunks > 1 else None

    def check_interleaving(self, chunks: int) -> None:
        """Raise ConfigurationError if the micro batches do not fill interleaved stages."""
        if chunks > 1 and self.num_micro_batches % self.pp_degree:
            raise ConfigurationError(
                f"interleaved stages need a num_micro_batches that is a multiple of pp_degree={self.pp_degree}, not "
                f"{self.num_micro_batches}."
            )

    def check_world(self, world_size: int) -> None:
        """Raise ConfigurationError if the number of processes does not fit."""
        sizes = {name: getattr(self, name) for name in _SIZES[:3]}
        product = math.prod(sizes.values())
        written = " x ".join(f"{name}={size}" for name, size in sizes.items())
        if world_size % product:
            raise ConfigurationError(
                f"{world_size} processes are not a multiple of {written} = {product}. Launch a multiple of {product} "
                "processes, or reduce one of the sizes."
            )
        expert_tp = self.expert_tensor_parallel_size or self.tp_degree
        experts = expert_tp * self.expert_model_parallel_size * self.pp_degree
        if world_size % experts:
            raise ConfigurationError(
                f"{world_size} processes are not a multiple of expert_tensor_parallel_size={expert_tp} x "
                f"expert_model_parallel_size={self.expert_model_parallel_size} x pp_degree={self.pp_degree} = "
                f"{experts}."
            )
        if self.use_custom_fsdp and world_size == experts > self.tp_degree:
            raise ConfigurationError(
                f"use_custom_fsdp=True: {world_size} processes / (expert_tensor_parallel_size={expert_tp} x "
                f"expert_model_parallel_size={self.expert_model_parallel_size}) leave one data-parallel rank for each "
                f"expert, whose gradients Megatron-core adds twice. Launch {2 * experts} processes, or a multiple, or "
                "use use_distributed_optimizer=True instead."
            )

    def set_training_args(self, micro_batch_size: int, dp_degree: int) -> None:
        """Set the batch sizes."""
        self.micro_batch_size = micro_batch_size
        self.global_batch_size = micro_batch_size * dp_degree * self.num_micro_batches

    def settings_for(self, *kinds: type[Any]) -> list[dict[str, Any]]:
        """Return the ``other_megatron_args`` that are fields of each class; one that no class has is an error."""
        given = dict(self.other_megatron_args or {})
        for name in (*_FSDP_NAMES, "use_torch_fsdp2"):
            given.pop(name, None)
        found = []
        for kind in kinds:
            names = {item.name for item in fields(kind) if item.init}
            found.append({name: value for name, value in given.items() if name in names})
        known = {name for settings in found for name in settings}
        unknown = sorted(set(given) - known)
        if unknown:
            raise ConfigurationError(
                f"other_megatron_args has {', '.join(unknown)}, which {', '.join(kind.__name__ for kind in kinds)} of "
                "Megatron-core do not have. Arguments of Megatron-LM's training scripts, such as files of a tokenizer "
                "or logging options, are not part of Megatron-core; position embeddings and heads follow from the "
                "model."
            )
        return found
