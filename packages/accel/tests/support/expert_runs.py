"""Mixtures of experts on meshes, and the same ones in one process of plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accel import Accelerator
from accel.core.fused_dtensor import full_tensor
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.parallel.axis_settings import ExpertParallelConfig, PipelineParallelConfig
from accel.parallel.config import ParallelismConfig

VOCABULARY, EXPERTS, SAMPLES = 61, 8, 8
BLOCKS = {"fsdp_version": 2, "auto_wrap_policy": "transformer_based_wrap"}
SMALL: dict[str, Any] = {
    **{"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32},
    **{"bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
}
AUXILIARY: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.02}
LOCAL: dict[str, Any] = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}
SPARSE: dict[str, Any] = {"moe_intermediate_size": 8, "num_experts": EXPERTS, "num_experts_per_tok": 2, **AUXILIARY}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
GROUPED = {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {**LOCAL, **AUXILIARY}),
    "qwen2": ("Qwen2Moe", {**SPARSE, "shared_expert_intermediate_size": 12}),
    "qwen3": ("Qwen3Moe", {**SPARSE, "num_experts_per_tok": 3, "norm_topk_prob": True, "head_dim": 4}),
    "deepseek": (
        "DeepseekV3",
        {"moe_intermediate_size": 8, "first_k_dense_replace": 1, "num_key_value_heads": 4, **GROUPED, **LATENT},
    ),
    "gpt oss": (
        "GptOss",
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 4,
            "head_dim": 4,
            **LOCAL,
            **AUXILIARY,
        },
    ),
    "llama4": (
        "Llama4Text",
        {
            **LOCAL,
            **{"num_experts_per_tok": 1, "head_dim": 4, "intermediate_size_mlp": 24},
            **{"interleave_moe_layer_step": 1, "attention_chunk_size": 32},
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": EXPERTS, "num_experts_per_tok": 2, **AUXILIARY}),
}


def build(kind: str, seed: int = 0, **changes: Any) -> nn.Module:
    import transformers

    name, settings = SETTINGS[kind]
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **settings, **changes})
    torch.manual_seed(seed)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim > 1:  # larger than by default, so that routing is uneven
            nn.init.normal_(parameter, std=0.15)
    return model


def skew(model: nn.Module, routing: str) -> None:
    """Bias what the routers choose: "idle" leaves the last expert without tokens, "two" sends all tokens to two."""
    if routing == "even":
        return
    bias = torch.zeros(EXPERTS)
    bias[-1 if routing == "idle" else slice(2, None)] = -1e3
    for module in model.modules():
        if type(module).__name__.lower().endswith(("topkrouter", "llama4router")):
            _add_bias(module, bias)


def _add_bias(router: nn.Module, bias: torch.Tensor) -> None:
    """Run the router's own code with a bias on its logits."""
    inner, linear = router.forward, nn.functional.linear

    def forward(hidden: torch.Tensor) -> Any:
        nn.functional.linear = lambda x, weight, b=None: linear(x, weight, b) + bias.to(x)  # type: ignore[assignment]
        try:
            return inner(hidden)
        finally:
            nn.functional.linear = linear  # type: ignore[assignment]

    router.forward = forward


def batches(steps: int, length: int = 9) -> torch.Tensor:
    """Tokens (steps, samples, length)."""
    return torch.randint(0, VOCABULARY, (steps, SAMPLES, length), generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def optimizer_of(model: nn.Module, **kernel: bool) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4, **kernel)


def plain(
    kind: str,
    steps: int,
    window: int = 1,
    routing: str = "even",
    length: int = 9,
    max_norm: float = 0.5,
    after_step: Callable[[nn.Module], None] | None = None,
    observe: Callable[[nn.Module], None] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """One process, plain PyTorch, whole batches."""
    model = build(kind, **changes)
    skew(model, routing)
    if observe is not None:
        observe(model)
    optimizer = optimizer_of(model)
    losses, norms, gradients = [], [], {}
    for number, tokens in enumerate(batches(steps, length)):
        loss = loss_of(model, tokens)
        (loss / window).backward()
        losses.append(loss.item())
        if (number + 1) % window:
            continue
        if not gradients:
            gradients = {name: item.grad.clone() for name, item in model.named_parameters() if item.grad is not None}
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
        if after_step is not None:
            after_step(model)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights}


