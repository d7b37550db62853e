"""Every private name of torch that this package uses; tests/test_torch_compat.py fails when torch drops one."""

from torch import nn

# Offloaded layers override this hook, and call torch's own: that of bitsandbytes requires the weight in memory.
# register_state_dict_post_hook replaces it where the base class can save a layer without its weight.
save_to_state_dict = nn.Module._save_to_state_dict
