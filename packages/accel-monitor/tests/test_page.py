"""The page of accel monitor: states, own times, widths, and many ranks."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest
from written_runs import write

from accel_monitor import read_runs
from accel_monitor.commands.monitor import COMMAND, coloured, has_colours
from accel_monitor.page import _legend, render, rows_of
from accel_state import ConfigurationError


def test_states_and_own_times(tmp_path: Path) -> None:
    early = {"startup": 10.0, "step": 0, "part": "startup", "step_at": None}
    work = {**early, "data": 2.0, "forward": 3.0, "backward": 4.0, "waiting": 11.0, "step": 10}
    write(tmp_path, 0, 6, early, {**work, "part": "backward", "step_at": None, "at": 0})
    write(tmp_path, 1, 6, early, {**work, "data": 12.0, "waiting": 1.0, "part": "data"})
    write(tmp_path, 2, 6, early, {**work, "part": "saving"})
    write(tmp_path, 3, 6, early, {**work, "part": "other"}, end=True)
    write(tmp_path, 4, 6, early, {**work, "waiting": 100.0, "part": "waiting", "step_at": 30.0})
    write(tmp_path, 5, 6, early)
    silent = time.time() - 100
    os.utime(tmp_path / "monitor" / "rank-00005.now", (silent, silent))
    (run,) = read_runs(tmp_path)
    rows = rows_of(run)
    assert [row.state for row in rows] == ["training", "training", "saving", "finished", "hung", "dead"]
    assert [rows[0].own, rows[1].own, rows[5].own] == [pytest.approx(0.9), pytest.approx(1.9), None]
    assert rows[0].rate == pytest.approx(40 / 20) and rows[0].memory == 2**31
    # 20 s of rank 1: 12 of data, 3 forward, 4 backward, 1 waiting.
    (line,) = [line for line in render(run, 100, 40) if line.startswith("     1 ")]
    bar = line.rsplit(" ", 1)[1]
    # The letters that the bars have, and no line is cut off.
    legend = "D data, F forward, B backward, w waiting for others, - start-up"
    assert legend in list(render(run, 80, 40))
    assert list(_legend("DFBw-", 60)) == ["D data, F forward, B backward, w waiting for others,", "- start-up"]
    assert len(bar) == 100 - 66 and bar == "D" * 20 + "F" * 6 + "B" * 6 + "w" * 2


@pytest.mark.parametrize("width", [80, 200])
def test_every_line_fits(tmp_path: Path, width: int) -> None:
    for rank in range(300):
        sample = {"data": 1.0 + rank / 100, "forward": 3.0, "step": 10, "part": "forward"}
        write(tmp_path, rank, 300, sample, host=f"host{rank // 8}")
    (run,) = read_runs(tmp_path)
    lines = list(render(run, width, 40))
    assert len(lines) < 40 and max(map(len, lines)) <= width
    assert any(line.startswith("   299 ") for line in lines), "the slowest rank is shown"
    assert not any(line.startswith("     0 ") for line in lines)
    # The own times of a step go from 0.4 to 0.7 s, evenly: each of 8 bins has an eighth of the ranks.
    counts = [int(line.split("own/step")[1].split()[0]) for line in lines if " own/step " in line and "#" in line]
    assert sum(counts) == 300 and all(30 <= count <= 45 for count in counts)


def test_the_command_prints_once_without_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(ConfigurationError, match=str(tmp_path)):
        COMMAND.run([str(tmp_path)])
    write(tmp_path, 1, 2, {"forward": 3.0, "step": 10, "part": "forward"})
    assert COMMAND.run([str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert "1 of 2 ranks have not reported: 0" in output and "\x1b" not in output


def test_colours_repeat_what_letters_say(monkeypatch: pytest.MonkeyPatch) -> None:
    line = "     1 training        10    1.9 s DDFFBBwwww"
    shown = coloured(line)
    assert re.sub(r"\x1b\[[0-9;]*m", "", shown) == line and shown.count("\x1b[30;48") == 4
    assert coloured("2 ranks: 2 training; step 10") == "2 ranks: 2 training; step 10"
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert has_colours()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not has_colours()
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not has_colours()
