"""``python -m accel_track``: the command ``accel track`` without the launcher."""

from .commands.track import main

raise SystemExit(main())
