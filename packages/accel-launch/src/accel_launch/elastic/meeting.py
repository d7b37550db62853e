"""The board of machines that have met through torch's rendezvous (c10d), which assigns their ranks."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Mapping

from torch.distributed.elastic.rendezvous import RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError

from ..network.board import Board
from ..network.contact import say, token_of_run
from ..network.hub import Hub
from ..network.member import Member
from ..network.records import Machine, State
from ..ports import listening_host

_BOARD_KEY = "accel/port_of_board"
# Those that torch's rendezvous has brought together connect within moments.
_JOIN_SECONDS = 60.0


def join_others(info: RendezvousInfo, local_processes: int, give_up_seconds: float, facts: Mapping[str, str]) -> Board:
    """The board of this meeting, once all machines are on it.

    The machine of rank 0 listens on a free port, where the others reach it, and tells it through the store.

    Raises:
        ConfigurationError: the machines disagree.
        RendezvousTimeoutError: not all machines have connected.
    """
    board = _join(info, local_processes, give_up_seconds, facts)
    try:
        board.wait(lambda: board.refusal is not None or len(board.machines()) == info.world_size, _JOIN_SECONDS)
        board.raise_if_refused()
        if len(board.machines()) < info.world_size:
            problem = board.problem if isinstance(board, Member) and not board.met else "other machines are missing"
            raise RendezvousTimeoutError(f"the launchers did not connect to each other: {problem}")
    except BaseException:
        board.close()
        raise
    return board


def _join(info: RendezvousInfo, local_processes: int, give_up_seconds: float, facts: Mapping[str, str]) -> Board:
    place = info.bootstrap_store_info
    assert place is not None
    me = Machine(
        info.rank, uuid.uuid4().hex, socket.gethostname(), local_processes, facts=facts, round=0, state=State.RUNNING
    )
    if info.rank == 0:
        hub = Hub(me, listening_host(place.master_addr), 0, token_of_run(), info.world_size, give_up_seconds, say)
        info.store.set(_BOARD_KEY, str(hub.port))
        return hub
    port = int(info.store.get(_BOARD_KEY))
    return Member(me, (place.master_addr, port), token_of_run(), give_up_seconds, say)
