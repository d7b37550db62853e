"""Run the cases of the client libraries on accel, compare them with the reference, and print two tables.

    python tests/clients/run.py [--reference PYTHON] [--only PATTERN] [--processes 1,2] [--quick]

Started by scripts/test-clients, which makes the environments. For each number of processes, accel and the reference run
all cases at the same time, each library in one process a rank, and what they compute is compared. Then steps.py
measures how long steps take, case by case, in turns. Without a reference, results are compared with those in
recorded.json, which holds what the reference computed in the cases of --quick, and with themselves: a resumed run with
the uninterrupted one, an evaluation with plain PyTorch.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib.util
import json
import math
import os
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import steps

HERE = Path(__file__).parent
RECORDED = HERE / "recorded.json"
# In this order: DeepSpeed changes its process when it is imported.
FILES = (
    "loading_cases.py",
    "trainer_cases.py",
    "trl_cases.py",
    "sentence_cases.py",
    "diffusers_cases.py",
    "interface_cases.py",
    "compressed_cases.py",
    "deepspeed_cases.py",
)
# In an environment of its own: it requires older versions of Transformers and compressed-tensors.
LLMCOMPRESSOR = ("llmcompressor_cases.py", "compressed_cases.py")
TOLERANCE = 1e-5  # reductions in another order
RECORDED_TOLERANCE = 1e-3  # processors and versions of libraries round differently, and training amplifies it
# A case whose steps seem to take this much longer while both libraries run is measured as steps.py does.
SUSPECT = 1.15
SESSION_SECONDS = 1800
QUICK: dict[int, dict[str, str]] = {
    1: {
        "loading_cases.py": "auto_llama,disk_alternate_t5,eight_auto_llama,four_auto_gpt2,peft_merge_disk",
        "trainer_cases.py": "trainer_cp",
        "trl_cases.py": "sft_packed_cp,sft_qlora",
        "diffusers_cases.py": "*offload,diffusers_from_pretrained",
        "interface_cases.py": "*",
    },
    2: {
        "trainer_cases.py": "plain,trainer_cp,accumulation_tokens_across,resume_middle,seq2seq,fsdp2,evaluate_iterable",
        "trl_cases.py": "sft_lora,sft_packed_cp,sft_qlora,dpo,grpo",
        "sentence_cases.py": "sentences_resumed",
        "diffusers_cases.py": "diffusers_training_resumed",
        "interface_cases.py": "*",
        "deepspeed_cases.py": "deepspeed_zero2,deepspeed_zero3_resume",
    },
}
# The rows of the summary: names of cases, and what the row is called. A case belongs to the first row that fits.
CLIENTS = (
    ("trainer_tp", "Transformers' Trainer and TRL SFT with tp or cp, compared with one process"),
    ("trainer_cp", "Transformers' Trainer and TRL SFT with tp or cp, compared with one process"),
    ("sft*_cp", "Transformers' Trainer and TRL SFT with tp or cp, compared with one process"),
    ("sft_qlora", "TRL SFT with QLoRA under FSDP 2, compared with one process"),
    ("trainer_cases.py", "Transformers' Trainer: training, evaluation, prediction, data loaders, resuming"),
    ("seq2seq*", "Transformers' Seq2SeqTrainer: training, generation"),
    ("fsdp1*", "Transformers' Trainer with FSDP 1, saved and resumed"),
    ("fsdp2*", "Transformers' Trainer with FSDP 2, saved and resumed"),
    ("deepspeed_zero2*", "Transformers' Trainer with DeepSpeed ZeRO 2"),
    ("deepspeed_zero3*", "Transformers' Trainer with DeepSpeed ZeRO 3"),
    ("sft_fsdp*", "TRL SFT and DPO with FSDP"),
    ("dpo_fsdp*", "TRL SFT and DPO with FSDP"),
    ("sft*", "TRL SFT, with and without LoRA"),
    ("dpo*", "TRL DPO, with and without LoRA"),
    ("reward*", "TRL Reward, with and without LoRA"),
    ("grpo*", "TRL GRPO"),
    ("peft_*", "PEFT: LoRA on models in memory, on disk, in 8 and 4 bits"),
    ("eight_*", "`from_pretrained` in 8 and 4 bits, `generate`"),
    ("four_*", "`from_pretrained` in 8 and 4 bits, `generate`"),
    ("diffusers_training*", "diffusers: training with EMA and hooks of `save_state`"),
    ("diffusers_*", "diffusers: pipelines and models that are offloaded"),
    ("sentences*", "sentence-transformers: training, resumed"),
    ("loading_cases.py", "`from_pretrained` with device maps and disk, `generate`"),
    ("convert_*", "compressed-tensors: conversions from and to accelerate's offloading"),
    ("load_offloaded_*", "compressed-tensors: models loaded offloaded, changed and saved"),
    ("oneshot_*_offloaded", "llmcompressor's `oneshot`: loaded with `load_offloaded_model`"),
    ("oneshot_plain_*", "llmcompressor's `oneshot`: models in memory"),
    ("oneshot_cpu_*", "llmcompressor's `oneshot`: a device map on the CPU"),
    ("oneshot_disk_*", "llmcompressor's `oneshot`: all layers on the disk"),
    ("oneshot_*", "llmcompressor's `oneshot`: some layers on the disk"),
    ("*_imports", "names that the clients import"),
    ("refusals_*", "exceptions on bad input"),
)
COLUMNS = (
    *("client", "processes", "cases", "equal to the bit", "equal to 1e-5", "on purpose", "with neither"),
    *("CPU time", "time"),
)


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
    Expected("diffusers_training_resumed", (1, 2), "resumed = uninterrupted; the reference's is not"),
    Expected("diffusers_sequential_cpu_offload", (1,), "equal to the model in memory; the reference fails"),
    Expected("diffusers_from_pretrained", (1,), "numbers equal; nothing is reserved for layers", ("disk map",)),
    Expected("convert_dispatched_disk", (1,), "equal to the model in memory; the reference cannot load this"),
    Expected("convert_cpu_offload*", (1,), "equal to the model in memory; the reference fails"),
    Expected("convert_dispatched_mixed_inner", (1,), "numbers equal; the root is converted, too", ("hooks",)),
    Expected("resize_and_move", (1,), "exceptions of moving an offloaded model", ("to", "half")),
)  # fmt: skip
# Cases whose processes share each batch, or shard a model in 4 bits, which the reference does not do on CPUs: several
# processes have to compute what one does. The values are the parts of the result that may differ.
AS_ALONE: dict[str, tuple[str, ...]] = {
    "trainer_tp": (),
    "trainer_cp": (),
    "sft_cp": (),
    "sft_padding_free_cp": (),
    "sft_packed_cp": (),
    # TRL keeps adapters in bfloat16, in which one process computes the norm of the gradients; a state has other names.
    "sft_qlora": ("grad_norm", "weights"),
}
# Bad input that the two treat differently. All other must raise what a handler for the reference's exception catches.
REFUSALS = {
    "the reference accepts it": """
        deepspeed_plugin gradient_accumulation_steps rng_types dataloader_config get_tracker save_model_into_a_file
        on_process reduce fsdp_version deepspeed_config comm_hook dynamo_mode process_index split_between_processes
        split_of_uneven_dict init_on_device on_process_without_an_index
        """,
    "accel accepts it": "load_disk_without_a_folder move_an_offloaded_model concatenate",
    "the reference fails by accident, with an AttributeError, IndexError or TypeError of Python": """
        gather_text gather_number parallelism_config backward_of_a_number unwrap_nothing dispatch_and_no_data
        skip_first_batches_of_a_list not_torch size_type find_batch_size_of_a_scalar save_state_without_a_folder
        """,
    "the exception is that of the library that the reference calls": "device_7 broken_config save_nowhere",
    "checked without Transformer Engine, too": "te_format te_amax",
    "checked when the script is launched": "precision",
}
# What cannot be done with either: each must fail with the same exception.
FAILURES = ("peft_on_alternate_*", "peft_train_alternate_*", "sft_packing_cp", "oneshot_*_awq_*")


@dataclass
class Row:
    """A client on a number of processes: how often each result was seen, and step times relative to the reference."""

    results: Counter[str] = field(default_factory=Counter)
    ratios: dict[str, list[float]] = field(default_factory=lambda: {kind: [] for kind in steps.KINDS})
    slower: bool = False

    def count(self, good: bool, text: str) -> None:
        """Count a result that :func:`judge` has described."""
        alike = re.match(r"(\d+) of (\d+) refused alike", text)
        if alike:
            self.results["equal to the bit"] += int(alike[1])
            self.results["other"] += int(alike[2]) - int(alike[1])
        else:
            special = text in ("equal to the bit", f"equal to {TOLERANCE}") or text.startswith("not possible")
            self.results[text if special else "other" if good else "wrong"] += 1

    def ratio(self, kind: str) -> str:
        return f"{statistics.geometric_mean(self.ratios[kind]):.2f}" if self.ratios[kind] else ""


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--reference", help="the Python of an environment with Accelerate 1.15")
    parser.add_argument("--only", default="*", help="comma-separated patterns of case names")
    parser.add_argument("--files", default="*", help="comma-separated patterns of files of cases")
    parser.add_argument("--processes", default="1,2")
    parser.add_argument(
        "--quick", action="store_true", help="only the cases of `scripts/test --all`, without step times"
    )
    parser.add_argument("--numbers-only", action="store_true", help="do not measure steps")
    parser.add_argument("--steps-only", action="store_true", help="do not compare what the cases compute")
    parser.add_argument("--llmcompressor", action="store_true", help="the cases of its environment, and their table")
    parser.add_argument("--record", action="store_true", help=f"write the reference's results to {RECORDED.name}")
    parser.add_argument("--summary", type=Path, help="a file for the table of compat.md, or a page that has it already")
    arguments = parser.parse_args()
    begin = time.monotonic()
    files = [file for file in (LLMCOMPRESSOR if arguments.llmcompressor else FILES) if fits(file, arguments.files)]
    if "deepspeed_cases.py" in files and importlib.util.find_spec("deepspeed") is None:
        print("DeepSpeed is not installed: its cases are skipped")
        files.remove("deepspeed_cases.py")
    worlds = [int(world) for world in arguments.processes.split(",")]
    plans = {world: dict.fromkeys(files, arguments.only) for world in worlds}
    if arguments.quick:
        plans = {world: {file: names for file, names in QUICK[world].items() if file in files} for world in worlds}
    rows: dict[tuple[str, int], Row] = defaultdict(Row)
    failed = total = 0
    suspects: dict[int, steps.Plan] = {}
    if arguments.reference:
        refuse_beside(arguments.reference)
    if not arguments.steps_only:
        failed, total, suspects = compare(plans, arguments.reference, rows, arguments.record)
    slower = 0
    if arguments.reference and not (arguments.quick or arguments.numbers_only or arguments.llmcompressor):
        slower = measure(plans, suspects, arguments.reference, rows)
    summary = summarise(rows)
    if arguments.reference:
        print("\n" + summary)
    if arguments.summary and arguments.reference:
        write_table(arguments.summary, summary, "--llmcompressor" if arguments.llmcompressor else "")
    if not arguments.steps_only:
        print(f"{total - failed} of {total} cases as they should be")
    if slower:
        print(f"{slower} cases with slower steps, or whose steps could not be measured")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(f"{(time.monotonic() - begin) / 60:.1f} minutes, CPU time {(used.ru_utime + used.ru_stime) / 60:.1f} minutes")
    return 1 if failed or slower or not (total or arguments.steps_only) else 0


def fits(name: str, patterns: str) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns.split(","))


def compare(
    plans: dict[int, dict[str, str]], reference: str | None, rows: dict[tuple[str, int], Row], record: bool
) -> tuple[int, int, dict[int, steps.Plan]]:
    """Run cases on accel and on the reference, and print how the results compare.

    Returns:
        How many are wrong, how many there are, and those whose steps seem slower, by number of processes and file.
    """
    recorded = json.loads(RECORDED.read_text(encoding="utf-8")) if RECORDED.exists() else {}
    failed = total = 0
    suspects: dict[int, steps.Plan] = {}
    alone: dict[str, Any] = {}
    print(f"{'processes':<10}{'case':<36}{'result':<66}{'step: accel':>12}{'reference':>11}", flush=True)
    for processes, plan in plans.items():
        pythons = [sys.executable, *([reference] if reference else [])]
        with ThreadPoolExecutor(len(pythons)) as threads:
            both = list(threads.map(partial(run, plan=plan, processes=processes), pythons))
        ours, theirs = both if reference else (both[0], {})
        slow: dict[str, list[str]] = defaultdict(list)
        for name, result in ours.items():
            file = result["file"]
            other = theirs.get(name)
            if "fsdp1" in name:
                other = theirs.get(name.replace("fsdp1", "fsdp2"), theirs.get("fsdp2"))
            tolerance = 0.0
            if not reference:
                other, tolerance = recorded.get(f"{file} {processes}", {}).get(name), RECORDED_TOLERANCE
            if processes == 1:
                alone[name] = other or result
            elif name in AS_ALONE:
                other = alone.get(name)
            good, text = judge(name, processes, result, other, tolerance)
            rows[client_of(name, file), processes].count(good, text)
            times = [entry["step"] * 1000 for entry in (result, theirs.get(name, {})) if "step" in entry]
            if len(times) == 2 and "fsdp" not in name and times[0] > SUSPECT * times[1]:
                slow[file].append(name)
            total, failed = total + 1, failed + (not good)
            shown = "".join(f"{milliseconds:>9.1f} ms" for milliseconds in times)
            print(f"{processes:<10}{name:<36}{('' if good else 'WRONG: ') + text:<66}{shown}", flush=True)
        suspects[processes] = {file: tuple(names) for file, names in slow.items()}
        if record:
            for file in plan:
                part = {n: {"value": r["value"]} for n, r in theirs.items() if "value" in r and r["file"] == file}
                recorded[f"{file} {processes}"] = part
    if record:
        RECORDED.write_text(json.dumps(recorded, separators=(",", ":")).replace('{"value"', '\n{"value"') + "\n")
    return failed, total, suspects


def measure(
    plans: dict[int, dict[str, str]],
    suspects: dict[int, steps.Plan],
    reference: str,
    rows: dict[tuple[str, int], Row],
) -> int:
    """Measure the steps of every client, and of the cases that seemed slower; returns how many of them are."""
    chosen: dict[int, steps.Plan] = {}
    for processes, plan in plans.items():
        chosen[processes] = {}
        for file, patterns in plan.items():
            names = [name for name in steps.TIMED.get(file, ()) if processes == 1 or name not in steps.ONE_PROCESS]
            names = [name for name in names if fits(name, patterns)]
            chosen[processes][file] = tuple(dict.fromkeys([*names, *suspects.get(processes, {}).get(file, ())]))
    with tempfile.TemporaryDirectory() as folder:

        def start(processes: int, plan: steps.Plan) -> list[steps.Player]:
            players = []
            for python in (sys.executable, reference):
                here = Path(tempfile.mkdtemp(dir=folder)) / "turns"
                names = {file: ",".join(group) for file, group in plan.items()}
                command = command_of(python, processes, names, here / "results.json")
                players.append(steps.Player(command, VARIABLES, here, processes))
            return players

        ratios, slower = steps.report(steps.measure(start, chosen))
    for (name, processes), ratio in ratios.items():
        file = next(file for file, names in chosen[processes].items() if name in names)
        if name in steps.TIMED[file]:  # the row is about the same cases in each run
            for kind in steps.KINDS:
                rows[client_of(name, file), processes].ratios[kind].append(ratio[kind].value)
        rows[client_of(name, file), processes].slower |= any(one.slower for one in ratio.values())
    return slower


def refuse_beside(reference: str) -> None:
    """`accel_compat enable` has to refuse where Accelerate is installed."""
    source = str(HERE.parents[1] / "packages" / "accel-compat" / "src")
    done = subprocess.run(
        [reference, "-m", "accel_compat", "enable"],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 1 or "Accelerate 1.15.0 is installed in" not in done.stderr:
        raise SystemExit(f"enable did not refuse beside Accelerate: {done.stdout}{done.stderr}")


def client_of(name: str, file: str) -> str:
    return next((label for pattern, label in CLIENTS if fnmatch.fnmatch(name, pattern)), dict(CLIENTS).get(file, file))


def summarise(rows: dict[tuple[str, int], Row]) -> str:
    """The table of docs/guides/compat.md."""
    libraries = (
        *("transformers", "trl", "peft", "diffusers", "sentence-transformers", "deepspeed", "bitsandbytes"),
        *("llmcompressor", "compressed-tensors"),
    )
    order = [*(label for _, label in CLIENTS), *FILES, *LLMCOMPRESSOR]
    lines = [
        f"Versions: torch {version('torch').partition('+')[0]}, "
        + ", ".join(f"{name} {version(name)}" for name in libraries if importlib.util.find_spec(name.replace("-", "_")))
        + ".",
        "",
        f"| {' | '.join(COLUMNS)} |",
        f"|{' --- |' * len(COLUMNS)}",
    ]
    for client, processes in sorted(rows, key=lambda row: (order.index(row[0]), row[1])):
        row = rows[client, processes]
        bit, near = row.results["equal to the bit"], row.results[f"equal to {TOLERANCE}"]
        neither = sum(count for text, count in row.results.items() if text.startswith("not possible"))
        cells = [client, processes, row.results.total(), bit, near, row.results["other"], neither]
        wrong = row.results["wrong"]
        shown = [*(str(cell or "") for cell in cells), *(row.ratio(kind) for kind in steps.KINDS)]
        bad = f" ({wrong} wrong)" * bool(wrong) + " (slower)" * row.slower
        lines.append(f"| {' | '.join(shown)}{bad} |")
    return "\n".join(lines)


def write_table(page: Path, table: str, option: str = "") -> None:
    """Put the table between the markers of a page, those with the option; a file without markers becomes the table."""
    command = " ".join(["scripts/test-clients", *filter(None, [option])])
    start, end = f"<!-- table of {command} -->\n", "<!-- end of the table -->"
    before, found, rest = (page.read_text(encoding="utf-8") if page.exists() else "").partition(start)
    after = rest.partition(end)[2]
    page.write_text(f"{before}{start}\n{table}\n\n{end}{after}" if found and after else f"{table}\n", encoding="utf-8")


VARIABLES = {
    "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE / "wide")]),
    "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "WANDB_MODE": "disabled",
}  # fmt: skip


def command_of(python: str, processes: int, plan: dict[str, str], out: Path, skip: Collection[str] = ()) -> list[str]:
    """What runs cases."""
    launch = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}", "--standalone"] if processes > 1 else []
    what = ["--out", str(out), "--plan", json.dumps(plan), "--skip", json.dumps(sorted(skip))]
    return [python, *launch, str(HERE / "harness.py"), *what]


def run(python: str, plan: dict[str, str], processes: int) -> dict[str, Any]:
    """The results of cases, by name. After a case that ends its process, another one goes on with the next case."""
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        while True:
            command = command_of(python, processes, plan, out, results)
            environment = {**os.environ, **VARIABLES, "CASES_FOLDER": folder}
            out.unlink(missing_ok=True)
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, timeout=SESSION_SECONDS, check=False
            )
            written = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"results": {}, "running": None}
            origin = written["results"].pop("accelerate", None)
            if origin is not None and ("accel_compat" in origin) != (python == sys.executable):
                raise SystemExit(f"{python} imports accelerate from {origin}")
            results |= written["results"]
            if done.returncode == 0:
                return results
            print(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
            running = written["running"]
            if running is None or running in plan:
                order = list(plan)
                plan = {file: plan[file] for file in order[order.index(running or order[0]) + 1 :]}
                running = f"({running or 'the start'})"
            results[running] = {"error": why_ended(done.returncode, done.stderr), "file": next(iter(plan), FILES[0])}
            if not plan:
                return results


def why_ended(code: int, errors: str) -> str:
    """The exit code of a process of cases, or where its ranks stood when the time of a case was over."""
    if "Timeout (" not in errors:
        return f"exit code {code}"
    stacks = []
    for thread in re.split(r"hread 0x\w+", errors):
        frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', thread)
        if any(Path(file).name == "harness.py" for file, _, _ in frames):
            stacks.append(" < ".join(f"{name} ({Path(file).name}:{line})" for file, line, name in frames[:5]))
    return f"hangs in {', and in '.join(stacks)}"


def judge(
    name: str, processes: int, ours: dict[str, Any], theirs: dict[str, Any] | None, tolerance: float = 0.0
) -> tuple[bool, str]:
    """Whether a result is as it should be, and a description.

    Args:
        name: of the case.
        processes: that ran it.
        ours: the result on accel.
        theirs: that of the reference, now or as it was recorded, if there is one.
        tolerance: 0 to ask for equal bits first, and then for TOLERANCE; for recorded results, what is asked for.
    """
    if any(fnmatch.fnmatch(name, pattern) for pattern in FAILURES):
        kinds = [result["error"].partition(":")[0] for result in (ours, theirs or ours) if "error" in result]
        alike = len(kinds) == 2 and kinds[0] == kinds[1]
        return alike, f"not possible, as in the reference: {kinds[0]}" if kinds else "no error"
    if "error" in ours:
        return False, ours["error"][:200]
    wrong = inconsistent(name, processes, ours["value"])
    if wrong:
        return False, wrong
    if theirs is None and tolerance:
        return True, "runs, and agrees with itself"
    expected = next((e for e in DIFFERENCES if fnmatch.fnmatch(name, e.cases) and processes in e.processes), None)
    if expected is not None and not expected.ignore:
        return True, expected.why
    if theirs is None or "error" in theirs:
        return False, f"the reference fails: {(theirs or {}).get('error', 'no result')[:150]}"
    if "refusals" in ours["value"]:
        return judge_refusals(ours["value"]["refusals"], theirs["value"]["refusals"])
    ignore = expected.ignore if expected else ()
    if processes > 1 and name in AS_ALONE:
        ignore, tolerance = AS_ALONE[name], TOLERANCE
    if not tolerance and not differences(ours["value"], theirs["value"], 0.0, ignore):
        return True, expected.why if expected else "equal to the bit"
    tolerance = tolerance or TOLERANCE
    near = differences(ours["value"], theirs["value"], tolerance, ignore)
    near = [difference for difference in near if "digest" not in difference]
    if not near:
        return True, expected.why if expected else f"equal to {tolerance}"
    return False, f"{len(near)} differences: {near[0][:150]}"


def judge_refusals(ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[bool, str]:
    """Whether clients that catch the exceptions of the reference catch those of accel."""
    explained = {name for names in REFUSALS.values() for name in names.split()}
    different, wrong = 0, []
    for name, outcome in ours.items():
        reference = theirs[name].get("raises", [None])[0]
        if reference in outcome.get("raises", [None]):
            continue
        different += 1
        if name.replace(" ", "_") not in explained:
            wrong.append(f"{name}: {outcome.get('raises', ['accepted'])[0]}, the reference {reference or 'accepts it'}")
    if wrong:
        return False, "; ".join(wrong)[:200]
    return True, f"{len(ours) - different} of {len(ours)} refused alike, {different} differ on purpose"


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
