"""Training on every mesh gives the numbers of one process; and what ranks of a mesh get, gather, clip and draw."""

from __future__ import annotations

import random
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mesh_runs import (
    BATCH,
    BLOCKS,
    LENGTH,
    VOCABULARY,
    accelerator_for,
    assert_same,
    batches,
    build,
    counted,
    llama,
    loss_of,
    optimizer_of,
    plain,
    train,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torch.utils.data import DataLoader, IterableDataset
from transformers_5 import needs_transformers_5

from accel import Accelerator, LocalSGD
from accel.parallel import tp_collectives
from accel.parallel.config import ParallelismConfig, TorchTensorParallelPlugin
from accel.parallel.mesh import is_alive
from accel.parallel.tp_layers import Columns
from accel.parallel.tp_plan import get_model_tp_size
from accel_state import AcceleratorState, context
from accel_state.errors import ConfigurationError
from accel_state.random import set_seed
from accel_state.testing import run_world

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers"),
    pytest.mark.timeout(600),
]

STEPS = 20
TWO: list[tuple[Any, ...]] = [
    # Sizes, settings of FSDP, model, micro batches a step, order of preparing.
    ({"tp_size": 2}, None, "llama", 1, "optimizer first"),
    ({"tp_size": 2}, None, "gpt2", 2, "model first"),
    ({"tp_size": 2}, None, "own", 1, "optimizer first"),
    ({"dp_shard_size": 2}, BLOCKS, "gpt2", 1, "model first"),
    ({"dp_replicate_size": 2}, None, "tied llama", 1, "model first"),
]
FOUR: list[tuple[Any, ...]] = [
    ({"tp_size": 4}, None, "gpt2", 1, "model first"),
    ({"tp_size": 4}, None, "tied llama", 1, "model first"),
    ({"dp_shard_size": 4}, BLOCKS, "llama", 1, "model first"),
    ({"dp_shard_size": 2, "tp_size": 2}, BLOCKS, "llama", 2, "model first"),
    ({"dp_shard_size": 2, "tp_size": 2}, BLOCKS, "gpt2", 1, "optimizer first"),
    ({"dp_shard_size": 2, "tp_size": 2}, {**BLOCKS, "activation_checkpointing": True}, "own", 2, "optimizer first"),
    ({"dp_replicate_size": 2, "tp_size": 2}, None, "gpt2", 2, "model first"),
    ({"dp_replicate_size": 2, "tp_size": 2}, None, "tied llama", 1, "optimizer first"),
    ({"dp_replicate_size": 2, "dp_shard_size": 2}, BLOCKS, "gpt2", 1, "model first"),
    ({"dp_replicate_size": 2, "dp_shard_size": 2}, BLOCKS, "llama", 2, "model first"),
]


def train_all(cases: list[tuple[Any, ...]]) -> list[dict[str, Any]]:
    return [
        train(accelerator_for(sizes, fsdp, gradient_accumulation_steps=window), kind, STEPS, window, order=order)
        for sizes, fsdp, kind, window, order in cases
    ]


@pytest.mark.slow  # a training for each mesh in 2 and 4 ranks; the meshes themselves have fast tests
@pytest.mark.parametrize(("world", "cases"), [(2, TWO), (4, FOUR)], ids=["two ranks", "four ranks"])
def test_every_mesh_trains_as_one_process(world: int, cases: list[tuple[Any, ...]]) -> None:
    ranks = run_world(train_all, world, cases, timeout=250)
    for number, case in enumerate(cases):
        sizes, _, kind, window, _ = case
        assert_same(ranks[0][number], plain(kind, STEPS, window), case)
        assert all(rank[number]["weights"] == {} for rank in ranks[1:]) or sizes == {"dp_replicate_size": 2}, (
            "rank 0 alone has whole weights"
        )
        assert all(rank[number]["losses"] == ranks[0][number]["losses"] for rank in ranks), case
        if sizes == {"dp_shard_size": 2, "tp_size": 2} and kind == "gpt2":
            whole = sum(parameter.numel() for parameter in build(kind).parameters())
            divided = 2 * (16 * 48 + 48 + 16 * 16 + 16 * 64 + 64 + 64 * 16) + VOCABULARY * 16
            # Each element of a layer that is shared lies on one rank of four; of the others on one of two.
            assert sum(rank[number]["held"] for rank in ranks) == divided + 2 * (whole - divided)