def accelerator_for(
    sizes: Mapping[str, int],
    fsdp: Mapping[str, Any] | None = None,
    balance_rate: float = 0.0,
    pipeline: PipelineParallelConfig | None = None,
    **settings: Any,
) -> Accelerator:
    handler = ExpertParallelConfig(balance_rate) if balance_rate else None
    return Accelerator(
        parallelism_config=ParallelismConfig(**sizes, ep_handler=handler, pp_handler=pipeline),
        fsdp_plugin=None if fsdp is None else FullyShardedDataParallelPlugin(**fsdp),
        **settings,
    )


def loss_on(accelerator: Accelerator, model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """This rank's share of the loss of a batch, whose mean over ranks is that of the batch; with its backward pass."""
    ranks = accelerator.strategy.data_collectives
    own = tokens.chunk(ranks.world_size)[ranks.rank].clone()
    if accelerator.parallelism_config.cp_size == 1:
        loss = loss_of(model, own)
        accelerator.backward(loss)
        return loss
    # The parts of a sequence have unequally many labels, so their sum is divided by the mean number of them.
    items = tokens[:, 1:].numel() / accelerator.strategy.averaging_collectives.world_size
    labels = own.clone()
    with accelerator.maybe_context_parallel(buffers=[own, labels], buffer_seq_dims=[1, 1]):
        assert own.shape[1] * accelerator.parallelism_config.cp_size == tokens.shape[1]
        loss = model(input_ids=own, labels=labels, use_cache=False, num_items_in_batch=items).loss
        accelerator.backward(loss)
    return loss


def train(
    accelerator: Accelerator,
    kind: str,
    steps: int,
    window: int = 1,
    routing: str = "even",
    length: int = 9,
    max_norm: float = 0.5,
    **changes: Any,
) -> dict[str, Any]:
    """The run of :func:`plain` on a mesh; only rank 0 of each stage starts with the same weights."""
    stage_ranks = accelerator.num_processes // accelerator.parallelism_config.pp_size
    model = build(kind, seed=accelerator.process_index % stage_ranks, **changes)
    skew(model, routing)
    model, optimizer = accelerator.prepare(model, optimizer_of(model))
    losses, norms, gradients = [], [], {}
    for tokens in batches(steps, length):
        with accelerator.accumulate(model):
            loss = loss_on(accelerator, model, tokens)
            if accelerator.sync_gradients:
                if not gradients:
                    gradients = of_all_stages(accelerator, full_gradients(model))
                norms.append(accelerator.clip_grad_norm_(model.parameters(), max_norm).item())
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    held = sum(part_of(item).numel() for name, item in model.named_parameters() if ".experts." in name)
    accelerator.free_memory()
    return {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights, "held": held}


def of_all_stages(accelerator: Accelerator, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    if accelerator.parallelism_config.pp_size == 1:
        return gradients
    stages: list[Any] = [None] * accelerator.parallelism_config.pp_size
    torch.distributed.all_gather_object(stages, gradients, group=accelerator.torch_device_mesh.get_group("pp"))
    return {name: value for stage in stages for name, value in stage.items()}


def part_of(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def full_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every gradient in full, by the parameter's name in the model before it was wrapped."""
    found = {}
    for name, item in model.named_parameters():
        if item.grad is not None:
            gradient = full_tensor(item.grad).clone()
            found[name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", "")] = gradient
    return found


def deviation(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """The largest difference of any two tensors, relative to the largest value of all of them."""
    assert set(expected) <= set(found), sorted(set(expected) - set(found))
    scale = max(float(value.abs().max()) for value in expected.values() if value.is_floating_point())
    worst = 0.0
    for name, value in expected.items():
        worst = max(worst, float((found[name].reshape(value.shape).float().cpu() - value.float().cpu()).abs().max()))
    return worst / scale


def compare(found: Mapping[str, Any], expected: Mapping[str, Any]) -> dict[str, float]:
    """Relative deviations of losses, norms, first gradients and last weights."""

    def relative(name: str) -> float:
        pairs = zip(found[name], expected[name], strict=True)
        return max(abs(a - b) / max(abs(b), 1e-3) for a, b in pairs)

    return {
        "losses": relative("losses"),
        "norms": relative("norms"),
        "gradients": deviation(found["gradients"], expected["gradients"]),
        "weights": deviation(found["weights"], expected["weights"]),
    }
