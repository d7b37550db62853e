"""``python -m accel_track`` is ``accel track``, for where the launcher is not installed."""

from .commands.track import main

raise SystemExit(main())
