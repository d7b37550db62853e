"""accel-bigmodel alone, with a U-Net of no library: loads are bit-equal wherever the weights are."""

import torch
from safetensors.torch import save_file
from unet import UNet

from accel_bigmodel import init_empty_weights, load_checkpoint_and_dispatch


def empty() -> UNet:
    """The model without memory for its parameters."""
    with init_empty_weights(include_buffers=False):
        return UNet().eval()


torch.manual_seed(0)
model = UNet().eval()
inputs = torch.randn(2, 3, 8, 8), torch.tensor([1.0, 5.0])
save_file(model.state_dict(), "unet.safetensors")
torch.save({"state_dict": model.state_dict(), "epoch": 3}, "train.bin")
with torch.no_grad():
    for place in ("cpu", "disk"):
        loaded = load_checkpoint_and_dispatch(empty(), "unet.safetensors", device_map={"": place})
        assert torch.equal(loaded(*inputs), model(*inputs)), place
    loaded = load_checkpoint_and_dispatch(empty(), "train.bin", device_map={"": "cpu"})
    assert torch.equal(loaded(*inputs), model(*inputs))
    print("U-Net on the CPU, on the disk and from a checkpoint of training: bit-equal")
    half = load_checkpoint_and_dispatch(empty(), "unet.safetensors", device_map={"": "cpu"}, dtype=torch.bfloat16)
    inputs = tuple(value.bfloat16() for value in inputs)
    assert torch.equal(half(*inputs), model.to(torch.bfloat16)(*inputs))
print("in bfloat16: bit-equal to model.to(bfloat16)")