def all_reduces() -> dict[str, int]:
    """How often ranks that share layers add something up in a forward and a backward pass of two blocks."""
    found = {}
    for kind in ("llama", "gpt2", "own", "qwen"):
        model = accelerator_for({"tp_size": 2, "tp_sequence_parallel": False}, None).prepare(build(kind))
        with counted(tp_collectives, "_all_reduced") as made:
            loss_of(model, batches(1)).backward()
        found[kind] = made["_all_reduced"]
        with torch.inference_mode():
            loss_of(model, batches(1))
    return found


@needs_transformers_5
def test_layers_that_take_the_same_input_send_its_gradient_once() -> None:
    # Two a block forward, two backward; one for the embedding, and one for the head.
    assert run_world(all_reduces, 2, timeout=250)[0] == dict.fromkeys(("llama", "gpt2", "own", "qwen"), 2 * 4 + 2)


def by_items() -> dict[str, Any]:
    accelerator = accelerator_for({"dp_shard_size": 2, "tp_size": 2}, BLOCKS, gradient_accumulation_steps=2)
    model, optimizer = accelerator.prepare(*(lambda model: (model, optimizer_of(model)))(build("llama")))
    ranks = accelerator.strategy.data_collectives
    for number, tokens in enumerate(batches(4).split(BATCH)):
        # The ranks have unequally many samples.
        own = tokens[:6] if ranks.rank == 0 else tokens[6:]
        with accelerator.accumulate(model):
            items = own.shape[0] * (LENGTH - 1)
            accelerator.backward(loss_of(model, own, "sum"), num_items=items, reduction="sum")
            optimizer.step()
            optimizer.zero_grad()
        assert accelerator.sync_gradients == (number % 2 == 1)
    return accelerator.get_state_dict(model)


def test_items_count_the_same_on_all_ranks_that_have_their_own() -> None:
    found = run_world(by_items, 4, timeout=250)[0]
    for name, value in plain("llama", 4, 2, float("inf"))["weights"].items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


class Stream(IterableDataset[int]):
    """Draws random numbers while it is read, which happens on rank 0 only."""

    def __iter__(self) -> Any:
        for sample in range(13):
            torch.rand(sample)
            yield sample


def views() -> dict[str, Any]:
    accelerator = accelerator_for({"dp_shard_size": 2, "tp_size": 2}, BLOCKS, step_scheduler_with_optimizer=True)
    other = Accelerator()
    assert (
        other.torch_device_mesh is accelerator.torch_device_mesh
        and other.parallelism_config is accelerator.parallelism_config
    )
    model = build("own")
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    set_seed(7, device_specific=True)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    shuffled = accelerator.prepare(DataLoader(range(13), batch_size=2, shuffle=True))
    batches_got, gathered = [], []
    for batch in shuffled:
        batches_got.append(batch.tolist())
        gathered += accelerator.gather_for_metrics(batch).tolist()
    streamed = [
        accelerator.gather_for_metrics(batch).tolist()
        for batch in accelerator.prepare(DataLoader(Stream(), batch_size=2))
    ]
    objects = [
        accelerator.gather_for_metrics(batch, use_gather_object=True)
        for batch in accelerator.prepare(DataLoader(range(6), batch_size=3))
    ]
    scheduler.step()
    return {
        "coordinates": (
            accelerator.data_parallel_rank,
            accelerator.data_parallel_shard_rank,
            accelerator.tensor_parallel_rank,
        ),
        "names": accelerator.torch_device_mesh.mesh_dim_names,
        "kind": (
            str(accelerator.distributed_type),
            accelerator.is_fsdp2,
            accelerator.is_composable_parallelism_enabled,
        ),
        "batches": batches_got,
        "gathered": gathered,
        "streamed": [sample for batch in streamed for sample in batch],
        "objects": [[int(row) for row in rows] for rows in objects],
        "sum": accelerator.reduce(torch.tensor([1.0, accelerator.process_index]), "sum").tolist(),
        "gather": accelerator.gather(torch.tensor([accelerator.process_index])).tolist(),
        "rate": optimizer.param_groups[0]["lr"],
        "drawn": [*torch.rand(2).tolist(), random.random(), float(np.random.rand())],
        "shared": get_model_tp_size(model),
    }


