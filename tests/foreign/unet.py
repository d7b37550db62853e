"""A U-Net of no library, which the programs share."""

import torch
from torch import nn


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
