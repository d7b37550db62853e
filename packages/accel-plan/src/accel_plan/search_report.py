"""Formats the result of ``accel plan --auto`` as text, and as a configuration file."""

from __future__ import annotations

from pathlib import Path

from accel_launch.config.write import BASE, nest, write_file
from accel_state.humanize import convert_bytes

from .search import Choice, Found, reason

_NOT_SEARCHED = (
    "offloading (its transfers are not timed)",
    "pipelines with sharded parameters, and distributed experts (their memory is not followed)",
    "checkpointing of some blocks only",
    "schedules without a time model",
    "fp8 (not every mesh takes it)",
)


def as_text(found: Found) -> str:
    """Return the report."""
    request = found.request
    assert request.hardware is not None and request.memory_limit is not None and request.seq_length is not None
    processes = int(request.settings["num_processes"])
    lines = [
        f"{request.model} on {processes:,} x {request.hardware.key}, {convert_bytes(request.memory_limit)} each",
        f"{found.samples:,} samples of {request.seq_length:,} tokens per step",
        f"{found.searched:,} configurations: {found.too_large:,} are far too large, {found.planned} were planned",
        "",
        f"     {'step':>10} {'tokens/s':>10} {'MFU':>6} {'peak':>11} {'needed':>11}",
    ]
    for number, choice in enumerate(found.best, 1):
        lines.append(f"  {number}  {_row(choice)}")
        lines.append(f"     {choice.candidate.describe()}")
        if number < len(found.best):
            lines.append(f"     {reason(choice, found.best[number])}")
    lines += ["", "needed: the peak, and the reserve for context, communication and the allocator"]
    if found.others:
        lines += ["", "others that one would try:"]
        lines += [f"  {item.description}\n     {item.reason}" for item in found.others]
    lines += ["", f"not searched: {'; '.join(_NOT_SEARCHED)}"]
    time = found.best[0].plan.time
    if time is not None and not time.compared:
        lines.append(f"Times on {request.hardware.key} are not compared with runs: near ones may change places.")
    return "\n".join(lines)


def _row(choice: Choice) -> str:
    time = choice.plan.time
    assert time is not None
    return (
        f"{time.seconds:>8.3f} s {time.tokens:>10,.0f} {time.utilization:>6.1%} "
        f"{convert_bytes(choice.plan.total):>11} {convert_bytes(choice.plan.needed):>11}"
    )


def write_best(found: Found, file: Path) -> str:
    """Write the best configuration as a file of ``accel launch``.

    Returns:
        What the script has to set itself.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    settings, candidate = found.request.settings, found.best[0].candidate
    kept = {name: settings[name] for name in settings.settings if settings.is_set(name) or name in BASE}
    values = {**kept, **candidate.values()}
    # accel launch derives other types from the number of processes and the device.
    values["distributed_type"] = "FSDP" if values["use_fsdp"] else None
    write_file(file, nest(values))
    script = f"a DataLoader with batch_size={candidate.batch_size}"
    if candidate.axes["pp"] > 1:
        settings_of_pipeline = f"schedule={candidate.schedule!r}, num_microbatches={candidate.micro_batches}"
        script += f", and PipelineParallelConfig({settings_of_pipeline})"
    return f"written to {file}; the script needs {script}"
