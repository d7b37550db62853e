"""accel-checkpoint alone, with a diffusion loop of no library: killed twice and resumed, it ends with the same bits."""

import random
import signal
import subprocess
import sys
from pathlib import Path

STEPS = 12
# Run as `train.py KILL`: a plain loop, with the calls that the README of accel-checkpoint shows. It dies by SIGKILL in
# step KILL, while the state of that step is being written; 0: never.
TRAIN = """
import os, random, signal, sys
import torch
from diffusion import make, step
from accel_checkpoint import AsyncSaver, list_checkpoints, load

kill = int(sys.argv[1])
state = make()
complete = [info.path for info in list_checkpoints("runs") if info.complete]
first = load(complete[-1], state)["step"] + 1 if complete else 1
print(first, flush=True)
saver = AsyncSaver()
for number in range(first, {steps} + 1):
    step(**state)
    if number % 3 == 0 or number == kill:
        saver.save(state | {{"step": number}}, f"runs/checkpoint_{{number}}", step=number, keep=2)
    if number == kill:
        os.kill(os.getpid(), {kill_signal})
saver.wait()
"""
DIFFUSION = '''
import random
import torch
from unet import UNet

def make():
    """What a run has: with dropout-like noise, a schedule and an optimizer with state."""
    torch.manual_seed(0)
    random.seed(0)
    model = UNet()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    return {"model": model, "optimizer": optimizer, "schedule": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)}

def step(model, optimizer, schedule):
    """One step: both generators give other numbers in each."""
    clean, noise = torch.rand(4, 3, 8, 8), torch.randn(4, 3, 8, 8)
    level = torch.rand(4)
    noisy = clean + (level * random.uniform(0.5, 1.5))[:, None, None, None] * noise
    optimizer.zero_grad()
    (model(noisy, level) - noise).square().mean().backward()
    optimizer.step()
    schedule.step()
'''


def run(kill: int) -> int:
    """Run the script; returns the step that it began with."""
    done = subprocess.run([sys.executable, "train.py", str(kill)], capture_output=True, text=True, timeout=200)
    assert done.returncode == (-signal.SIGKILL if kill else 0), (done.returncode, done.stderr)
    return int(done.stdout)


Path("unet.py").write_bytes(Path(__file__).with_name("unet.py").read_bytes())
Path("diffusion.py").write_text(DIFFUSION)
Path("train.py").write_text(TRAIN.format(steps=STEPS, kill_signal=int(signal.SIGKILL)))
first = [run(5), run(8), run(0)]
# Each begins after the save before the kill, or after the one that the kill interrupted, if that was complete already.
assert first[0] == 1 and first[1] in (4, 6) and first[2] in (7, 9), first

sys.path.insert(0, ".")
import torch  # noqa: E402
from diffusion import make, step  # noqa: E402
from safetensors.torch import load_file  # noqa: E402

plain = make()
for _ in range(STEPS):
    step(**plain)
drawn = torch.rand(1), random.random()

from accel_checkpoint import CheckpointError, list_checkpoints, load  # noqa: E402

newest = [info for info in list_checkpoints("runs") if info.complete][-1].path
resumed = make()
assert load(newest, resumed)["step"] == STEPS
assert (torch.rand(1), random.random()) == drawn, "the generators continue"
for name in plain:
    first_state, second = plain[name].state_dict(), resumed[name].state_dict()
    torch.testing.assert_close(first_state, second, rtol=0, atol=0)
weights = load_file(newest / "model.safetensors")
assert all(torch.equal(weights[key], value) for key, value in plain["model"].state_dict().items())
print(f"U-Net killed in steps 5 and 8 of {STEPS}, while it saved: weights, optimizer and generators of plain PyTorch")

file = newest / "model.safetensors"
content = bytearray(file.read_bytes())
content[-1] ^= 1
file.write_bytes(content)
before = {key: value.clone() for key, value in resumed["model"].state_dict().items()}
refusal = ""
try:
    load(newest, resumed)
except CheckpointError as error:
    refusal = str(error)
assert "model.safetensors" in refusal, f"a flipped bit was loaded, or its file is not named: {refusal!r}"
torch.testing.assert_close(before, dict(resumed["model"].state_dict()), rtol=0, atol=0)
print("a flipped bit is refused, and nothing changed")
