"""The configuration that accel plan --auto chooses for four ranks of this machine, next to all others, measured.

    python benchmarks/plan_auto.py            # five models; an hour of two cores that do nothing else
    python benchmarks/plan_auto.py deep       # those whose name contains one of the words

accel doctor --measure writes a profile of four ranks first, and the search gets it. Then every configuration that the
search considers is trained for some steps, one after the other; those that accel refuses are listed with the reason.
The fastest ones and the chosen one are measured again in turns, because the machine's speed varies: the ratio is that
of their medians.

Exits with 1 if a chosen configuration takes more than 1.10 times the fastest one.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from pathlib import Path

from _plan_runs import ENVIRON, MODELS, measured_profile, preload_all, step_seconds, write_model

from accel_launch.config.read import load_settings
from accel_plan.candidates import candidates, shape_of
from accel_plan.plan import PlanRequest
from accel_plan.search import search
from accel_state.hardware import HardwareProfile
from accel_state.testing import WorldError

RANKS, LIMIT = 4, 1.10
_AGAIN, _ROUNDS = 4, 5


def compare(folder: Path, name: str, hardware: HardwareProfile) -> float:
    """Print the configurations of a model, and return how many times as long as the best the chosen one takes."""
    model, length, samples = write_model(folder, name)
    settings = load_settings({"num_processes": str(RANKS), "cpu": "true"}, environ=ENVIRON)
    limit = hardware.memory_bytes
    request = PlanRequest(settings, model, seq_length=length, hardware=hardware, memory_limit=limit)
    found = search(request, samples * length)
    chosen = found.best[0].candidate.describe()
    planned = {choice.candidate.describe(): choice.seconds for choice in found.best}
    every = list(candidates(request, shape_of(request), hardware, RANKS, samples, length))
    print(f"{name}: {samples} samples of {length} tokens, {len(every)} configurations, {found.planned} planned")
    by_text = {item.describe(): item for item in every}
    measured: dict[str, list[float]] = {}
    for text, item in by_text.items():
        try:
            measured[text] = [step_seconds(model, length, item, RANKS)]
        except WorldError as error:
            print(f"  refused: {text}: {_reason(error)}", flush=True)
    fastest = sorted(measured, key=lambda text: measured[text][0])[:_AGAIN]
    for _ in range(_ROUNDS):
        for text in dict.fromkeys((*fastest, chosen)):
            measured[text].append(step_seconds(model, length, by_text[text], RANKS))
    medians = {text: statistics.median(taken[1:] or taken) for text, taken in measured.items()}
    for text in sorted(medians, key=lambda text: medians[text]):
        plan = f"planned {planned[text]:.3f}" if text in planned else ""
        mark = "<- chosen" if text == chosen else ""
        print(f"  {medians[text]:8.3f} s  {len(measured[text])} x  {text}  {plan} {mark}".rstrip())
    ratio = medians[chosen] / min(medians.values())
    print(f"{name}: the chosen one takes {ratio:.3f} times as long as the fastest, allowed {LIMIT:.2f}\n", flush=True)
    return ratio


def _reason(error: WorldError) -> str:
    """What the first rank raised; only a configuration that accel refuses is left out."""
    line = next((line for line in error.reports[0].splitlines()[::-1] if line.strip()), "")
    if "ConfigurationError" not in line:
        raise error
    return line.split("ConfigurationError: ", 1)[-1]


def main() -> int:
    words = sys.argv[1:]
    preload_all()
    ratios = {}
    with tempfile.TemporaryDirectory() as folder:
        hardware = measured_profile(RANKS, Path(folder))
        for name in MODELS:
            if not words or any(word in name for word in words):
                ratios[name] = compare(Path(folder), name, hardware)
    for name, ratio in ratios.items():
        print(f"{name:<20}{ratio:>7.3f}")
    return int(max(ratios.values()) > LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
