"""An ssh daemon of our own on loopback, with a shim named ssh that goes to it without a password."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from accel_state.ports import reserved_port

from .slurm import find

SERVER = """\
Port {port}
ListenAddress 127.0.0.1
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/key.pub
PidFile {folder}/sshd.pid
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin yes
AcceptEnv *
Subsystem sftp internal-sftp
"""
CLIENT = """\
Host *
    HostName 127.0.0.1
    Port {port}
    IdentityFile {folder}/key
    UserKnownHostsFile /dev/null
    StrictHostKeyChecking no
    LogLevel ERROR
"""


def missing(*programs: str) -> str:
    """Why there can be no ssh here; empty where there can."""
    absent = [program for program in ("sshd", "ssh", "ssh-keygen", *programs) if find(program) is None]
    if absent:
        return f"{', '.join(absent)} not installed: scripts/components ssh"
    return "" if os.geteuid() == 0 else "an ssh daemon that lets in its own user needs root here"


class SshServer:
    """A running daemon; a context. Every host name leads to it, for programs that find ``bin`` first on their PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"

    def __enter__(self) -> SshServer:
        self._ports = contextlib.ExitStack()
        self.port = port = self._ports.enter_context(reserved_port())
        for name in ("host_key", "key"):
            command = [str(find("ssh-keygen")), "-q", "-t", "ed25519", "-N", "", "-f", str(self.folder / name)]
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
        for name, text in (("sshd_config", SERVER), ("ssh_config", CLIENT)):
            (self.folder / name).write_text(text.format(port=port, folder=self.folder))
        self.bin.mkdir()
        shim = self.bin / "ssh"
        # The first value of an option wins: pdsh asks for an answer within ten seconds.
        shim.write_text(
            f'#!/bin/sh\nexec {shutil.which("ssh")} -o ConnectTimeout=100 -F {self.folder}/ssh_config "$@"\n'
        )
        shim.chmod(0o755)
        # Debian's sshd wants this folder even where it does not use it.
        Path("/run/sshd").mkdir(exist_ok=True)
        with (self.folder / "sshd.log").open("wb") as log:
            command = [str(find("sshd")), "-D", "-e", "-f", str(self.folder / "sshd_config")]
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        self._wait(port)
        return self

    def _wait(self, port: int) -> None:
        deadline = time.monotonic() + 90
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                return
            except OSError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    self.__exit__()
                    raise RuntimeError(f"sshd did not come up: {(self.folder / 'sshd.log').read_text()}") from None
                time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)
        self._ports.close()
