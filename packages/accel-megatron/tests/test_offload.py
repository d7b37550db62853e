"""The optimizer in host memory gives the numbers of plain torch; saved states load in it and in others."""

from __future__ import annotations

from typing import Any

import matrix
import pytest
import torch

from accel_megatron import MegatronLMPlugin
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

OFFLOAD = {"optimizer_cpu_offload": True}
SHARDED = {**OFFLOAD, "use_distributed_optimizer": True}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("no", {**OFFLOAD, "tp_degree": 2, "overlap_cpu_optimizer_d2h_h2d": True}),
    ("no", {**SHARDED, "other_megatron_args": {"optimizer_offload_fraction": 0.5}}),
    ("bf16", SHARDED),
]


def train(directory: str) -> dict[str, Any]:
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    from accel import Accelerator
    from accel_megatron._megatron_compat import sub_optimizers
    from accel_megatron.testing import cuda_on_cpu

    cuda_on_cpu()
    found: dict[str, Any] = {"cases": []}
    data = matrix.batches("llama", 6, 128)
    for precision, plugin in CASES:
        losses, _ = matrix.reference("llama", 6, dtype=torch.bfloat16 if precision == "bf16" else None)
        run = matrix.Run("llama", precision, **plugin)
        hybrid = sub_optimizers(run.model.optimizer.core)[0].optimizer
        kind = isinstance(hybrid, HybridDeviceOptimizer)
        offloaded = sum(len(group["params"]) for sub in hybrid.cpu_optimizers for group in sub.param_groups)
        shares = (offloaded, sum(len(group["params"]) for group in hybrid.param_groups))
        trained = [run.step(batch) for batch in data[:3]]
        run.accelerator.save_state(directory)
        trained += [run.step(batch) for batch in data[3:]]
        run.accelerator.load_state(directory)
        again = [run.step(batch) for batch in data[3:]]
        found["cases"].append((kind, shares, matrix.worst(trained, losses), matrix.worst(again, trained[3:])))
        run.close()
        if precision == "no":  # the state is that of every other optimizer
            run = matrix.Run("llama", tp_degree=2)
            run.accelerator.load_state(directory)
            found["elsewhere"] = matrix.worst([run.step(batch) for batch in data[3:]], losses[3:])
            run.close()
    messages = []
    for kind, precision in ((torch.optim.Adam, "no"), (torch.optim.AdamW, "bf16")):
        accelerator = Accelerator(cpu=True, mixed_precision=precision, megatron_lm_plugin=MegatronLMPlugin(**OFFLOAD))
        model = matrix.create("llama")
        try:
            accelerator.prepare(model, kind(model.parameters()))
        except ConfigurationError as error:
            messages.append(str(error))
        matrix.close(accelerator)
    found["messages"] = messages
    return found


@pytest.mark.timeout(150)
def test_an_optimizer_in_host_memory(tmp_path: Any) -> None:
    for found in run_world(train, 2, str(tmp_path), timeout=140):
        for (precision, plugin), (hybrid, shares, loss, again) in zip(CASES, found["cases"], strict=True):
            where = (precision, plugin, shares, loss, again)
            assert hybrid and loss < (1e-5 if precision == "no" else 2e-3) and again < 1e-6, where
            part = "other_megatron_args" in plugin
            assert 0 < shares[0] < shares[1] if part else shares[0] == shares[1], where
        assert found["elsewhere"] < 1e-5, found
        adam, half = found["messages"]
        assert "updates parameters with AdamW or SGD, not Adam." in adam
        assert "in mixed precision needs use_distributed_optimizer=True" in half
