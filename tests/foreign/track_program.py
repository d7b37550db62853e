"""accel-track alone: a plain loop, a tracker of its own as in the guide, and what it wrote read back."""

from pathlib import Path

from accel_track import GeneralTracker, TrackerRun, find_runs, on_main_process


class Lines(GeneralTracker):
    """Appends to a file."""

    name = "lines"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str) -> None:
        super().__init__()
        self.path = Path(logging_dir) / f"{run_name}.txt"

    @property
    def tracker(self) -> Path:
        return self.path

    @on_main_process
    def log(self, values: dict, step: int | None = None, **_: object) -> None:
        with self.path.open("a") as file:
            file.write(f"{step} {values['loss']}\n")


Path("logs").mkdir()
with TrackerRun(["jsonl", Lines("own", "logs")], "logs") as run:
    run.init_trackers("project", {"lr": 0.1})
    for step in range(3):
        run.log({"loss": 1 / (step + 1)}, step=step)
(found,) = find_runs("logs")
assert [row["loss"] for row in found.rows] == [1.0, 0.5, 1 / 3]
assert Path("logs/own.txt").read_text().splitlines() == ["0 1.0", "1 0.5", f"2 {1 / 3}"]
print("jsonl and a custom tracker: all values")
