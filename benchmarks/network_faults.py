"""Cut, slow and misconfigure the network between the hosts of a run, and see what the launchers say and do.

    python benchmarks/network_faults.py                      every row of the table
    python benchmarks/network_faults.py --rows cut drop      some of them
    python benchmarks/network_faults.py --torchrun           torchrun too, where a row applies to it (16 minutes each)
    python benchmarks/network_faults.py --drawn 50 --seed 1  faults that are drawn, in runs with --max_restarts
    python benchmarks/network_faults.py --undisturbed 200    runs without a fault

The hosts are network namespaces with a cable (veth) between them, so it needs root and iproute2. It prints seconds from
the fault to the first sentence of each host and to its end, the exit codes and the sentence. A row fails if a host is
silent or hangs, or does not name the machine or the setting; or if a run that can end has other weights than an
undisturbed one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from components import namespaces

SCRIPT = Path(__file__).with_name("_network_script.py")
CABLE = Path(__file__).with_name("_slow_cable.py")
STEPS, STEP_SECONDS = 60, 0.1
FIRST_SENTENCE, END = 12.0, 45.0
"""Seconds within which a host must speak after a fault, and end or start again."""
LONGEST = 240.0
"""Seconds after which a run counts as hanging."""
AGAIN = "starting all processes again"


class Host:
    """The launcher of one host, and the lines that it prints with their times."""

    def __init__(self, hosts: namespaces.Hosts, host: int, words: Sequence[str], folder: Path) -> None:
        variables = {
            name: value for name, value in os.environ.items() if not name.startswith(("ACCEL", "GLOO", "NCCL"))
        }
        variables |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self.lines: list[tuple[float, str]] = []
        self.ended = 0.0
        self.process = subprocess.Popen(
            hosts.command(host, list(words)),
            cwd=folder,
            env=variables,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            self.lines.append((time.monotonic(), text.rstrip()))
        self.process.wait()
        self.ended = time.monotonic()

    def wait(self, seconds: float) -> bool:
        """Whether it ends within so many seconds."""
        self._reader.join(seconds)
        return not self._reader.is_alive()

    def sentences(self, since: float) -> list[tuple[float, str]]:
        """What the launcher said after a moment, with the seconds since then."""
        return [(at - since, text) for at, text in self.lines if at >= since and text.startswith("accel launch:")]

    def text(self) -> str:
        """Everything it printed."""
        return "\n".join(text for _, text in self.lines)

    def launcher(self) -> psutil.Process:
        """The process of the launcher: unshare and bash have become it."""
        return psutil.Process(self.process.pid)

    def kill(self) -> None:
        """End it with everything that it started, as a machine that loses its power would."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in [*self.launcher().children(recursive=True), self.launcher()]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


