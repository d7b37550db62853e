"""A simulated GPU in the memory of the host, for tests of what GPUs demand of a program.

Importing this package adds the device type ``simgpu`` to torch, as a vendor's plug-in does: ``torch.simgpu`` with the
functions of ``torch.cuda``, and the backend ``simccl`` of torch.distributed. ``build_simgpu.py`` compiles it.

Environment variables: ``SIMGPU_DEVICES`` (number, 2), ``SIMGPU_VISIBLE_DEVICES`` ("0,1"), ``SIMGPU_MEMORY`` (bytes of
each, 8 GiB), ``SIMGPU_LATE`` (0: copies are not late), ``SIMGPU_REPORT`` (a file to which races are appended).
"""

import torch
from build_simgpu import BuildError, library

if not library().exists():
    raise BuildError("the simulated GPU has not been built: run python tests/device/build_simgpu.py")
torch.ops.load_library(str(library()))
torch.utils.rename_privateuse1_backend("simgpu")

from . import module  # noqa: E402 - the functions below need the name

torch._register_device_module("simgpu", module)  # the documented way for plug-ins, in spite of its name
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)

from . import process_group  # noqa: E402

process_group.register()
