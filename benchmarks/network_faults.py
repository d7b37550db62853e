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
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from _network_hosts import Host, Run, Server, namespaces
from _network_rows import DRAW, RESTARTS, ROWS, STEPS, Row, command, cut_for, gone_and_back, killed_and_back

SCRIPT, REPLICAS = (Path(__file__).with_name(f"_network_{name}.py") for name in ("script", "replicas"))
FIRST_SENTENCE = 12.0
"""Seconds within which a host must speak after a fault."""
LONGEST = 240.0
"""Seconds after which a run counts as hanging."""
AGAIN = "starting all processes again"


@dataclass
class Seen:
    """What a row led to."""

    row: Row
    first: list[str] = field(default_factory=list)  # seconds to the first sentence of each host
    end: list[str] = field(default_factory=list)
    codes: list[int | None] = field(default_factory=list)
    digest: str = ""  # of the weights that the run ended with
    sentence: str = ""
    problems: list[str] = field(default_factory=list)
    text: str = ""


@contextlib.contextmanager
def prepared(
    hosts: namespaces.Hosts, row: Row, torchrun: bool = False, servers: Sequence[Server] = ()
) -> Iterator[Run]:
    """A run that is about to start, in a folder of its own for each host."""
    folder = Path(tempfile.mkdtemp(prefix="network-faults-"))
    words = [command(row, host, torchrun) for host in (0, 1)]
    run = Run(hosts, folder, words=words, servers=servers, restarts=3 if RESTARTS[0] in row.words else 0)
    try:
        for host in (0, 1):
            place = folder / f"host{host}"
            place.mkdir()
            if row.script[host] != "absent.py":
                shutil.copy(REPLICAS if row.replicas else SCRIPT, place / row.script[host])
        if row.prepare is not None:
            row.prepare(run)
        yield run
    finally:
        hosts.set_cable(plugged=True)
        run.close()
        shutil.rmtree(folder, ignore_errors=True)


def check(
    hosts: namespaces.Hosts, row: Row, digest: str, patience: float = 1.0, servers: Sequence[Server] = ()
) -> Seen:
    """Run one row.

    Args:
        hosts: two of them.
        row: the fault.
        digest: of an undisturbed run.
        patience: factor for the seconds that a host may take.
        servers: which fork the launchers, if given.
    """
    seen = Seen(row)
    with prepared(hosts, row, servers=servers) as run:
        for host in (0, 1):
            if row.starts[host]:
                run.start(host)
            else:
                run.launchers.append(_absent(run, host))
        run.now()
        if row.fault is not None:
            run.trained()
            row.fault(run)
        deadline = time.monotonic() + LONGEST * patience
        for host, launcher in enumerate(run.launchers):
            if not launcher.wait(max(0.0, deadline - time.monotonic())):
                seen.problems.append(f"host{host} hangs: {launcher.processes()}")
        _judge(seen, run, digest, patience)
        seen.text = "\n".join(f"-- host{host}\n{one.text()}" for host, one in enumerate(run.launchers))
    return seen


def _absent(run: Run, host: int) -> Host:
    return Host.start(run.hosts, host, ["true"], run.folder)


def _judge(seen: Seen, run: Run, digest: str, patience: float) -> None:
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
        if not row.starts[host] or (row.same_weights and not row.says[host]):
            continue
        if first is not None and first > FIRST_SENTENCE * patience:
            seen.problems.append(f"host{host} first speaks after {first:.0f} s")
        if row.fault is not None and launcher.ended and end > row.limit * patience:
            seen.problems.append(f"host{host} ends after {end:.0f} s")
    if row.codes is not None:
        wrong = [wanted is not None and wanted != code for wanted, code in zip(row.codes, seen.codes, strict=True)]
        if any(wrong):
            seen.problems.append(f"exit codes {seen.codes} instead of {row.codes}")
    seen.digest = run.digest()
    if row.same_weights and seen.digest != digest:
        seen.problems.append(f"ends with {seen.digest or 'no weights'}")
    sentences = [text for one in run.launchers for _, text in one.sentences(run.fault_at)]
    if row.quiet and any(map(_is_alarm, sentences)):
        seen.problems.append("has something to say")
    named = [text for text in sentences if any(pattern and re.search(pattern, text) for pattern in row.says)]
    seen.sentence = (named or sentences or [""])[0].removeprefix("accel launch: ")


def _is_alarm(text: str) -> bool:
    # On a busy machine one launcher may start seconds after the other, which is no fault.
    return not text.startswith("accel launch: waiting for ")


def undisturbed(hosts: namespaces.Hosts, patience: float = 1.0, servers: Sequence[Server] = ()) -> str:
    """The digest of a run without a fault.

    Raises:
        RuntimeError: it fails, or a launcher says more than what it waits for at the start.
    """
    seen_digest = ""
    with prepared(hosts, Row("undisturbed", ""), servers=servers) as run:
        for host in (0, 1):
            run.start(host)
        ended = [launcher.wait(LONGEST * patience) for launcher in run.launchers]
        said = [text for launcher in run.launchers for _, text in launcher.sentences(0) if _is_alarm(text)]
        codes = [launcher.process.returncode for launcher in run.launchers]
        seen_digest = run.digest()
        if not all(ended) or codes != [0, 0] or said or not seen_digest:
            raise RuntimeError(f"an undisturbed run: {codes}, {said}, {[one.text() for one in run.launchers]}")
    return seen_digest


