"""examples/fsdp.py: one script, and a configuration file for each way of sharding the model."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from documents import all_commands, shows
from forks import run_launched
from safetensors.torch import load_file
from torch.nn import functional
from workspace import ROOT

SCRIPT = ROOT / "examples" / "fsdp.py"
CONFIGS = ROOT / "examples" / "fsdp_configs"
HELD = re.compile(r"(\d) processes, (\d+) parameters on rank 0")
LOSS = re.compile(r"final loss: (\d+\.\d{6}), accuracy: (\d\.\d{3}) on 160 sentences \(chance: 0\.250\)")
# The processes of each file, and over how many of them the parameters are sharded.
FILES = {"ddp": (2, 1), "fsdp1": (2, 2), "fsdp2": (2, 2), "tp_fsdp": (4, 4)}

pytest.importorskip("transformers")


def loss_of_whole(weights: Path) -> float:
    """The loss of the saved weights in plain PyTorch, in one batch."""
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        import fsdp as example
    finally:
        sys.path.remove(str(SCRIPT.parent))
    model = example.make_model(64, 2)
    model.load_state_dict(load_file(weights))
    batch = example.collate(example.examples(160)[1])
    labels = batch.pop("labels")
    with torch.no_grad():
        return functional.cross_entropy(model.eval()(**batch).logits, labels).item()


# Four trainings of a Llama on two or four ranks: 20 seconds on two cores.
@pytest.mark.slow
@pytest.mark.timeout(1300)
def test_every_configuration_trains_to_the_loss_that_pages_show(tmp_path: Path) -> None:
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == set(FILES)
    losses, held, printed = {}, {}, {}
    for name, (processes, _) in FILES.items():
        config, target = CONFIGS / f"{name}.yaml", tmp_path / name
        lines = run_launched(SCRIPT, "--output_dir", target, launch=("--config_file", config), folder=tmp_path)
        sizes, found = HELD.fullmatch(lines[-2]), LOSS.fullmatch(lines[-1])
        assert sizes and found and int(sizes[1]) == processes, (name, lines)
        losses[name], held[name], printed[name] = float(found[1]), int(sizes[2]), "\n".join(lines)
        assert float(found[2]) >= 0.4, (name, lines)
        assert loss_of_whole(target / "model.safetensors") == pytest.approx(losses[name], abs=1e-5), name
    assert max(losses.values()) - min(losses.values()) <= 1e-4, losses
    for name, (_, divided) in FILES.items():
        assert held[name] == pytest.approx(held["ddp"] / divided, rel=0.05), (name, held)
    commands = [command for command in all_commands() if command.words[-1] == "examples/fsdp.py"]
    assert {command.block.page for command in commands} >= {"README.md", "packages/accel/README.md"}
    for command in commands:
        name = Path(command.words[-2]).stem
        assert not command.shown or shows(command.shown, printed[name]), f"{command}: prints\n{printed[name]}"
