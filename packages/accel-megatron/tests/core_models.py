"""Models that Megatron-core builds of its own layers, with its optimizers, in every rank of a test."""

from __future__ import annotations

from typing import Any

import matrix
import torch

from accel_megatron._megatron_compat import repair_moe
from accel_megatron.architectures.registry import architecture_of
from accel_megatron.weights import part_of, split_dim


class CoreModel:
    """A model and an optimizer of Megatron-core.

    Args:
        name: a model of :func:`matrix.models`.
        tp: tensor-parallel size.
        ep: expert-parallel size.
        half: in bfloat16.
        distributed: with the distributed optimizer.
    """

    def __init__(self, name: str, tp: int, ep: int = 1, half: bool = False, distributed: bool = False) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.module import Float16Module
        from megatron.core.transformer.transformer_config import TransformerConfig

        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tp, expert_model_parallel_size=ep)
        model_parallel_cuda_manual_seed(1)
        self.tp, self.original = tp, matrix.create(name)
        self.architecture = architecture_of(self.original)
        dtype = torch.bfloat16 if half else torch.float32
        settings = {
            **self.architecture.settings(),
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            "params_dtype": dtype,
            "bf16": half,
            "tensor_model_parallel_size": tp,
            "expert_model_parallel_size": ep,
        }
        config = TransformerConfig(**settings)
        self.bare = self._build(name, config)
        model: Any = Float16Module(config, self.bare) if half else self.bare
        ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=distributed)
        self.model = DistributedDataParallel(config, ddp, model)
        options = {"bf16": half, "params_dtype": dtype, "use_distributed_optimizer": distributed}
        self.optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, **options), [self.model])

    def _build(self, name: str, config: Any) -> Any:
        from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
        from megatron.core.models.bert.bert_model import BertModel
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.T5 import T5Model
        from megatron.core.models.T5.t5_spec import (
            get_t5_decoder_with_local_block_spec,
            get_t5_encoder_with_local_block_spec,
        )

        repair_moe()
        architecture: Any = self.architecture
        rows, shared = architecture.vocab_size, {"share_embeddings_and_output_weights": architecture.tied}
        if name == "megatron-bert":
            spec = bert_layer_local_spec
            return BertModel(config, 2, spec, rows, architecture.max_length, **shared)
        layers = config.num_layers
        if name.startswith("t5"):
            encoder, decoder = (
                get_t5_encoder_with_local_block_spec(layers),
                get_t5_decoder_with_local_block_spec(layers),
            )
            return T5Model(config, config, encoder, decoder, rows, 0, position_embedding_type="relative", **shared)
        spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, qk_layernorm=config.qk_layernorm)
        kind = architecture.position_embedding
        return GPTModel(config, spec, rows, architecture.max_length, position_embedding_type=kind, **shared)

    def state(self, loading: bool, optimizer: bool) -> dict[str, Any]:
        """What dist_checkpointing saves or loads."""
        from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group

        options = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
        metadata = ensure_metadata_has_dp_cp_group(options)
        state = {"model": self.bare.sharded_state_dict(metadata=metadata)}
        if optimizer:
            state["optimizer"] = self.optimizer.sharded_state_dict(state["model"], loading, metadata=metadata)
        return state

    def load(self, folder: str, optimizer: bool = False) -> None:
        """Load a checkpoint of dist_checkpointing."""
        from megatron.core import dist_checkpointing

        loaded: Any = dist_checkpointing.load(self.state(True, optimizer), folder)
        self.bare.load_state_dict(loaded["model"])
        if optimizer:
            self.optimizer.load_state_dict(loaded["optimizer"])

    def save(self, folder: str) -> None:
        """Save one."""
        from megatron.core import dist_checkpointing

        dist_checkpointing.save({**self.state(False, True), "iteration": 3}, folder)

    def different(self, expected: dict[str, torch.Tensor]) -> list[str]:
        """The parameters of this rank that are not the parts of a Transformers model's weights."""
        from megatron.core import parallel_state

        rank, experts = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_expert_model_parallel_rank()
        own, found = dict(self.bare.named_parameters()), []
        count = (
            self.architecture.settings().get("num_moe_experts") or 1
        ) // parallel_state.get_expert_model_parallel_world_size()
        for pair in self.architecture.weights():
            full = pair.transform.to_megatron([expected[name] for name in pair.names])
            for target, tensor in zip(pair.targets, full, strict=True):
                name = target
                if ".local_experts." in target:
                    before, number, after = (
                        target.partition(".local_experts.")[0],
                        *target.split(".local_experts.")[1].split(".", 1),
                    )
                    if int(number) // count != experts:
                        continue
                    name = f"{before}.local_experts.{int(number) % count}.{after}"
                if name.endswith("final_layernorm.weight") and name not in own:
                    continue  # Megatron-core's own local layers of T5 lack it
                part = part_of(tensor, pair, split_dim(target), self.tp, rank, tensor.shape[0])
                if not torch.equal(own.pop(name).detach().float(), part.float()):
                    found.append(target)
        return found + [name for name in own if name not in self.architecture.unmapped and "output_layer" not in name]
