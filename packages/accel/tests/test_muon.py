"""Muon on several ranks gives the weights of torch's own in one process, and its work is divided."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from mesh_runs import BATCH, BLOCKS, Own, accelerator_for, batches, counted
from muon_runs import deviations, loss_of, model_of, optimizers_of, plain, train
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils.data import DataLoader

from accel import Accelerator, DataLoaderConfiguration, DeepSpeedPlugin, LocalSGD
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.kwargs.ddp import DistributedDataParallelKwargs
from accel.strategies.ft_fsdp2 import FaultTolerantFSDP2Strategy
from accel.training import muon
from accel_state import context
from accel_state.errors import ConfigurationError, DistributedOperationException
from accel_state.testing import WorldError, run_world

pytestmark = [
    pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9"),
    pytest.mark.timeout(600),
]
needs_transformers = pytest.mark.skipif(find_spec("transformers") is None, reason="the models are transformers'")

STEPS = 20
Case = tuple[dict[str, int], Any, str, int, str]
TWO: list[Case] = [
    # Sizes, settings of FSDP, model, micro batches a step, order of preparing.
    ({}, None, "llama", 1, "model first"),
    ({"tp_size": 2}, None, "llama", 1, "optimizer first"),
    ({"tp_size": 2}, None, "gpt2", 2, "model first"),
    ({"tp_size": 2}, None, "own", 1, "optimizer first"),
    ({"dp_shard_size": 2}, BLOCKS, "own", 2, "model first"),
    ({"dp_shard_size": 2, "ep_size": 2}, BLOCKS, "moe qwen2", 1, "optimizer first"),
]
FOUR: list[Case] = [
    ({}, None, "own", 2, "optimizer first"),
    ({"dp_shard_size": 4}, BLOCKS, "llama", 1, "model first"),
    ({"dp_shard_size": 2, "tp_size": 2}, BLOCKS, "gpt2", 1, "optimizer first"),
    ({"dp_replicate_size": 2, "tp_size": 2}, None, "gpt2", 2, "model first"),
    ({"dp_replicate_size": 2, "dp_shard_size": 2}, BLOCKS, "llama", 2, "model first"),
    ({"cp_size": 2, "dp_shard_size": 2}, BLOCKS, "llama", 1, "model first"),
    ({"dp_shard_size": 4, "ep_size": 2}, BLOCKS, "moe qwen3", 1, "model first"),
    ({"dp_shard_size": 2, "dp_replicate_size": 2, "ep_size": 2}, BLOCKS, "moe qwen2", 2, "optimizer first"),
    ({"dp_shard_size": 2, "tp_size": 2, "ep_size": 4}, BLOCKS, "moe mixtral", 1, "model first"),
]


def accelerator_of(sizes: dict[str, int], fsdp: Any, **settings: Any) -> Accelerator:
    return accelerator_for(sizes, fsdp, **settings) if sizes else Accelerator(cpu=True, **settings)


def train_all(cases: list[Case], steps: int) -> list[dict[str, Any]]:
    results = []
    for sizes, fsdp, kind, window, order in cases:
        with context.isolated(), counted(torch.optim._muon, "_zeropower_via_newtonschulz") as made:
            accelerator = accelerator_of(sizes, fsdp, gradient_accumulation_steps=window)
            found = train(accelerator, kind, steps, order=order)
        # One call more finds out the type.
        results.append({**found, "orthogonalised": made["_zeropower_via_newtonschulz"] - 1})
    return results


def check(world: int, cases: list[Case], steps: int) -> None:
    ranks = run_world(train_all, world, cases, steps, timeout=400)
    for number, case in enumerate(cases):
        sizes, fsdp, kind, window, _ = case
        with counted(torch.optim._muon, "_zeropower_via_newtonschulz") as made:
            expected = plain(kind, steps, window)
        apart = deviations(ranks[0][number], expected)
        assert max(apart.values()) < 1e-10, (case, apart)
        shares = [rank[number]["orthogonalised"] for rank in ranks]
        assert sum(shares) == made["_zeropower_via_newtonschulz"], (case, shares)
        assert min(shares) > 0, (case, shares)
        whole = sum(momentum.numel() for momentum in expected["momentum"])
        if fsdp is not None and not {"tp_size", "ep_size"} <= set(sizes):  # those of tp have the routers whole
            held = sum(rank[number]["held"] for rank in ranks)
            assert held == whole * sizes.get("dp_replicate_size", 1), case


def test_sharded_matrices_are_orthogonalised_whole() -> None:
    check(2, [({"dp_shard_size": 2}, BLOCKS, "own", 1, "model first"), ({}, None, "own", 2, "optimizer first")], 4)


@needs_transformers
@pytest.mark.slow  # a training for each mesh in 2 and 4 ranks; the test above shows that the feature works
@pytest.mark.parametrize(("world", "cases"), [(2, TWO), (4, FOUR)], ids=["two ranks", "four ranks"])
def test_every_mesh_trains_as_one_process(world: int, cases: list[Case]) -> None:
    check(world, cases, STEPS)


# -- one step with given gradients -----------------------------------------------------------------------------------


class Blocks(nn.Module):
    """Matrices whose rows two ranks hold unequally; the last has fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*sizes, bias=False) for sizes in ((6, 5), (5, 9), (9, 9), (9, 1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def stepped(accelerator: Accelerator | None, dtype: torch.dtype, settings: dict[str, Any]) -> list[torch.Tensor]:
    """The weights after steps with gradients that are the same on any number of ranks."""
    torch.manual_seed(0)
    model: Any = Blocks().to(dtype)
    model.layers[1].requires_grad_(False)
    first, *rest = (parameter for parameter in model.parameters() if parameter.requires_grad)
    optimizer: Any = torch.optim.Muon([{"params": [first], "lr": 0.1}, {"params": rest}], **settings)
    if accelerator is not None:
        model, optimizer = accelerator.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):

        def closure() -> float:
            for parameter in (item for item in model.parameters() if item.requires_grad):
                whole = torch.randn(parameter.shape, generator=generator).to(dtype)
                if isinstance(parameter, DTensor):
                    whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
                parameter.grad = whole
            return 1.5

        assert optimizer.step(closure) == 1.5
        assert all(item.grad is not None for item in model.parameters() if item.requires_grad)
    weights = [item.full_tensor() if isinstance(item, DTensor) else item for item in model.parameters()]
    return [weight.detach().clone() for weight in weights]


STEPPED: list[tuple[bool, torch.dtype, dict[str, Any]]] = [
    (True, torch.float32, {}),
    (True, torch.bfloat16, {"adjust_lr_fn": "match_rms_adamw"}),
    (True, torch.float32, {"nesterov": False, "lr": torch.tensor(0.02), "ns_steps": 3}),
    (False, torch.bfloat16, {"momentum": 0.5, "weight_decay": 0.0}),
]


def step_all(at_once: int) -> list[list[torch.Tensor]]:
    muon.AT_ONCE = at_once
    found = []
    for sharded, dtype, settings in STEPPED:
        with context.isolated():
            plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if sharded else None
            found.append(stepped(Accelerator(cpu=True, fsdp_plugin=plugin), dtype, settings))
    return found


@pytest.mark.parametrize("at_once", [muon.AT_ONCE, 60], ids=["all at once", "one by one"])
def test_a_step_has_the_bits_of_one_process(at_once: int) -> None:
    for found in run_world(step_all, 2, at_once, timeout=250):
        for (sharded, dtype, settings), weights in zip(STEPPED, found, strict=True):
            expected = stepped(None, dtype, settings)
            assert all(map(torch.equal, weights, expected)), (sharded, dtype, settings)


# -- ranks that use other branches -----------------------------------------------------------------------------------

USED = [("ab", "ab"), ("a", "b"), ("a", "ab"), ("b", "b"), ("ab", "a")]
"""By step, the branches that each of two ranks uses."""


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = (nn.Linear(6, 6, bias=False) for _ in range(2))

    def forward(self, used: str, x: torch.Tensor | None = None) -> torch.Tensor:
        x = torch.ones(2, 6, dtype=self.a.weight.dtype) if x is None else x
        for name in used:
            x = x + torch.tanh(getattr(self, name)(x))
        return x


def branch_loss(model: nn.Module, step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2 * step + rank)
    return model(USED[step][rank], torch.randn(4, 6, dtype=torch.float64, generator=generator)).square().mean()


def train_branches(finds_unused: bool) -> list[torch.Tensor]:
    handler = DistributedDataParallelKwargs(find_unused_parameters=finds_unused)
    accelerator, model = Accelerator(cpu=True, kwargs_handlers=[handler]), Branches().double()
    model, optimizer = accelerator.prepare(model, torch.optim.Muon(model.parameters(), lr=0.02))
    for step in range(len(USED)):
        accelerator.backward(branch_loss(model, step, accelerator.process_index))
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach() for parameter in model.parameters()]


