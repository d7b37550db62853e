"""What a type checker says about the code of users."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from accel_data import prepare_data_loader
from accel_state import PartialState, gather, pad_across_processes, reduce

loader = prepare_data_loader(DataLoader(TensorDataset(torch.ones(4)), batch_size=2))
loader.load_state_dict(loader.state_dict())
for batch in loader:
    print(loader.end_of_dataloader, loader.remainder)
total: torch.Tensor = reduce(gather(torch.ones(2)), "sum")
padded: dict[str, torch.Tensor] = pad_across_processes({"a": total})
rank: int = PartialState().process_index
wrong: int = gather(total)
PartialState().no_such
"""


@pytest.mark.slow  # mypy reads torch
@pytest.mark.timeout(300)
@pytest.mark.skipif(find_spec("mypy") is None, reason="needs mypy")
def test_loaders_and_collectives_are_typed(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    errors = [line for line in done.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 2, done.stdout + done.stderr
    assert "[assignment]" in errors[0] and "no_such" in errors[1]
