"""accel plan --auto: the best of all configurations, the file that it writes, and what it refuses."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from plan_models import write_llama

from accel_launch.config.read import load_settings
from accel_plan.candidates import AXES, FULL, NONE, SELECTIVE, Candidate, candidates, shape_of
from accel_plan.command import COMMAND
from accel_plan.plan import PlanRequest, make_plan
from accel_plan.search import Found, planning_request, search
from accel_state.errors import ConfigurationError
from accel_state.hardware import HardwareProfile, read_profile
from accel_state.options import check, load_groups, resolve

pytestmark = [
    pytest.mark.skipif(find_spec("transformers") is None, reason="the models are those of transformers"),
    pytest.mark.timeout(900),
]

PROFILE = {
    "names": [],
    "memory_bytes": 10**9,
    "memory_bandwidth": 1e9,
    "flops": {"bf16": 4e10, "fp32": 1e10},
    "link_bandwidth": 2e8,
    "link_latency": 1e-5,
    "network_bandwidth": 5e7,
    "network_latency": 1e-4,
    "message_seconds": 1e-5,
    "operation_seconds": 1e-6,
    "devices_per_node": 2,
    "sources": {},
    "measured": True,
}
"""A slow device, two of which are in a node."""


@pytest.fixture
def hardware(tmp_path: Path) -> Path:
    file = tmp_path / "slow.json"
    file.write_text(json.dumps(PROFILE))
    return file


def a_request(tmp_path: Path, hardware: HardwareProfile, processes: int = 4, **changed: Any) -> PlanRequest:
    model = write_llama(tmp_path / "model")
    settings = check(resolve(load_groups(), {"num_processes": str(processes)}))
    given = {"memory_limit": hardware.memory_bytes, "seq_length": 64, **changed}
    return PlanRequest(settings, model, hardware=hardware, **given)


def test_every_size_divides(tmp_path: Path, hardware: Path) -> None:
    profile = read_profile(hardware)
    request = a_request(tmp_path, profile, 8)
    every = list(candidates(request, shape_of(request), profile, processes=8, samples=16, length=64))
    assert len(every) == len({item.describe() for item in every})
    for item in every:
        sizes = item.axes
        data = sizes["dp_replicate"] * sizes["dp_shard"]
        assert data * sizes["cp"] * sizes["tp"] * sizes["pp"] == 8
        assert data * item.batch_size * item.steps == 16
        assert sizes["tp"] <= 2  # in a node, and the model has two heads of keys
        assert sizes["cp"] == sizes["pp"] == 1  # short sequences, and three blocks
        assert item.precision == "bf16"  # the faster one
    sharded = {(item.axes["dp_replicate"], item.axes["dp_shard"], item.axes["tp"]) for item in every}
    assert sharded == {(8, 1, 1), (4, 2, 1), (1, 8, 1), (4, 1, 2), (1, 4, 2)}
    assert {item.checkpointing for item in every if item.axes["dp_shard"] > 1} == {NONE, SELECTIVE, FULL}


def test_sequences_and_stages_are_divided_where_they_can_be(tmp_path: Path) -> None:
    profile = HardwareProfile("fast", **{**PROFILE, "names": (), "devices_per_node": 8})
    request = a_request(tmp_path, profile, 8)
    shape = replace(shape_of(request), blocks=8)  # with four heads, two of them of keys
    every = list(candidates(request, shape, profile, processes=8, samples=8, length=4096))
    assert {(item.axes["tp"], item.axes["sp"]) for item in every} == {(1, 1), (1, 2), (1, 4), (2, 1), (2, 2)}
    assert {item.axes["cp"] for item in every} == {1, 2, 4}
    assert all(item.axes["cp"] == 1 or item.axes["sp"] == 1 for item in every)
    interleaved = {(item.axes["pp"], item.micro_batches) for item in every if item.schedule == "interleaved1f1b"}
    assert interleaved == {(2, 2), (2, 4), (4, 4), (4, 8)}


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> tuple[PlanRequest, Found]:
    """The search that several tests look at."""
    folder = tmp_path_factory.mktemp("searched")
    (folder / "slow.json").write_text(json.dumps(PROFILE))
    request = a_request(folder, read_profile(folder / "slow.json"))
    return request, search(request, 4 * 64)


def check_best(request: PlanRequest, found: Found, ranks: int) -> None:
    """No configuration is faster, as the plans of all of them say."""
    times = []
    assert request.hardware is not None and request.memory_limit is not None
    for item in candidates(request, shape_of(request), request.hardware, processes=ranks, samples=ranks, length=64):
        if item.checkpointing == FULL:
            continue  # computes more than SELECTIVE, and memory is no limit here: a third of the time of the test
        try:
            plan = make_plan(planning_request(request, item))
        except ConfigurationError:
            continue
        if plan.time is not None and plan.peak is not None and plan.total <= request.memory_limit:
            times.append((plan.time.seconds, item.describe()))
    assert len(times) > 9
    assert found.best[0].seconds == pytest.approx(min(times)[0], rel=0.02), (found.best[0].candidate, min(times))
    for first, second in itertools.pairwise(found.best):
        assert first.seconds <= second.seconds


@pytest.mark.slow  # plans every configuration of four ranks
def test_the_best_is_that_of_all(searched: tuple[PlanRequest, Found]) -> None:
    request, found = searched
    check_best(request, found, ranks=4)
    assert found.best[0].candidate.axes["pp"] == 1


@pytest.mark.slow  # a search
def test_the_best_within_a_limit_of_memory(searched: tuple[PlanRequest, Found]) -> None:
    request, found = searched
    limit = int(found.best[0].plan.total * 0.8)
    less = search(replace(request, memory_limit=limit), 4 * 64)
    assert all(choice.plan.total <= limit for choice in less.best)
    assert less.best[0].candidate != found.best[0].candidate
    with pytest.raises(ConfigurationError, match="no configuration fits in 0.0 GiB"):
        search(replace(request, memory_limit=100_000), 4 * 64)


@pytest.mark.slow  # a search
def test_a_search_leaves_a_part_of_the_device_free(searched: tuple[PlanRequest, Found]) -> None:
    request, found = searched
    assert request.hardware is not None
    limit = int(found.best[0].plan.total * 1.1)
    wide = search(replace(request, memory_limit=limit), 4 * 64)
    assert wide.best[0].candidate == found.best[0].candidate
    less = search(replace(request, memory_limit=limit, hardware=replace(request.hardware, allocator_share=0.2)), 4 * 64)
    assert less.best[0].candidate != found.best[0].candidate
    assert all(1.2 * choice.plan.total <= limit + 1 for choice in less.best)


@pytest.mark.slow  # plans every configuration of two ranks
def test_the_best_on_shared_processors_is_that_of_all(tmp_path: Path, hardware: Path) -> None:
    """Two ranks on a processor, where a pipeline's bubble costs nothing and messages cost much."""
    shared = {"devices_per_node": 4, "overlaps": False, "alone_speedup": 2.0, "message_seconds": 1e-3}
    request = a_request(tmp_path, replace(read_profile(hardware), **shared), processes=2)
    request = replace(request, model=write_llama(tmp_path / "deep", num_hidden_layers=4))
    found = search(request, 2 * 64)
    check_best(request, found, ranks=2)
    assert found.best[0].candidate.axes["pp"] > 1