def test_ranks_that_use_other_branches_train_as_one_process() -> None:
    model = Branches().double()
    optimizer = torch.optim.Muon(model.parameters(), lr=0.02)
    for step in range(len(USED)):
        torch.stack([branch_loss(model, step, rank) for rank in range(2)]).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_world(train_branches, 2, True, timeout=250):
        torch.testing.assert_close(found, [parameter.detach() for parameter in model.parameters()], rtol=0, atol=1e-12)


def one_rank_waits() -> None:
    """DDP reduces nothing on rank 1, while rank 0 waits for it in its backward pass."""
    accelerator, model = Accelerator(cpu=True), Branches()
    model, optimizer = accelerator.prepare(model, torch.optim.Muon(model.parameters()))
    accelerator.backward(model("a" if accelerator.process_index else "ab").sum())
    optimizer.step()


def test_a_rank_whose_gradients_were_not_reduced_ends_the_run() -> None:
    with pytest.raises(WorldError, match="find_unused_parameters=True") as found:
        run_world(one_rank_waits, 2, timeout=60)
    assert not found.value.timed_out
    assert "did not take part in the loss" in found.value.reports[1]


# -- the same bits in float32 ----------------------------------------------------------------------------------------


def elastic(plugin: bool) -> dict[str, torch.Tensor]:
    fsdp = FullyShardedDataParallelPlugin(fsdp_version=2) if plugin else None
    loaders = DataLoaderConfiguration(elastic=True, logical_shards=2)
    accelerator = Accelerator(cpu=True, fsdp_plugin=fsdp, dataloader_config=loaders, deterministic_reduction=True)
    model: Any = model_of("own", torch.float32)
    model, *optimizers, loader = accelerator.prepare(
        model, *optimizers_of(model), DataLoader(batches(4), batch_size=BATCH)
    )
    for tokens in loader:
        accelerator.backward(loss_of(model, tokens))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def test_an_elastic_run_has_the_same_bits_on_any_number_of_ranks() -> None:
    alone = run_world(elastic, 1, False, timeout=200)[0]
    for plugin in (False, True):
        found = run_world(elastic, 2, plugin, timeout=200)[0]
        assert all(torch.equal(found[name], value) for name, value in alone.items()), plugin


