"""Public names of accel_monitor; also read at run time."""

from .ledger import Ledger as Ledger
from .ledger import make_ledger as make_ledger
from .monitor import Monitor as Monitor
from .monitor import attach as attach
from .parts import Part as Part
from .records import Attempt as Attempt
from .records import Run as Run
from .records import read_runs as read_runs
