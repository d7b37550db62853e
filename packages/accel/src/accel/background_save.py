"""A save that goes on beside the training loop."""

from __future__ import annotations

import threading

from accel_state import get_logger

from .agreement import Alone, StoreAgreement
from .state_writing import StateWriter

logger = get_logger(__name__)


class BackgroundSave:
    """One save in a thread of its own.

    The interpreter waits for the thread before it ends. An error is logged at once, and raised by the first :meth:`wait`.

    Args:
        writer: what is to be written.
        agreement: how the ranks agree.
        number: the checkpoint's.
    """

    def __init__(self, writer: StateWriter, agreement: StoreAgreement | Alone, number: int) -> None:
        self.writer = writer
        self.number = number
        self._agreement = agreement
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"accel-save-{number}", daemon=False)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Return when it has ended.

        Raises:
            CheckpointError: it failed on some rank.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self.writer.finish(self._agreement)
        except BaseException as error:
            self._error = error
            logger.error("the state could not be saved to %s: %s", self.writer.folder.target, error, main_process_only=False)
        finally:
            self._agreement.leave()
