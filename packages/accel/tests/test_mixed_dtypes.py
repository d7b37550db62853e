"""Models with parameters of several dtypes, frozen or trained, under FSDP and tp, against one process.

``pytest -s --all packages/accel/tests/test_mixed_dtypes.py -k table`` prints the table of
docs/reference/combinations.md.
"""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from mixed_dtypes import BOUNDS, CASES, STRATEGIES, Case, deviation, outcomes, plain
from torch import nn

from accel import Accelerator
from accel.fsdp.plugin import FullyShardedDataParallelPlugin
from accel.fsdp.unit_dtypes import unify_dtypes
from accel.utils import load_fsdp_model, save_fsdp_model
from accel_state import context, is_torch_version
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

pytestmark = pytest.mark.timeout(600)
needs_models = pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers")
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "combinations.md"
HEAD = "| base | model | trained | precision | FSDP 1 | FSDP 2 | HSDP | tp |"


def cell(case: Case, found: dict[str, Any] | str, expected: dict[str, Any]) -> str:
    if isinstance(found, str):
        assert "must have one dtype" in found and "mixed_precision='bf16'" in found, (case, found)
        assert "layers.1.self_attn.q_proj" in found, "the error names a parameter of each dtype"
        return "refused"
    figure = deviation(found, expected)
    assert figure < BOUNDS[case.computes_in], (case, figure)
    return f"{figure:.0e}"


FIXED = [
    Case("bf16", "plain", True, "bf16"),
    Case("bf16", "LoRA", True, "no"),
    Case("bf16", "LoRA", True, "fp16"),
    Case("bf16", "bf16 LoRA", True, "bf16"),
    Case("bf16", "LoRA", False, "no"),
]
# Cells of the table; only FSDP 1 stores one dtype per unit, frozen parameters included.
FIXED_REFUSED = {"FSDP 1": [1, 4], "FSDP 2": [4], "tp": []}


def fixed_cells() -> dict[str, list[Any]]:
    return {strategy: outcomes(FIXED, strategy) for strategy in FIXED_REFUSED}


@needs_models
def test_some_cells_of_the_table() -> None:
    (found, _) = run_world(fixed_cells, 2, timeout=200)
    for strategy, refused in FIXED_REFUSED.items():
        cells = [cell(case, one, plain(case)) for case, one in zip(FIXED, found[strategy], strict=True)]
        assert [index for index, text in enumerate(cells) if text == "refused"] == refused, (strategy, cells)


@needs_models
@pytest.mark.slow  # 144 models
def test_the_table_of_the_documentation() -> None:
    expected = [plain(case) for case in CASES]
    columns = []
    for strategy, ranks in STRATEGIES.items():
        found = run_world(outcomes, ranks, CASES, strategy, timeout=500)[0]
        columns.append([cell(*one) for one in zip(CASES, found, expected, strict=True)])
    lines = [
        f"| {' | '.join([*case.words, *cells])} |"
        for case, cells in zip(CASES, zip(*columns, strict=True), strict=True)
    ]
    print("\n".join(["", HEAD, "|---|---|---|---|---|---|---|---|", *lines]))
    rows = PAGE.read_text(encoding="utf-8").split(HEAD + "\n")[1].split("\n\n")[0].splitlines()[1:]
    assert [shape_of(row) for row in rows] == [shape_of(line) for line in lines], "print the table again"


def shape_of(row: str) -> list[str]:
    """The cells of a row; a figure may differ, if it stays within the bound."""
    *words, precision = [text.strip() for text in row.strip("|").split("|")[:4]]
    case = next(case for case in CASES if case.words == [*words, precision])
    cells = [text.strip() for text in row.strip("|").split("|")[4:]]
    assert all(text == "refused" or float(text) < BOUNDS[case.computes_in] for text in cells), row
    return [*case.words, *("equal" if text != "refused" else text for text in cells)]


FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
LAYERS = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Linear"]}


class Net(nn.Module):
    """A layer in one dtype, and a normalisation and a layer in another one."""

    def __init__(self, first: torch.dtype, rest: torch.dtype, frozen: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(8, 8, dtype=first)
        self.norm, self.last = nn.LayerNorm(8, dtype=rest), nn.Linear(8, 2, dtype=rest)
        if frozen:
            self.get_submodule(frozen).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x.to(self.first.weight.dtype)))
        x = self.norm(x.to(self.norm.weight.dtype))
        return self.last(x.to(self.last.weight.dtype)).float()