def test_ranks_that_share_layers_get_the_same_batches_and_random_numbers() -> None:
    ranks = run_world(views, 4, timeout=250)
    assert [rank["coordinates"] for rank in ranks] == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert ranks[0]["names"] == ("dp_shard", "tp") and ranks[0]["kind"] == ("FSDP", True, True)
    for key in ("batches", "drawn"):
        assert ranks[0][key] == ranks[1][key] and ranks[2][key] == ranks[3][key] and ranks[0][key] != ranks[2][key], key
    for rank in ranks:
        assert sorted(rank["gathered"]) == list(range(13)) and sorted(rank["streamed"]) == list(range(13))
        assert rank["objects"] == [[0, 1, 2, 3, 4, 5]] and rank["shared"] == 2
        # Two ranks have batches of their own, so the schedule advances by two.
        assert rank["rate"] == 0.25
    assert [rank["sum"] for rank in ranks] == [[2.0, 2.0], [2.0, 4.0], [2.0, 2.0], [2.0, 4.0]]
    assert [rank["gather"] for rank in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]


def ending() -> None:
    config = ParallelismConfig(tp_size=2)
    mesh = config.build_device_mesh("cpu")
    assert is_alive(mesh) and config.build_device_mesh("cpu") is mesh and config.get_device_mesh() is mesh
    del mesh
    dist.destroy_process_group()
    assert not is_alive(config.device_mesh)
    with pytest.raises(ConfigurationError, match="of 2 processes"):
        config.build_device_mesh("cpu")


def test_a_mesh_ends_with_the_process_group() -> None:
    run_world(ending, 2, timeout=250)


def in_bf16() -> list[dict[str, Any]]:
    return [
        train(accelerator_for(sizes, fsdp, mixed_precision="bf16"), "gpt2", STEPS)
        for sizes, fsdp in (({"dp_shard_size": 2, "tp_size": 2}, BLOCKS), ({"tp_size": 4}, None))
    ]


@pytest.mark.slow  # trains in four ranks; test_layers_that_take_the_same_input_send_its_gradient_once is fast
def test_bf16_stays_near_fp32() -> None:
    # bf16 keeps 8 bits: a hundredth of the loss, which is near 2.6.
    expected = plain("gpt2", STEPS)
    for found in run_world(in_bf16, 4, timeout=250)[0]:
        torch.testing.assert_close(found["losses"], expected["losses"], rtol=0, atol=0.03)
        assert all(value.dtype == torch.float32 for value in found["weights"].values()), "the master weights are fp32"


TORCHS = {
    "blocks.*.mlp.w1": ColwiseParallel(),
    "blocks.*.mlp.w3": ColwiseParallel(),
    "blocks.*.mlp.w2": RowwiseParallel(),
}


def with_plans() -> list[dict[str, Any]]:
    found = [train(accelerator_for({"dp_replicate_size": 2, "tp_size": 2}, plan=TORCHS), "own", 4)]
    words = {
        "blocks.*.mlp.w[13]": Columns(gathers=True),
        "blocks.*.mlp.w2": "rowwise_split_input",
        "embedding": "embedding_rowwise",
    }
    found.append(train(accelerator_for({"dp_shard_size": 2, "tp_size": 2}, BLOCKS, plan=words), "own", 4))
    accelerator = Accelerator(torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2))
    assert accelerator.torch_device_mesh.mesh_dim_names == ("dp_replicate", "dp_shard", "tp")
    assert accelerator.parallelism_config.dp_replicate_size == 2
    found.append(train(accelerator, "own", 4))
    return found


