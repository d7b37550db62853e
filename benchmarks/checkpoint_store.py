"""Sending and fetching files with an S3 server on this machine, relative to the store's own client (boto3).

    python benchmarks/checkpoint_store.py [--megabytes 192] [--server weed] [--rounds 5]

"files" are four of a quarter of the size, "file" is one. boto3 transfers with its defaults, the four files at once.
Both run in one process next to the server, so this measures the work of the clients more than a link.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import _measure

from accel_state.storage.store import Store
from accel_state.storage.url import RemotePath

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "packages" / "accel-checkpoint" / "tests" / "support"))
TARGET = 1 / 0.9


def main(megabytes: int, server: str, rounds: int) -> None:
    """Print the table."""
    from s3_server import client, has_server, s3_server

    if not has_server(server):
        sys.exit(f"{server} is not installed. scripts/test --setup-only installs it.")
    with tempfile.TemporaryDirectory(prefix="checkpoint-store-") as folder, s3_server(server):
        own, store, target = client(), Store(RemotePath("s3://bucket/ours")), Path(folder, "fetched")
        target.mkdir()
        for label, count in (("files", 4), ("file", 1)):
            names = [f"{label}-{number}" for number in range(count)]
            for name in names:
                Path(folder, name).write_bytes(os.urandom(megabytes * 2**20 // count))

            def each(call: Callable[[str], None], names: list[str] = names) -> None:
                with ThreadPoolExecutor(len(names)) as pool:
                    list(pool.map(call, names))

            def put(name: str) -> None:
                own.upload_file(f"{folder}/{name}", "bucket", f"theirs/{name}")

            def get(name: str) -> None:
                own.download_file("bucket", f"theirs/{name}", f"{target}/{name}")

            variants: dict[str, Callable[[], None]] = {
                "put": lambda each=each: each(put),
                "ours put": lambda names=names: store.upload([(Path(folder, name), name) for name in names]),
                "get": lambda each=each: each(get),
                "ours get": lambda names=names: store.download([(name, target / name) for name in names]),
            }
            for name in ("put", "ours put"):
                variants[name]()  # what is fetched must be there
            times = _measure.in_turns(variants, rounds, warm_up=1, clock=time.perf_counter)
            assert all((target / name).read_bytes() == Path(folder, name).read_bytes() for name in names)
            _measure.heading(f"{megabytes} MiB in {count} file{'s' if count > 1 else ''}, {server}")
            for what in ("put", "get"):
                ratio = _measure.ratio(times, f"ours {what}", what)
                speed = megabytes / sorted(times[what])[len(times[what]) // 2]
                note = f"boto3: {speed:.0f} MiB/s; target: at most {TARGET:.2f}: {_measure.verdict(ratio, TARGET)}"
                _measure.row(f"{what}, relative to boto3", f"{ratio:.3f} x", note)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=192, help="bytes of each transfer, in MiB")
    parser.add_argument("--server", default="weed", choices=("weed", "rclone", "moto"), help="kind of server")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds")
    chosen = parser.parse_args()
    main(chosen.megabytes, chosen.server, chosen.rounds)