@pytest.mark.slow  # a search
def test_the_file_is_the_best_configuration(
    tmp_path: Path,
    hardware: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    searched: tuple[PlanRequest, Found],
) -> None:
    model, output = write_llama(tmp_path / "model"), tmp_path / "best.yaml"
    words = ["--model", model, "--num_processes", "4", "--hardware", str(hardware), "--seq_length", "64"]
    assert COMMAND.run(["--auto", *words, "--global_batch_tokens", "256", "--output", str(output)]) == 0
    text = capsys.readouterr().out
    assert f"written to {output}; the script needs a DataLoader with batch_size=" in text
    size = text.rsplit("batch_size=", 1)[1].strip()
    # The plan of the file is that of another search, which the command prints as JSON.
    with monkeypatch.context() as patch:
        patch.setattr("accel_plan.search.search", lambda *_: searched[1])
        assert COMMAND.run(["--auto", *words, "--global_batch_tokens", "256", "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"][0]
    del best["settings"]
    assert COMMAND.run([str(output), *words, "--batch_size", size, "--json"]) == 0
    assert {**json.loads(capsys.readouterr().out), "model": ""} == {**best, "model": ""}
    assert f"{best['time']['seconds']:.3f} s" in text
    # And accel launch takes it.
    assert load_settings({"config_file": str(output)})["num_processes"] == 4


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "llama-3-8b"], "--auto needs --hardware, --global_batch_tokens, --seq_length, --num_pro"),
        (["--global_batch_tokens", "100"], "100: not a multiple of 64.*Nearest: 64 or 128"),
        (["--global_batch_tokens", "64"], "1 samples of 64 tokens cannot be divided over 4.*a multiple of 256"),
        (["--global_batch_tokens", "256", "--batch_size", "2"], "--batch_size does not go with --auto"),
        (["--global_batch_tokens", "256", "--html", "x"], "--html does not go with --auto"),
        (["--global_batch_tokens", "256", "--use_deepspeed"], "--use_deepspeed.*searches DDP, FSDP 2"),
        (["--global_batch_tokens", "256", "--strategy", "ddp"], "--strategy.*searches DDP, FSDP 2"),
        (["--global_batch_tokens", "256", "--mixed_precision", "fp8"], "does not search in fp8"),
        (["c.yaml", "--output", "best.yaml"], "--output is an option of a search"),
    ],
)
def test_what_is_refused(tmp_path: Path, hardware: Path, words: list[str], message: str) -> None:
    (tmp_path / "c.yaml").write_text("distributed_type: MULTI_CPU\n")
    words = [str(tmp_path / "c.yaml") if word == "c.yaml" else word for word in words]
    words = words if "--output" in words else ["--auto", *words]
    if "llama-3-8b" not in words:
        model = write_llama(tmp_path / "model")
        words += ["--model", model, "--num_processes", "4", "--seq_length", "64", "--hardware", str(hardware)]
    with pytest.raises(ConfigurationError, match=message):
        COMMAND.run(words)


def test_the_settings_of_a_configuration() -> None:
    one = dict.fromkeys(AXES, 1)
    assert Candidate({**one, "dp_replicate": 4}, 2, 3, NONE, "bf16").values() == {
        "mixed_precision": "bf16",
        "gradient_accumulation_steps": 3,
        "use_fsdp": False,
        "use_parallelism_config": False,
    }
    mesh = Candidate({**one, "dp_shard": 2, "tp": 2}, 1, 1, SELECTIVE, "no")
    assert mesh.values()["fsdp_activation_checkpointing_mode"] == "selective"
    assert mesh.values()["parallelism_config_tp_size"] == 2
    assert mesh.describe() == "dp_shard 2 x tp 2, batch 1, checkpointing selective, precision no"
    assert asdict(mesh)["axes"]["dp_shard"] == 2
