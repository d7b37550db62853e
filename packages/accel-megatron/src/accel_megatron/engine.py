"""The prepared model: a Transformers model as this rank's chunks of a Megatron-core model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim import Optimizer

from accel.core.computed_loss import ComputedLoss
from accel_state import GradientState
from accel_state.errors import ConfigurationError, require

from ._megatron_compat import CalledRoot, data_parallel_wrappers, drop_gathered, load_core, parallel_state, repair_fsdp
from .architectures.base import IGNORED, Architecture, Batch, Chunk
from .architectures.provided import Provided, ProvidedGroups, bare, share_first_values
from .architectures.registry import architecture_of, settings_of
from .core_config import adopt, config_for, create, dtype_of, set_virtual_stages
from .optimizer import EngineOptimizer, ParameterGroups, build_optimizer, check_optimizer
from .plugin import SHARDING, MegatronLMPlugin
from .runtime import seed_generators
from .train_step import AbstractTrainStep, create_train_step
from .weights import ParameterTable

_UNEQUAL = (
    "the losses of an accumulation window were scaled by different factors ({}), and Megatron-core computes their "
    "gradients before backward() knows the factors. Scale all losses of a window by the same factor, and do not pass "
    "num_items (use MegatronLMPlugin(calculate_per_token_loss=True) to give every token the same weight)."
)


@dataclass
class MegatronOutput:
    """The output of a prepared model, on every rank."""

    loss: torch.Tensor | None  # averaged over all data-parallel ranks; None without labels
    logits: Any = None  # of this data-parallel rank; None in training, and where they were not asked for

    def __getitem__(self, key: str) -> Any:
        return getattr(self, key)


@dataclass
class _Call:
    """A forward and backward pass whose gradients are in the buffers."""

    weight: torch.Tensor | float  # the number that the sum of its gradients is divided by
    factor: float | None = None  # the factor of its loss; None before backward


class MegatronEngine(nn.Module):
    """A model in Megatron-core.

    Called with the arguments of the Transformers model, it runs the pipeline's schedule: in training the forward and
    the backward pass, otherwise the forward pass. The loss is the mean over the batches of all data-parallel ranks.

    Args:
        model: the Transformers model; its weights are taken over, and its parameters move to the meta device. With
            ``custom_model_provider_function`` any module, of which only the parameters in the optimizer are used.
        optimizer: the optimizer of its parameters; None for evaluation only.
        plugin: the settings.
        mixed_precision: "no", "fp16" or "bf16".
        device: this process's device.
        scaler: settings of fp16's loss scale, as fields of OptimizerConfig.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        plugin: MegatronLMPlugin,
        mixed_precision: str,
        device: torch.device,
        scaler: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        load_core()
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig
        from megatron.core.transformer.module import Float16Module
        from megatron.core.transformer.transformer_config import TransformerConfig

        self.plugin: MegatronLMPlugin = plugin
        self.device: torch.device = device
        provided = plugin.custom_model_provider_function is not None
        self.architecture: Architecture = Provided(model, plugin) if provided else architecture_of(model)
        self.architecture.lengths = (plugin.encoder_seq_length, plugin.decoder_seq_length)
        self.train_step: AbstractTrainStep | None = create_train_step(plugin, self.architecture.hf.model_type)
        self.gradient_state: GradientState = GradientState()
        own = torch.float32 if provided else next(model.parameters()).dtype
        self.dtype: torch.dtype = dtype_of(mixed_precision, own)
        ranks = parallel_state.get_data_parallel_group(with_context_parallel=True).size()
        # On one rank there is nothing to shard, and Megatron-core's FSDP would add gradients twice.
        self.shards_parameters = bool(plugin.use_custom_fsdp) and optimizer is not None and ranks > 1
        if optimizer is not None:
            check_optimizer(plugin, optimizer)
        if self.shards_parameters:
            self._check_fsdp()
        seed_generators()
        config, ddp, core = plugin.settings_for(TransformerConfig, DistributedDataParallelConfig, OptimizerConfig)
        self._calls: list[_Call] = []
        self._complete = False  # gradients were reduced over the ranks
        self._stale = False  # the buffers hold gradients of a step that was taken
        self._uncleared = False  # zero_grad was not called since the last step
        self._dropped = False  # zero_grad was called after a forward pass without backward
        chunks = self._provide(model, config) if provided else self._build(config)
        if self.dtype is not torch.float32:
            chunks = [chunk if chunk is not bare(chunk) else Float16Module(self.config_core, chunk) for chunk in chunks]
        plain = [bare(chunk) for chunk in chunks]
        self.table: ParameterTable = ParameterTable(plain, list(self.architecture.weights()), device, buffers=provided)
        self.table.check(self.architecture.unmapped)
        for name in self.architecture.unmapped:
            for parameter in self.table.local.get(name, ()):
                parameter.data.zero_()
        groups: Any = None
        if optimizer is not None and isinstance(self.architecture, Provided):
            groups = ProvidedGroups(self.architecture, optimizer)
        elif optimizer is not None:
            groups = ParameterGroups(model, optimizer, self.table)
        for name, tensors in self.table.local.items():
            for tensor in tensors:
                if isinstance(tensor, nn.Parameter):
                    tensor.requires_grad_(groups is not None and groups.of_target.get(name) is not None)
        self.optimizer: Any = None
        if optimizer is not None:
            ddp = {"grad_reduce_in_fp32": True, "use_megatron_fsdp": self.shards_parameters, **ddp}
            ddp.setdefault("use_distributed_optimizer", bool(plugin.use_distributed_optimizer))
            ddp["data_parallel_sharding_strategy"] = plugin.sharding_strategy or "no_shard"
            settings = DistributedDataParallelConfig(**ddp)
            chunks = self._optimised(chunks, settings, optimizer, groups, {**(scaler or {}), **core})
        self.chunks: Any = nn.ModuleList(chunks)
        self._take_weights(model, optimizer)
        self.train(model.training)

    # -- building ----------------------------------------------------------------------------------------------------

    def _build(self, other: dict[str, Any]) -> list[nn.Module]:
        """Return this rank's chunks of a mapped model."""
        config = config_for(self.plugin, self.architecture, self.dtype, other)
        self.config_core: Any = config
        set_virtual_stages(config.virtual_pipeline_model_parallel_size)
        padded = -(-self.architecture.vocab_size // self.plugin.tp_degree) * self.plugin.tp_degree
        chunks = []
        for stage in range(config.virtual_pipeline_model_parallel_size or 1):
            vp_stage = None if config.virtual_pipeline_model_parallel_size is None else stage
            where = {} if vp_stage is None else {"ignore_virtual": False, "vp_stage": vp_stage}
            pre = parallel_state.is_pipeline_first_stage(**where)
            post = parallel_state.is_pipeline_last_stage(**where)
            built = self.architecture.build(Chunk(config, padded, pre, post, vp_stage, self.plugin))
            chunks.append(built.to(self.device))
        return chunks

    def _provide(self, model: nn.Module, other: dict[str, Any]) -> list[nn.Module]:
        """Return this rank's chunks of the user's model, each wrapped or not."""
        architecture, plugin = self.architecture, self.plugin
        assert isinstance(architecture, Provided)
        fields = {**settings_of(model), **other}
        vp_size = plugin.virtual_stages(fields.get("num_layers"))
        set_virtual_stages(vp_size)
        config = create(plugin, self.dtype, vp_size, fields) if "num_layers" in fields else None
        chunks = [chunk.to(self.device) for chunk in architecture.provide(config, vp_size)]
        plain = [bare(chunk) for chunk in chunks]
        for chunk in plain:
            adopt(chunk.config, plugin, self.dtype, vp_size)
        self.config_core = plain[0].config
        architecture.describe(plain)
        share_first_values(plain)
        return chunks

    def _optimised(
        self, chunks: list[Any], settings: Any, optimizer: Optimizer, groups: Any, core: dict[str, Any]
    ) -> list[nn.Module]:
        """Return the chunks with buffers for their gradients, after the optimizer of their parameters was created."""
        from megatron.core.distributed import DistributedDataParallel

        wrapped = [chunk for chunk in chunks if isinstance(chunk, data_parallel_wrappers())]
        if wrapped:
            settings = _check_wrapped(wrapped, len(chunks), settings)
        elif self.shards_parameters:
            chunks = [self._shard(chunk, settings) for chunk in chunks]
        else:
            chunks = [
                DistributedDataParallel(self.config_core, settings, chunk, disable_bucketing=index > 0)
                for index, chunk in enumerate(chunks)
            ]
        # FSDP sums the gradients of any number of backward passes.
        self.overlaps = settings.overlap_grad_reduce and not self.shards_parameters
        precision = {"bf16": self.dtype is torch.bfloat16, "fp16": self.dtype is torch.float16}
        shared = {"overlap_param_gather": settings.overlap_param_gather, "params_dtype": self.dtype}
        built = build_optimizer(self.plugin, optimizer, groups, self.table, chunks, {**precision, **shared, **core})
        self.optimizer = EngineOptimizer(self.plugin, optimizer, built, groups, self.table)
        if self.dtype is torch.float16:
            self.config_core.grad_scale_func = built.scale_loss
        if settings.overlap_param_gather and len(chunks) > 1:
            self.config_core.param_sync_func = [chunk.start_param_sync for chunk in chunks]
        return chunks

    def _check_fsdp(self) -> None:
        """Raise an error where Megatron-core's FSDP cannot train this model."""
        require("einops", purpose="Megatron-core's FSDP", install="accel[megatron]")
        if self.dtype is torch.float16:
            raise ConfigurationError(
                "use_custom_fsdp=True does not work in fp16: Megatron-core does not unscale gradients that are "
                "sharded. Use bf16, or use_distributed_optimizer=True instead."
            )

    def _shard(self, chunk: nn.Module, settings: Any) -> nn.Module:
        """Return a chunk of the model in Megatron-core's FSDP, which gathers parameters one layer after the other."""
        repair_fsdp()
        from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel

        class Sharded(FullyShardedDataParallel):
            def sync_rng_states_across_tp_group(self) -> None:
                """Nothing: dropout differs between tensor-parallel ranks, and other generators belong to the script."""

        # Every rank keeps fixed parameters: FSDP takes trained ones only.
        for module in chunk.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                if not parameter.requires_grad:
                    delattr(module, name)
                    module.register_buffer(name, parameter)
        units = None
        if settings.data_parallel_sharding_strategy == SHARDING[-1]:
            lists = [(name, item) for name, item in chunk.named_modules() if isinstance(item, nn.ModuleList)]
            stacks = [item for name, item in lists if name.rpartition(".")[2] == "layers"]
            units = list({type(layer): None for stack in stacks for layer in stack})
            if not units:
                raise ConfigurationError(
                    "use_custom_fsdp=True gathers the layers of a model one by one, and "
                    f"{type(bare(chunk)).__name__} has no `layers`. Set "
                    "other_megatron_args={'data_parallel_sharding_strategy': 'optim_grads'}."
                )
        return Sharded(self.config_core, settings, CalledRoot(chunk), fsdp_unit_modules=units, device=self.device)

    def _take_weights(self, model: nn.Module, optimizer: Optimizer | None) -> None:
        """Load the weights of the Transformers model, and move its parameters to the meta device."""
        if isinstance(self.architecture, Provided):
            self.dtypes: dict[Any, Any] = self.architecture.dtypes
        else:
            state = model.state_dict()
            self.dtypes = {name: tensor.dtype for name, tensor in state.items()}
            self.load_weights(lambda name: state[name])
        parameters = list(model.parameters())  # kept, so that no other object gets the id of one
        meta = {id(item): nn.Parameter(item.detach().to("meta"), item.requires_grad) for item in parameters}
        _exchange(model, meta)
        for group in [] if optimizer is None else optimizer.param_groups:
            group["params"] = [meta[id(parameter)] for parameter in group["params"]]
        self.__dict__["transformers_model"] = model  # not a submodule

    def load_weights(self, read: Callable[[str], torch.Tensor]) -> None:
        """Take over weights that ``read`` returns by their Transformers names."""
        put = self._put if self.optimizer is None else self.optimizer.put
        self.drop_gathered()
        self.table.load(read, put)

    def drop_gathered(self) -> None:
        """Let FSDP gather parameters again: their parts are about to be changed."""
        for chunk in self.chunks if self.shards_parameters else ():
            drop_gathered(chunk)

    @staticmethod
    def _put(parameter: torch.Tensor, value: torch.Tensor) -> None:
        parameter.data.copy_(value)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the weights by their Transformers names, on the host of rank 0.

        Every rank must exhaust the iterator.
        """
        value = (lambda parameter: parameter.detach().float()) if self.optimizer is None else self.optimizer.value
        for name, tensor in self.table.collect(value):
            yield name, tensor.to(self.dtypes[name])

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """Return the state dict of the Transformers model, or of the provided one, on rank 0; empty on other ranks.

        Every rank must call it.
        """
        state = dict(self.weights())
        if not state or not self.architecture.takes_weights:
            return state
        model = self.transformers_model
        buffers, first = dict(model.named_buffers()), {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if name in state:
                first[id(parameter)] = name
        complete = {}
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name in state:
                complete[name] = state[name]
            elif name in buffers:
                complete[name] = tensor
            else:  # another name of a tied weight
                complete[name] = state[first[id(tensor)]]
        return complete

    def unwrapped(self) -> nn.Module:
        """Return the Transformers model with the current weights, on the host of every rank. A collective call.

        Of a provided model, this rank's part without wrappers; a list of modules, if stages are interleaved.
        """
        if not self.architecture.takes_weights:
            parts = [bare(chunk) for chunk in self.chunks]
            return parts[0] if len(parts) == 1 else nn.ModuleList(parts)
        state = self.full_state_dict()
        model = self.transformers_model
        filled: dict[int, nn.Parameter] = {}
        named = dict(model.named_parameters())
        for name, parameter in named.items():
            tensor = state[name] if state else torch.empty(parameter.shape, dtype=parameter.dtype)
            moved = tensor.to(self.device)
            dist.broadcast(moved, 0)
            filled[id(parameter)] = nn.Parameter(moved.cpu(), requires_grad=parameter.requires_grad)
        _exchange(model, filled)
        return model

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "transformers_model":
                raise
        return getattr(self.__dict__["transformers_model"], name)  # such as config

    # -- running -----------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> MegatronOutput:
        if args:
            raise ConfigurationError(
                f"the model was called with {len(args)} arguments without names. Call it as model(input_ids=..., "
                "labels=...), for example model(**batch)."
            )
        batch = {name: value for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
        if "tokens" in batch:  # of Megatron-core's datasets, whose labels are shifted already
            labels = batch["labels"]
            if "loss_mask" in batch:
                labels = labels.masked_fill(batch["loss_mask"] == 0, IGNORED)
            batch = {"input_ids": batch["tokens"], "position_ids": batch["position_ids"], "labels": labels}
            return self._run(batch, batch, training=self.training and torch.is_grad_enabled())
        free = not self.architecture.takes_weights and self.train_step is not None  # it reads batches itself
        if "input_ids" not in batch and not (free and batch):
            raise ConfigurationError(f"the model was called without input_ids, with {', '.join(kwargs) or 'nothing'}.")
        training = self.training and torch.is_grad_enabled()
        if training and (("labels" not in batch and not free) or self.optimizer is None):
            optimizer = "an optimizer, which belongs into the same call of prepare()"
            lacks = optimizer if self.optimizer is None else "labels"
            raise ConfigurationError(
                f"forward and backward passes run in one call, which lacks {lacks}. For outputs only, use model.eval() "
                "or torch.no_grad()."
            )
        return self._run(batch, self.architecture.inputs(batch), training)

    def _run(self, batch: Batch, inputs: Batch, training: bool) -> MegatronOutput:
        samples, length = self.architecture.shape(batch)
        micro_batches = self._micro_batches(inputs, samples, training)
        if training:
            return MegatronOutput(self._train(micro_batches))
        return self._evaluate(micro_batches, samples, length)

    def _micro_batches(self, inputs: Batch, samples: int, training: bool) -> list[Batch]:
        """Return the inputs, padded and split into micro batches, and their parts of the sequences."""
        count = self.plugin.num_micro_batches if training else min(self.plugin.num_micro_batches, samples)
        if self.config_core.virtual_pipeline_model_parallel_size:
            count = self.plugin.num_micro_batches  # the interleaved schedule needs a multiple of the stages
        missing = -samples % count
        length = self.architecture.shape(inputs)[1]
        if missing and not self.architecture.pads_batches:
            raise ConfigurationError(
                f"a batch of {samples} samples cannot be split into num_micro_batches={count}, and how the train step "
                "treats padding is unknown. Pass batches of a multiple (DataLoader(drop_last=True))."
            )
        cp_size = self.plugin.context_parallel_size
        multiple = self.plugin.tp_degree if self.plugin.sequence_parallelism else 1
        if cp_size > 1:
            multiple *= 2 * cp_size
        padded = {}
        for name, tensor in inputs.items():
            fill = _FILL.get(name, 0)
            if tensor.ndim == 2:
                tensor = F.pad(tensor, (0, -tensor.shape[1] % multiple), value=fill)
            if missing:
                tensor = torch.cat([tensor, tensor.new_full((missing, *tensor.shape[1:]), fill)])
                if name == "attention_mask":  # a row that is masked as a whole has no softmax
                    tensor[-missing:] = inputs[name].new_zeros(()) if tensor.dtype is torch.bool else 1
            padded[name] = tensor
        limit, length = self.architecture.max_length, length + -length % multiple
        if limit is not None and length > limit:
            raise ConfigurationError(
                f"sequences of {length} tokens (padded to a multiple of {multiple}) are longer "
                f"than the {limit} positions of the model."
            )
        if cp_size > 1:
            rank = parallel_state.get_context_parallel_rank()
            for name, tensor in padded.items():
                # Attention needs the mask of all keys.
                if tensor.ndim == 2 and name != "attention_mask":
                    pieces = tensor.unflatten(1, (2 * cp_size, -1))
                    padded[name] = pieces[:, [rank, 2 * cp_size - 1 - rank]].flatten(1)
        size = (samples + missing) // count
        return [{name: tensor[i * size : (i + 1) * size] for name, tensor in padded.items()} for i in range(count)]

    def _schedule(self, micro_batches: list[Batch], step: Callable[..., Any], training: bool) -> list[Any]:
        """Run the pipeline; returns what the loss functions of the last stage have reported."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        chunks = list(self.chunks)
        iterators = [iter(micro_batches) for _ in chunks]
        samples, length = self.architecture.shape(micro_batches[0])
        length *= self.plugin.context_parallel_size
        return get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if len(chunks) > 1 else iterators[0],
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=length * self.architecture.sequences,
            micro_batch_size=samples,
            forward_only=not training,
        )

    def _weights_of(self, micro_batches: list[Batch]) -> torch.Tensor:
        weights = torch.stack([self.architecture.weigh(batch) for batch in micro_batches]).sum(0).to(self.device)
        dist.all_reduce(weights, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return weights

    def _train(self, micro_batches: list[Batch]) -> torch.Tensor:
        self._begin_call()
        weights = self._weights_of(micro_batches)
        architecture = self.architecture
        divisor = torch.ones_like(weights[0]) if architecture.normalised else weights[0].clamp(min=1)
        per_token = bool(self.plugin.calculate_per_token_loss) and not architecture.normalised
        # Each call has the same weight in a window, or each token.
        scale = 1.0 if per_token else 1.0 / divisor

        def step(iterator: Iterator[Batch], model: nn.Module) -> Any:
            batch = next(iterator)

            def loss_of(output: Any) -> Any:
                loss = architecture.loss(batch, output, weights)
                return loss * scale, torch.zeros((), dtype=torch.int, device=loss.device), loss.detach()

            return architecture.call(model, batch), loss_of

        if self.train_step is not None:
            step, per_token, divisor = self._custom_step(len(micro_batches)), False, torch.ones_like(divisor)
        last = self.gradient_state.sync_gradients
        with ExitStack() as stack:
            if self.overlaps:
                each = [chunk.no_sync for chunk in self.chunks]
                if not last:
                    for no_sync in each:
                        stack.enter_context(no_sync())
                several = len(each) > 1
                at_end = each if several else each[0]
                self.config_core.no_sync_func = at_end if last else nullcontext
                starts = [chunk.start_grad_sync for chunk in self.chunks]
                self.config_core.grad_sync_func = starts if several and last else None
            losses = self._schedule(micro_batches, step, training=True)
        value = self._share_loss(losses) / divisor
        call = _Call(divisor if per_token else 1.0)
        self._calls.append(call)
        trigger = torch.zeros((), device=self.device, requires_grad=True)

        def report(gradient: torch.Tensor) -> None:
            call.factor = float(gradient) + (call.factor or 0.0)

        return ComputedLoss.apply(trigger, value, report)

    def _custom_step(self, count: int) -> Callable[..., Any]:
        """Return the user's train step, whose losses are averaged over micro batches and ranks."""
        ranks = parallel_state.get_data_parallel_group(with_context_parallel=True).size()
        train_step = self.train_step
        assert train_step is not None

        def step(iterator: Iterator[Batch], model: nn.Module) -> Any:
            output, loss_func = train_step.forward_step(iterator, model)

            def loss_of(value: Any) -> Any:
                loss = loss_func(value)[0] / (count * ranks)
                return loss, torch.zeros((), dtype=torch.int, device=loss.device), loss.detach()

            return output, loss_of

        return step

    def _begin_call(self) -> None:
        if self._stale:
            self._clear_buffers()
        pending = [call for call in self._calls if call.factor is None]
        if pending and self._dropped:
            self._clear_buffers()
        elif pending:
            raise ConfigurationError(
                "the model was called in training before backward() of the last loss, whose gradients are computed "
                "already. Call accelerator.backward(loss) first, optimizer.zero_grad() to discard it, or evaluate with "
                "model.eval() or torch.no_grad()."
            )
        elif self._complete:
            raise ConfigurationError(
                "the gradients were reduced already (by clip_grad_norm_), and the model was called again. Call "
                "optimizer.step() and optimizer.zero_grad() first."
            )
        elif self._calls and self.overlaps and not self._accumulated:
            raise ConfigurationError(
                "overlap_grad_reduce=True reduces gradients in the backward pass, so accumulation needs `with "
                "accelerator.accumulate(model):`."
            )
        self._accumulated = not self.gradient_state.sync_gradients
        self._dropped = False

    overlaps: bool = False
    _accumulated = False

    def _share_loss(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """Return the sum of the last stage's losses over all data-parallel ranks, on every rank."""
        total = torch.stack(losses).sum().reshape(()).float() if losses else torch.zeros((), device=self.device)
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        if pipeline.size() > 1:
            dist.broadcast(total, parallel_state.get_pipeline_model_parallel_last_rank(), group=pipeline)
        dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        return total

    @torch.no_grad()
    def _evaluate(self, micro_batches: list[Batch], samples: int, length: int) -> MegatronOutput:
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region, vocab_parallel_cross_entropy

        architecture = self.architecture
        labelled = "labels" in micro_batches[0]
        weights = self._weights_of(micro_batches) if labelled else torch.zeros(1)
        wants_logits = self.plugin.return_logits or not labelled
        if self.train_step is not None and not (wants_logits and architecture.returns_logits):
            losses = self._schedule(micro_batches, self._custom_step(len(micro_batches)), training=False)
            return MegatronOutput(self._share_loss(losses))

        def step(iterator: Iterator[Batch], model: nn.Module) -> Any:
            batch = next(iterator)
            labels: Any = batch.get("labels")
            called = {key: value for key, value in batch.items() if key != "labels"} if wants_logits else batch

            def report(output: Any, **_: Any) -> Any:
                logits = None
                if wants_logits:
                    logits = output[0] if isinstance(output, tuple) else output
                    if labelled:
                        words = logits.transpose(0, 1).contiguous().float()
                        losses = vocab_parallel_cross_entropy(words, labels.clamp(min=0).transpose(0, 1).contiguous())
                        losses = losses.transpose(0, 1)
                        output = (losses, output[1]) if isinstance(output, tuple) else losses
                    if logits.shape[-1] < architecture.vocab_size:  # a provided model may have gathered them itself
                        logits = gather_from_tensor_model_parallel_region(logits)
                    logits = logits[..., : architecture.vocab_size]
                loss = architecture.loss(batch, output, weights) if labelled else torch.zeros((), device=self.device)
                return loss, torch.zeros((), dtype=torch.int, device=self.device), (loss.detach(), logits)

            return architecture.call(model, called), report

        results = self._schedule(micro_batches, step, training=False)
        loss = logits = None
        if labelled:
            divisor = torch.ones_like(weights[0]) if architecture.normalised else weights[0].clamp(min=1)
            loss = self._share_loss([item[0] for item in results]) / divisor
        if wants_logits:
            joined = torch.cat([item[1] for item in results]) if results else None
            logits = self._share_logits(joined)[:samples, :length]
        return MegatronOutput(loss, logits)

    def _share_logits(self, logits: torch.Tensor | None) -> torch.Tensor:
        """Return the logits of the last stage, with whole sequences, on every rank of the pipeline."""
        size = self.plugin.context_parallel_size
        if logits is not None and size > 1:
            parts = [torch.empty_like(logits) for _ in range(size)]
            dist.all_gather(parts, logits.contiguous(), group=parallel_state.get_context_parallel_group())
            pieces: list[Any] = [None] * (2 * size)
            for rank, part in enumerate(parts):
                pieces[rank], pieces[2 * size - 1 - rank] = part.chunk(2, 1)
            logits = torch.cat(pieces, 1)
        group = parallel_state.get_pipeline_model_parallel_group()
        if group.size() > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            meta: list[Any] = [None if logits is None else (logits.shape, logits.dtype)]
            dist.broadcast_object_list(meta, last, group=group)
            if logits is None:
                logits = torch.empty(meta[0][0], dtype=meta[0][1], device=self.device)
            logits = logits.contiguous()
            dist.broadcast(logits, last, group=group)
        assert logits is not None
        return logits

    def megatron_generate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Generate tokens with tensor and pipeline parallelism. Every rank must call it with the same arguments.

        Args:
            *args: ``input_ids`` of shape (prompts, length), and ``attention_mask``, with zeros where prompts are padded
                on one side.
            **kwargs: ``max_new_tokens`` (default 20) or ``max_length``; ``temperature``, ``top_k``, ``top_p`` (with
                ``top_p_decay`` and ``top_p_bound``) for random tokens, which are the most likely ones otherwise;
                ``num_beams`` and ``length_penalty`` for a beam search of one prompt; ``eos_token_id`` and
                ``pad_token_id``, by default those of the model's config; ``add_BOS``; ``generator``.

        Returns:
            The tokens of the prompts and the new ones, on every rank.
        """
        from .generation import generate

        return generate(self, *args, **kwargs)

    # -- gradients ---------------------------------------------------------------------------------------------------

    def scale(self, factor: float) -> None:
        """Multiply the gradients accumulated so far."""
        for call in self._calls:
            if call.factor is not None:
                call.factor *= factor

    def finish_gradients(self) -> None:
        """Reduce the gradients of the window over the ranks, once."""
        from megatron.core.distributed import finalize_model_grads

        if self._complete:
            return
        calls = [call for call in self._calls if call.factor is not None]
        if not calls or len(calls) < len(self._calls):
            raise ConfigurationError(
                "optimizer.step() or clip_grad_norm_() was called without a backward() of the last loss. Call "
                "accelerator.backward(outputs.loss) first."
            )
        if self._uncleared:
            raise ConfigurationError(
                "the gradients of the last step were not cleared. Call optimizer.zero_grad() after each "
                "optimizer.step()."
            )
        factors = [call.factor or 0.0 for call in calls]
        if max(factors) - min(factors) > 1e-6 * max(map(abs, factors)):
            raise ConfigurationError(_UNEQUAL.format(", ".join(f"{factor:g}" for factor in factors)))
        finalize_model_grads(list(self.chunks))
        divisor = sum(call.weight for call in calls)
        scaling = sum(factors) / divisor
        if not isinstance(scaling, float) or scaling != 1.0:
            for chunk in self.chunks:
                chunk.scale_gradients(scaling)
        self._complete = True

    def clip(self, max_norm: float) -> torch.Tensor:
        """Clip in the next step; returns the norm."""
        self.finish_gradients()
        self.optimizer.prepare()
        return torch.tensor(self.optimizer.clip(max_norm), device=self.device)

    def step(self) -> bool:
        """Update the parameters; False if gradients overflowed."""
        self.finish_gradients()
        stepped = self.optimizer.step()
        self.optimizer.clear()
        self._calls.clear()
        self._complete, self._stale, self._uncleared = False, True, True
        return bool(stepped)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, except those of a loss whose backward is still to come."""
        waiting = [call for call in self._calls if call.factor is None]
        if waiting and len(waiting) < len(self._calls):
            raise ConfigurationError(
                "optimizer.zero_grad() was called between a forward pass and its backward() within an accumulation "
                "window. Call it after optimizer.step()."
            )
        self._uncleared, self._dropped = False, bool(waiting)
        if not waiting:
            self._clear_buffers()

    def _clear_buffers(self) -> None:
        self._calls.clear()
        self._complete = self._stale = False
        if self.optimizer is not None:
            self.optimizer.clear()
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.core.zero_grad()


def _exchange(model: nn.Module, parameters: dict[int, nn.Parameter]) -> None:
    """Put other parameters into a model, by the ids of its own."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = parameters[id(parameter)]


def _check_wrapped(wrapped: list[Any], count: int, settings: Any) -> Any:
    """Return the settings of chunks that custom_prepare_model_function wrapped in DistributedDataParallel."""
    found = wrapped[0].ddp_config
    problem = None
    if len(wrapped) < count:
        problem = f"{len(wrapped)} of {count} parts are wrapped"
    elif found.use_megatron_fsdp or settings.use_megatron_fsdp:
        problem = "Megatron-core's FSDP wraps it here, with use_custom_fsdp=True"
    elif found.use_distributed_optimizer != settings.use_distributed_optimizer:
        problem = f"its use_distributed_optimizer={found.use_distributed_optimizer}"
    elif any(buffer.gradient_scaling_factor != 1.0 for chunk in wrapped for buffer in chunk.buffers):
        problem = "it divides gradients by the number of ranks (calculate_per_token_loss=False in its config)"
    if problem is not None:
        raise ConfigurationError(
            f"custom_prepare_model_function wrapped the model in {type(wrapped[0]).__name__}, and {problem}. Return "
            "the model without it: prepare() wraps it."
        )
    return found


_FILL = {"labels": IGNORED, "next_sentence_label": IGNORED, "decoder_labels": IGNORED}
