"""How long the steps of a client take with accel, relative to the reference.

Milliseconds vary with what else a machine does, and by a percent or two from one process to the next. So both libraries
run a case at the same time and take turns: a block of steps with the one, then as many with the other, while the first
one sleeps. Each pair of blocks gives a ratio, and the median over the rounds is the ratio of this pair of processes.
Pairs are started until the ratio is known well enough. Its error has two parts: the spread of the rounds, and the
spread between pairs beyond that, which is pooled over all cases.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Measured for every client; cases whose steps seem slower when the results are compared are added. Not FSDP, which the
# reference replaces by DDP on CPUs.
TIMED = {
    "loading_cases.py": ("auto_llama", "disk_alternate_llama", "eight_auto_llama", "peft_eight_llama"),
    "trainer_cases.py": ("many_steps", "accumulation", "bf16", "dispatch", "seq2seq_beams"),
    "trl_cases.py": ("sft_lora", "dpo", "reward", "grpo"),
    "sentence_cases.py": ("sentences",),
    "diffusers_cases.py": ("diffusers_training", "diffusers_model_cpu_offload"),
    "deepspeed_cases.py": ("deepspeed_zero2", "deepspeed_zero3"),
}
ONE_PROCESS = ("disk_alternate_llama", "diffusers_model_cpu_offload")
Plan = dict[str, tuple[str, ...]]
KINDS = ("cpu", "wall")
ROUNDS = 8
WARM_UP = (6, 12)  # steps of two blocks, of which the second says how many fit into BLOCK_SECONDS
BLOCK_SECONDS = 0.15
PAIRS = (3, 6)  # of processes: at least, and at most
ERRORS = 3.0  # half the width of an interval, in standard errors: one of 740 is beyond its lower bound by chance
PRECISION = 0.02  # half the width of an interval that is known well enough
ANSWER_SECONDS = 900.0


@dataclass(frozen=True)
class Ratio:
    """Seconds with accel divided by those with the reference, and the interval in which it is."""

    value: float
    low: float
    high: float

    @property
    def slower(self) -> bool:
        return self.low > 1.0

    @property
    def clear(self) -> bool:
        """Whether more pairs would not change what is said about it."""
        return self.high <= 1.0 or self.high - self.low <= 2 * PRECISION

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass
class Steps:
    """The steps of a case: the logarithms of the ratios of each pair of processes, and their variances."""

    logs: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    variances: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    milliseconds: list[tuple[float, float]] = field(default_factory=list)
    error: str = ""

    def add(self, rounds: list[tuple[dict[str, float], dict[str, float]]], steps: int) -> None:
        """The rounds of one pair of processes: seconds with accel, and with the reference."""
        for kind in KINDS:
            logs = [math.log(ours[kind] / theirs[kind]) for ours, theirs in rounds]
            middle = statistics.median(logs)
            spread = 1.4826 * statistics.median(abs(log - middle) for log in logs)
            self.logs[kind].append(middle)
            self.variances[kind].append(math.pi / 2 * spread**2 / len(logs))  # of a median
        each = [[side["cpu"] / steps * 1000 for side in sides] for sides in zip(*rounds, strict=True)]
        self.milliseconds.append((statistics.median(each[0]), statistics.median(each[1])))


def ratios(measured: dict[Any, Steps], kind: str) -> dict[Any, Ratio]:
    """The ratio of each case with its interval."""
    known = {key: steps for key, steps in measured.items() if steps.logs[kind] and not steps.error}
    several = [steps for steps in known.values() if len(steps.logs[kind]) > 1]
    between = 0.0
    if several:
        squares = sum(statistics.variance(s.logs[kind]) * (len(s.logs[kind]) - 1) for s in several)
        within = statistics.fmean(v for s in several for v in s.variances[kind])
        between = max(0.0, squares / sum(len(s.logs[kind]) - 1 for s in several) - within)
    result = {}
    for key, steps in known.items():
        count = len(steps.logs[kind])
        middle = statistics.fmean(steps.logs[kind])
        error = ERRORS * math.sqrt((between + statistics.fmean(steps.variances[kind])) / count)
        result[key] = Ratio(math.exp(middle), math.exp(middle - error), math.exp(middle + error))
    return result


class Player:
    """The processes of one library, which make steps when they are told to."""

    def __init__(self, command: list[str], variables: dict[str, str], folder: Path, ranks: int) -> None:
        folder.mkdir(parents=True)
        self.folder, self.ranks, self.block = folder, ranks, 0
        variables = {**variables, "CASES_FOLDER": str(folder), "CASES_TURNS": str(folder)}
        self.log = folder / "log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=log, stderr=log)

    def stop(self) -> None:
        """End the processes, if they have not ended."""
        for stop in (self.process.terminate, self.process.kill):  # the launcher ends its ranks when it is terminated
            try:
                self.process.wait(15)
                return
            except subprocess.TimeoutExpired:
                stop()
        self.process.wait()

    def go(self, steps: int) -> None:
        target = self.folder / f"go-{self.block}"
        target.with_suffix(".tmp").write_text(str(steps))
        target.with_suffix(".tmp").rename(target)
        if not steps:
            self.block += 1

    def answer(self) -> dict[str, Any]:
        """The CPU seconds of all ranks together, and the wall-clock seconds of the slowest."""
        paths = [self.folder / f"done-{self.block}-{rank}" for rank in range(self.ranks)]
        end = time.monotonic() + ANSWER_SECONDS
        while not all(path.exists() for path in paths):
            if self.process.poll() is not None:
                end_of_log = self.log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"the processes ended with {self.process.returncode}: {end_of_log}")
            if time.monotonic() > end:
                raise RuntimeError(f"no answer for {ANSWER_SECONDS:.0f} s")
            time.sleep(0.002)
        self.block += 1
        answers = [json.loads(path.read_text()) for path in paths]
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            return {"error": errors[0]}
        return {"cpu": sum(answer["cpu"] for answer in answers), "wall": max(answer["wall"] for answer in answers)}


def measure_pair(
    players: list[Player], names: list[str], measured: dict[Any, Steps], processes: int, turn: int
) -> None:
    """Measure cases with one pair of processes.

    Args:
        players: accel, and the reference.
        names: of the cases, in the order in which the processes run them.
        measured: what is known, by name and number of processes; results are added.
        processes: how many each library has.
        turn: which of the two begins.
    """
    for name in names:
        steps = measured.setdefault((name, processes), Steps())
        answers: list[dict[str, Any]] = [{}, {}]
        failed = False
        for count in WARM_UP:
            going = [player for player, answer in zip(players, answers, strict=True) if "error" not in answer]
            for player in going:
                player.go(count)
            for index, player in enumerate(players):
                if player in going:
                    answers[index] = player.answer()
            failed = failed or any("error" in answer for answer in answers)
            if failed:
                break
        rounds = []
        if not failed:
            each = max(answer["wall"] for answer in answers) / WARM_UP[-1]
            count = min(max(2, round(BLOCK_SECONDS / each)), 60)
            for number in range(ROUNDS):
                for index in (0, 1) if (number + turn) % 2 else (1, 0):
                    players[index].go(count)
                    answers[index] = players[index].answer()
                if any("error" in answer for answer in answers):
                    break
                rounds.append((answers[0], answers[1]))
            else:
                steps.add(rounds, count)
        for player, answer in zip(players, answers, strict=True):
            if "error" in answer:
                steps.error = answer["error"]
            else:
                player.go(0)


def measure(start: Callable[[int, Plan], list[Player]], plans: dict[int, Plan]) -> dict[Any, Steps]:
    """Measure cases with as many pairs of processes as it takes.

    Args:
        start: starts accel and the reference on a number of processes, with cases by file.
        plans: the cases for each number of processes.

    Returns:
        The steps of each case, by name and number of processes.
    """
    measured: dict[Any, Steps] = {}
    for turn in range(PAIRS[1]):
        known = [ratios(measured, kind) for kind in KINDS]
        unclear = {key for one in known for key, ratio in one.items() if not ratio.clear}
        for processes, plan in plans.items():
            if turn >= PAIRS[0]:
                plan = {file: tuple(n for n in names if (n, processes) in unclear) for file, names in plan.items()}
            plan = {file: names for file, names in plan.items() if names}
            names = [name for group in plan.values() for name in group]
            if not names:
                continue
            print(f"measuring steps: pair {turn + 1}, processes: {processes}, cases: {len(names)}", flush=True)
            players = start(processes, plan)
            try:
                measure_pair(players, names, measured, processes, turn)
            except RuntimeError as error:
                for name in names:
                    steps = measured.setdefault((name, processes), Steps())
                    if len(steps.milliseconds) <= turn:
                        steps.error = steps.error or str(error)
            finally:
                for player in players:
                    player.stop()
    return measured


def report(measured: dict[Any, Steps]) -> tuple[dict[Any, dict[str, Ratio]], int]:
    """Print the ratios, and return them by case, with the number of cases in which accel is slower."""
    known = {kind: ratios(measured, kind) for kind in KINDS}
    result, failed = {}, 0
    print(
        f"\nSeconds of a step with accel, divided by those with the reference. An interval is {ERRORS:.0f} standard "
        "errors to either side; accel is slower where it lies above 1."
    )
    head = f"{'processes':<10}{'case':<36}{'CPU time of all ranks':<26}{'time':<26}"
    print(f"{head}{'CPU: accel':>12}{'reference':>11}{'pairs':>7}")
    for key, steps in sorted(measured.items(), key=lambda item: item[0][1]):
        name, processes = key
        if steps.error or key not in known["cpu"]:
            failed += 1
            print(f"{processes:<10}{name:<36}WRONG: {steps.error or 'not measured'}")
            continue
        result[key] = {kind: known[kind][key] for kind in KINDS}
        slower = any(ratio.slower for ratio in result[key].values())
        failed += slower
        ours, theirs = (statistics.median(side) for side in zip(*steps.milliseconds, strict=True))
        shown = "".join(f"{result[key][kind]!s:<26}" for kind in KINDS)
        times = f"{ours:>9.1f} ms{theirs:>8.1f} ms{len(steps.milliseconds):>7}"
        print(f"{processes:<10}{name:<36}{shown}{times}{'  WRONG: slower' if slower else ''}", flush=True)
    return result, failed
