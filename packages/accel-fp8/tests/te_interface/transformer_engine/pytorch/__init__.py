from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

calls: list[dict[str, Any]] = []


class Linear(nn.Module):
    def __init__(self, in_features, out_features, bias=True, params_dtype=None, device="cuda"):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        inner = nn.Linear(in_features, out_features, bias=bias, dtype=params_dtype, device=device)
        self.weight, self.bias = inner.weight, inner.bias

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


class LayerNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-5, params_dtype=None, device="cuda"):
        super().__init__()
        self.eps = eps
        inner = nn.LayerNorm(hidden_size, eps=eps, dtype=params_dtype, device=device)
        self.weight, self.bias = inner.weight, inner.bias

    def forward(self, x):
        return nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class TransformerLayer(nn.Module):
    pass


@contextmanager
def fp8_autocast(enabled=True, fp8_recipe=None, fp8_group=None) -> Iterator[None]:
    calls.append({"enabled": enabled, "recipe": fp8_recipe, "group": fp8_group})
    yield


def is_fp8_available(return_reason=False):
    return (False, "Device compute capability 8.9 or higher required for FP8 execution.")