# -- checkpoints -----------------------------------------------------------------------------------------------------


def part_of_a_run(
    folder: Path, kind: str, sizes: dict[str, int], fsdp: Any, begin: int, end: int
) -> dict[str, torch.Tensor]:
    accelerator = accelerator_of(sizes, fsdp)
    model: Any = model_of(kind, seed=accelerator.process_index + begin)
    model, *optimizers = accelerator.prepare(model, *optimizers_of(model))
    if begin:
        accelerator.load_state(str(folder / str(begin)))
    ranks = accelerator.strategy.data_collectives
    for tokens in batches(end).split(BATCH)[begin:]:
        accelerator.backward(loss_of(model, tokens.chunk(ranks.world_size)[ranks.rank]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    accelerator.save_state(str(folder / str(end)))
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


RESUMED: dict[str, list[tuple[int, dict[str, int], Any]]] = {
    "own": [
        (2, {"dp_shard_size": 2}, BLOCKS),
        (4, {"dp_shard_size": 2, "tp_size": 2}, BLOCKS),
        (2, {}, None),
        (1, {}, None),
        (4, {"dp_shard_size": 4}, BLOCKS),
    ],
    "moe qwen3": [
        (2, {"dp_shard_size": 2, "ep_size": 2}, BLOCKS),
        (4, {"dp_shard_size": 2, "tp_size": 2, "ep_size": 2}, BLOCKS),
        (2, {"dp_shard_size": 2}, BLOCKS),
        (4, {"dp_shard_size": 4, "ep_size": 4}, BLOCKS),
        (1, {}, None),
    ],
}


@pytest.mark.slow  # five worlds, one after the other
@pytest.mark.parametrize("kind", RESUMED)
def test_a_state_is_continued_on_other_numbers_of_ranks(tmp_path: Path, kind: str) -> None:
    runs = RESUMED[kind]
    found: dict[str, torch.Tensor] = {}
    for number, (world, sizes, fsdp) in enumerate(runs):
        steps = 2 * number, 2 * number + 2
        found = run_world(part_of_a_run, world, tmp_path, kind, sizes, fsdp, *steps, timeout=250)[0]
    model = model_of(kind)
    optimizers = optimizers_of(model)
    for tokens in batches(2 * len(runs)).split(BATCH):
        loss_of(model, tokens).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-12)


# -- what is refused -------------------------------------------------------------------------------------------------


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 7, bias=False)])
        self.unembedding = nn.Linear(4, 7, bias=False)
        self.classifier = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.unembedding(self.layers[0](self.table(x)))


