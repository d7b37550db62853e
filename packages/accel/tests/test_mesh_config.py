"""The sizes of a mesh: where they come from, what follows from them, and what is refused. Nothing here needs a second
process.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from mesh_runs import build, llama
from torch import nn
from transformers_5 import needs_transformers_5

from accel import Accelerator, ParallelismConfig
from accel.parallel.tp_layers import Columns, Heads, Rows, VocabularyRows
from accel.parallel.tp_plan import get_model_tp_size, plan_of
from accel.parallelism_config import (
    DeepSpeedSequenceParallelConfig,
    TorchContextParallelConfig,
    TorchTensorParallelConfig,
)
from accel.setup.registry import STRATEGIES
from accel.utils import TorchTensorParallelPlugin
from accel_state.env import patch_environment
from accel_state.errors import ConfigurationError
from accel_state.options import ParallelismOptions


def test_what_nobody_sets_is_one() -> None:
    config = ParallelismConfig()
    assert (config.total_size, config.active_mesh_dims, config.fsdp_dim_names) == (1, [], ["dp_shard_cp"])
    assert (config.cp_backend, config.sp_backend) == ("torch", "deepspeed")
    assert (config.tp_handler, config.cp_handler, config.sp_handler) == (None, None, None)
    assert config.build_device_mesh("cpu") is None and config.get_device_mesh() is None
    assert config.strategy == "mesh"


# Sizes, the axes that are larger than one, and other attributes: as the reference's says of the same sizes.
FOLLOWS: list[tuple[dict[str, int], str, dict[str, Any]]] = [
    (
        {"dp_replicate_size": 2, "dp_shard_size": 2, "cp_size": 2},
        "dp_replicate dp_shard cp",
        {
            "dp_dim_names": ["dp_replicate", "dp_shard"],
            "dp_shard_cp_dim_names": ["dp_shard", "cp"],
            "dp_cp_dim_names": ["dp_replicate", "dp_shard", "cp"],
            "fsdp_dim_names": ["dp_replicate", "dp_shard_cp"],
            "non_dp_dim_names": ["cp"],
            **{"data_parallel_size": 4, "non_data_parallel_size": 2, "total_size": 8, "strategy": "mesh"},
            "cp_handler": TorchContextParallelConfig("allgather"),
        },
    ),
    (
        {"dp_shard_size": 2, "sp_size": 2},
        "dp_shard sp",
        {"dp_cp_dim_names": ["dp_shard"], "fsdp_dim_names": ["dp_shard_cp"], "non_dp_dim_names": ["sp"]},
    ),
    ({"dp_replicate_size": 2}, "dp_replicate", {"dp_shard_cp_dim_names": [], "strategy": "mesh_ddp"}),
    (
        {"tp_size": 4, "dp_shard_size": 2, "pp_size": 3},
        "pp dp_shard tp",
        {
            "non_dp_dim_names": ["pp", "tp"],
            **{"total_size": 24, "data_parallel_size": 2, "tp_handler": TorchTensorParallelConfig()},
        },
    ),
]


@pytest.mark.parametrize(("sizes", "active", "expected"), FOLLOWS, ids=str)
def test_what_follows_from_the_sizes(sizes: dict[str, int], active: str, expected: dict[str, Any]) -> None:
    config = ParallelismConfig(**sizes)  # type: ignore[arg-type]
    assert {name: getattr(config, name) for name in expected} == expected
    assert config.active_mesh_dims == active.split()
    for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp", "pp"):
        assert getattr(config, f"{axis}_enabled") == (axis in active.split()), axis
    written = json.loads(config.to_json())
    assert {name: written[name] for name in sizes} == sizes and written["cp_backend"] == "torch"


def test_the_launchers_sizes_are_taken_where_the_script_gives_none() -> None:
    launched = {
        "PARALLELISM_CONFIG_TP_SIZE": "2",
        "PARALLELISM_CONFIG_DP_SHARD_SIZE": "4",
        "PARALLELISM_CONFIG_PP_SIZE": "3",
        "PARALLELISM_CONFIG_CP_COMM_STRATEGY": "alltoall",
        "PARALLELISM_CONFIG_SP_SEQ_LENGTH": "128",
    }
    with patch_environment(**launched):
        config = ParallelismConfig(dp_shard_size=8)
        assert (config.tp_size, config.dp_shard_size, config.pp_size, config.cp_size) == (2, 8, 3, 1)
        assert TorchContextParallelConfig().cp_comm_strategy == "alltoall"
        assert TorchContextParallelConfig("allgather").cp_comm_strategy == "allgather"
        assert DeepSpeedSequenceParallelConfig() == DeepSpeedSequenceParallelConfig(128, True, "sdpa")
    assert {opt.name for opt in ParallelismOptions.options() if opt.name.endswith("_size")} == {
        f"parallelism_config_{axis}_size" for axis in ("dp_replicate", "dp_shard", "tp", "cp", "sp", "pp", "ep")
    }


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ParallelismConfig(tp_size=0), "tp_size=0 must be a positive integer"),
        (lambda: ParallelismConfig(dp_shard_size=-1), "dp_shard_size=-1 must be a positive integer"),
        (lambda: ParallelismConfig(cp_size="2"), "cp_size='2' must be a positive integer"),  # type: ignore[arg-type]
        (lambda: ParallelismConfig(tp_size=True), "tp_size=True must be a positive integer"),
        (lambda: ParallelismConfig(cp_size=2, sp_size=2), "cp_size=2 and sp_size=2 exclude each other"),
        (lambda: ParallelismConfig(cp_backend="jax"), "cp_backend='jax' is not one of torch"),
        (lambda: ParallelismConfig(tp_size=2, tp_handler=object()), "must be a TorchTensorParallelConfig"),  # type: ignore[arg-type]
        (lambda: TorchContextParallelConfig("pigeon"), "cp_comm_strategy='pigeon' is not one of allgather, alltoall"),
        (lambda: DeepSpeedSequenceParallelConfig(sp_seq_length=0), "sp_seq_length=0 must be a positive integer"),
        (lambda: DeepSpeedSequenceParallelConfig(sp_attn_implementation="eager"), "'eager' is not one of sdpa, flash"),
        (lambda: TorchTensorParallelPlugin(tp_size=0), "tp_size=0 must be a positive integer"),
        (lambda: TorchTensorParallelPlugin(tp_size=3).for_world(4), "tp_size=3 does not divide the 4 processes"),
        (lambda: ParallelismConfig(dp_shard_size=4, tp_size=2).for_world(4), "= 8, but there are 4 processes. Start 8"),
        (lambda: ParallelismConfig(tp_size=2).get_device_mesh(), "the device mesh has not been built"),
        (lambda: ParallelismConfig(tp_size=2).build_device_mesh("cpu"), "of 2 processes needs a process group"),
        (lambda: Accelerator(cpu=True, parallelism_config=ParallelismConfig(tp_size=2)), "2, but there is 1 process"),
        (lambda: Accelerator(cpu=True, parallelism_config={"tp_size": 2}), "must be a ParallelismConfig"),
    ],
)
def test_what_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert message in str(caught.value)


def test_the_launcher_asks_for_a_mesh() -> None:
    launched = {
        "ACCELERATE_USE_PARALLELISM_CONFIG": "true",
        "ACCELERATE_USE_FSDP": "true",
        "PARALLELISM_CONFIG_TP_SIZE": "2",
    }
    with (
        patch_environment(**launched),
        pytest.raises(ConfigurationError, match="tp_size=2 = 2, but there is 1 process"),
    ):
        Accelerator(cpu=True)
    assert (
        STRATEGIES.load("mesh").__name__ == "MeshStrategy" and STRATEGIES.load("mesh_ddp").__name__ == "MeshDDPStrategy"
    )


def test_one_process_and_a_mesh_of_one_train_as_they_are(caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True, parallelism_config=ParallelismConfig())
    model = nn.Linear(2, 2)
    assert accelerator.prepare(model) is model and accelerator.parallelism_config is None
    assert "mesh trains a model over several processes, and there is only one" in caplog.text


def kinds(plan: dict[str, Any]) -> dict[str, str]:
    return {name: repr(style) for name, style in plan.items()}


@needs_transformers_5
def test_plans_come_from_the_model_or_from_the_shape_of_its_blocks() -> None:
    pytest.importorskip("transformers")
    own, derived = plan_of(build("llama"), None, 2)
    assert not derived and isinstance(own["model.embed_tokens"], VocabularyRows)
    assert isinstance(own["model.layers.1.self_attn.o_proj"], Rows) and isinstance(
        own["model.layers.0.mlp.up_proj"], Columns
    )
    plan, derived = plan_of(build("gpt2"), None, 2)
    assert derived and kinds(plan)["transformer.h.0.attn.c_attn"] == "Columns(pieces=3, gathers=False)"
    assert kinds(plan)["transformer.h.1.mlp.c_proj"] == "Rows(splits=False)"
    # The words of the output layer are those of the embedding, so both are divided between words.
    assert (
        kinds(plan)["transformer.wte"] == "VocabularyRows()"
        and kinds(plan)["lm_head"] == "Columns(pieces=1, gathers=True)"
    )
    plan, _ = plan_of(build("own"), None, 2)
    assert set(plan) == {
        "embedding",
        "lm_head",
        *(f"blocks.0.attention.{name}" for name in ("c_attn", "c_proj")),
        *(f"blocks.1.attention.{name}" for name in ("wq", "wk", "wv", "wo")),
        *(f"blocks.{block}.mlp.{name}" for block in (0, 1) for name in ("w1", "w2", "w3")),
    }


def test_plans_of_the_user() -> None:
    pytest.importorskip("transformers")
    plan, derived = plan_of(
        build("own"),
        {"blocks.*.mlp.w1": "colwise", "blocks.0.first": "replicated_with_grad_allreduce", "lm_head": "replicate"},
        2,
    )
    assert (
        not derived
        and set(plan) == {"blocks.0.mlp.w1", "blocks.1.mlp.w1", "blocks.0.first"}
        and isinstance(plan["blocks.0.first"], Heads)
    )
    # Dividing one of two layers that share a weight would untie them.
    plan, _ = plan_of(build("own"), {"blocks.*.mlp.w1": "colwise", "lm_head": "rowwise"}, 2)
    assert "lm_head" not in plan
    assert get_model_tp_size(build("own")) is None and get_model_tp_size(llama()) is None


def test_heads_must_be_divided_evenly() -> None:
    pytest.importorskip("transformers")
    of_llama = "tp_size=4 does not divide num_key_value_heads=2 of LlamaForCausalLM: .* Allowed: 1, 2."
    of_own = "tp_size=3 does not divide num_heads=4 of blocks.0.attention"
    for model, size, message in ((llama(kv_heads=2), 4, of_llama), (build("own"), 3, of_own)):
        with pytest.raises(ConfigurationError, match=message):
            plan_of(model, None, size)


def test_settings_are_made_without_torch() -> None:
    code = "import sys, accel.parallel.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_layer_that_is_not_divided_computes_as_before() -> None:
    # What a style would replace is what it is said to divide, and nothing that computes in another way.
    class Doubled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    assert Columns().fits(nn.Linear(2, 2)) and not Columns().fits(Doubled(2, 2)) and not Rows().fits(nn.Embedding(2, 2))
    assert VocabularyRows().fits(nn.Embedding(2, 2)) and not VocabularyRows().fits(nn.Embedding(2, 2, max_norm=1.0))


def test_a_kernel_on_the_hub_may_compute_attention() -> None:
    DeepSpeedSequenceParallelConfig(sp_attn_implementation="kernels-community/flash-attn2")
