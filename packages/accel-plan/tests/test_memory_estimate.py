"""What ranks really hold and send is what `accel estimate-memory` and `accel plan` say: storages and collectives are
counted.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from plan_models import write_llama
from safetensors.torch import save_file

from accel import Accelerator
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.parallel.config import ParallelismConfig
from accel_bigmodel.estimate.command import run as estimate
from accel_launch.config.read import load_settings
from accel_plan.models import build_model, model_config
from accel_plan.plan import PlanRequest, make_plan
from accel_plan.record import Recorder, storage_bytes
from accel_state.testing import run_world

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers"),
    pytest.mark.timeout(600),
]

BATCH, LENGTH = 2, 16
WRAP = {"fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}

# By name: options of the launcher, the estimate's name, and the same from code.
RUNS: dict[str, tuple[dict[str, str], str, dict[str, Any]]] = {
    "ddp": ({}, "ddp", {}),
    "full_shard": ({"use_fsdp": "true", **WRAP}, "fsdp", {"sharding_strategy": "FULL_SHARD"}),
    "shard_grad_op": (
        {"use_fsdp": "true", "fsdp_sharding_strategy": "SHARD_GRAD_OP", **WRAP},
        "shard_grad_op",
        {"sharding_strategy": "SHARD_GRAD_OP"},
    ),
    "no_shard": (
        {"use_fsdp": "true", "fsdp_sharding_strategy": "NO_SHARD", **WRAP},
        "no_shard",
        {"sharding_strategy": "NO_SHARD"},
    ),
    "fsdp2": ({"use_fsdp": "true", "fsdp_version": "2", **WRAP}, "fsdp2", {"fsdp_version": 2}),
    "tp x fsdp2": (
        {"use_fsdp": "true", "fsdp_version": "2", "use_parallelism_config": "true", **WRAP},
        "fsdp2",
        {"fsdp_version": 2},
    ),
}


def measured(path: str, names: list[str]) -> dict[str, Any]:
    """What this rank holds and sends with each strategy, after a real step."""
    found = {}
    for name in names:
        settings = RUNS[name][2]
        plugin = (
            FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap", **settings) if settings else None
        )
        mesh = ParallelismConfig(tp_size=2, dp_shard_size=2) if name.startswith("tp") else None
        accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, parallelism_config=mesh)
        found[name] = _step(accelerator, path)
        # Making the groups of a mesh waits for all ranks, and not for long.
        accelerator.wait_for_everyone()
        accelerator.free_memory()
        del accelerator
    return found


def _step(accelerator: Accelerator, path: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = build_model(model_config(path))
    model.to_empty(device="cpu")
    model.init_weights()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    tokens = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % 300
    with Recorder({"rank": accelerator.num_processes}) as recorder:
        accelerator.backward(model(input_ids=tokens, labels=tokens).loss)
    optimizer.step()
    states = [
        value
        for state in optimizer.optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    ]
    sent = {}
    for one in recorder.traffic:
        sent[one.kind] = sent.get(one.kind, 0) + one.payload
    return {
        "weights": storage_bytes(model.parameters()),
        "gradients": storage_bytes(item.grad for item in model.parameters() if item.grad is not None),
        "optimizer": storage_bytes(states),
        "sent": sent,
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    shapes = build_model(model_config(write_llama(folder))).state_dict()
    save_file({name: torch.zeros(value.shape) for name, value in shapes.items()}, folder / "weights.safetensors")
    return folder


@pytest.mark.slow  # trains every strategy in 2 and 4 ranks; accel-plan's figures have fast tests
@pytest.mark.parametrize(
    ("world", "names"),
    [(2, ["ddp", "full_shard", "shard_grad_op", "no_shard", "fsdp2"]), (4, ["full_shard", "fsdp2", "tp x fsdp2"])],
)
def test_what_ranks_hold_and_send_is_what_was_said(model, capsys, world, names) -> None:
    """Memory is within 10% of the estimate; the plan's bytes equal those of the run."""
    ranks = run_world(measured, world, str(model), names, timeout=250)
    for name in names:
        options, strategy, _ = RUNS[name]
        sizes = [
            "--num_processes",
            str(world),
            "--strategy",
            strategy,
            *(["--tp_size", "2"] if name.startswith("tp") else []),
        ]
        capsys.readouterr()
        estimate([str(model / "weights.safetensors"), "--json", *sizes])
        said = json.loads(capsys.readouterr().out)["training_per_process"][strategy]
        for rank, real in enumerate(ranks):
            for part in ("weights", "gradients", "optimizer"):
                assert real[name][part] == pytest.approx(said[part], rel=0.1), (name, rank, part)
        if world == 4 and not name.startswith("tp"):
            continue
        mesh = (
            {"parallelism_config_tp_size": "2", "parallelism_config_dp_shard_size": "2"}
            if name.startswith("tp")
            else {}
        )
        settings = load_settings({"num_processes": str(world), **options, **mesh}, environ={"HF_HOME": str(model)})
        planned, real = (
            make_plan(PlanRequest(settings, str(model), rank=1, batch_size=BATCH, seq_length=LENGTH)),
            ranks[1][name],
        )
        assert (planned.memory.weights, planned.memory.gradients) == (real["weights"], real["gradients"]), name
        # Adam counts its steps too, in four bytes for each parameter.
        assert planned.memory.optimizer == pytest.approx(real["optimizer"], rel=0.02), name
        sent: dict[str, int] = {}
        for one in planned.collectives:
            sent[one.kind] = sent.get(one.kind, 0) + one.payload
        assert sent == real["sent"], name