@dataclass
class Run:
    """Two launchers on two hosts."""

    hosts: namespaces.Hosts
    folder: Path
    launchers: list[Host] = field(default_factory=list)
    fault_at: float = 0.0
    words: list[list[str]] = field(default_factory=list)
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def start(self, host: int) -> None:
        """Start, or start again, the launcher of a host."""
        place = self.folder / f"host{host}"
        place.mkdir(exist_ok=True)
        launcher = Host(self.hosts, host, self.words[host], place)
        if host < len(self.launchers):
            self.launchers[host] = launcher
        else:
            self.launchers.append(launcher)

    def steps(self) -> int:
        """Steps that were trained."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder / "host0" / "steps").read_text())
        return 0

    def trained(self, steps: int = 10, seconds: float = 90) -> None:
        """Wait for some steps, and note the time: now comes the fault."""
        deadline = time.monotonic() + seconds
        while self.steps() < steps:
            if time.monotonic() > deadline or all(one.process.poll() is not None for one in self.launchers):
                raise RuntimeError("no training: " + " | ".join(one.text()[-2000:] for one in self.launchers))
            time.sleep(0.05)
        self.now()

    def now(self) -> None:
        """Note the moment of the fault."""
        self.fault_at = time.monotonic()

    def digest(self) -> str:
        """What the script wrote at its end."""
        with contextlib.suppress(OSError):
            return (self.folder / "host0" / "digest").read_text()
        return ""

    def one_way(self, lost: bool) -> None:
        """Lose all packets from host1 to host0, by a wrong hardware address."""
        name, device = self.hosts.names[1], self.hosts.cables[1]
        words = "replace 10.77.0.1 lladdr 02:00:00:00:00:99" if lost else "del 10.77.0.1"
        subprocess.run(["ip", "-n", name, "neigh", *words.split(), "dev", device], check=True)

    def close(self) -> None:
        """End what still runs, and mend the cable."""
        for launcher in self.launchers:
            launcher.kill()
            launcher.wait(10)
        self.stack.close()


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


def _cut(run: Run) -> None:
    run.hosts.set_cable(plugged=False)


def _cut_for(seconds: float) -> Fault:
    def fault(run: Run) -> None:
        _cut(run)
        time.sleep(seconds)
        run.hosts.set_cable(plugged=True)

    return fault


def _killed_and_back(host: int, seconds: float = 10) -> Fault:
    def fault(run: Run) -> None:
        run.launchers[host].kill()
        time.sleep(seconds)
        run.start(host)

    return fault


def _gone_and_back(host: int, seconds: float) -> Fault:
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
SHORT = ("--rdzv_conf=timeout=20",)
SLOW = ("--rdzv_conf=timeout=15",)

ROWS = [
    Row("cut", "link down for ever", _cut, says=LOST, codes=(1, 1)),
    Row("drop", "all packets lost in one direction, for ever", _one_way, says=LOST, codes=(1, 1)),
    Row(
        "cut, restarts",
        "link down for ever, --max_restarts 3, waits of 20 s",
        _cut,
        (*RESTARTS, *SHORT),
        says=("machine rank 1 .host1", "machine rank 0 .host0"),
        codes=(2, 2),
        limit=30 + 10 + 20 + 10,
    ),
    Row("cut, group", "the same, process group of 15 s", _cut, says=LOST, group_timeout="15"),
    Row("cut 40 s", "link down for 40 s, --max_restarts 3", _cut_for(40), RESTARTS, same_weights=True, codes=(0, 0)),
    Row("cut 3 s", "link down for 3 s", _cut_for(3), same_weights=True, codes=(0, 0), quiet=True),
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
        "host0 back", "host0 killed and back after 10 s", _killed_and_back(0), RESTARTS, same_weights=True, codes=(0, 0)
    ),
    Row(
        "host1 back", "host1 killed and back after 10 s", _killed_and_back(1), RESTARTS, same_weights=True, codes=(0, 0)
    ),
    Row(
        "host0 power",
        "host0 without power, back after 40 s",
        _gone_and_back(0, 40),
        RESTARTS,
        same_weights=True,
        codes=(0, 0),
    ),
    Row(
        "host0 gone",
        "host0 killed for ever",
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
]
DRAW = ("cut", "drop", "host0 back", "no script", "port taken", "127.0.1.1", "ctrl-c", "not main")


def _command(row: Row, host: int, torchrun: bool = False) -> list[str]:
    script = [row.script[host], ".", str(STEPS), str(STEP_SECONDS), *filter(None, (row.group_timeout,))]
    if torchrun:
        words = [
            "--nnodes=2",
            "--nproc_per_node=1",
            f"--node_rank={host}",
            "--master_addr=10.77.0.1",
            "--master_port=29500",
        ]
        return [sys.executable, "-m", "torch.distributed.run", *words, *script]
    common = [
        "--cpu",
        "--num_machines=2",
        "--num_processes=2",
        "--main_process_ip=10.77.0.1",
        "--main_process_port=29500",
    ]
    launch = [sys.executable, "-m", "accel_launch", "launch", *common, f"--machine_rank={host}"]
    return [*launch, *row.words, *row.own[host], *script]


@dataclass
class Seen:
    """What a row led to."""

    row: Row
    first: list[str] = field(default_factory=list)  # seconds to the first sentence of each host
    end: list[str] = field(default_factory=list)
    codes: list[int | None] = field(default_factory=list)
    sentence: str = ""
    problems: list[str] = field(default_factory=list)
    text: str = ""


@contextlib.contextmanager
def prepared(hosts: namespaces.Hosts, row: Row, torchrun: bool = False) -> Iterator[Run]:
    """A run that is about to start, in a folder of its own for each host."""
    folder = Path(tempfile.mkdtemp(prefix="network-faults-"))
    run = Run(hosts, folder, words=[_command(row, host, torchrun) for host in (0, 1)])
    try:
        for host in (0, 1):
            place = folder / f"host{host}"
            place.mkdir()
            if row.script[host] != "absent.py":
                shutil.copy(SCRIPT, place / row.script[host])
        if row.prepare is not None:
            row.prepare(run)
        yield run
    finally:
        hosts.set_cable(plugged=True)
        run.close()
        shutil.rmtree(folder, ignore_errors=True)


def check(hosts: namespaces.Hosts, row: Row, digest: str) -> Seen:
    """Run one row."""
    seen = Seen(row)
    with prepared(hosts, row) as run:
        for host in (0, 1):
            if row.starts[host]:
                run.start(host)
            else:
                run.launchers.append(_absent(run, host))
        run.now()
        if row.fault is not None:
            run.trained()
            row.fault(run)
        deadline = time.monotonic() + LONGEST
        for host, launcher in enumerate(run.launchers):
            if not launcher.wait(max(0.0, deadline - time.monotonic())):
                seen.problems.append(f"host{host} hangs")
        _judge(seen, run, digest)
        seen.text = "\n".join(f"-- host{host}\n{one.text()}" for host, one in enumerate(run.launchers))
    return seen


def _absent(run: Run, host: int) -> Host:
    return Host(run.hosts, host, ["true"], run.folder)


def _judge(seen: Seen, run: Run, digest: str) -> None:
    row = seen.row
    for host, launcher in enumerate(run.launchers):
        said = launcher.sentences(run.fault_at)
        began = run.fault_at if row.fault is not None else launcher.lines[0][0] if launcher.lines else run.fault_at
        again = [seconds for seconds, text in said if AGAIN in text]
        first = said[0][0] if said else None
        end = again[0] if again else launcher.ended - began
        seen.first.append("" if first is None else f"{first:.0f}")
        seen.end.append(f"{end:.0f}")
        seen.codes.append(launcher.process.returncode)
        if row.says[host] and not re.search(row.says[host], launcher.text()):
            seen.problems.append(f"host{host} does not say {row.says[host]!r}")
        if row.fault is None or not row.starts[host] or (row.same_weights and not row.says[host]):
            continue
        if first is not None and first > FIRST_SENTENCE:
            seen.problems.append(f"host{host} first speaks after {first:.0f} s")
        if launcher.ended and end > row.limit:
            seen.problems.append(f"host{host} ends after {end:.0f} s")
    if row.codes is not None:
        wrong = [wanted is not None and wanted != code for wanted, code in zip(row.codes, seen.codes, strict=True)]
        if any(wrong):
            seen.problems.append(f"exit codes {seen.codes} instead of {row.codes}")
    if row.same_weights and run.digest() != digest:
        seen.problems.append(f"ends with {run.digest() or 'no weights'}")
    sentences = [text for one in run.launchers for _, text in one.sentences(run.fault_at)]
    if row.quiet and sentences:
        seen.problems.append("has something to say")
    named = [text for text in sentences if any(pattern and re.search(pattern, text) for pattern in row.says)]
    seen.sentence = (named or sentences or [""])[0].removeprefix("accel launch: ")


def undisturbed(hosts: namespaces.Hosts) -> str:
    """The digest of a run without a fault.

    Raises:
        RuntimeError: it fails, or a launcher has something to say.
    """
    seen_digest = ""
    with prepared(hosts, Row("undisturbed", "")) as run:
        for host in (0, 1):
            run.start(host)
        ended = [launcher.wait(LONGEST) for launcher in run.launchers]
        said = [text for launcher in run.launchers for _, text in launcher.sentences(0)]
        codes = [launcher.process.returncode for launcher in run.launchers]
        seen_digest = run.digest()
        if not all(ended) or codes != [0, 0] or said or not seen_digest:
            raise RuntimeError(f"an undisturbed run: {codes}, {said}, {[one.text() for one in run.launchers]}")
    return seen_digest


def drawn(hosts: namespaces.Hosts, draws: random.Random, number: int, digest: str) -> Seen:
    """A run with --max_restarts and a fault that is drawn: what, which host, and for how long."""
    host, seconds, steps = draws.randrange(2), draws.uniform(0, 60), draws.randrange(1, STEPS - 5)
    kind = draws.choice(("cut", "one way", "killed", "power"))

    def fault(run: Run) -> None:
        if kind == "cut":
            _cut_for(seconds)(run)
        elif kind == "one way":
            run.one_way(True)
            time.sleep(seconds)
            run.one_way(False)
        elif kind == "killed":
            _killed_and_back(host, seconds)(run)
        else:
            _gone_and_back(host, seconds)(run)

    def late(run: Run) -> None:
        run.trained(steps)
        fault(run)

    row = Row(
        f"drawn {number}",
        f"{kind}, host{host}, step {steps}, {seconds:.0f} s",
        late,
        RESTARTS,
        same_weights=True,
        codes=(0, 0),
    )
    return check(hosts, row, digest)


def torchrun(hosts: namespaces.Hosts, row: Row) -> str:
    """What torchrun does in a row, in words."""
    with prepared(hosts, row, torchrun=True) as run:
        for host in (0, 1):
            run.start(host)
        run.trained()
        assert row.fault is not None
        row.fault(run)
        ends = [f"{one.ended - run.fault_at:.0f} s" if one.wait(1200) else "hangs" for one in run.launchers]
        return f"{row.name}: {', '.join(ends)}, exit codes {[one.process.poll() for one in run.launchers]}"


def show(seen: Seen) -> None:
    """Print a line of the table."""
    row, mark = seen.row, "FAIL" if seen.problems else "ok"
    first, end = "/".join(seen.first), "/".join(seen.end)
    print(f"{mark:<4} | {row.name} | {row.what} | {first} | {end} | {seen.codes} | {seen.sentence[:150]}", flush=True)
    for problem in seen.problems:
        print(f"       {problem}", flush=True)
    if seen.problems:
        print("       " + seen.text.replace("\n", "\n       "), flush=True)


def main() -> int:
    """Run what the command line asks for; the number of rows that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", metavar="NAME", choices=[row.name for row in ROWS])
    parser.add_argument("--drawn", type=int, default=0, metavar="N")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--undisturbed", type=int, default=0, metavar="N")
    parser.add_argument("--torchrun", action="store_true")
    args = parser.parse_args()
    reason = namespaces.missing()
    if reason:
        print(f"network_faults.py needs root and iproute2: {reason}")
        return 0
    failed = 0
    with namespaces.Hosts() as hosts:
        digest = undisturbed(hosts)
        for number in range(args.undisturbed):
            if undisturbed(hosts) != digest:
                failed += 1
            print(f"undisturbed run {number + 1} of {args.undisturbed}: {failed} failed", flush=True)
        draws = random.Random(args.seed)
        results = (drawn(hosts, draws, number, digest) for number in range(args.drawn))
        if not (args.drawn or args.undisturbed):
            rows = [row for row in ROWS if args.rows is None or row.name in args.rows]
            results = (check(hosts, row, digest) for row in rows)
        print("     | row | fault | first sentence (s) | end or restart (s) | exit codes | sentence")
        for seen in results:
            show(seen)
            failed += bool(seen.problems)
        if args.torchrun:
            for row in ROWS[:2]:
                print("torchrun:", torchrun(hosts, row), flush=True)
    print(f"{failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
