"""The interface of trackers."""

from __future__ import annotations

from typing import Any, ClassVar

from accel_state.errors import AccelError, ConfigurationError

REQUIRED = ("name", "requires_logging_directory", "tracker")


class TrackerError(AccelError, RuntimeError):
    """A tracker could not start, log or finish. Raised in strict mode only; otherwise it is a warning."""


class IncompleteTrackerError(ConfigurationError, NotImplementedError):
    """A tracker class lacks an attribute that it must define."""


class GeneralTracker:
    """Base class of trackers, including custom ones.

    A subclass defines ``name``, ``requires_logging_directory`` and a property ``tracker``, and overrides the methods
    below that it needs. To accept images, tables or files it adds ``log_images(values, step)``,
    ``log_table(table_name, columns, data, dataframe, step)`` or ``log_artifact(local_path, artifact_path)``.

    :class:`accel_track.TrackerRun` creates the object in the script's thread, and calls its methods in a separate
    thread, one at a time, in the order of the script's calls.

    Attributes:
        name: the tracker's name in ``log_with``, ``init_kwargs`` and ``get_tracker``.
        requires_logging_directory: whether the constructor takes ``logging_dir``.
        main_process_only: False creates a tracker on every rank.
        background: False calls the methods in the script's thread, for libraries that require it. The script then waits
            for every call.
        failed: whether the script ended with an exception; set before ``finish``.

    Raises:
        IncompleteTrackerError: the class lacks ``name``, ``requires_logging_directory`` or ``tracker``.
    """

    name: str
    requires_logging_directory: bool
    main_process_only: ClassVar[bool] = True
    background: ClassVar[bool] = True
    failed: bool = False

    def __init__(self, _blank: bool = False) -> None:
        missing = [] if _blank else [attribute for attribute in REQUIRED if not _has(self, attribute)]
        if missing:
            raise IncompleteTrackerError(
                f"the tracker class {type(self).__name__} lacks {', '.join(missing)}. Define name and "
                "requires_logging_directory in the class, and tracker as a property."
            )

    @classmethod
    def is_available(cls) -> bool:
        """Return True if the library of this tracker is installed."""
        return True

    @property
    def run_id(self) -> str | None:
        """Identifier of the run at the back end, once started; None if runs cannot be resumed."""
        return None

    def resume(self, run_id: str, step: int | None = None) -> None:
        """Make the next :meth:`start` continue an earlier run.

        Args:
            run_id: :attr:`run_id` of that run.
            step: the last step to keep; later steps of an interrupted job are logged again.

        Raises:
            ConfigurationError: this tracker cannot resume runs.
        """
        raise ConfigurationError(
            f"the tracker {self.name!r} cannot continue the run {run_id!r}: its class has no resume() method."
        )

    def discard(self) -> None:
        """End an empty run that is replaced by a resumed one; back ends that can do so delete it."""
        self.finish()

    def start(self) -> None:
        """Begin a run."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Store the hyperparameters of the run.

        Args:
            values: names to values of any type, possibly nested.
        """

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values of a step.

        Args:
            values: names to numbers, strings, tensors (copied to host memory when the script logged them) or nested
                dictionaries.
            step: the step.
            **kwargs: the script's ``log_kwargs`` for this tracker.
        """

    def finish(self) -> None:
        """Deliver everything and end the run."""


class Silence(GeneralTracker):
    """Null object in place of a tracker on ranks that do not log, and of a disabled tracker.

    All its methods and attributes accept anything and do nothing.
    """

    requires_logging_directory = False

    def __init__(self, name: str = "silence") -> None:
        self.name = name
        super().__init__(_blank=True)

    @property
    def tracker(self) -> Any:
        """Itself."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Silence(name)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Accept anything and return None."""


def _has(tracker: object, attribute: str) -> bool:
    # Properties are looked up without reading them, because they may need what the constructor has not set yet.
    classes = [cls for cls in type(tracker).__mro__ if cls is not GeneralTracker]
    return attribute in vars(tracker) or any(attribute in vars(cls) for cls in classes)
