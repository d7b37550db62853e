"""``python -m accel_checkpoint``: the command ``accel checkpoint`` without the launcher."""

from .commands.checkpoint import main

raise SystemExit(main())
