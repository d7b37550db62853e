"""Run the cases of the client libraries on accel, compare them with the reference, and print a table.

    python tests/clients/run.py [--reference PYTHON] [--only PATTERN] [--processes 1,2]

Started by scripts/test-clients, which makes the environments. Each file of cases runs once for each number of processes
and each interpreter, in processes of its own.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
FILES = ("trainer_cases.py", "trl_cases.py", "loading_cases.py")
TOLERANCE = 1e-5  # reductions in another order


@dataclass(frozen=True)
class Expected:
    """Why a case differs from the reference, and what must be equal nevertheless.

    Attributes:
        cases: pattern of names.
        processes: the numbers of processes.
        why: shown in the table.
        ignore: the parts of the result that may differ; empty for all.
    """

    cases: str
    processes: tuple[int, ...]
    why: str
    ignore: tuple[str, ...] = ()


DIFFERENCES = (
    Expected("evaluate_iterable_no_dispatch", (1, 2), "every sample counts once (the reference: padding, too)"),
    *(
        Expected(f"{name}datasets_iterable{more}", (2,), "ranks read different shards of the stream")
        for name, more in (("", ""), ("", "_shuffled"), ("resume_", ""), ("evaluate_", ""))
    ),
    Expected("*no_seedable*", (2,), "the shuffled order is that of plain PyTorch"),
    Expected("resume_dispatch", (2,), "resumed = uninterrupted; the reference's is not"),
    Expected("fsdp?_bf16", (2,), "gradients are reduced in fp32"),
    # The reference does not shard on CPUs: its FSDP 2 runs are DDP, which has the same numbers, and it refuses FSDP 1.
    Expected("*fsdp2*", (2,), "numbers equal; the reference runs DDP on CPUs", ("files", "final")),
    Expected("*fsdp1*", (2,), "numbers equal to the reference's DDP", ("files", "final")),
    Expected("disk_alternate_*", (1,), "numbers equal; hooks of tied modules", ("hooks",)),
    Expected("sequential_memory_t5", (1,), "numbers equal; hooks of tied modules", ("hooks",)),
    Expected("peft_load_alternate_*", (1,), "the reference cannot load this"),
    Expected("peft_merge_disk", (1,), "equal to the model in memory; the reference cannot load this"),
    Expected("resize_and_move", (1,), "exceptions of moving an offloaded model", ("to", "half")),
)  # fmt: skip
# What cannot be done with either: each must fail with the same exception.
FAILURES = ("peft_on_alternate_*", "peft_train_alternate_*")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--reference", help="the Python of an environment with Accelerate 1.15")
    parser.add_argument("--only", default="*", help="comma-separated patterns of case names")
    parser.add_argument("--processes", default="1,2")
    arguments = parser.parse_args()
    failed = total = 0
    print(f"{'processes':<10}{'case':<38}{'result':<72}{'accel':>7}{'reference':>11}", flush=True)
    for file in FILES:
        for processes in map(int, arguments.processes.split(",")):
            ours = run(sys.executable, file, processes, arguments.only)
            theirs = run(arguments.reference, file, processes, arguments.only) if arguments.reference else {}
            for name, result in ours.items():
                reference = theirs.get(name)
                if "fsdp1" in name:
                    stand_in = name.replace("fsdp1", "fsdp2")
                    reference = theirs.get(stand_in, theirs.get("fsdp2"))
                good, text = judge(name, processes, result, reference, bool(arguments.reference))
                total, failed = total + 1, failed + (not good)
                times = f"{result['seconds']:>6.1f}s" + (f"{theirs[name]['seconds']:>10.1f}s" if name in theirs else "")
                print(f"{processes:<10}{name:<38}{('' if good else 'WRONG: ') + text:<72}{times}", flush=True)
    print(f"{total - failed} of {total} cases as they should be")
    return 1 if failed or not total else 0


def run(python: str, file: str, processes: int, only: str) -> dict[str, Any]:
    """The results of the cases of a file, by name."""
    launch = [] if processes == 1 else ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--standalone"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        variables = {
            "CASES_FOLDER": folder, "PYTHONPATH": str(HERE), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
            "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        command = [python, *launch, str(HERE / file), "--out", str(out), "--only", only]
        done = subprocess.run(
            command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=1200, check=False
        )
        results = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    origin = results.pop("accelerate", "")
    if done.returncode != 0:
        print(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
        results["(the file)"] = {"error": f"exit code {done.returncode}", "seconds": 0.0}
    elif ("accel_compat" in origin) != (python == sys.executable):
        raise SystemExit(f"{python} imports accelerate from {origin}")
    return results


def judge(
    name: str, processes: int, ours: dict[str, Any], theirs: dict[str, Any] | None, compare: bool
) -> tuple[bool, str]:
    """Whether a result is as it should be, and a description."""
    if any(fnmatch.fnmatch(name, pattern) for pattern in FAILURES):
        kinds = [result["error"].partition(":")[0] for result in (ours, theirs or ours) if "error" in result]
        return len(kinds) == 2 and kinds[0] == kinds[
            1
        ], f"not possible, as in the reference: {kinds[0]}" if kinds else "no error"
    if "error" in ours:
        return False, ours["error"][:200]
    wrong = inconsistent(name, processes, ours["value"])
    if wrong:
        return False, wrong
    if not compare:
        return True, "runs, and agrees with itself"
    expected = next((e for e in DIFFERENCES if fnmatch.fnmatch(name, e.cases) and processes in e.processes), None)
    if expected is not None and not expected.ignore:
        return True, expected.why
    if theirs is None or "error" in theirs:
        return False, f"the reference fails: {(theirs or {}).get('error', 'no result')[:150]}"
    ignore = expected.ignore if expected else ()
    exact = differences(ours["value"], theirs["value"], 0.0, ignore)
    if not exact:
        return True, expected.why if expected else "equal to the bit"
    near = [
        difference
        for difference in differences(ours["value"], theirs["value"], TOLERANCE, ignore)
        if "digest" not in difference
    ]
    if not near:
        return True, expected.why if expected else f"equal to {TOLERANCE}"
    return False, f"{len(near)} differences: {near[0][:150]}"


def inconsistent(name: str, processes: int, value: Any) -> str:
    """How a result contradicts itself: a resumed run and the uninterrupted one, an evaluation and plain PyTorch."""
    if not isinstance(value, dict):
        return ""
    whole, resumed = value.get("whole") or (value.get("weights") if "resumed" in value else None), value.get("resumed")
    # These do not restore the order of data: they skip nothing, or torch's global generator decides it.
    unordered = ("resume_no_skip", "resume_no_seedable_second_epoch")
    if whole and resumed and name not in unordered and differences(whole["sum"], resumed["sum"], TOLERANCE):
        return f"resumed {resumed['sum']}, uninterrupted {whole['sum']}"
    if not all(value.get("equal to the model in memory", ())):
        return "differs from the model in memory"
    rows = value.get("evaluate", {}).get("eval_rows", 11)
    if rows != 11:
        return f"{rows} rows of 11 were evaluated"
    # On several processes the trainer itself weighs the batches of all ranks alike.
    if processes == 1 and "plain" in value and differences(value["evaluate"]["eval_loss"], value["plain"], TOLERANCE):
        return f"eval_loss {value['evaluate']['eval_loss']}, plain PyTorch {value['plain']}"
    return ""


def differences(ours: Any, theirs: Any, tolerance: float, ignore: tuple[str, ...] = (), path: str = "") -> list[str]:
    """Where two results differ."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        if ours.keys() != theirs.keys():
            return [f"{path}: keys {sorted(ours.keys() ^ theirs.keys())}"]
        return [
            d
            for key in ours
            if key not in ignore
            for d in differences(ours[key], theirs[key], tolerance, ignore, f"{path}.{key}")
        ]
    if isinstance(ours, list) and isinstance(theirs, list):
        if len(ours) != len(theirs):
            return [f"{path}: {len(ours)} items, not {len(theirs)}"]
        pairs = enumerate(zip(ours, theirs, strict=True))
        return [d for i, (a, b) in pairs for d in differences(a, b, tolerance, ignore, f"{path}.{i}")]
    if isinstance(ours, float) and isinstance(theirs, (int, float)):
        same = ours == theirs or (math.isnan(ours) and math.isnan(theirs))
        near = abs(ours - theirs) <= tolerance * max(abs(ours), abs(theirs), 0.1)
        return [] if same or near else [f"{path}: {ours!r}, not {theirs!r}"]
    return [] if ours == theirs else [f"{path}: {str(ours)[:100]}, not {str(theirs)[:100]}"]


if __name__ == "__main__":
    raise SystemExit(main())
