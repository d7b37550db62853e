"""Fitting into memory: retrying with smaller batches, and letting go of what is held."""

from __future__ import annotations

import functools
import gc
import inspect
from collections.abc import Callable
from typing import Any

from . import devices
from .errors import AccelError, ConfigurationError


class NoExecutableBatchSizeError(AccelError, RuntimeError):
    """The function ran out of memory at every batch size."""


def should_reduce_batch_size(exception: BaseException) -> bool:
    """Whether an exception says that memory ran out: of a device, in its libraries (cuDNN, cuBLAS), or of the host."""
    return any(devices.get(name).is_out_of_memory(exception) for name in devices.names())


def clear_device_cache(garbage_collection: bool = False) -> None:
    """Hand the memory that torch's allocator keeps in reserve back to the device.

    Args:
        garbage_collection: collect reference cycles first, which may hold tensors.
    """
    if garbage_collection:
        gc.collect()
    for device in devices.available():
        device.empty_cache()


def release_memory(*objects: Any) -> list[Any]:
    """Let go of objects and hand their device memory back.

    The caller's own names must be overwritten with the result::

        model, optimizer = release_memory(model, optimizer)

    Args:
        *objects: anything.

    Returns:
        As many Nones.
    """
    count = len(objects)
    # Else the tuple of arguments keeps the objects alive through the collection below.
    del objects
    clear_device_cache(garbage_collection=True)
    return [None] * count


def find_executable_batch_size(
    function: Callable[..., Any] | None = None,
    starting_batch_size: int = 128,
    reduce_batch_size_fn: Callable[..., int] | None = None,
) -> Any:
    """Decorator: call a function with ever smaller batch sizes until it does not run out of memory.

    The function takes the batch size as its first parameter; callers leave it out. What consumes device memory must be
    made inside it, or it cannot be let go between attempts. A later call starts from the batch size that worked last.
    With several processes, each decides for itself.

    Args:
        function: what to decorate; None to give the other arguments first.
        starting_batch_size: the first attempt.
        reduce_batch_size_fn: gives the next, smaller batch size; called with the last one if it has a parameter. None:
            half.

    Returns:
        The decorated function; it returns what ``function`` returns, and lets every other exception through as it is.

    Raises:
        TypeError: the function has no parameter for the batch size; or, at a call, the arguments do not fit behind it.
        NoExecutableBatchSizeError: at a call, memory ran out down to the smallest batch size.
        ConfigurationError: ``reduce_batch_size_fn`` gave a batch size that is not smaller.
    """
    if function is None:
        return functools.partial(
            find_executable_batch_size,
            starting_batch_size=starting_batch_size,
            reduce_batch_size_fn=reduce_batch_size_fn,
        )
    signature = inspect.signature(function)
    _check_takes_batch_size(function, signature)
    reduce = _with_parameter(reduce_batch_size_fn) if reduce_batch_size_fn is not None else _half
    first_batch_size = starting_batch_size

    @functools.wraps(function)
    def with_batch_size(*args: Any, **kwargs: Any) -> Any:
        nonlocal first_batch_size
        _check_arguments(function, signature, args, kwargs)
        batch_size, failure = first_batch_size, "none was tried"
        while batch_size > 0:
            try:
                result = function(batch_size, *args, **kwargs)
            except Exception as error:
                if not should_reduce_batch_size(error):
                    raise
                # Only its text: the exception holds the frames, and they the tensors, of the attempt.
                failure = f"at batch size {batch_size}: {error}"
            else:
                first_batch_size = batch_size
                return result
            # Out here, where the exception and with it the frames of the attempt are gone.
            clear_device_cache(garbage_collection=True)
            batch_size = _next(reduce, batch_size)
        raise NoExecutableBatchSizeError(
            f"No executable batch size found, reached zero: {function.__qualname__} ran out of memory at every batch "
            "size from "
            f"{first_batch_size} down. Make the model or its inputs smaller. The last failure, {failure}"
        )

    return with_batch_size


def _half(batch_size: int) -> int:
    return batch_size // 2


def _with_parameter(reduce: Callable[..., int]) -> Callable[[int], int]:
    """The same function with one parameter, which it may leave unused."""
    if inspect.signature(reduce).parameters:
        return reduce
    return lambda batch_size: reduce()


def _next(reduce: Callable[[int], int], batch_size: int) -> int:
    smaller = reduce(batch_size)
    if smaller >= batch_size:
        raise ConfigurationError(
            f"reduce_batch_size_fn gave {smaller} after {batch_size} ran out of memory; it must give a smaller one"
        )
    return smaller


def _check_takes_batch_size(function: Callable[..., Any], signature: inspect.Signature) -> None:
    try:
        signature.bind_partial(1)
    except TypeError:
        raise TypeError(
            f"{function.__qualname__}{signature} has no parameter for the batch size: find_executable_batch_size "
            "passes it as the first "
            f"positional argument. Declare it as {function.__name__}(batch_size, ...)."
        ) from None


def _check_arguments(
    function: Callable[..., Any], signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse a call that could never work, above all one that passes the batch size itself."""
    try:
        signature.bind(1, *args, **kwargs)
    except TypeError as error:
        given = [repr(value) for value in args[1:]] + [f"{key}={value!r}" for key, value in kwargs.items()]
        hint = (
            f"; if the batch size was passed, leave it out: {function.__name__}({', '.join(given)})"
            if args or kwargs
            else ""
        )
        raise TypeError(
            f"{function.__qualname__}{signature} cannot be called with these arguments behind the batch size, which "
            f"find_executable_batch_size adds as the first one ({error}){hint}"
        ) from None
