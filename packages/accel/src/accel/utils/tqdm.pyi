"""Progress bars, under the module path that other libraries know."""

from accel_state.progress import tqdm as tqdm
