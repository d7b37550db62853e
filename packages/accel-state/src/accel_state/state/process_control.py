"""Doing something on one process, in order, or with a share of the data each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from ..splitting import share_of

F = TypeVar("F", bound=Callable[..., Any])


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Accept anything and return None."""


def skipped(function: Callable[..., Any]) -> Callable[..., None]:
    """A function of the same name and documentation that does nothing."""

    @wraps(function)
    def skip(*args: Any, **kwargs: Any) -> None:
        return do_nothing(*args, **kwargs)

    return skip


class ProcessControl:
    """Everything that follows from a rank and a world size; PartialState, AcceleratorState and Accelerator share it."""

    if TYPE_CHECKING:
        # Attributes in some of the classes, properties in others.
        @property
        def num_processes(self) -> int: ...
        @property
        def process_index(self) -> int: ...
        @property
        def local_process_index(self) -> int: ...

    def wait_for_everyone(self) -> None:
        """Return when every process has come here; at once in a single process."""
        raise NotImplementedError

    @property
    def use_distributed(self) -> bool:
        """Whether there is more than one process."""
        return self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """Whether this is rank 0."""
        return self.process_index == 0

    @property
    def is_local_main_process(self) -> bool:
        """Whether this is local rank 0, the first process of its node."""
        return self.local_process_index == 0

    @property
    def is_last_process(self) -> bool:
        """Whether this is the highest rank."""
        return self.process_index == self.num_processes - 1

    def on_main_process(self, function: F | None = None) -> Any:
        """Decorator: run the function on rank 0 only; elsewhere it returns None."""
        return self._only_if(self.is_main_process, function)

    def on_local_main_process(self, function: F | None = None) -> Any:
        """Decorator: run the function on the first process of each node only; elsewhere it returns None."""
        return self._only_if(self.is_local_main_process, function)

    def on_last_process(self, function: F) -> Any:
        """Decorator: run the function on the highest rank only; elsewhere it returns None."""
        return self._only_if(self.is_last_process, function)

    def on_process(self, function: F | None = None, process_index: int | None = None) -> Any:
        """Decorator: run the function on one rank only; elsewhere it returns None.

        Raises:
            ValueError: there is no such rank.
        """
        _check_index("process_index", process_index, self.num_processes)
        return self._only_if(self.process_index == process_index, function)

    def on_local_process(self, function: F | None = None, local_process_index: int | None = None) -> Any:
        """Decorator: run the function on one local rank of each node only; elsewhere it returns None.

        Raises:
            ValueError: there is no such local rank.
        """
        _check_index("local_process_index", local_process_index, self.num_processes)
        return self._only_if(self.local_process_index == local_process_index, function)

    @staticmethod
    def _only_if(chosen: bool, function: F | None) -> Any:
        def decorate(function: F) -> Callable[..., Any]:
            return function if chosen else skipped(function)

        return decorate if function is None else decorate(function)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Let rank 0 through the block before all others, for example to fill a cache that the others then read."""
        with self._goes_first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Let the first process of each node through the block before the others."""
        with self._goes_first(self.is_local_main_process):
            yield

    @contextmanager
    def _goes_first(self, first: bool) -> Iterator[None]:
        if not first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            # Also after an error: the others would wait for ever, and hide the traceback that explains it.
            if first:
                self.wait_for_everyone()

    @contextmanager
    def split_between_processes(self, inputs: Any, apply_padding: bool = False) -> Iterator[Any]:
        """Give each process its share of the inputs.

        Args:
            inputs: a list, tuple, tensor, array or data set; or a dictionary (or named tuple) of those, all of one
                length.
            apply_padding: repeat the last input where a process has one fewer than the others, so that results can be
                gathered; remove what the gathered results have too many.

        Yields:
            A contiguous share. Without padding the shares are an exact partition in the order of ranks, the first ones
            longer by one where the length does not divide evenly.

        Raises:
            TypeError: the inputs cannot be split.
            ValueError: the members of a dictionary differ in length, or there is nothing to pad with.
        """
        yield share_of(inputs, self.process_index, self.num_processes, apply_padding)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """`print`, once a node (on the local main process)."""
        if self.is_local_main_process:
            print(*args, **kwargs)


def _check_index(name: str, index: int | None, count: int) -> None:
    if index is None or not 0 <= index < count:
        raise ValueError(f"{name}={index!r} is not a process of this run. Allowed: 0 to {count - 1}.")
