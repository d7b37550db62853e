"""Some rows of benchmarks/network_faults.py: two hosts, and what their launchers say and do about a fault."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from components import namespaces

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import network_faults

_MISSING = namespaces.missing()
pytestmark = [
    pytest.mark.component,
    pytest.mark.slow,  # each starts two launchers and two ranks; test_board.py is fast, on one machine
    pytest.mark.skipif(bool(_MISSING), reason=_MISSING or "hosts can be made"),
    pytest.mark.timeout(960),
]
ROWS = {row.name: row for row in network_faults.ROWS if row.name in network_faults.DRAW}


@pytest.fixture(scope="module")
def hosts() -> Iterator[namespaces.Hosts]:
    """Two hosts with a cable."""
    with namespaces.Hosts() as made:
        yield made


@pytest.fixture(scope="module")
def digest(hosts) -> str:
    """What a run without a fault ends with, in which the launchers have nothing to say."""
    return network_faults.undisturbed(hosts)


@pytest.mark.parametrize("name", network_faults.DRAW)
def test_a_fault_is_named_in_time(hosts, digest, name: str) -> None:
    if ROWS[name].replicas and find_spec("torchft") is None:
        pytest.skip("needs torchft: pip install 'accel[ft]'")
    # Seconds have a margin: these machines may be three times slower, and CI's more than that.
    patience = 3.0 * float(os.environ.get("ACCEL_TEST_PATIENCE", "1"))
    seen = network_faults.check(hosts, ROWS[name], digest, patience=patience)
    assert not seen.problems, seen.text