# The settings of FSDP, the precision, the model, and the dtypes of its saved parameters.
TRAINED = [
    ({"fsdp_version": 1}, "bf16", (BF16, FP32), {FP32}),
    ({"fsdp_version": 1}, "bf16", (BF16, BF16, "last"), {FP32}),
    ({"fsdp_version": 1}, "bf16", (FP16, FP32, "first"), {FP32}),
    ({"fsdp_version": 1}, "bf16", (FP64, FP32, "first"), {FP64}),
    ({"fsdp_version": 1, "cpu_ram_efficient_loading": True}, "bf16", (BF16, BF16, "first"), {FP32}),
    ({"fsdp_version": 1, **LAYERS}, "no", (BF16, FP32), {BF16, FP32}),
    ({"fsdp_version": 1, "ignored_modules": "first"}, "no", (BF16, FP32, "first"), {BF16, FP32}),
    ({"fsdp_version": 2}, "no", (BF16, FP32, "first"), {BF16, FP32}),
    ({"fsdp_version": 2}, "bf16", (BF16, FP32), {FP32}),
    ({"fsdp_version": 2, **LAYERS}, "no", (FP64, FP32), {FP64, FP32}),
]
REFUSED = [
    ({"fsdp_version": 1}, "no", (BF16, FP32), "first.weight is torch.bfloat16 and norm.weight is torch.float32"),
    ({"fsdp_version": 1}, "no", (FP32, FP64, "last"), r"fsdp_version=1 .* set mixed_precision='bf16'"),
    ({"fsdp_version": 1, "use_orig_params": False}, "no", (FP32, FP32, "first"), "first.weight is frozen and norm"),
    ({"fsdp_version": 2}, "no", (FP16, FP32), "first.weight is torch.float16 and norm.weight is torch.float32"),
    ({"fsdp_version": 2}, "bf16", (FP64, FP32), r"fsdp_version=2 .* Convert the model with model.to\(dtype\)"),
]


def train(settings: dict[str, Any] | None, precision: str, model: tuple[Any, ...]) -> Any:
    """The last loss, and the dtypes of the saved parameters."""
    accelerator, net, rank, ranks = None, Net(*model), 0, 1
    if settings is not None:
        plugin = FullyShardedDataParallelPlugin(**settings)
        accelerator = Accelerator(cpu=True, mixed_precision=precision, fsdp_plugin=plugin)
        rank, ranks = accelerator.process_index, accelerator.num_processes
        if settings.get("cpu_ram_efficient_loading") and rank:
            net = net.to("meta")
    elif precision != "no":
        for parameter in net.parameters():  # master weights
            parameter.data = parameter.data.float() if parameter.requires_grad else parameter.data
    optimizer: Any = torch.optim.SGD([item for item in net.parameters() if item.requires_grad], lr=0.1)
    if accelerator is not None:
        net, optimizer = accelerator.prepare(net, optimizer)
    for step in range(3):
        x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step)).chunk(ranks)[rank]
        with torch.autocast("cpu", BF16, enabled=accelerator is None and precision != "no"):
            loss = (net(x) - 1).square().mean()
        loss.backward() if accelerator is None else accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if accelerator is None:
        return loss.item()
    saved = {value.dtype for value in accelerator.get_state_dict(net).values()}
    return accelerator.reduce(loss.detach(), "mean").item(), saved


def train_all() -> list[Any]:
    found = []
    for *what, _ in TRAINED:
        with context.isolated():
            found.append(train(*what))
    for *what, message in REFUSED:
        with context.isolated(), pytest.raises(ConfigurationError, match=message):
            train(*what)
    with context.isolated(), pytest.raises(ConfigurationError, match=r"first\.weight is torch\.bfloat16 and norm"):
        thaw()
    return found


def thaw() -> None:
    """Train a layer later that has another dtype than the parameters that are reduced together with it."""
    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    model: Any = accelerator.prepare(Net(BF16, FP32, "first"))
    accelerator.backward(model(torch.ones(2, 8)).sum())
    accelerator.unwrap_model(model).first.requires_grad_(True)
    model(torch.ones(2, 8))


@pytest.mark.slow  # 16 models
def test_units_of_several_dtypes_train_like_one_process_or_are_refused() -> None:
    (found, _) = run_world(train_all, 2, timeout=200)
    for (settings, precision, model, dtypes), (loss, saved) in zip(TRAINED, found, strict=True):
        half = precision != "no" or not {BF16, FP16}.isdisjoint(model)
        assert loss == pytest.approx(train(None, precision, model), rel=1e-2 if half else 1e-6), (settings, model)
        assert saved == dtypes, (settings, model)


def torch_warnings(folder: str) -> list[str]:
    """What torch warns of while adapters on a frozen model are prepared, saved and loaded under FSDP 1."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        plugin = FullyShardedDataParallelPlugin(fsdp_version=1, **LAYERS)
        accelerator = Accelerator(cpu=True, mixed_precision="bf16", fsdp_plugin=plugin)
        model = Net(BF16, BF16)
        for layer in (model.first, model.last):
            layer.weight.requires_grad_(False)
        model = accelerator.prepare(model)
        save_fsdp_model(plugin, accelerator, model, folder)
        load_fsdp_model(plugin, accelerator, model, folder)
        accelerator.get_state_dict(model)
        accelerator.save_state(f"{folder}/state")
        accelerator.load_state(f"{folder}/state")
    return [f"{item.filename}: {item.message}" for item in caught if "torch" in item.filename]


@pytest.mark.skipif(is_torch_version("<", "2.7"), reason="torch 2.6 warns of DTensor's random operators on CPUs")
def test_torch_warns_of_nothing_under_fsdp_1(tmp_path: Path) -> None:
    assert run_world(torch_warnings, 2, str(tmp_path)) == [[], []]


@pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="the clients' environment has bitsandbytes")
def test_packed_weights_are_not_converted() -> None:
    from bitsandbytes.nn import Linear4bit

    packed = Linear4bit(64, 64, bias=False, quant_type="nf4", quant_storage=torch.bfloat16)
    model = nn.Sequential(packed, nn.Linear(64, 4)).to("cpu")
    with pytest.raises(ConfigurationError, match=r"packed 4-bit weights cannot be converted.*fsdp_version=2"):
        unify_dtypes([list(model.named_parameters())], torch.bfloat16)
