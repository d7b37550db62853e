"""Prompts that PEFT trains and saves, of sharded models, against one process."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from accel import Accelerator
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel_state import context
from accel_state.testing import run_world

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers"),
    pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is in the clients' environment"),
    pytest.mark.timeout(400),
]
SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 2},
}


def model_of(kind: str) -> tuple[Any, torch.optim.Optimizer]:
    from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config: Any = {"prompt": PromptTuningConfig, "prefix": PrefixTuningConfig}[kind]
    model = get_peft_model(LlamaForCausalLM(LlamaConfig(**SIZES)), config(task_type="CAUSAL_LM", num_virtual_tokens=4))
    return model, torch.optim.SGD([item for item in model.parameters() if item.requires_grad], lr=5.0)


def batches() -> torch.Tensor:
    return torch.randint(64, (2, 4, 8), generator=torch.Generator().manual_seed(1))


def plain(kind: str, steps: int) -> torch.Tensor:
    model, optimizer = model_of(kind)
    for batch in batches()[:steps]:
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    prompt: torch.Tensor = model.get_prompt_embedding_to_save("default")
    return prompt


def save(folder: str) -> None:
    for version in (1, 2):
        for kind in ("prompt", "prefix"):
            with context.isolated():
                plugin = FullyShardedDataParallelPlugin(
                    fsdp_version=version,
                    auto_wrap_policy="transformer_based_wrap",
                    use_orig_params=version == 1 or None,
                )
                accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
                model, optimizer = accelerator.prepare(*model_of(kind))
                for batch in batches():
                    part = batch.chunk(2)[accelerator.process_index]
                    accelerator.backward(model(input_ids=part, labels=part).loss)
                    optimizer.step()
                    optimizer.zero_grad()
                accelerator.unwrap_model(model).save_pretrained(
                    f"{folder}/{version}_{kind}",
                    is_main_process=accelerator.is_main_process,
                    state_dict=accelerator.get_state_dict(model),
                )


def test_trained_prompts_are_saved_as_in_one_process(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run_world(save, 2, str(tmp_path), timeout=300)
    for kind in ("prompt", "prefix"):
        start, wanted = plain(kind, 0), plain(kind, 2)
        assert not torch.allclose(start, wanted, atol=1e-3)
        for version in (1, 2):
            found = load_file(tmp_path / f"{version}_{kind}" / "adapter_model.safetensors")["prompt_embeddings"]
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
