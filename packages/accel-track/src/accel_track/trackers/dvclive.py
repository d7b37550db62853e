"""DVCLive."""

from __future__ import annotations

from typing import Any, ClassVar

from ..images import as_images
from ..sdk_tracker import SdkTracker
from ..serialize import as_number, flatten, to_plain


class DVCLiveTracker(SdkTracker):
    """Writes files for DVC: ``dvclive/metrics.json``, ``params.yaml`` and ``plots/``.

    Args:
        run_name: ignored, because DVC names experiments after ``exp_name``.
        live: an existing ``dvclive.Live`` to log to.
        **kwargs: arguments of ``dvclive.Live``.
    """

    name = "dvclive"
    module: ClassVar[str] = "dvclive"
    handle: ClassVar[str] = "live"
    id_attribute: ClassVar[str] = "dir"
    finish_method: ClassVar[str] = "end"

    def __init__(self, run_name: str | None = None, live: Any = None, **kwargs: Any) -> None:
        super().__init__(run_name, **kwargs)
        self.live: Any = live
        self._given = live is not None

    def start(self) -> None:
        if not self._given:
            resumed = {} if self._resumed_id is None else {"dir": self._resumed_id, "resume": True}
            self.live = self._sdk().Live(**{**resumed, **self._kwargs})

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.live.log_params(_without_none(to_plain(values)))

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log values of a step; ``kwargs`` go to ``Live.log_metric``."""
        if step is not None:
            self.live.step = step
        for name, value in flatten(values, "/").items():
            number = as_number(value)
            if number is None and not isinstance(value, str):
                self._numbers({name: value})  # warns that it is skipped
                continue
            self.live.log_metric(name, value if number is None else number, **kwargs)
        self.live.next_step()

    def log_images(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        """Log images of a step as ``plots/images/<name>/<index>.png``."""
        for name, value in values.items():
            for index, image in enumerate(as_images(value)):
                self.live.log_image(
                    f"{name}/{0 if step is None else step}_{index}.png",
                    image[..., 0] if image.shape[-1] == 1 else image,
                )

    def log_artifact(self, local_path: str, artifact_path: str | None = None, **kwargs: Any) -> None:
        """Store a file as a DVC artifact; ``kwargs`` go to ``Live.log_artifact``."""
        self.live.log_artifact(local_path, **kwargs)


def _without_none(value: Any) -> Any:
    """Replace None, which DVC does not accept."""
    if isinstance(value, dict):
        return {name: _without_none(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    return "None" if value is None else value
