"""On a mesh, ``gather`` and ``reduce`` of scripts written for Accelerate cover all processes, as they expect."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from accel.parallel.config import ParallelismConfig
from accel.utils import DataLoaderConfiguration
from accel_compat import install, shim_path
from accel_state import context
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world


def construct(package: str) -> Callable[..., Any]:
    """What makes an Accelerator in a module that imports it from a package."""
    namespace: dict[str, Any] = {"__name__": f"script_of_{package}"}
    exec(f"from {package} import Accelerator\ndef make(**options): return Accelerator(**options)", namespace)
    return namespace["make"]


def gathered(package: str, axes: dict[str, int], dispatch: bool) -> dict[str, list[float]]:
    """Gather a value of each process, a row of each, and six samples in batches of four, to which each rank adds."""
    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    accelerator = construct(package)(cpu=True, parallelism_config=ParallelismConfig(**axes), dataloader_config=config)
    loader = accelerator.prepare(DataLoader(torch.arange(6.0), batch_size=2))
    rank = accelerator.process_index
    part = accelerator.strategy.axis_rank("cp") / 10
    rows = [accelerator.gather_for_metrics({"rows": batch + part, "rank": torch.tensor(rank)}) for batch in loader]
    return {
        "values": accelerator.gather(torch.tensor(float(rank))).tolist(),
        "sum": [accelerator.reduce(torch.tensor(float(rank))).item()],
        "vectors": accelerator.gather(torch.tensor([float(rank)])).tolist(),
        "ranks": rows[-1]["rank"].tolist(),
        "rows": sorted(torch.cat([one["rows"] for one in rows]).tolist()),
    }


def gather_all(cases: list[tuple[str, dict[str, int], bool]]) -> list[dict[str, list[float]]]:
    install()
    found = []
    for case in cases:
        with context.isolated():
            found.append(gathered(*case))
    sys.path.remove(str(shim_path()))
    return found


SAMPLES = [float(sample) for sample in range(6)]
PARTS = sorted([*SAMPLES, *(sample + 0.1 for sample in SAMPLES)])


def test_every_process_counts_for_scripts_of_accelerate() -> None:
    mesh = {"dp_replicate_size": 2, "cp_size": 2}
    cases = [
        ("accelerate", mesh, False),
        ("accelerate", mesh, True),
        ("accelerate", {"dp_replicate_size": 2, "tp_size": 2}, False),
        ("accel", mesh, False),
        ("accel", {"dp_replicate_size": 2, "tp_size": 2}, False),
    ]
    for rank, (split, dispatched, copied, native, without_copies) in enumerate(
        run_world(gather_all, 4, cases, timeout=100)
    ):
        for found in (split, dispatched, copied):
            assert found["values"] == found["vectors"] == found["ranks"] == [0, 1, 2, 3]
            assert found["sum"] == [6]
        # Each rank has a part of each sample: all of them count, and the padding of the last batch does not.
        assert split["rows"] == pytest.approx(PARTS) and dispatched["rows"] == pytest.approx(PARTS)
        assert copied["rows"] == SAMPLES  # ranks with copies add nothing
        assert native["sum"] == [6] and without_copies["sum"] == [2 * (rank % 2) + 2]
        assert native["values"] == [rank % 2, 2 + rank % 2]
        assert native["rows"] == pytest.approx([sample + rank % 2 / 10 for sample in SAMPLES])


def trainers() -> None:
    """Transformers' Trainer, whose loss of sequences split by heads comes from DeepSpeed, and loops of one's own."""
    install()
    sequences, context_parallel = ParallelismConfig(sp_size=2), ParallelismConfig(cp_size=2)
    allowed = [("accelerate", sequences)]
    for imported in (False, True):
        if imported:
            sys.modules["transformers.trainer"] = types.ModuleType("transformers.trainer")
            allowed = [("accelerate", context_parallel), ("accel", sequences)]
            with context.isolated(), pytest.raises(ConfigurationError, match="sp_size=2: Transformers.* Set cp_size"):
                construct("accelerate")(cpu=True, parallelism_config=sequences)
        for package, config in allowed:
            with context.isolated():
                construct(package)(cpu=True, parallelism_config=config)
    del sys.modules["transformers.trainer"]
    sys.path.remove(str(shim_path()))


def test_sequences_split_by_heads_are_refused_where_the_trainer_of_transformers_is_imported() -> None:
    run_world(trainers, 2, timeout=120)
