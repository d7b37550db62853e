"""Sequences shared by attention heads: what ranks get. test_mesh_packed.py and test_mesh_matrix.py train on them."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from language_models import BATCH, LENGTH, build, dataset, stack
from torch.nn import functional
from torch.utils.data import DataLoader
from transformers_5 import needs_transformers_5
from windows import TOLERANCE

from accel import Accelerator
from accel.parallel.axis_settings import DeepSpeedSequenceParallelConfig
from accel.parallel.config import ParallelismConfig
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers"),
    pytest.mark.timeout(600),
]


def parts_and_refusals() -> dict[str, Any]:
    handler = DeepSpeedSequenceParallelConfig(sp_seq_length=LENGTH, sp_seq_length_is_variable=False)
    accelerator = Accelerator(parallelism_config=ParallelismConfig(sp_size=2, sp_handler=handler))
    model, loader = accelerator.prepare(build("llama"), DataLoader(dataset(1), batch_size=BATCH))
    split = accelerator.deepspeed_ulysses_dl_adapter(loader, model)
    assert len(split) == len(loader) and split.dataset is loader.dataset
    model.eval()
    batch = next(iter(split))
    with torch.no_grad():
        logits = accelerator.strategy.whole_sequences(model(**{**batch, "labels": None, "shift_labels": None}).logits)
    whole = stack(dataset(1))
    with pytest.raises(ConfigurationError, match="not those of a split batch"):
        model(input_ids=whole["input_ids"])
    for given, message in (
        ([whole["input_ids"]], "a batch of list has no input_ids"),
        ({"input_ids": whole["input_ids"][:, :8]}, "sequences of 8 positions, and sp_seq_length=16"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            accelerator.strategy.ulysses.split(given)
    handler.sp_seq_length = None
    with pytest.raises(ConfigurationError, match="of 15 positions.*sp_size=2"):
        accelerator.strategy.ulysses.split({"input_ids": whole["input_ids"][:, 1:]})
    with pytest.raises(ConfigurationError, match="Own is not a model of Transformers"):
        accelerator.prepare(build("own"))
    with pytest.raises(ConfigurationError, match="sp_attn_implementation='flash_attention_2'"):
        other = DeepSpeedSequenceParallelConfig(sp_attn_implementation="flash_attention_2")
        Accelerator(parallelism_config=ParallelismConfig(sp_size=2, sp_handler=other))
    return {
        "keys": sorted(batch),
        "positions": batch["position_ids"][0].tolist(),
        "shift": batch["shift_labels"],
        "logits": logits,
    }


@needs_transformers_5
def test_each_rank_gets_its_part_and_what_does_not_fit_is_refused() -> None:
    whole = stack(dataset(1))
    with torch.no_grad():
        expected = build("llama").eval()(input_ids=whole["input_ids"]).logits
    shifted = functional.pad(whole["labels"], (0, 1), value=-100)[:, 1:]
    for rank, found in enumerate(run_world(parts_and_refusals, 2, timeout=250)):
        mine = slice(rank * LENGTH // 2, (rank + 1) * LENGTH // 2)
        assert found["keys"] == ["input_ids", "labels", "position_ids", "shift_labels"]
        assert found["positions"] == list(range(LENGTH))[mine]
        assert torch.equal(found["shift"], shifted[:, mine])
        torch.testing.assert_close(found["logits"], expected, rtol=0, atol=TOLERANCE)
