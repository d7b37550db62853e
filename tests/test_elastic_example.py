"""examples/elastic.py: a replica that is killed changes nothing."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
from components.digits import environment
from workspace import ROOT

SCRIPT = ROOT / "examples" / "elastic.py"


# Two runs of two replicas, and the second start of one: half a minute on two cores.
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(find_spec("torchft") is None, reason="needs torchft: pip install 'accel[ft]'")
def test_a_killed_replica_leaves_the_same_weights() -> None:
    found = []
    # Replica 0 waits for the other one, which may start late, and would otherwise join after the step of its kill.
    options = ["--num_replicas", "2", "--min_replicas", "2"]
    for more in ([], ["--kill_at", "20"]):
        launch = [sys.executable, "-m", "accel_launch", "launch", "--cpu", "--ft", *options]
        done = subprocess.run(
            [*launch, str(SCRIPT), "--epochs", "1", *more],
            env=environment(),
            capture_output=True,
            text=True,
            timeout=180,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        found.append(re.findall(r"^57 steps, sha256 ([0-9a-f]{16})$", done.stdout, flags=re.MULTILINE))
        assert ("SIGKILL" in done.stderr) is bool(more), done.stderr[-3000:]
    assert len(found[0]) == 1 and found[1] == found[0]