@pytest.mark.slow  # trains in four ranks; plans without training have fast tests
def test_plans_of_the_user_and_the_older_plugin() -> None:
    expected = plain("own", 4)
    for number, found in enumerate(run_world(with_plans, 4, timeout=250)[0]):
        assert_same(found, expected, number)


def refusals() -> None:
    def message(accelerator: Accelerator, model: nn.Module) -> str:
        with pytest.raises(ConfigurationError) as caught:
            accelerator.prepare(model)
        accelerator.free_memory()
        return str(caught.value)

    assert "tp_size=2 does not divide num_key_value_heads=1" in message(
        accelerator_for({"tp_size": 2}), llama(kv_heads=1)
    )
    assert "has no plan for tensor parallelism, and no blocks" in message(
        accelerator_for({"tp_size": 2}), nn.Linear(2, 2)
    )
    for plan, expected in (
        ({"nothing": "colwise"}, "the plan names 'nothing', and Own has no such module"),
        ({"lm_head": "sideways"}, "the plan shards 'lm_head' by 'sideways', which is not one of colwise"),
        ({"blocks.0.first": "rowwise"}, "blocks.0.first by 'rowwise', which does not support a RMSNorm"),
        ({"blocks.0.mlp.w1": "packed_colwise"}, "the number of packed matrices is known for gate_up_proj"),
        ({"blocks.0.mlp.w1": Columns(pieces=3)}, "a layer of 20 outputs holds 3 matrices"),
    ):
        assert expected in message(accelerator_for({"tp_size": 2}, plan=plan), build("own"))
    divided = build("own")
    divided.lm_head.bias = nn.Parameter(
        distribute_tensor(torch.zeros(VOCABULARY), init_device_mesh("cpu", (2,)), [Shard(0)])
    )
    assert "the parameters of Own are already sharded" in message(accelerator_for({"tp_size": 2}), divided)
    accelerator = accelerator_for({"tp_size": 2})
    with pytest.raises(ConfigurationError, match="LocalSGD.*MeshStrategy"):
        LocalSGD(accelerator, accelerator.prepare(build("own")), 2)
    accelerator.free_memory()
    headless = build("own")
    del headless.blocks[1].attention.n_heads
    assert "blocks.1.attention is attention, but does not say how many heads" in message(
        accelerator_for({"tp_size": 2}), headless
    )
    for settings, expected in (
        ({"sizes": {"tp_size": 2}, "fsdp": {"fsdp_version": 1}}, "fsdp_version=1 does not support a mesh"),
        ({"sizes": {"dp_replicate_size": 2}, "fsdp": BLOCKS}, "the mesh has dp_replicate_size=2 and dp_shard_size=1"),
        ({"sizes": {"dp_shard_size": 2, "tp_size": 2}}, "= 4, but there are 2 processes"),
    ):
        with pytest.raises(ConfigurationError, match=expected):
            accelerator_for(**settings)
    for names, expected in (
        (("a", "tp"), "torch_device_mesh has the axes a, tp. Allowed: 'tp', and others of pp, dp_replicate"),
        (("tp", "dp_shard"), "torch_device_mesh has the axes tp, dp_shard"),
        (("dp_replicate", "tp"), "torch_device_mesh has dp_replicate, but no dp_shard"),
    ):
        with pytest.raises(ConfigurationError, match=expected):
            Accelerator(
                torch_tp_plugin=TorchTensorParallelPlugin(
                    torch_device_mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=names)
                )
            )
    own = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    with pytest.raises(ConfigurationError, match="tp_size=4.*'tp'.*torch_device_mesh.*size 2"):
        Accelerator(torch_tp_plugin=TorchTensorParallelPlugin(tp_size=4, torch_device_mesh=own))
    accelerator = Accelerator(torch_tp_plugin=TorchTensorParallelPlugin(torch_device_mesh=own))
    assert (
        accelerator.torch_device_mesh is own
        and accelerator.parallelism_config.tp_size == 2
        and accelerator.tensor_parallel_rank in (0, 1)
    )
    AcceleratorState._reset_state()
    with pytest.raises(ConfigurationError, match="tp_size=3.*the 2 processes"):
        Accelerator(torch_tp_plugin=TorchTensorParallelPlugin(tp_size=3))
    with pytest.raises(ConfigurationError, match="settings were given for mesh, torch_tp"):
        Accelerator(
            torch_tp_plugin=TorchTensorParallelPlugin(tp_size=2), parallelism_config=ParallelismConfig(tp_size=2)
        )


