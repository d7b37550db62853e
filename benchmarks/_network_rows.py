"""The table of network_faults.py: faults, and what must follow."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from _network_hosts import Run

CABLE = Path(__file__).with_name("_slow_cable.py")
STEPS, STEP_SECONDS = 60, 0.1
END = 45.0
"""Seconds within which a host must end or start again."""

Fault = Callable[[Run], None]


@dataclass(frozen=True)
class Row:
    """A fault, and what must follow."""

    name: str
    what: str
    fault: Fault | None = None  # after ten steps, or None for one that is there from the start
    words: tuple[str, ...] = ()  # of both hosts
    own: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())  # of each host
    says: tuple[str, str] = ("", "")  # pattern in what each host prints; empty for none
    codes: tuple[int | None, int | None] | None = None  # of each host; None for one that is not asked
    same_weights: bool = False  # whether the run must end as an undisturbed one
    quiet: bool = False  # whether there is nothing to say
    script: tuple[str, str] = ("train.py", "train.py")
    prepare: Fault | None = None
    starts: tuple[bool, bool] = (True, True)
    limit: float = END  # seconds to the end, or to the first start after it
    group_timeout: str = ""
    steps: int = 60

    @property
    def replicas(self) -> bool:
        """Whether the run has replicas (--ft)."""
        return "--ft" in self.words


def _cut(run: Run) -> None:
    run.hosts.set_cable(plugged=False)


def cut_for(seconds: float) -> Fault:
    def fault(run: Run) -> None:
        _cut(run)
        time.sleep(seconds)
        run.hosts.set_cable(plugged=True)

    return fault


def killed_and_back(host: int, seconds: float = 10) -> Fault:
    def fault(run: Run) -> None:
        run.launchers[host].kill()
        time.sleep(seconds)
        run.start(host)

    return fault


def gone_and_back(host: int, seconds: float) -> Fault:
    """The host loses its power: nothing says that its connections have ended."""

    def fault(run: Run) -> None:
        _cut(run)
        run.launchers[host].kill()
        time.sleep(seconds)
        run.hosts.set_cable(plugged=True)
        run.start(host)

    return fault


def _interrupt(*hosts: int, cut: bool = False) -> Fault:
    def fault(run: Run) -> None:
        if cut:
            _cut(run)
            time.sleep(3)
            run.now()
        for host in hosts:
            run.launchers[host].launcher().send_signal(signal.SIGINT)

    return fault


def _suspend(run: Run) -> None:
    family = [run.launchers[1].launcher(), *run.launchers[1].launcher().children(recursive=True)]
    for process in family:
        process.suspend()
    time.sleep(15)
    for process in family:
        process.resume()


def _listener(run: Run) -> None:
    """Another server takes the main port of host0."""
    code = "import socket, time\ns = socket.create_server(('', 29500))\nprint('up', flush=True)\ntime.sleep(600)"
    server = subprocess.Popen(run.hosts.command(0, [sys.executable, "-c", code]), stdout=subprocess.PIPE)
    run.stack.callback(server.kill)
    assert server.stdout is not None
    server.stdout.readline()


def _names(line0: str, line1: str) -> Fault:
    """What the names of the hosts resolve to, on each."""

    def prepare(run: Run) -> None:
        for name, line in zip(run.hosts.names, (line0, line1), strict=True):
            file = Path("/etc/netns") / name / "hosts"
            former = file.read_text()
            run.stack.callback(file.write_text, former)
            file.write_text(f"127.0.0.1 localhost\n{line}\n")

    return prepare


def _lossy(run: Run) -> None:
    words = [sys.executable, str(CABLE), *run.hosts.names, "10.78.0.1", "10.78.0.2", "100", "20", "1"]
    cable = subprocess.Popen(words, stdout=subprocess.PIPE)
    run.stack.callback(cable.wait)
    run.stack.callback(cable.terminate)
    assert cable.stdout is not None and cable.stdout.readline() == b"up\n"


def _ipv6(run: Run) -> None:
    for end in (0, 1):
        words = ["-n", run.hosts.names[end], "addr", "replace", f"fd77::{end + 1}/64", "dev", run.hosts.cables[end]]
        subprocess.run(["ip", *words, "nodad"], check=True)


def _one_way(run: Run) -> None:
    run.stack.callback(run.one_way, False)
    run.one_way(True)


RESTARTS = ("--max_restarts=3",)
LOST = (r"machine rank 1 \(host1.*is lost", r"machine rank 0 \(host0.*is lost")
REPLICAS = ("--ft", "--num_replicas=2", "--replica_timeout=8")
SHORT = ("--rdzv_conf=timeout=20",)
SLOW = ("--rdzv_conf=timeout=15",)

ROWS = [
    Row("cut", "link down forever", _cut, says=LOST, codes=(1, 1)),
    Row("drop", "all packets lost in one direction, forever", _one_way, says=LOST, codes=(1, 1)),
    Row("c10d cut", "link down forever, c10d", _cut, ("--rdzv_backend=c10d",), says=LOST, codes=(1, 1)),
    Row(
        "cut, restarts",
        "link down forever, --max_restarts 3, waits of 20 s",
        _cut,
        (*RESTARTS, *SHORT),
        says=("machine rank 1 .host1", "machine rank 0 .host0"),
        codes=(2, 2),
        limit=30 + 10 + 20 + 10,
    ),
    Row("cut, group", "the same, process group of 15 s", _cut, says=LOST, group_timeout="15"),
    Row("cut 40 s", "link down for 40 s, --max_restarts 3", cut_for(40), RESTARTS, same_weights=True, codes=(0, 0)),
    Row("cut 3 s", "link down for 3 s", cut_for(3), same_weights=True, codes=(0, 0), quiet=True),
    Row(
        "slow",
        "20% loss and 200 ms",
        None,
        ("--main_process_ip=10.78.0.1",),
        same_weights=True,
        codes=(0, 0),
        quiet=True,
        prepare=_lossy,
    ),
    Row(
        "suspended",
        "host1 is suspended for 15 s",
        _suspend,
        same_weights=True,
        codes=(0, 0),
        says=("machine rank 1 .host1.*10 s", ""),
    ),
    Row(
        "host0 back", "host0 killed and back after 10 s", killed_and_back(0), RESTARTS, same_weights=True, codes=(0, 0)
    ),
    Row(
        "host1 back", "host1 killed and back after 10 s", killed_and_back(1), RESTARTS, same_weights=True, codes=(0, 0)
    ),
    Row(
        "host0 power",
        "host0 without power, back after 40 s",
        gone_and_back(0, 40),
        RESTARTS,
        same_weights=True,
        codes=(0, 0),
    ),
    Row(
        "host0 gone",
        "host0 killed forever",
        lambda run: run.launchers[0].kill(),
        says=("", "machine rank 0 .host0"),
        codes=(None, 1),
    ),
    Row(
        "processes",
        "--num_processes 2 and 4",
        own=((), ("--num_processes=4",)),
        says=("num_processes",) * 2,
        codes=(2, 2),
    ),
    Row(
        "machines",
        "--num_machines 2 and 3",
        own=((), ("--num_machines=3", "--num_processes=3")),
        says=("num_machines",) * 2,
        codes=(2, 2),
    ),
    Row("script", "another script on host1", script=("train.py", "other.py"), says=("script",) * 2, codes=(2, 2)),
    Row(
        "no script",
        "the script is missing on host1",
        script=("train.py", "absent.py"),
        says=("machine rank 1 .host1.*absent.py", "absent.py"),
        codes=(2, 2),
    ),
    Row(
        "never",
        "host1 never starts; waits of 15 s",
        words=SLOW,
        starts=(True, False),
        says=("machine rank 1", ""),
        codes=(2, None),
    ),
    Row(
        "no rank 0",
        "rank 0 never starts; waits of 15 s",
        words=SLOW,
        starts=(False, True),
        says=("", "rank 0 at 10.77.0.1:29500"),
        codes=(None, 2),
    ),
    Row(
        "port",
        "another port on host1",
        words=SLOW,
        own=((), ("--main_process_port=29599",)),
        says=("machine rank 1", "10.77.0.1:29599.*refused"),
        codes=(2, 2),
    ),
    Row(
        "address",
        "another address on host1",
        words=SLOW,
        own=((), ("--main_process_ip=10.77.0.9",)),
        says=("machine rank 1", "10.77.0.9:29500"),
        codes=(2, 2),
    ),
    Row(
        "two rank 0",
        "both have rank 0",
        words=SLOW,
        own=((), ("--machine_rank=0",)),
        says=("", "10.77.0.2"),
        codes=(2, 2),
    ),
    Row(
        "two rank 1",
        "both have rank 1",
        words=SLOW,
        own=(("--machine_rank=1",), ()),
        says=("rank 0",) * 2,
        codes=(2, 2),
    ),
    Row(
        "not main",
        "main address of no host",
        words=(*SLOW, "--main_process_ip=10.77.0.9"),
        says=("10.77.0.1", "10.77.0.9"),
        codes=(2, 2),
    ),
    Row(
        "port taken",
        "another server at the main port",
        words=SLOW,
        prepare=_listener,
        says=("29500.*in use", "not the launcher"),
        codes=(2, 2),
    ),
    Row(
        "127.0.1.1",
        "host names that resolve to 127.0.1.1",
        words=("--main_process_ip=host0",),
        prepare=_names("127.0.1.1 host0", "127.0.1.1 host1\n10.77.0.1 host0"),
        same_weights=True,
        codes=(0, 0),
        quiet=True,
    ),
    Row(
        "no name", "host names that do not resolve", prepare=_names("", ""), same_weights=True, codes=(0, 0), quiet=True
    ),
    Row(
        "ipv6",
        "IPv6 address in brackets",
        words=("--main_process_ip=[fd77::1]",),
        prepare=_ipv6,
        same_weights=True,
        codes=(0, 0),
        quiet=True,
    ),
    Row("ctrl-c", "Ctrl-C on host0", _interrupt(0), says=("", "SIGINT.*machine rank 0"), codes=(130, 130), limit=15),
    Row("ctrl-c 1", "Ctrl-C on host1", _interrupt(1), says=("SIGINT.*machine rank 1", ""), codes=(130, 130), limit=15),
    Row("ctrl-c, cut", "Ctrl-C on both during a cut", _interrupt(0, 1, cut=True), codes=(130, 130), limit=15),
    Row(
        "ft cut 45 s",
        "--ft, link down for 45 s",
        cut_for(45),
        REPLICAS,
        says=(r"machine rank 1 .*is back after", r"waiting for machine rank 0 [\s\S]*is back after"),
        codes=(0, 0),
        steps=900,
        limit=200,
    ),
    Row(
        "ft cut",
        "--ft, link down forever, waits of 20 s",
        _cut,
        (*REPLICAS, *SHORT),
        says=(r"machine rank 1 .*is lost.*The others continue", r"machine rank 0 .*is lost"),
        codes=(0, 1),
        steps=900,
        limit=200,
    ),
    Row(
        "ft host0 gone",
        "--ft, host0 (lighthouse) killed forever, waits of 20 s",
        lambda run: run.launchers[0].kill(),
        (*REPLICAS, *SHORT),
        says=("", r"waiting for machine rank 0 [\s\S]*machine rank 0 .*is lost"),
        codes=(None, 1),
        steps=900,
        limit=30 + 20 + 15,
    ),
    Row(
        "ft ctrl-c",
        "--ft, Ctrl-C on host0",
        _interrupt(0),
        REPLICAS,
        says=("", "SIGINT on host0 .machine rank 0"),
        codes=(130, 130),
        steps=900,
        limit=15,
    ),
]
DRAW = ("cut", "drop", "c10d cut", "host0 back", "no script", "port taken", "127.0.1.1", "ctrl-c", "not main")
DRAW += ("ft host0 gone",)


_OF_TORCHRUN = {
    "num_machines": "nnodes",
    "machine_rank": "node_rank",
    "main_process_ip": "master_addr",
    "main_process_port": "master_port",
}


def command(row: Row, host: int, torchrun: bool = False) -> list[str]:
    script = [row.script[host], ".", str(row.steps), str(STEP_SECONDS), *filter(None, (row.group_timeout,))]
    if torchrun:
        words = {"nnodes": "2", "nproc_per_node": "1", "node_rank": str(host)}
        words |= {"master_addr": "10.77.0.1", "master_port": "29500"}
        for word in (*row.words, *row.own[host]):
            name, _, value = word.removeprefix("--").partition("=")
            if name == "num_processes":
                words["nproc_per_node"] = str(int(value) // (3 if row.name == "machines" else 2))
            else:
                words[_OF_TORCHRUN.get(name, name)] = value
        options = [f"--{name}={value}" for name, value in words.items()]
        return [sys.executable, "-m", "torch.distributed.run", *options, *script]
    common = [
        "--cpu",
        "--num_machines=2",
        *([] if row.replicas else ["--num_processes=2"]),
        "--main_process_ip=10.77.0.1",
        "--main_process_port=29500",
    ]
    launch = [sys.executable, "-m", "accel_launch", "launch", *common, f"--machine_rank={host}"]
    return [*launch, *row.words, *row.own[host], *script]
