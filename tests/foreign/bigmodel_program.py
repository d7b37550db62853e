"""accel-bigmodel alone, with a U-Net of no library: loads are bit-equal wherever the weights are."""

import torch
from safetensors.torch import save_file
from torch import nn

from accel_bigmodel import init_empty_weights, load_checkpoint_and_dispatch


class UNet(nn.Module):
    """Down, middle and up, with a skip connection and frequencies that no checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequencies", torch.exp(-torch.arange(8.0)), persistent=False)
        self.time = nn.Linear(16, 8)
        self.down, self.middle = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.up, self.out = nn.ConvTranspose2d(8, 8, 2, stride=2), nn.Conv2d(11, 3, 3, padding=1)

    def forward(self, image: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
        angles = step[:, None] * self.frequencies
        emb = self.time(torch.cat([angles.sin(), angles.cos()], dim=1))
        hidden = torch.relu(self.middle(torch.relu(self.down(image)) + emb[:, :, None, None]))
        return self.out(torch.cat([self.up(hidden), image], dim=1))


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
