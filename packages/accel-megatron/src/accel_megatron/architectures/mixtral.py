"""Mixtral."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, ClassVar

from accel_state.errors import ConfigurationError

from .._megatron_compat import repair_moe
from ..layers import layer_spec
from ..weights import Concatenated, Unstacked, Weight, weight
from .base import LlamaLike


class Mixtral(LlamaLike):
    """MixtralForCausalLM: a mixture of experts in every layer."""

    model_classes: ClassVar[tuple[str, ...]] = ("MixtralForCausalLM",)

    def settings(self) -> dict[str, Any]:
        if self.hf.output_router_logits or self.hf.router_jitter_noise:
            raise ConfigurationError(
                "output_router_logits=True and router_jitter_noise of Mixtral are not supported in Megatron-core. For "
                'a balancing loss pass other_megatron_args={"moe_aux_loss_coeff": ..., '
                '"moe_router_load_balancing_type": "aux_loss"}.'
            )
        return {
            **super().settings(),
            "num_moe_experts": self.hf.num_local_experts,
            "moe_router_topk": self.hf.num_experts_per_tok,
            "moe_ffn_hidden_size": self.hf.intermediate_size,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "none",
        }

    def spec(self) -> Any:
        from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec

        repair_moe()
        experts = get_moe_module_spec(use_te=False, num_experts=self.hf.num_local_experts, moe_grouped_gemm=False)
        return layer_spec("causal", mlp=experts)

    def file_weights(self) -> Iterator[Weight]:
        # Transformers has the experts in one tensor, and writes one for each.
        for pair in self.weights():
            match = re.fullmatch(r"(model\.layers\.\d+\.)mlp\.(gate\.weight|experts\.\w+)", pair.names[0])
            if match is None:
                yield pair
                continue
            source = f"{match[1]}block_sparse_moe."
            for index, target in enumerate(pair.targets):
                expert = f"{source}experts.{index}."
                if match[2] == "gate.weight":
                    yield weight(f"{source}gate.weight", target)
                elif match[2] == "experts.down_proj":
                    yield weight(f"{expert}w2.weight", target)
                else:
                    yield weight([f"{expert}w1.weight", f"{expert}w3.weight"], target, Concatenated(), blocks=2)

    def mlp_weights(self, source: str, target: str) -> Iterator[Weight]:
        experts = [f"{target}mlp.experts.local_experts.{index}." for index in range(self.hf.num_local_experts)]
        yield weight(f"{source}mlp.gate.weight", f"{target}mlp.router.weight")
        gated = [f"{expert}linear_fc1.weight" for expert in experts]
        yield weight(f"{source}mlp.experts.gate_up_proj", gated, Unstacked(), blocks=2)
        down = [f"{expert}linear_fc2.weight" for expert in experts]
        yield weight(f"{source}mlp.experts.down_proj", down, Unstacked())