def drawn(draws: random.Random, number: int) -> Row:
    """A run with --max_restarts and a fault that is drawn: what, which host, and for how long."""
    host, seconds, steps = draws.randrange(2), draws.uniform(0, 60), draws.randrange(1, STEPS - 5)
    kind = draws.choice(("cut", "one way", "killed", "power"))

    def fault(run: Run) -> None:
        if kind == "cut":
            cut_for(seconds)(run)
        elif kind == "one way":
            run.one_way(True)
            time.sleep(seconds)
            run.one_way(False)
        elif kind == "killed":
            killed_and_back(host, seconds)(run)
        else:
            gone_and_back(host, seconds)(run)

    def late(run: Run) -> None:
        run.trained(steps)
        fault(run)

    return Row(
        f"drawn {number}",
        f"{kind}, host{host}, step {steps}, {seconds:.0f} s",
        late,
        RESTARTS,
        same_weights=True,
        codes=(0, 0),
    )


def torchrun(hosts: namespaces.Hosts, row: Row, seconds: float) -> str:
    """A line of the table of torchrun: the same row, watched for so many seconds after the fault."""
    with prepared(hosts, row, torchrun=True) as run:
        for host in (0, 1):
            if row.starts[host]:
                run.start(host)
            else:
                run.launchers.append(_absent(run, host))
        run.now()
        if row.fault is not None:
            run.trained()
            row.fault(run)
        deadline = time.monotonic() + seconds
        ended = [one.wait(max(0.0, deadline - time.monotonic())) for one in run.launchers]
        said = [[at - run.fault_at for at, _ in one.lines if at >= run.fault_at] for one in run.launchers]
        first = "/".join(f"{times[0]:.0f}" if times else "" for times in said)
        ends = "/".join(
            f"{one.ended - run.fault_at:.0f}" if done else f"> {seconds:.0f}"
            for one, done in zip(run.launchers, ended, strict=True)
        )
        codes = [one.process.poll() for one in run.launchers]
        last = [line for one in run.launchers for at, line in one.lines if at >= run.fault_at and "Error" in line]
        weights = run.digest().partition(" ")[2] or "no weights"
        return f"{row.name} | {row.what} | {first} | {ends} | {codes} | {weights} | {(last or [''])[-1][:120]}"


def show(seen: Seen) -> None:
    """Print a line of the table."""
    row, mark = seen.row, "FAIL" if seen.problems else "ok"
    first, end = "/".join(seen.first), "/".join(seen.end)
    cells = (mark.ljust(4), row.name, row.what, first, end, seen.codes, seen.digest[:12], seen.sentence[:150])
    print(*cells, sep=" | ", flush=True)
    for problem in seen.problems:
        print(f"       {problem}", flush=True)
    if seen.problems:
        print("       " + seen.text.replace("\n", "\n       "), flush=True)


def main() -> int:
    """Run what the command line asks for; the number of rows that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", metavar="NAME", choices=[row.name for row in ROWS])
    parser.add_argument("--drawn", type=int, default=0, metavar="N")
    parser.add_argument("--patience", type=float, default=1.0, metavar="FACTOR", help="for a machine that is slower")
    parser.add_argument("--seed", type=int, default=2026)
    parser.add_argument("--share", default="0/1", metavar="I/N", help="of the drawn runs, every Nth from I on")
    parser.add_argument("--undisturbed", type=int, default=0, metavar="N")
    text = "drawn and undisturbed runs with launchers that are forks of a process with torch: a tenth of the CPU"
    parser.add_argument("--preloaded", action="store_true", help=text)
    parser.add_argument("--draw", action="store_true", help="the rows of the tests")
    parser.add_argument("--torchrun", type=float, metavar="SECONDS", help="the rows with torchrun, watched so long")
    args = parser.parse_args()
    reason = namespaces.missing()
    if reason:
        print(f"network_faults.py needs root and iproute2: {reason}")
        return 0
    # A shell ignores it for what it runs in the background, and the launchers would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    failed = 0
    with namespaces.Hosts() as hosts, contextlib.ExitStack() as stack:
        servers = [Server(hosts, host) for host in (0, 1)] if args.preloaded else []
        for server in servers:
            stack.callback(server.close)
        compared = bool(args.undisturbed or args.drawn) or any(
            row.same_weights for row in ROWS if args.rows is None or row.name in args.rows
        )
        digest = undisturbed(hosts, args.patience) if compared and not args.torchrun else ""
        for number in range(args.undisturbed):
            try:
                seen_digest = undisturbed(hosts, args.patience, servers)
                if seen_digest != digest:
                    raise RuntimeError(f"an undisturbed run: {seen_digest} instead of {digest}")
            except RuntimeError as error:
                failed += 1
                print(error, flush=True)
            print(f"undisturbed run {number + 1} of {args.undisturbed}: {failed} failed", flush=True)
        draws, (first, step) = random.Random(args.seed), map(int, args.share.split("/"))
        rows = [drawn(draws, number) for number in range(args.drawn)][first::step]
        if not (args.drawn or args.undisturbed):
            names = DRAW if args.draw else args.rows
            rows = [row for row in ROWS if names is None or row.name in names]
        if args.torchrun:
            print("row | fault | first line (s) | end (s) | exit codes | weights | last error")
            for row in rows:
                print(torchrun(hosts, row, args.torchrun), flush=True)
            return failed
        print("     | row | fault | first sentence (s) | end or restart (s) | exit codes | weights | sentence")
        for row in rows:
            seen = check(hosts, row, digest, args.patience, servers)
            show(seen)
            failed += bool(seen.problems)
    print(f"{failed} failed")
    return failed


if __name__ == "__main__":
    sys.exit(main())
