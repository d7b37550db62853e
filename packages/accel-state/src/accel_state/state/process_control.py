"""Running code on one process, in order, or with a share of the inputs per process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from numbers import Integral
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, overload

from ..arguments import check_flag
from ..splitting import share_of

T = TypeVar("T")
P = ParamSpec("P")


class RunsOnSome(Protocol):
    """A decorator of functions that run on some processes, and return None on the others."""

    def __call__(self, function: Callable[P, T], /) -> Callable[P, T | None]: ...


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """Accept anything and return None."""


def skipped(function: Callable[..., Any]) -> Callable[..., None]:
    """Return a function with the same name and docstring that does nothing."""

    @wraps(function)
    def skip(*args: Any, **kwargs: Any) -> None: ...

    return skip


class ProcessControl:
    """Methods derived from rank and world size, shared by PartialState and AcceleratorState."""

    if TYPE_CHECKING:
        # Attributes in some of the classes, properties in others.
        @property
        def num_processes(self) -> int: ...
        @property
        def process_index(self) -> int: ...
        @property
        def local_process_index(self) -> int: ...

        stands_by: bool

    def wait_for_everyone(self) -> None:
        """Wait until every process has reached this call; returns at once in a single process."""
        raise NotImplementedError

    @property
    def use_distributed(self) -> bool:
        """True if there is more than one process."""
        return self.num_processes > 1

    @property
    def is_main_process(self) -> bool:
        """True if this is rank 0."""
        return self.process_index == 0 and not self.stands_by

    @property
    def is_local_main_process(self) -> bool:
        """True if this is local rank 0, the first process of its node."""
        return self.local_process_index == 0 and not self.stands_by

    @property
    def is_last_process(self) -> bool:
        """True if this is the highest rank."""
        return self.process_index == self.num_processes - 1

    @overload
    def on_main_process(self, function: Callable[P, T]) -> Callable[P, T | None]: ...
    @overload
    def on_main_process(self, function: None = None) -> RunsOnSome: ...
    def on_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Run the decorated function on rank 0 only; elsewhere it returns None."""
        return self._only_if(self.is_main_process, function)

    @overload
    def on_local_main_process(self, function: Callable[P, T]) -> Callable[P, T | None]: ...
    @overload
    def on_local_main_process(self, function: None = None) -> RunsOnSome: ...
    def on_local_main_process(self, function: Callable[..., Any] | None = None) -> Any:
        """Run the decorated function on the first process of each node only; elsewhere it returns None."""
        return self._only_if(self.is_local_main_process, function)

    def on_last_process(self, function: Callable[P, T]) -> Callable[P, T | None]:
        """Run the decorated function on the highest rank only; elsewhere it returns None."""
        decorated: Callable[P, T | None] = self._only_if(self.is_last_process, function)
        return decorated

    @overload
    def on_process(self, function: Callable[P, T], process_index: int | None = None) -> Callable[P, T | None]: ...
    @overload
    def on_process(self, function: None = None, process_index: int | None = None) -> RunsOnSome: ...
    def on_process(self, function: Callable[..., Any] | None = None, process_index: int | None = None) -> Any:
        """Run the decorated function on one rank only; elsewhere it returns None.

        Args:
            function: the function to decorate; None to pass the rank first: ``@on_process(process_index=1)``.
            process_index: the rank that runs it, counted over all machines from 0.

        Returns:
            The function, or on other ranks one that does nothing and returns None.

        Raises:
            ValueError: there is no such rank.
        """
        _check_index("process_index", process_index, self.num_processes)
        return self._only_if(self.process_index == process_index, function)

    @overload
    def on_local_process(
        self, function: Callable[P, T], local_process_index: int | None = None
    ) -> Callable[P, T | None]: ...
    @overload
    def on_local_process(self, function: None = None, local_process_index: int | None = None) -> RunsOnSome: ...
    def on_local_process(
        self, function: Callable[..., Any] | None = None, local_process_index: int | None = None
    ) -> Any:
        """Run the decorated function on one local rank of each node only; elsewhere it returns None."""
        _check_index("local_process_index", local_process_index, self.num_processes)
        return self._only_if(self.local_process_index == local_process_index, function)

    @staticmethod
    def _only_if(chosen: bool, function: Callable[..., Any] | None) -> Any:
        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            return function if chosen else skipped(function)

        return decorate if function is None else decorate(function)

    @contextmanager
    def main_process_first(self) -> Iterator[None]:
        """Run the block on rank 0 before all other ranks, for example to fill a cache that they read."""
        with self._goes_first(self.is_main_process):
            yield

    @contextmanager
    def local_main_process_first(self) -> Iterator[None]:
        """Run the block on the first process of each node before the others."""
        with self._goes_first(self.is_local_main_process):
            yield

    @contextmanager
    def _goes_first(self, first: bool) -> Iterator[None]:
        if not first:
            self.wait_for_everyone()
        try:
            yield
        finally:
            # Also after an error: otherwise all other ranks wait until the timeout, which hides the traceback.
            if first:
                self.wait_for_everyone()

    @contextmanager
    def split_between_processes(self, inputs: T, apply_padding: bool = False) -> Iterator[T]:
        """Give each process its share of the inputs.

        Args:
            inputs: a list, tuple, tensor, array or data set; or a dictionary or named tuple of those, of equal lengths.
            apply_padding: repeat the last input on processes with one input fewer, so that results can be gathered;
                the caller removes the duplicates.

        Yields:
            A contiguous share, in rank order. Without padding the shares are a partition of the inputs; the first ranks
            have one input more if the length is not a multiple of the world size.

        Raises:
            TypeError: the inputs cannot be split.
            ValueError: the members of a dictionary differ in length, or the inputs to pad are empty.
        """
        check_flag("apply_padding", apply_padding)
        yield share_of(inputs, self.process_index, self.num_processes, apply_padding)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Call `print` once per node (on the local main process)."""
        if self.is_local_main_process:
            print(*args, **kwargs)


def _check_index(name: str, index: int | None, count: int) -> None:
    if not isinstance(index, Integral) or not 0 <= index < count:
        raise ValueError(f"{name}={index!r} is not a rank of this run. Allowed: 0 to {count - 1}.")