@pytest.mark.parametrize("name", ["table", "unembedding", "classifier"])
@pytest.mark.parametrize("model_first", [True, False])
def test_embeddings_and_heads_are_refused(name: str, model_first: bool) -> None:
    model = Named()
    optimizer = torch.optim.Muon([getattr(model, name).weight, model.layers[0].weight])
    accelerator = Accelerator(cpu=True)
    with pytest.raises(ConfigurationError, match=rf"(?s){name}\.weight.*AdamW"):
        accelerator.prepare(*((model, optimizer) if model_first else (optimizer, model)))


def test_what_is_left_of_the_hidden_matrices_may_be_shaped_like_a_head_and_vectors_are_refused() -> None:
    model = Named()
    optimizer = torch.optim.Muon([layer.weight for layer in model.layers])
    Accelerator(cpu=True).prepare(model, optimizer)
    with context.isolated(), pytest.raises(ConfigurationError, match=r"layers\.0\.bias, a vector"):
        optimizer.add_param_group({"params": [model.layers[0].bias]})
        Accelerator(cpu=True).prepare(model, optimizer)


def test_groups_that_are_added_later_are_checked_like_those_that_were_prepared() -> None:
    accelerator, model = Accelerator(cpu=True), Named()
    model, optimizer = accelerator.prepare(model, torch.optim.Muon([model.layers[0].weight]))
    with pytest.raises(ConfigurationError, match=r"table\.weight, an embedding"):
        optimizer.add_param_group({"params": [model.table.weight]})
    optimizer.add_param_group({"params": [model.layers[1].weight]})
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 1]
    optimizer.optimizer.add_param_group({"params": [model.classifier.bias]})
    with pytest.raises(ConfigurationError, match=r"classifier\.bias, a vector"):
        optimizer.step()


@needs_transformers
def test_the_output_layer_of_a_model_of_transformers_is_refused() -> None:
    model = model_of("llama")
    with pytest.raises(ConfigurationError, match=r"lm_head\.weight, the output layer"):
        Accelerator(cpu=True).prepare(model, torch.optim.Muon([model.lm_head.weight]))


class OtherMuon(torch.optim.SGD):
    """Another implementation."""


def hidden(model: nn.Module) -> list[torch.Tensor]:
    return [model.layers[0].weight]  # type: ignore[index, union-attr]


def refused(match: str, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, **settings: Any) -> None:
    accelerator, model = Accelerator(cpu=True, **settings), Named()
    with pytest.raises(ConfigurationError, match=match):
        accelerator.prepare(model, optimizer(hidden(model)))


def other_muon() -> None:
    refused(r"OtherMuon.*torch\.optim\.Muon", OtherMuon, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))


def other_muon_with_ddp() -> None:
    model = Named()
    Accelerator(cpu=True).prepare(model, OtherMuon(hidden(model)))


def fsdp1() -> None:
    refused("FSDP1Strategy", torch.optim.Muon, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=1))


def deepspeed() -> None:
    if find_spec("deepspeed") is not None:
        refused("DeepSpeedStrategy", torch.optim.Muon, deepspeed_plugin=DeepSpeedPlugin(zero_stage=1))


def pipeline() -> None:
    accelerator, model = accelerator_for({"pp_size": 2}), Own()
    with pytest.raises(ConfigurationError, match="pp_size=2"):
        accelerator.prepare(optimizers_of(model)[0])


