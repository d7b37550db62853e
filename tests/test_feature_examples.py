"""The small examples, run as the launcher runs them; each prints a number, which is checked.

`scripts/test --all` prints the list with its times (see ``pytest_terminal_summary`` of the root's conftest.py).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from forks import run_launched
from workspace import ROOT

from accel_launch.cli import main as accel

EXAMPLES = ROOT / "examples"
# Seconds on a busy machine: two processes that import torch, some also transformers.
pytestmark = pytest.mark.timeout(400)


def at_least(low: float) -> Callable[[str], None]:
    def check(found: str) -> None:
        assert low <= float(found) <= 1, found

    return check


def equal(wanted: str) -> Callable[[str], None]:
    def check(found: str) -> None:
        assert found == wanted

    return check


def at_most(high: float) -> Callable[[str], None]:
    def check(found: str) -> None:
        assert 0 <= float(found) <= high, found

    return check


@dataclass(frozen=True)
class Example:
    """A run of a script; ``number`` has one group, which is passed to ``check``."""

    script: str
    number: str
    check: Callable[[str], None]
    processes: int = 2
    words: tuple[str, ...] = ()
    launch: tuple[str, ...] = ()
    needs: str = "sklearn"
    fast: bool = False


ACCURACY = r"accuracy: (\d\.\d{3})"


def mesh(axis: str, script: str) -> Example:
    options = mesh_options(axis)
    return Example(script, r"last loss: (.*)", same_loss_as_alone(script), launch=options, needs="transformers")


def mesh_options(axis: str) -> tuple[str, ...]:
    return ("--use_parallelism_config", f"--parallelism_config_{axis}_size", "2")


def same_loss_as_alone(script: str) -> Callable[[str], None]:
    def check(found: str) -> None:
        alone = number_of(Example(LOSS_OF_ONE_PROCESS, r"last loss: (.*)", at_most(9), processes=1))
        assert float(found) == pytest.approx(float(alone), abs=2e-4)

    return check


def distributed(
    script: str, *launch: str, tolerance: float = 2e-4, processes: int = 2, needs: str = "transformers"
) -> Example:
    """20 steps of a script, whose loss is that of one process."""
    words = ("--steps", "20")

    def check(found: str) -> None:
        alone = number_of(Example(script, r"last loss: (.*)", at_most(9), processes=1, words=words))
        assert float(found) == pytest.approx(float(alone), abs=tolerance)

    return Example(script, r"last loss: (.*)", check, processes, words, launch, needs)


FSDP2 = ("--use_fsdp", "--fsdp_version", "2", "--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP")


LOSS_OF_ONE_PROCESS = "by_feature/tensor_parallel.py"
RUNS = [
    Example("by_feature/gradient_accumulation.py", ACCURACY, at_least(0.8), fast=True),
    Example(
        "by_feature/gradient_accumulation_for_autoregressive_models.py",
        r"largest difference to one batch: (.*)",
        at_most(1e-5),
    ),
    Example("by_feature/automatic_gradient_accumulation.py", ACCURACY, at_least(0.8), words=("--fits", "16")),
    Example(
        "by_feature/memory.py", r"batch sizes tried: (.*)", equal("64 57 51 45 40"), processes=1, words=("--fits", "40")
    ),
    Example("by_feature/checkpointing.py", r"weights that differ after resuming: (\d+) of 2410", equal("0")),
    Example("by_feature/cross_validation.py", ACCURACY, at_least(0.8)),
    Example("by_feature/ddp_comm_hook.py", f"power_sgd {ACCURACY}", at_least(0.8)),
    Example("by_feature/ddp_comm_hook.py", f"fp16 {ACCURACY}", at_least(0.8), words=("--hook", "fp16")),
    Example(
        "by_feature/early_stopping.py",
        r"steps per rank: (\d+ \d+)",
        lambda found: equal(*found.split()[:1])(found.split()[1]),
    ),
    Example("by_feature/fsdp_with_peak_mem_tracking.py", r"share on rank 0: (.*)", equal("0.500")),
    Example("by_feature/moving_average.py", r"their average: (.*)", at_least(0.8)),
    Example("by_feature/moving_average.py", r"difference to the best accuracy: (.*)", equal("0.0")),
    Example("by_feature/local_sgd.py", r"largest difference between ranks: (.*)", equal("0.000000")),
    Example(
        "by_feature/multi_process_metrics.py",
        r"gather: 400 samples, gather_for_metrics: (\d+) samples",
        equal("359"),
    ),
    Example("by_feature/profiler.py", r"FLOPs of the recorded steps: (\d+)", equal("647168"), processes=1),
    Example("by_feature/schedule_free.py", f"^{ACCURACY}", at_least(0.8), processes=1, needs="schedulefree"),
    Example(
        "by_feature/torch_compile.py",
        r"largest difference to eager mode: (.*)",
        at_most(1e-4),
        processes=1,
        words=("--backend", "aot_eager"),  # inductor would compile C++
    ),
    Example("by_feature/fp8.py", ACCURACY, at_least(0.8)),
    mesh("tp", "by_feature/tensor_parallel.py"),
    mesh("pp", "by_feature/pipeline_parallel.py"),
    mesh("cp", "by_feature/context_parallel.py"),
    mesh("sp", "by_feature/sequence_parallel.py"),
    distributed(
        "moe.py",
        *("--use_fsdp", "--fsdp_version", "2", "--use_parallelism_config"),
        *("--parallelism_config_dp_shard_size", "4", "--parallelism_config_ep_size", "2"),
        processes=4,
    ),
    distributed("muon.py", *FSDP2, tolerance=0),  # elastic loaders give gradients the same bits
    distributed("packed_long_context.py", *mesh_options("cp"), "--parallelism_config_cp_balance", "documents"),
    distributed("qlora.py", *FSDP2, needs="bitsandbytes"),
    Example("distributed_inference/text.py", r"(\d) prompts on rank 0, 5 in all", equal("3"), needs="transformers"),
    Example("distributed_inference/image.py", r"5 images on rank 0, (\d+) files", equal("10")),
    Example("distributed_inference/speech.py", r"frames recognised: (\d+ of \d+)", equal("460 of 460"), fast=True),
    Example("complete_cv_example.py", f"^{ACCURACY}", at_least(0.8), launch=("--mixed_precision", "bf16")),
    Example("complete_nlp_example.py", r"perplexity: .* before, (.*) after", at_most(25), needs="transformers"),
    Example("sagemaker/train.py", r"last loss: (.*)", at_most(0.8)),
]


def number_of(example: Example, folder: Path | None = None) -> str:
    lines = output_of(example, folder)
    found = [match[1] for line in lines for match in [re.search(example.number, line)] if match]
    assert found, "\n".join(lines)
    return found[-1]


@cache
def output_of(example: Example, folder: Path | None) -> list[str]:
    """What the script prints; it may write into the directory."""
    options = ("--cpu", "--num_processes", example.processes, *example.launch)
    return run_launched(EXAMPLES / example.script, *example.words, launch=options, folder=folder or Path.cwd())


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(
            example,
            id=" ".join([Path(example.script).stem, *example.words]),
            # Some seconds each. Two are in the fast tier, and digits.py (test_examples.py also really launches it).
            marks=() if example.fast else pytest.mark.slow,
        )
        for example in RUNS
    ],
)
def test_example(example: Example, tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    if find_spec(example.needs) is None:
        pytest.skip(f"needs {example.needs}")
    start = time.perf_counter()
    example.check(number_of(example, tmp_path))
    record_property(
        "documented run", f"{time.perf_counter() - start:6.1f} s  examples/{example.script} {' '.join(example.words)}"
    )


# Processes are forked from a fresh interpreter, as from a kernel's.
RUN_CELLS = """
import json, sys
for cell in json.load(open(sys.argv[1], encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), "<cell>", "exec"), globals())
"""


@pytest.mark.slow  # starts two processes; test_launch_notebook.py runs a real kernel
def test_notebook(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", RUN_CELLS, str(EXAMPLES / "notebook.ipynb")],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=tmp_path,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    match = re.search(r"2 processes, accuracy: (\d\.\d{3})", result.stdout)
    assert match and float(match[1]) > 0.85, result.stdout


def test_notebook_is_a_notebook() -> None:
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    assert all(not cell.get("outputs") for cell in notebook["cells"]), "clear the outputs before committing"


@pytest.mark.parametrize(
    "file",
    sorted([*EXAMPLES.glob("config_templates/*.yaml"), EXAMPLES / "sagemaker" / "config.yaml"]),
    ids=lambda p: p.stem,
)
def test_configuration_template_is_valid(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = str(EXAMPLES / "sagemaker" / "train.py")
    assert accel(["launch", "--dry_run", "--json", "-q", "--config_file", str(file), script]) == 0
    starts = json.loads(capsys.readouterr().out)
    assert starts
    assert accel(["config", "show", "--config_file", str(file)]) == 0


@pytest.mark.parametrize("file", sorted(EXAMPLES.glob("slurm/*.sh")), ids=lambda path: path.stem)
def test_slurm_script(file: Path) -> None:
    """The script is valid, and so is each of its launches."""
    assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0
    launches = re.findall(r"^accel launch (.*?)(?: \|\| .*)?$", file.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(launches) == 1
    words = [word.strip('"').replace("examples/", f"{EXAMPLES}/") for word in launches[0].split()]
    assert any(Path(word).is_file() for word in words if word.endswith(".py"))
    assert accel(["launch", "--dry_run", "-q", *words]) == 0


def test_every_example_is_listed_and_run() -> None:
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    here = [*(ROOT / "tests").glob("test_*.py"), *ROOT.glob("packages/*/tests/test_*.py")]
    sources = "\n".join(path.read_text(encoding="utf-8") for path in here)
    helpers = {"common"}
    for script in [*EXAMPLES.rglob("*.py"), *EXAMPLES.rglob("*.ipynb"), *EXAMPLES.glob("slurm/*.sh")]:
        if script.stem not in helpers and script.parent.name != "sagemaker":
            assert script.name in page, f"docs/examples.md does not list {script.name}"
        if script.suffix == ".py" and script.stem not in helpers:
            assert script.name in sources, f"no test runs {script.name}"
    for file in EXAMPLES.glob("config_templates/*.yaml"):
        assert file.name in page, f"docs/examples.md does not list {file.name}"
