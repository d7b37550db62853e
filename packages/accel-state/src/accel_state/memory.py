"""Retrying with smaller batches after running out of memory, and releasing memory."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, overload

from . import devices
from .arguments import check_number
from .errors import AccelError, ConfigurationError

T = TypeVar("T")
P = ParamSpec("P")


class NoExecutableBatchSizeError(AccelError, RuntimeError):
    """The function ran out of memory at every batch size."""


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Return True if an exception reports that a device, a library of it (cuDNN, cuBLAS) or the host ran out of memory.

    That is every RuntimeError with "out of memory" in its message, and the messages known of each device.
    """
    if isinstance(exception, RuntimeError) and "out of memory" in str(exception):
        return True
    return any(device.is_out_of_memory(exception) for device in devices.known())


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Return the memory that torch's allocators have cached to the devices.

    Args:
        garbage_collection: first collect reference cycles, which may hold tensors.
    """
    if garbage_collection:
        gc.collect()
    for device in devices.known():
        if device.caches_memory and device.is_available():
            device.empty_cache()


def release_memory(*objects: Any) -> list[Any]:
    """Release objects and their device memory. Overwrite the caller's variables with the result::

        model, optimizer = release_memory(model, optimizer)

    Returns:
        One None for each object.
    """
    count = len(objects)
    del objects  # this tuple would keep them alive
    clear_device_cache(garbage_collection=True)
    return [None] * count


class TakesBatchSize(Protocol):
    """A decorator of functions whose first parameter is the batch size, which callers omit."""

    def __call__(self, function: Callable[Concatenate[int, P], T], /) -> Callable[P, T]: ...


@overload
def find_executable_batch_size(
    function: Callable[Concatenate[int, P], T],
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> Callable[P, T]: ...
@overload
def find_executable_batch_size(
    function: None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> TakesBatchSize: ...
def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> Any:
    """Call the decorated function with smaller and smaller batch sizes until it fits into memory.
    The function takes the batch size as its first parameter, which callers omit. It must create everything that uses
    device memory itself, so that the memory can be released between attempts. A later call starts with the batch size
    that worked last. In a distributed run all ranks must call it; they take the same batch size, the largest that
    fits on every rank, and results of an attempt that ran out of memory on another rank are dropped.

    Args:
        function: the function to decorate; None to pass the other arguments first.
        starting_batch_size: batch size of the first attempt.
        reduce_batch_size_fn: returns the next, smaller batch size; called with the last one if it has a parameter. None
            multiplies it by 0.9 and rounds down: 128, 115, 103, ...

    Returns:
        The decorated function. Exceptions other than out-of-memory errors pass through it.

    Raises:
        TypeError: the function has no parameter for the batch size; or, at a call, the other arguments do not fit.
        NoExecutableBatchSizeError: at a call, every batch size ran out of memory; or one ran out of memory on this rank
            while the others wait for it in a collective.
        ConfigurationError: ``reduce_batch_size_fn`` returned a batch size that is not smaller.

    Examples:
        >>> @find_executable_batch_size(starting_batch_size=64)
        ... def train(batch_size):
        ...     if batch_size > 32:
        ...         raise torch.OutOfMemoryError("out of memory")
        ...     return batch_size
        >>> train()
        32
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    signature = inspect.signature(function)
    try:
        signature.bind_partial(1)
    except TypeError:
        raise TypeError(
            f"{function.__qualname__}{signature} has no parameter for the batch size: find_executable_batch_size "
            f"passes it as the first positional argument. Declare it as {function.__name__}(batch_size, ...)."
        ) from None
    reduce: Callable[..., int] = reduce_batch_size_fn or (lambda batch_size: batch_size * 9 // 10)
    takes_last = bool(inspect.signature(reduce).parameters)
    first_batch_size = int(check_number("starting_batch_size", starting_batch_size, whole=True))

    @functools.wraps(function)
    def with_batch_size(*args: Any, **kwargs: Any) -> Any:
        nonlocal first_batch_size
        _check_arguments(function, signature, args, kwargs)
        batch_size, failure = first_batch_size, "none was tried"
        while batch_size > 0:
            own = ""
            try:
                result = function(batch_size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
                # Keep the text only: the exception references the frames, and with them the tensors, of the attempt.
                own = f"at batch size {batch_size}: {error}"
            # Outside the except block, where the exception and its frames are gone.
            if own:
                clear_device_cache(garbage_collection=True)
            failures = _failures_of_ranks(own, function.__qualname__, batch_size)
            if not any(failures):
                first_batch_size = batch_size
                return result
            if not own:
                del result
                clear_device_cache(garbage_collection=True)
            failure = next(filter(None, failures))
            smaller = reduce(batch_size) if takes_last else reduce()
            if smaller >= batch_size:
                raise ConfigurationError(
                    f"reduce_batch_size_fn returned {smaller} after {batch_size} ran out of memory; it must return a "
                    "smaller batch size"
                )
            batch_size = smaller
        raise NoExecutableBatchSizeError(
            f"No executable batch size found, reached zero: {function.__qualname__} ran out of memory at every batch "
            f"size from {first_batch_size} down. Make the model or its inputs smaller. The last failure, {failure}"
        )

    return with_batch_size


def _failures_of_ranks(failure: str, name: str, batch_size: int) -> list[str]:
    """Return how an attempt ended on each rank, so that all take the same batch size next."""
    from .attempts import outcomes_of_ranks

    try:
        return outcomes_of_ranks(failure)
    except RuntimeError as error:
        if not failure:
            raise
        raise NoExecutableBatchSizeError(
            f"{name} ran out of memory on this rank only, {failure}\nThe other ranks wait for it in a collective, so "
            f"that no batch size below {batch_size} can be tried: {error}\nStart with a smaller starting_batch_size, "
            "or give all ranks inputs of the same size."
        ) from None


def _check_arguments(
    function: Callable[..., Any], signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Reject a call with wrong arguments, in particular one that passes the batch size."""
    try:
        signature.bind(1, *args, **kwargs)
    except TypeError as error:
        hint = ""
        if args or kwargs:
            given = [repr(value) for value in args[1:]] + [f"{key}={value!r}" for key, value in kwargs.items()]
            hint = f"; if the batch size was passed, leave it out: {function.__name__}({', '.join(given)})"
        raise TypeError(
            f"{function.__qualname__}{signature} cannot be called with these arguments after the batch size, which "
            f"find_executable_batch_size passes as the first one ({error}){hint}"
        ) from None
