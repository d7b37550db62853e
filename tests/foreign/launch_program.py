"""accel-launch alone, with scripts that do not import it: plain DDP and a failing rank. numpy is not installed."""

import importlib.util
import subprocess
import sys
from pathlib import Path

DDP = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
data = torch.arange(32.0).view(8, 4) / 32
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(data[dist.get_rank()::2]).square().mean().backward()
    optimizer.step()
print(f"{float(model.module.weight.sum()):.6f}", flush=True)
del model  # with its reducer, which otherwise may abort the process when gloo's threads end after the group
dist.destroy_process_group()
"""
PLAIN = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
data = torch.arange(32.0).view(8, 4) / 32
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(data).square().mean().backward()
    optimizer.step()
print(f"{float(model.weight.sum()):.6f}")
"""
LAUNCH = (sys.executable, "-m", "accel_launch", "launch", "--cpu", "--nproc-per-node", "2", "-q")


def output(*command: str, code: int = 0) -> subprocess.CompletedProcess:
    """Run a command that must end with a code."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return done


assert importlib.util.find_spec("numpy") is None, "the launcher needs no numpy"
Path("ddp.py").write_text(DDP)
Path("plain.py").write_text(PLAIN)
Path("fails.py").write_text("import os\nif os.environ['RANK'] == '1': raise ValueError('of the script')\n")
expected = output(sys.executable, "plain.py").stdout.strip()
assert output(*LAUNCH, "ddp.py").stdout.split() == [expected] * 2
print("plain DDP equals one process")
failed = output(*LAUNCH, "fails.py", code=1)
assert "ValueError: of the script" in failed.stderr.split("accel launch: rank 1 of 2")[1]
print("the failed rank's traceback is last")
