"""The page of `accel plan --html`: what its charts and tables show is what the plan says."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec

import pytest
from plan_models import write_llama

from accel_launch.config.read import load_settings
from accel_plan.command import COMMAND
from accel_plan.page import as_html
from accel_plan.plan import PlanRequest, make_plan
from accel_state.errors import ConfigurationError
from accel_state.hardware import profile

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers"),
    pytest.mark.timeout(600),
]


def test_the_page_shows_the_plan(tmp_path) -> None:
    options = {"use_fsdp": "true", "fsdp_version": "2", "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    settings = load_settings({**options, "num_processes": "16", "mixed_precision": "bf16"}, environ={})
    hardware = profile("h100-sxm")
    model = write_llama(tmp_path / "<m>")
    limit_bytes = hardware.memory_bytes
    plan = make_plan(PlanRequest(settings, model, rank=9, seq_length=32, hardware=hardware, memory_limit=limit_bytes))
    page = as_html(plan, hardware)
    assert "<m>" not in page and "http://" not in page.split("<script>")[0]
    memory, time = (json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page))
    curves = {curve["label"]: curve for curve in memory["curves"]}
    assert plan.peak is not None and plan.time is not None
    assert memory["unit"] == "B" and max(curves["all"]["y"]) == curves["peak"]["y"][0] == plan.peak.total
    when = curves["all"]["x"].index(curves["peak"]["x"][0])
    stacked = {name: curve for name, curve in curves.items() if curve["stacked"]}
    parts = {name: curve["y"][when] for name, curve in stacked.items()}
    assert parts == {name: plan.peak.categories[name] for name in parts}
    assert sum(parts.values()) == plan.peak.total
    colors = [curve["color"] for curve in stacked.values()]
    assert len(set(colors)) == len(colors) > 3 and None not in colors
    (limit,) = (curve for curve in memory["curves"] if curve["dashed"])
    # The reserve is not in the curves: what is below the line fits.
    assert plan.reserve is not None and set(limit["y"]) == {limit_bytes - plan.reserve.total}
    assert limit["label"].startswith("limit: 80.0 GiB less a reserve of ")
    lanes = {curve["label"]: curve for curve in time["curves"]}
    assert time["lanes"] == sorted(lanes) == ["compute", "gather dp_shard", "reduce dp_shard"]
    # One value for each x: an interruption would hide the end of what is before it.
    assert all(len(set(curve["x"])) == len(curve["x"]) for curve in lanes.values())
    gathers = [y is None for y in lanes["gather dp_shard"]["y"]].count(True) + 1
    assert 1 < gathers <= 2 * (3 + 1), "at most one for each block and the rest, forward and backward"
    assert max(max(curve["x"]) for curve in lanes.values()) <= 1e3 * plan.time.seconds * (1 + 1e-6)
    # Rank 9 of one axis over two nodes of eight.
    assert re.search(r'data-number="16">16</td>.*data-number="9">9</td>.*between nodes', page)
    headline = dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    assert headline["memory"].startswith("Fits in 80.0 GiB, with ") and headline["bottleneck"] == plan.time.bottleneck
    assert headline["speed"] == f"{plan.time.tokens:,.0f} tokens per second and device"
    assert headline["model FLOPs utilization (MFU)"] == f"{plan.time.utilization:.1%}"
    table = page.partition("<h2>Largest tensors at the peak</h2>")[2].partition("</table>")[0]
    assert len(re.findall("<tr>", table)) == 1 + len(plan.peak.tensors) and ">model.layers.*" in table
    assert "empty.memory_format" not in page and ">gathered parameters<" in table


def test_a_page_of_a_plan_that_does_not_fit(tmp_path) -> None:
    settings = load_settings({"num_processes": "2", "multi_gpu": "true"}, environ={})
    model = write_llama(tmp_path / "m", num_hidden_layers=1)
    plan = make_plan(PlanRequest(settings, model, seq_length=8, memory_limit=2**12))
    page = as_html(plan, None)
    assert re.search(r"<dt>memory</dt><dd>Does not fit in 4\.0 KiB: [\d.]+ \wiB too much</dd>", page)
    assert "<dt>speed</dt>" not in page
    (memory,) = (json.loads(text) for text in re.findall(r'<script type="application/json">(.*?)</script>', page))
    (limit,) = (curve for curve in memory["curves"] if curve["dashed"])
    assert limit["label"] == "limit: 4.0 KiB" and set(limit["y"]) == {2**12}


def test_a_page_that_cannot_be_written(tmp_path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    words = [str(file), "--model", write_llama(tmp_path / "m", num_hidden_layers=1), "--seq_length", "8"]
    with pytest.raises(ConfigurationError, match="--html .*: No such file or directory"):
        COMMAND.run([*words, "--html", str(tmp_path / "missing/page.html")])
