"""accel-fp8 alone, with a loop of an MLP that learns from another: each scaling ends within 1% of bfloat16."""

import statistics
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from accel_fp8 import FP8Recipe, autocast, convert, has_native_layers, restore_native

STEPS, TOLERANCE = 150, 0.01


def mlp(seed: int) -> nn.Sequential:
    """Four linear layers, of which the two in the middle are converted."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU()), nn.Linear(64, 16)
    )


def train(model: nn.Module, precision) -> float:
    """A plain loop; mean loss of the last 30 steps."""
    teacher, optimizer = mlp(1), torch.optim.AdamW(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(2)
    losses = []
    for _ in range(STEPS):
        inputs = torch.randn(128, 32, generator=generator)
        with torch.no_grad():
            labels = (8 * teacher(inputs)).argmax(1)
        with precision(model):
            logits = model(inputs)
        loss = nn.functional.cross_entropy(logits.float(), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert statistics.mean(losses[-30:]) < 0.8 * losses[0], "it learns"
    return statistics.mean(losses[-30:])


def bfloat16(_: nn.Module) -> AbstractContextManager:
    """Plain PyTorch."""
    return torch.autocast("cpu", torch.bfloat16)


expected, single = train(mlp(0), bfloat16), train(mlp(0), lambda _: nullcontext())
found = []
for scaling in ("delayed", "dynamic", "rowwise"):
    model = convert(mlp(0), FP8Recipe(backend="native", scaling=scaling))
    assert has_native_layers(model)
    loss = train(model, autocast)
    assert loss != expected, "8 bits are not bfloat16"
    assert abs(loss / expected - 1) <= TOLERANCE, (scaling, loss, expected)
    found.append(f"{scaling} {loss / expected - 1:+.2%}")
    restore_native(model)
    assert not has_native_layers(model) and {value.dtype for value in model.parameters()} == {torch.float32}
    plain = mlp(0)
    plain.load_state_dict(model.state_dict())
    inputs = torch.randn(8, 32)
    assert torch.equal(model(inputs), plain(inputs)), "a restored model is a plain one"
print(
    f"an MLP's loss after {STEPS} steps relative to bfloat16: {', '.join(found)} "
    f"(float32 {single / expected - 1:+.2%}); restored to a plain model"
)
