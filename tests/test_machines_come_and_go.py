"""A small draw of benchmarks/machines_come_and_go.py: hosts join, leave and are killed while a run trains."""

from __future__ import annotations

import contextlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest
from components import namespaces
from components.digits import environment
from workspace import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))
import machines_come_and_go
from _network_hosts import Host

_MISSING = namespaces.missing()
# A join, a SIGTERM, the main host killed, another host killed so that too few are left, and a join.
SEED = 13


@pytest.mark.component
@pytest.mark.slow  # five starts of up to four processes; test_ranged_rendezvous.py is fast, without ranks
@pytest.mark.skipif(bool(_MISSING), reason=_MISSING or "hosts can be made")
@pytest.mark.timeout(960)
def test_no_sample_is_lost_or_repeated() -> None:
    """Three hosts, of which the third one has two processes."""
    found = machines_come_and_go.run(seed=SEED, events=4, machines="2:3", hosts=3, steps=60)
    assert not found.problems, "\n".join([*found.problems, found.text])
    assert found.starts >= 5 and {event.what for event in found.events} == {
        "join",
        "SIGTERM",
        "SIGKILL",
        "main host killed",
    }


GUIDE = ROOT / "docs" / "guides" / "elastic.md"


def _sentences(lines: Iterable[str]) -> list[str]:
    """What a launcher said, without what depends on when it was: numbers of states, seconds and folders."""
    said = [line for line in lines if re.match(r"accel( launch)?: ", line) and "waiting for" not in line]
    # The rank that reports may be the one that got the signal, or another one.
    said = [line.replace("a signal to another rank: the", "SIGTERM: the") for line in said]
    return [re.sub(r"checkpoint_\d+", "checkpoint_N", re.sub(r"\S*runs/", "runs/", line)) for line in said]


@pytest.mark.component
@pytest.mark.slow  # three hosts, and forty epochs twice
@pytest.mark.skipif(bool(_MISSING), reason=_MISSING or "hosts can be made")
@pytest.mark.timeout(960)
def test_the_example_of_the_guide(tmp_path: Path) -> None:
    """A host joins, another one gets SIGTERM: what the first one says is in the guide, and the weights are equal."""
    page = GUIDE.read_text(encoding="utf-8")
    line, output = re.search(r"\$ accel (launch \S.*--num_machines 2:8.*)\n((?:.*\n)*?)\$ python", page).groups()
    words = [sys.executable, "-m", "accel_launch", *line.split()]
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    with namespaces.Hosts(3) as network, contextlib.ExitStack() as stack:
        hosts: list[Host] = []

        def start(number: int) -> None:
            hosts.append(Host.start(network, number, words, tmp_path))
            stack.callback(hosts[-1].kill)

        def wait_for(text: str, after: int = 0) -> int:
            deadline = time.monotonic() + 240
            while not any(text in said for _, said in hosts[0].lines[after:]):
                assert time.monotonic() < deadline and hosts[0].process.poll() is None, hosts[0].text()
                time.sleep(0.05)
            return len(hosts[0].lines)

        start(0)
        wait_for("starting up to 8 processes")
        start(1)
        wait_for("epoch 0:")
        start(2)
        wait_for("epoch", wait_for("has joined"))
        hosts[1].process.send_signal(signal.SIGTERM)
        assert all(host.wait(400) for host in hosts), [host.text() for host in hosts]
        texts, codes = [host.text() for host in hosts], [host.process.returncode for host in hosts]
    assert codes == [0, 75, 0], texts
    assert _sentences(texts[0].splitlines()) == _sentences(output.splitlines())
    alone = [sys.executable, "examples/world_size.py", "--epochs", "40"]
    done = subprocess.run(alone, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].partition(", ")[2] == texts[0].splitlines()[-1].partition(", ")[2]


@pytest.mark.parametrize("seed", range(50))
def test_a_schedule_leaves_enough_machines(seed: int) -> None:
    """Whatever is drawn, only machines that are here leave, others join, and the run can end."""
    present = {0, 1}
    events = machines_come_and_go.schedule(random.Random(seed), 12, 8, 2, 8)
    for event in events:
        if event.what == "join":
            assert not present & set(event.hosts)
            present |= set(event.hosts)
        else:
            assert set(event.hosts) <= present
            present -= set(event.hosts) if event.what in ("SIGTERM", "SIGKILL") else set()
    assert len(events) >= 12 and 2 <= len(present) <= 8
