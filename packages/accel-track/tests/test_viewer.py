"""The command accel track show."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from accel_state import ConfigurationError, MissingDependencyError
from accel_track import TrackerRun
from accel_track.commands.track import COMMAND, run
from accel_track.viewer.terminal import Chart, charts, draw, smooth


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for scale in (1.0, 2.0):
        with TrackerRun("jsonl", tmp_path / "runs") as tracking:
            tracking.init_trackers("digits", {"scale": scale, "note": "<b>&"})
            for step in range(50):
                loss = math.nan if step == 20 else scale * math.exp(-step / 10)
                tracking.log({"train/loss": loss, "lr": 0.1, "note": "<script>"}, step=step)
    return tmp_path / "runs"


def test_values_and_curves_on_the_terminal(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["show", str(runs), "--width", "60", "--height", "5"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("digits/") == 2 and printed.count("at step 49") == 2 * 3
    assert printed.count("(scale=1, finished, ") == 1, "the label of the curves is beside the name"
    assert f"train/loss  {math.exp(-4.9):>12.4g}  at step 49" in printed
    assert max(map(len, printed.splitlines())) <= 140
    assert printed.count("  * scale=") == printed.count("  o scale=") == 2
    run(["show", str(runs), "--metric", "train/loss", "--smooth", "0.99", "--width", "60", "--height", "5"])
    smoothed = capsys.readouterr().out.partition("\ntrain/loss\n")[2]
    lowest = float(smoothed.splitlines()[6].split()[0])
    assert lowest > 0.1, "a run ends at 0.007, and its mean is above 0.1"


def test_the_first_value_is_at_the_upper_left() -> None:
    chart = Chart("loss", {"a": [(0, 2.0), (1, 1.0), (2, math.nan), (3, 0.0)]})
    lines = draw(chart, 30, 4, braille=False).splitlines()
    assert (
        lines[0] == "loss"
        and lines[1].startswith(" 2 |*")
        and lines[4].rstrip().endswith("*")
        and lines[5].split() == ["0", "3"]
    )
    for braille in (True, False):
        lines = draw(Chart("flat", {"a": [(5, 1.0), (6, math.nan)]}), 30, 3, braille=braille).splitlines()
        assert lines[-1].split() == ["5"] and lines[2].endswith("*") and lines[2].index("*") == lines[-1].index("5")
    assert draw(Chart("nothing", {"a": [(0, math.nan)]}), 30, 3, braille=True)


def test_smoothing_starts_at_the_first_value() -> None:
    points = [(0.0, 4.0), (1.0, 0.0), (2.0, math.inf), (3.0, 0.0)]
    smoothed = smooth(points, 0.5)
    assert smoothed[0] == (0.0, 4.0) and smoothed[1][1] == pytest.approx(4 * 0.25 / 0.75) and smoothed[2][1] == math.inf
    assert smooth(points, 0.0) is points


ODD_RUNS = {
    "texts": ('{"_step": 0, "note": "hello"}', "note         hello  at step 0"),
    "nothing": ("", "nothing was logged yet"),
    "an integer beyond all floats": (
        '{"_step": 0, "n": 1}\n{"_step": 1, "n": ' + "9" * 400 + "}",
        "999... (400 characters)  at step 1",
    ),
    "a range beyond all floats": ('{"_step": 0, "n": 1e308}\n{"_step": 1, "n": -1e308}', "-1e+308  at step 1"),
    "steps that are times": ('{"_step": 1764000000000000000, "n": 1}', "at step 1764000000000000000"),
    "steps that are none": ('{"_step": [1], "n": 1}\n{"_step": NaN, "n": 2}\n{"_step": "x", "n": 3}', "3  at step x"),
    "a step beyond all floats": ('{"_step": ' + "9" * 400 + ', "n": 1}', "999... (400 characters)"),
    "a mark of no number": ('{"_step": 0, "n": 1}\n{"_resumed_after": null}\n{"_step": 2, "n": 3}', "3  at step 2"),
    "nesting beyond reason": ("[" * 100_000 + '\n{"_step": 0, "n": 1}', "1 rows, 1 unreadable line"),
    "control characters": ('{"_step": 0, "\\u001b[31mred": 1, "text": "two\\nlines"}', r"\x1b[31mred"),
}


@pytest.mark.parametrize("name", ODD_RUNS)
def test_odd_runs_are_shown(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content, expected = ODD_RUNS[name]
    (tmp_path / "metrics.jsonl").write_text(content + "\n" if content else "")
    (tmp_path / "run.json").write_text('{"status": "running", "started": 3}')
    run(["show", str(tmp_path), "--html", str(tmp_path / "page.html"), "--csv", str(tmp_path / "table.csv")])
    assert (tmp_path / "page.html").stat().st_size and (tmp_path / "table.csv").exists()
    capsys.readouterr()
    run(["show", str(tmp_path), "--width", "60"])
    printed = capsys.readouterr().out
    assert expected in printed and "\x1b" not in printed
    if "note" not in printed and "nothing" not in printed:
        pytest.importorskip("matplotlib")
        run(["show", str(tmp_path), "--png", str(tmp_path / "curves.png")])
        assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_runs_of_several_directories(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(runs, tmp_path / "copy")
    first = next((runs / "digits").iterdir())
    run(["show", str(runs), str(first), "--width", "60"])
    assert capsys.readouterr().out.count("at step 49") == 2 * 3, "a run that is given twice is shown once"
    run(["show", str(runs), str(tmp_path / "copy"), "--metric", "train/loss", "--width", "60"])
    printed = capsys.readouterr().out
    assert printed.count("at step 49") == 4 and f"{tmp_path / 'copy'}/digits/" in printed
    assert all(mark in printed for mark in ("* ", "o ", "+ ", "x ")), "a curve for each"
    with pytest.raises(ConfigurationError, match="missing"):
        run(["show", str(runs), str(tmp_path / "missing")])


def test_a_pattern_selects_rows_of_tables_too(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = next(path.name for path in (runs / "digits").iterdir())
    run(["show", str(runs), "--run", name, "--metric", "*loss", "--width", "60"])
    printed = capsys.readouterr().out
    assert "train/loss" in printed and "lr" not in printed and "note" not in printed
    assert printed.count("digits/") == 1
    assert any("\u2800" < character <= "\u28ff" for character in printed), "one run is drawn finely"
    run(["show", str(runs), "--run", name, "--metric", "not*"])
    assert "note" in (printed := capsys.readouterr().out) and "train/loss" not in printed, "texts have a row only"
    page, table = tmp_path / "page.html", tmp_path / "table.csv"
    run(["show", str(runs), "--run", name, "--metric", "lr", "--html", str(page), "--csv", str(table)])
    assert 'type="button">lr<' in page.read_text() and "train/loss" not in page.read_text()
    assert table.read_text().splitlines()[0] == "_step,_time,lr"


def test_the_image_without_matplotlib(runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'accel-track\[plot\]'"):
        run(["show", str(runs), "--png", str(tmp_path / "curves.png")])


def test_the_table(runs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--csv takes one run, and there are 2"):
        run(["show", str(runs), "--csv", str(tmp_path / "table.csv")])
    name = next(path.name for path in (runs / "digits").iterdir())
    run(["show", str(runs), "--run", name, "--csv", str(tmp_path / "table.csv")])
    lines = (tmp_path / "table.csv").read_text().splitlines()
    assert lines[0] == "_step,_time,train/loss,lr,note" and len(lines) == 51


def test_wrong_input_is_named(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigurationError, match=r"acc\*\..*train/loss"):
        run(["show", str(runs), "--metric", "acc*"])
    with pytest.raises(ConfigurationError, match="is too small"):
        run(["show", str(runs), "--width", "3"])
    with pytest.raises(ConfigurationError, match="No numeric metric was logged yet"):
        charts([])
    with pytest.raises(SystemExit):
        run(["show", str(runs), "--smooth", "1"])
    assert "1 must be in [0, 1)" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run([])
    assert COMMAND.summary and "show" in capsys.readouterr().out


def test_it_is_a_command_of_its_own_too_and_needs_no_torch(runs: Path, tmp_path: Path) -> None:
    code = f"import sys; sys.argv = ['accel_track', 'show', {str(runs)!r}, '--width', '60']; import runpy\n"
    code += (
        "try: runpy.run_module('accel_track', run_name='__main__')\nexcept SystemExit as end: assert not "
        "end.code, end.code\n"
    )
    code += "print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=100, env={"PYTHONIOENCODING": "ascii"}
    )
    assert result.returncode == 0 and result.stdout.splitlines()[-1] == "False", result.stderr
    assert result.stdout.isascii()
    command = [sys.executable, "-m", "accel_track", "show", "missing"]
    wrong = subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=tmp_path)
    assert wrong.returncode == 2 and wrong.stderr.startswith("accel track: error: directory not found: 'missing'")
