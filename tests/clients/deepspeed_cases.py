"""Transformers' Trainer with DeepSpeed."""

from __future__ import annotations

import copy
import os
import socket
from pathlib import Path
from typing import Any

import deepspeed
import torch
from harness import WORLD, Cases, files, history, weights
from trainer_cases import causal_model, full_state, make
from transformers.integrations import unset_hf_deepspeed_config

cases = Cases()


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


# The operator that moves tensors through shared memory would be compiled first; gloo does.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def configuration(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "zero_optimization": {"stage": stage, "stage3_gather_16bit_weights_on_model_save": True},
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "zero_allow_untested_optimizer": True,
        **more,
    }


def _trained(stage: int, resume: bool = False, train: dict[str, Any] | None = None, **more: Any) -> Any:
    def case(folder: Path) -> Any:
        options = {"max_steps": 7, "learning_rate": 1e-2, **(train or {})}
        if resume:
            options |= {"save_strategy": "steps", "save_steps": 4}

        def trainer() -> Any:
            # The arguments come first: under ZeRO 3 they decide how the model is created.
            config = copy.deepcopy(configuration(stage, **more))
            return make(folder, model=causal_model(), deepspeed=config, **options)

        if WORLD == 1:  # DeepSpeed asks for the variables of a launcher on one process, too
            one = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
            os.environ.update(one, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
        try:
            first = trainer()
            first.train()
            evaluated = first.evaluate()["eval_loss"]
            result = {"log": history(first), "eval": evaluated, "weights": weights(full_state(first) or {})}
            if resume:
                result["files"] = files(folder / "out")
                first.save_model(str(folder / "final"))
                result["final"] = files(folder / "final")
                torch.manual_seed(99)
                again = trainer()
                again.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-4"))
                result |= {"log_resumed": history(again), "resumed": weights(full_state(again) or {})}
            return result
        finally:
            unset_hf_deepspeed_config()

    return case


OPTIMIZER = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}}
SCHEDULER = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
for _stage in (2, 3):
    _name = f"deepspeed_zero{_stage}"
    cases.add(_name, _trained(_stage))
    cases.add(f"{_name}_resume", _trained(_stage, resume=True), (2,))
    cases.add(f"{_name}_accumulation", _trained(_stage, train={"gradient_accumulation_steps": 2}), (2,))
    cases.add(f"{_name}_own_optimizer", _trained(_stage, optimizer=OPTIMIZER, scheduler=SCHEDULER), (2,))
    cases.add(f"{_name}_bf16", _trained(_stage, train={"bf16": True}, bf16={"enabled": "auto"}), (2,))
