"""Unreachable servers (a closed port, and one that never responds): the run continues and the process ends."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import Processes

from accel_track import get_available_trackers
from accel_track.sdk_tracker import responds

# Variables and arguments that send a tracker to a server.
SERVERS = {
    "wandb": ({"WANDB_BASE_URL": "http://{at}", "WANDB_API_KEY": "a" * 40}, "{{}}"),
    "comet_ml": ({"COMET_URL_OVERRIDE": "http://{at}/clientlib/", "COMET_API_KEY": "b" * 25}, "{{}}"),
    "mlflow": ({"MLFLOW_TRACKING_URI": "http://{at}"}, "{{}}"),
    "aim": ({"AIM_UI_TELEMETRY_ENABLED": "0"}, "{{'repo': 'aim://{at}'}}"),
    "clearml": (
        {name: "http://{at}" for name in ("CLEARML_API_HOST", "CLEARML_WEB_HOST", "CLEARML_FILES_HOST")}
        | {"CLEARML_API_ACCESS_KEY": "x", "CLEARML_API_SECRET_KEY": "y"},
        "{{}}",
    ),
    "swanlab": ({"SWANLAB_API_HOST": "http://{at}", "SWANLAB_API_KEY": "c" * 21, "SWANLAB_MODE": "online"}, "{{}}"),
    "trackio": ({"TRACKIO_WRITE_TOKEN": "t"}, "{{'server_url': 'http://{at}'}}"),
}
SCRIPT = """
import sys, time
from accel_track import Delivery, TrackerRun, find_runs, sdk_tracker
sdk_tracker.RESPONSE_SECONDS = 2.0
delivery = Delivery(start_timeout={patience}, stall_timeout={patience}, finish_timeout={patience})
tracking = TrackerRun([{name!r}, "jsonl"], "runs", delivery=delivery)
tracking.init_trackers("project", {{"lr": 1}}, {{{name!r}: {arguments}}})
for step in range(100):
    tracking.log({{"loss": step}}, step=step)
tracking.finish()
(run,) = find_runs(__import__("pathlib").Path("runs"))
print("logged", len(run.rows))
"""


@pytest.fixture
def silent_server() -> Iterator[str]:
    """Accepts connections, and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def closed_port() -> Iterator[str]:
    """A bound address without a listener."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def test_responds(silent_server: str, closed_port: str) -> None:
    assert not responds(f"http://{silent_server}", timeout=0.3) and not responds(f"http://{closed_port}", 5)
    assert not responds(f"aim://{closed_port}", 5) and responds(f"aim://{silent_server}", 5), (
        "for other schemes a connection is enough"
    )
    assert not responds("http://no-such-host.invalid", 5)


@pytest.mark.timeout(480)  # libraries that take ten seconds to import, on a busy machine
@pytest.mark.parametrize("address", ["closed_port", "silent_server"])
@pytest.mark.parametrize("name", SERVERS)
def test_training_goes_on_without_the_server(
    name: str, address: str, tmp_path: Path, request: pytest.FixtureRequest, processes: Processes
) -> None:
    if name not in get_available_trackers():
        pytest.skip(f"{name} is not installed here: scripts/test-trackers has an environment with all")
    at = request.getfixturevalue(address)
    variables, arguments = SERVERS[name]
    kept = {key: value for key, value in os.environ.items() if "proxy" not in key.lower()}
    environment = (
        kept
        | {"HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
        | {key: value.format(at=at) for key, value in variables.items()}
    )
    # Aim waits for a silent server without an end: these limits end its start, and then its finish.
    patience = 5 if (name, address) == ("aim", "silent_server") else 15
    code = SCRIPT.format(name=name, arguments=arguments.format(at=at), patience=patience)
    begin = time.monotonic()
    result = processes.run(code, cwd=tmp_path, env=environment, timeout=400)
    took = time.monotonic() - begin
    assert result.returncode == 0, result.stderr
    assert "logged 100" in result.stdout
    assert f"The tracker '{name}'" in result.stderr and "is disabled" in result.stderr, result.stderr
    assert took < 300, f"{took:.0f} s"