def alone() -> None:
    accelerator, model = Accelerator(cpu=True), Named()
    model, _ = accelerator.prepare(model, torch.optim.Muon(hidden(model)))
    with pytest.raises(ConfigurationError, match="LocalSGD cannot be used with Muon"):
        LocalSGD(accelerator, model, 2)
    with pytest.raises(ConfigurationError, match="join_uneven_inputs cannot be used with Muon"):
        accelerator.join_uneven_inputs([model])


def unprepared_model() -> None:
    accelerator, model = Accelerator(cpu=True), Named()
    optimizer = accelerator.prepare(torch.optim.Muon(hidden(model)))
    hidden(model)[0].grad = torch.ones(4, 4)
    with pytest.raises(ConfigurationError, match="belongs to no prepared model"):
        optimizer.step()


def other_matrices() -> None:
    """Every set of gradients was seen in an earlier step, so no rank has to plan anew."""
    accelerator, model = Accelerator(cpu=True), Named()
    model, optimizer = accelerator.prepare(model, torch.optim.Muon([layer.weight for layer in model.layers]))
    for chosen in ([0, 1], [0], [1], [], None):
        optimizer.zero_grad()
        for number in [accelerator.process_index] if chosen is None else chosen:
            weight = model.module.layers[number].weight
            weight.grad = torch.ones_like(weight)
        if chosen is not None:
            optimizer.step()
    before = [layer.weight.clone() for layer in model.module.layers]
    with pytest.raises(ConfigurationError, match=r"rank 0: layers\.0\.weight.*; rank 1: layers\.1\.weight"):
        optimizer.step()
    assert all(map(torch.equal, before, (layer.weight for layer in model.module.layers)))


def no_matrices_on_one_rank() -> None:
    accelerator, model = Accelerator(cpu=True), Named()
    model, optimizer = accelerator.prepare(model, torch.optim.Muon(hidden(model)))
    hidden(model.module)[0].grad = None if accelerator.process_index else torch.ones(4, 4)
    with pytest.raises(ConfigurationError, match=r"\[1, 0\] matrices.*rank 1: none"):
        optimizer.step()


def other_order() -> None:
    accelerator, model = Accelerator(cpu=True), Branches()
    weights = [layer.weight for layer in model.children()]
    model, optimizer = accelerator.prepare(
        model, torch.optim.Muon(weights if accelerator.is_main_process else weights[::-1])
    )
    model("ab").sum().backward()
    with pytest.raises(ConfigurationError, match="Their order differs"):
        optimizer.step()


def other_branches_in_a_unit() -> None:
    """FSDP 2 reduces the gradients of the branches together, since they have the same size."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model = Branches()
    model, optimizer = accelerator.prepare(model, torch.optim.Muon(model.parameters()))
    accelerator.backward(model("ab"[accelerator.process_index]).sum())
    differs = r"rank 0 has a gradient of a\.weight\n +rank 1 has a gradient of b\.weight\n.*x \+ 0 \* block"
    with pytest.raises(DistributedOperationException, match=differs):
        optimizer.step()


def in_place_momentum() -> None:
    accelerator, model = Accelerator(cpu=True), Named().bfloat16()
    model, optimizer = accelerator.prepare(model, torch.optim.Muon(hidden(model), nesterov=False))
    hidden(model.module)[0].grad = torch.ones(4, 4, dtype=torch.bfloat16)
    with pytest.raises(ConfigurationError, match="nesterov=False"):
        optimizer.step()


REFUSED = [
    other_muon,
    other_muon_with_ddp,
    fsdp1,
    deepspeed,
    pipeline,
    alone,
    unprepared_model,
    other_matrices,
    no_matrices_on_one_rank,
    other_order,
    other_branches_in_a_unit,
    in_place_momentum,
]


def run_all() -> None:
    for case in REFUSED:
        with context.isolated():
            case()


def test_what_has_not_been_compared_is_refused() -> None:
    run_world(run_all, 2, timeout=250)


def test_replicas_that_may_end_are_refused() -> None:
    strategy = FaultTolerantFSDP2Strategy.__new__(FaultTolerantFSDP2Strategy)
    with pytest.raises(ConfigurationError, match="Muon cannot be used with --ft"):
        _ = strategy.matrix_collectives
