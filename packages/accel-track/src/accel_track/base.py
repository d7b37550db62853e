"""What a tracker is."""

from __future__ import annotations

from typing import Any, ClassVar

from accel_state.errors import AccelError, ConfigurationError

REQUIRED = ("name", "requires_logging_directory", "tracker")


class TrackerError(AccelError, RuntimeError):
    """A tracker could not start, log or finish. Raised in strict mode only; otherwise it is a warning."""


class GeneralTracker:
    """Base class of trackers: of those in this package, and of your own.

    A subclass has a ``name``, says whether it ``requires_logging_directory``, has a property ``tracker``, and overrides
    what it has a use for of the methods below. One that can hold images, tables or files has ``log_images(values,
    step)``, ``log_table(table_name, columns, data, dataframe, step)`` or ``log_artifact(local_path, artifact_path)`` as
    well.

    :class:`accel_track.Tracking` makes the object in the script's thread, and calls the methods in a thread of the
    tracker's own, in the order of the script's calls and never two at a time.

    Attributes:
        name: how ``log_with``, ``init_kwargs`` and ``get_tracker`` call it.
        requires_logging_directory: whether the constructor takes ``logging_dir``.
        main_process_only: False gives every rank a tracker of its own.
        background: False has the methods called in the script's thread, for libraries that insist on one thread. A call
            then takes as long as it takes.
        failed: whether the script ended with an exception; set before ``finish``.

    Raises:
        ConfigurationError: the class lacks one of ``name``, ``requires_logging_directory`` and ``tracker``.
    """

    name: str
    requires_logging_directory: bool
    main_process_only: ClassVar[bool] = True
    background: ClassVar[bool] = True
    failed: bool = False

    def __init__(self, _blank: bool = False) -> None:
        missing = [] if _blank else [attribute for attribute in REQUIRED if not _has(self, attribute)]
        if missing:
            raise ConfigurationError(
                f"the tracker class {type(self).__name__} lacks {', '.join(missing)}. Define name and "
                "requires_logging_directory in the "
                "class, and tracker as a property."
            )

    @classmethod
    def is_available(cls) -> bool:
        """Whether the library of this tracker is installed."""
        return True

    @property
    def run_id(self) -> str | None:
        """What names the run at the back end, once started; None where runs cannot be continued."""
        return None

    def resume(self, run_id: str, step: int | None = None) -> None:
        """Have the next :meth:`start` continue a run.

        Args:
            run_id: an earlier :attr:`run_id`.
            step: the last step that the run keeps; what an interrupted job logged after it is logged anew.

        Raises:
            ConfigurationError: this tracker cannot continue runs.
        """
        raise ConfigurationError(
            f"the tracker {self.name!r} cannot continue the run {run_id!r}: its class has no resume()."
        )

    def discard(self) -> None:
        """End a run that holds nothing yet, in favour of the one that is resumed; back ends that can, delete it."""
        self.finish()

    def start(self) -> None:
        """Begin a run."""

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Keep the hyperparameters of the run.

        Args:
            values: names to values of any kind, nested or not.
        """

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Keep values of a step.

        Args:
            values: names to numbers, texts, tensors (in host memory, as they were when the script logged them) or
                nested dictionaries.
            step: the step they belong to.
            **kwargs: what the script gave as ``log_kwargs`` for this tracker.
        """

    def finish(self) -> None:
        """End the run, and deliver what is left."""


class Silence(GeneralTracker):
    """Stands in for a tracker where it does not run: every method and attribute of it does nothing.

    That is on ranks that do not log, and anywhere after the tracker was set aside.
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
    # A property may need what the constructor has yet to set, so it is looked for rather than read.
    return attribute in vars(tracker) or any(
        attribute in vars(cls) for cls in type(tracker).__mro__ if cls is not GeneralTracker
    )
