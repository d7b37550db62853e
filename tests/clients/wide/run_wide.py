"""Run the programs that the draw took on accel and on the reference, compare, and print the table.

    python tests/clients/wide/run_wide.py --reference PYTHON [--only PATTERN] [--summary FILE]

Started by `scripts/test-clients --wide`, which makes the environments. Each program has processes of its own, one a
rank: what it leaves behind, such as a process group that it ended, is not there for the next. Both libraries run it at
the same time. One that hangs is reported with its stacks, and the others run.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import run  # noqa: E402
import selection  # noqa: E402

FILES = ("language_cases.py", "training_cases.py", "media_cases.py", "tuning_cases.py")
COLUMNS = ("program", "version", "what runs", "1 process", "2 processes")
Found = dict[str, tuple[str, Any, tuple[int, ...]]]  # by program: the file, the case, its numbers of processes
# By program and number of processes: what of the result may differ, and why, as a row of docs/migration.md says.
DIFFERENCES: dict[tuple[str, int], tuple[tuple[str, ...], str]] = {
    **{
        (name, 2): (parts, f"equal to the bit {how}; by default another order of samples, that of plain PyTorch")
        for name, parts, how in (
            ("diffsynth", ("default order",), "with `use_seedable_sampler=True`"),
            ("smalldiffusion", ("default order",), "with `use_seedable_sampler=True`"),
            ("speechtokenizer", ("default order",), "without shuffling"),
            # These can run only once in a process group.
            ("dreamer4", (), "with `use_seedable_sampler=True`"),
            ("xztrainer", (), "with `use_seedable_sampler=True`"),
            ("f5-tts", (), "with batches by frames"),
            ("gigagan-pytorch", (), "without shuffling"),
        )
    },
    ("phenaki-pytorch", 1): (
        ("flips",),
        "equal to the bit without its random flips: accel draws those of a batch when the loop asks for it",
    ),
    ("colpali-engine", 2): (
        ("transposed gradients",),
        "equal to the bit with contiguous gradients; PyTorch's `all_gather` over gloo gives the reference wrong ones",
    ),
}

# What does not run on two processes with either library: a part of both errors, and why.
REFUSALS = {
    "dptrainer": ("Distributed training is not supported", "DPTrainer refuses to train on several processes"),
    "phenaki-pytorch": ("no attribute 'discr'", "its trainer reads a part of the model, which DDP hides"),
    "tiny-recursive-model": ("no attribute 'get_initial'", "its trainer calls a method of the model, which DDP hides"),
    "evolutionary-policy-optimization": (
        "stack expects a non-empty TensorList",
        "each rank waits for the episodes of all ranks, and has only its own",
    ),
}
# What has nothing to do with several processes, by the reason.
ONE_PROCESS = {
    "inference with one model": (
        *("aqlm", "audiodiffusion", "deepcache", "fschat", "lm-polygraph", "minicons", "outlines", "unitxt"),
    ),
    "quantization of one model": ("auto-round", "nvidia-modelopt"),
    "its trainer is not distributed": ("sae-lens",),
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--reference", required=True, help="the Python of the environment with Accelerate 1.15")
    parser.add_argument("--only", default="*", help="comma-separated patterns of programs")
    parser.add_argument("--processes", default="1,2")
    parser.add_argument("--seconds", type=int, default=300, help="a program that takes longer than this hangs")
    parser.add_argument("--summary", type=Path, help="the page with the table, or a file for it")
    arguments = parser.parse_args()
    os.environ["CASES_SECONDS"] = str(arguments.seconds)
    names = [name for name in selection.chosen() if run.fits(name, arguments.only)]
    print(f"every {selection.STEP}th of {len(selection.shuffled())} programs, shuffled with seed {selection.SEED}")
    found = {name: find(selection.function_of(name)) for name in names}
    texts = {(name, 2): f"one process only: {why}" for why, programs in ONE_PROCESS.items() for name in programs}
    wrong = set()
    for world in (int(world) for world in arguments.processes.split(",")):
        for name, case in found.items():
            if (name, world) in texts:
                continue
            good, text = compare(name, case, world, arguments.reference)
            texts[name, world] = text
            wrong |= set() if good else {name}
            print(f"{name:<36}{world:<4}{'' if good else 'WRONG: '}{text}", flush=True)
    lines = []
    for name, (_, case, _) in found.items():
        what = " ".join((case.__doc__ or "").split())
        results = [texts.get((name, world), "not compared") for world in (1, 2)]
        cells = (name, selection.versions()[name], what, *results)
        lines.append(f"| {' | '.join(cells)} |")
    table = "\n".join([f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}", *lines])
    if arguments.summary and set(names) == set(selection.chosen()) and not wrong and "not compared" not in table:
        run.write_table(arguments.summary, f"{table}\n\n{not_run()}")
    print(f"{len(names) - len(wrong)} of {len(names)} programs as they should be")
    return 1 if wrong or not names else 0


def not_run() -> str:
    """The programs that were drawn and not run: those replaced, with the reasons, and those without a case."""
    waiting = ", ".join(f"`{name}`" for name in selection.waiting())
    lines = [
        "Drawn and replaced by the next of the list:",
        *("", "| program | reason |", "| --- | --- |"),
        *(f"| {name} | {reason} |" for name, reason in selection.replaced().items()),
        *("", f"Drawn and not run yet: {waiting}."),
    ]
    return "\n".join(lines)


def find(function: str) -> tuple[str, Any, tuple[int, ...]]:
    """The file of a case, the case, and the numbers of processes that it runs on."""
    for file in FILES:
        cases = importlib.import_module(Path(file).stem).cases.cases
        if function in cases:
            return file, *cases[function]
    raise SystemExit(f"no case is called {function}: write one, or give the reason in replaced.txt")


def compare(name: str, case: tuple[str, Any, tuple[int, ...]], processes: int, reference: str) -> tuple[bool, str]:
    """Run a program under both libraries at the same time, in processes of its own, and compare the results."""
    file, function, _ = case
    plan = {file: function.__name__}
    with ThreadPoolExecutor(2) as threads:
        ours, theirs = threads.map(partial(run.run, plan=plan, processes=processes), (sys.executable, reference))
    nothing = {"error": f"does not run on {processes} processes"}
    return judge((name, processes), *(next(iter(results.values()), nothing) for results in (ours, theirs)))


def judge(program: tuple[str, int], ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[bool, str]:
    """Whether a result is as it should be, and how it compares."""
    errors = [result.get("error", "runs") for result in (ours, theirs)]
    if program[0] in REFUSALS and program[1] == 2:
        part, why = REFUSALS[program[0]]
        return all(part in error for error in errors), f"neither library can: {why}"
    if "error" in ours or "error" in theirs:
        return False, f"accel: {errors[0][:400]}; the reference: {errors[1][:400]}"
    ignore, why = DIFFERENCES.get(program, ((), ""))
    # To the bit: a sum of weights that a few small steps changed hides another order of samples within 1e-5.
    different = run.differences(ours["value"], theirs["value"], 0.0, ignore)
    if different:
        return False, f"{len(different)} differences: {different[0][:200]}"
    if ignore and not run.differences(ours["value"], theirs["value"], 0.0):
        return False, f"equal to the bit, and not as DIFFERENCES says: {why}"
    return True, why or "equal to the bit"


if __name__ == "__main__":
    raise SystemExit(main())
