"""Sends the state of a replica to one that joins, between processes that have the token of the run.

It replaces torchft's own transport, which listens at all addresses and unpickles what it gets. Here tensors travel as
their bytes, and the rest in torch's format, which is read with ``weights_only``: reading runs no code.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import pickle
import socket
import threading
import time
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch
from torch import nn

from accel_checkpoint.safe_load import allowing_harmless
from accel_state import run_token
from accel_state.errors import ConfigurationError
from accel_state.ports import listen

logger: Final = logging.getLogger(__name__)  # for threads, which do not know the rank

_CONNECT_SECONDS = 10.0
_STEP_BYTES = _SIZE_BYTES = 8
# The description of a state lists its tensors. More than this is no description of a model.
_MOST_DESCRIPTION_BYTES = 1 << 30
_TENSOR = "accel_tensor"


class StateError(ConfigurationError):
    """A state that holds more than tensors and plain values, or that another replica does not have."""


def pack(value: Any) -> bytes:
    """Return a value in torch's format.

    Raises:
        StateError: :func:`unpack` would refuse it.
    """
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except Exception as error:  # values may be of any type, and raise anything
        raise StateError(f"it cannot be written: {type(error).__name__}: {error}") from error
    unpack(buffer.getvalue())
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """Return a value that :func:`pack` has written: tensors, plain values and containers of them.

    Raises:
        StateError: it holds objects of other types, whose reading could run code.
    """
    try:
        with allowing_harmless():
            return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
        raise StateError(
            "a state holds more than tensors, numbers, texts and containers of them, or is damaged; allow a class that "
            f"you trust with torch.serialization.add_safe_globals: {error}"
        ) from error


class _Placeholders:
    """Takes the tensors out of nested containers, and puts them back."""

    def __init__(self, tensors: list[torch.Tensor] | None = None) -> None:
        self.tensors: list[torch.Tensor] = [] if tensors is None else tensors

    def take_out(self, value: Any) -> Any:
        # Other kinds of tensors stay where they are: torch's format knows them.
        if type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided and not value.is_quantized:
            self.tensors.append(value.detach())
            return {_TENSOR: len(self.tensors) - 1}
        return self._rebuilt(value, self.take_out)

    def put_back(self, value: Any) -> Any:
        if type(value) is dict and value.keys() == {_TENSOR}:
            return self.tensors[value[_TENSOR]]
        return self._rebuilt(value, self.put_back)

    @staticmethod
    def _rebuilt(value: Any, change: Any) -> Any:
        if isinstance(value, dict) and hasattr(value, "copy"):
            changed = value.copy()  # keeps the type, and a default
            changed.update({key: change(item) for key, item in value.items()})
            return changed
        if type(value) in (list, tuple):
            return type(value)(change(item) for item in value)
        return value


class _Served(NamedTuple):
    """A state that is ready to be sent."""

    step: int
    description: bytes
    tensors: list[torch.Tensor]


class StateTransport:
    """torchft's interface of a checkpoint transport.

    Args:
        host: the address of this machine under which other replicas reach this one.
        token: of the run.
        timeout: how long a replica may take to ask for the state, or not read.
    """

    def __init__(self, host: str, token: bytes, timeout: timedelta) -> None:
        self._host, self._token, self._seconds = host, token, timeout.total_seconds()
        self._listener = listen(host, 0)
        self._changed = threading.Condition()
        self._served: _Served | None = None
        self._sending = 0
        self._is_closed = False
        self._unknown_peers: set[str] = set()
        threading.Thread(target=self._accept, name="accel state", daemon=True).start()

    def metadata(self) -> str:
        """Return where to get the state of this replica."""
        return f"{self._host}:{self._listener.getsockname()[1]}"

    # -- the replica that has the state ------------------------------------------------------------------------------

    def send_checkpoint(self, dst_ranks: list[int], step: int, state_dict: Any, timeout: timedelta) -> None:
        """Send a state to the replicas that ask for it, until :meth:`disallow_checkpoint`."""
        found = _Placeholders()
        rest = pack(found.take_out(state_dict))
        tensors = [tensor.resolve_conj().resolve_neg().cpu().contiguous() for tensor in found.tensors]
        listed = [(str(tensor.dtype).removeprefix("torch."), list(tensor.shape)) for tensor in tensors]
        head = json.dumps({"tensors": listed, "rest": len(rest)}).encode()
        with self._changed:
            self._served = _Served(step, len(head).to_bytes(_SIZE_BYTES, "big") + head + rest, tensors)
            self._changed.notify_all()

    def disallow_checkpoint(self) -> None:
        """Wait until the state is sent to those that asked for it: it is about to change."""
        with self._changed:
            self._served = None
            if not self._changed.wait_for(lambda: not self._sending, self._seconds):
                raise TimeoutError(f"the state was not sent within {self._seconds:g} s")

    def shutdown(self, wait: bool = True) -> None:
        """Cease to listen."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # close alone does not wake accept
        self._listener.close()

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                continue
            threading.Thread(target=self._serve, args=(connection,), name="accel state", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                run_token.accept(connection, self._token, _CONNECT_SECONDS)
                step = int.from_bytes(run_token.receive(connection, _STEP_BYTES), "big")
                connection.settimeout(self._seconds)
                self._send(connection, step)
            except run_token.TokenError:
                self._warn(str(connection.getpeername()[0]), "asked for the state of this replica")
            except OSError as error:
                logger.debug("a state was not sent: %s", error)

    def _send(self, connection: socket.socket, step: int) -> None:
        with self._changed:
            # The other replica may ask before this one has noticed that it must send something.
            self._changed.wait_for(lambda: self._served is not None or self._is_closed, self._seconds)
            served = self._served
            if served is None or served.step != step:
                return  # which ends the connection
            self._sending += 1
        try:
            connection.sendall(served.description)
            for tensor in served.tensors:
                connection.sendall(_bytes_of(tensor))
        finally:
            with self._changed:
                self._sending -= 1
                self._changed.notify_all()

    # -- the replica that joins --------------------------------------------------------------------------------------

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        """Get the state of another replica.

        Args:
            src_rank: the rank of the other replica.
            metadata: its :meth:`metadata`.
            step: of the state.
            timeout: how long the other replica may take for each part.

        Raises:
            StateError: it does not have the token of the run, or not the state of this step; or its state holds more
                than tensors and plain values.
            OSError: it cannot be reached.
        """
        host, _, port = metadata.rpartition(":")
        if not port.isdecimal():
            raise StateError(f"{metadata!r} is not where a replica of this run sends its state")
        began = time.monotonic()
        try:
            connection = run_token.connect((host.strip("[]"), int(port)), self._token, _CONNECT_SECONDS)
        except run_token.TokenError:
            self._warn(metadata, "offered its state to this replica")
            raise
        with connection:
            connection.settimeout(timeout.total_seconds())
            connection.sendall(step.to_bytes(_STEP_BYTES, "big"))
            state = self._receive(connection, step)
        logger.debug("the state of step %d came in %.3f s", step, time.monotonic() - began)
        return state

    def _receive(self, connection: socket.socket, step: int) -> Any:
        try:
            size = int.from_bytes(run_token.receive(connection, _SIZE_BYTES), "big")
        except ConnectionError:
            raise StateError(f"the other replica does not have the state of step {step}") from None
        if size > _MOST_DESCRIPTION_BYTES:
            raise StateError(f"the description of a state has {size} bytes")
        head = json.loads(run_token.receive(connection, size))
        rest = run_token.receive(connection, int(head["rest"]))
        tensors = [torch.empty(shape, dtype=_dtype(name)) for name, shape in head["tensors"]]
        for tensor in tensors:
            run_token.receive_into(connection, _bytes_of(tensor))
        return _Placeholders(tensors).put_back(unpack(rest))

    def _warn(self, address: str, what: str) -> None:
        if address not in self._unknown_peers:
            self._unknown_peers.add(address)
            logger.warning(
                "%s, which does not have the token of this run (%s), %s. It was refused.",
                address,
                run_token.VARIABLE,
                what,
            )


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    return tensor.view(-1).view(torch.uint8).numpy().data if tensor.numel() else memoryview(b"")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise StateError(f"{name!r} is not a type of tensors")
    return dtype