def test_what_cannot_be_laid_over_a_mesh_is_refused() -> None:
    run_world(refusals, 2, timeout=250)


def foreach_of() -> str:
    """What an optimizer of sharded matrices and whole vectors does: accelerators update lists of tensors by default."""
    accelerator = accelerator_for({"tp_size": 2}, None)
    model = build("llama")
    _, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    kinds = {isinstance(parameter, DTensor) for group in optimizer.param_groups for parameter in group["params"]}
    assert kinds == {True, False}
    before = optimizer.state_dict()
    before["param_groups"][0]["foreach"] = None  # as of a run without tensor parallelism
    optimizer.load_state_dict(before)
    return str(optimizer.param_groups[0]["foreach"])


def test_sharded_and_whole_parameters_are_updated_one_by_one() -> None:
    assert run_world(foreach_of, 2, state=False) == ["False", "False"]


class Other(torch.optim.AdamW):
    """An optimizer of somebody else, whose step may keep values in its groups."""


def refuse_other_lists() -> None:
    accelerator = accelerator_for({"tp_size": 2}, None)
    model: Any = build("llama")
    with pytest.raises(ConfigurationError, match="Other with foreach or fused updates sharded parameters together"):
        accelerator.prepare(model, Other(model.parameters(), foreach=True))


def test_operators_over_lists_of_other_optimizers_are_refused() -> None:
    run_world(refuse_other_lists, 2)


LISTS: list[dict[str, Any]] = [{"foreach": True}, {"fused": True}]


def updated_in_lists(accelerated: bool) -> list[Any]:
    """Weights after steps of optimizers that were created with operators over lists, and their groups."""
    found = []
    for options in LISTS:
        with context.isolated():
            accelerator = accelerator_for({"tp_size": 2}, None) if accelerated else None
            model: Any = build("llama")
            groups = [{"params": list(model.model.parameters())}, {"params": list(model.lm_head.parameters())}]
            optimizer: Any = torch.optim.AdamW(groups, lr=0.1, **options)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
            if accelerator is not None:
                model, optimizer = accelerator.prepare(model, optimizer)
            for number, tokens in enumerate(batches(3).chunk(3)):
                loss = loss_of(model, tokens)
                loss.backward() if accelerator is None else accelerator.backward(loss)
                if number == 1:
                    with pytest.raises(ZeroDivisionError):  # a step that fails leaves the groups as they were
                        optimizer.step(lambda: 1 / 0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            state = model.state_dict() if accelerator is None else accelerator.get_state_dict(model)
            numbers = [group["params"] for group in optimizer.state_dict()["param_groups"]]
            found.append(({name: value.clone() for name, value in state.items()}, numbers, scheduler.get_last_lr()))
    return found


def test_optimizers_over_lists_update_sharded_and_whole_parameters() -> None:
    expected = updated_in_lists(False)
    for (weights, numbers, rates), one_process in zip(run_world(updated_in_lists, 2, True)[0], expected, strict=True):
        assert (numbers, rates) == one_process[1:]
        torch.testing.assert_close(weights, one_process[0], rtol=1e-5, atol=2e-5)
