"""accel-monitor alone, with a plain DDP script under torchrun: the same weights, and a ledger of every rank."""

import subprocess
import sys
from pathlib import Path

STEPS, SLEEP = 8, 0.1
DDP = """
import sys, time
import torch, torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
data = TensorDataset(torch.randn({samples}, 4), torch.randn({samples}, 1))
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters(), 0.1)
loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, seed=1))
if sys.argv[1] == "monitored":
    from accel_monitor import attach
    monitor = attach(loader=loader, optimizer=optimizer, model=model, project_dir="runs")
for inputs, targets in loader:
    loss = (model(inputs) - targets).square().mean()
    if rank == 1:
        time.sleep({sleep})  # a slow rank
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if sys.argv[1] == "monitored":
    monitor.finish()
torch.save(model.module.state_dict(), f"{{sys.argv[1]}}-{{rank}}.pt")
dist.destroy_process_group()
"""
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

Path("ddp.py").write_text(DDP.format(samples=8 * STEPS, sleep=SLEEP))
for mode in ("plain", "monitored"):
    done = subprocess.run([*TORCHRUN, "ddp.py", mode], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr

import torch  # noqa: E402

from accel_monitor import make_ledger, read_runs  # noqa: E402
from accel_monitor.ledger import Cause  # noqa: E402

for rank in range(2):
    plain, monitored = (torch.load(f"{mode}-{rank}.pt") for mode in ("plain", "monitored"))
    assert all(torch.equal(value, monitored[key]) for key, value in plain.items()), rank
print("plain DDP under torchrun: the same bits as unmonitored")

(run,) = read_runs("runs")
ledger = make_ledger(run)
assert sorted(run.attempts) == [(0, 0), (0, 1)] and ledger.failures == 0
for (attempt,) in run.attempts.values():
    assert attempt.finished and attempt.last_step == STEPS and attempt.samples[-1].samples == 4 * STEPS
for entries in ledger.entries.values():
    for entry in entries:
        assert abs(sum(entry.seconds.values()) - (entry.end - entry.begin)) < 1e-3, entry


def waited(rank: int) -> float:
    """Seconds in which a rank waited for others."""
    causes = (Cause.WAITING, Cause.STRAGGLER)
    return sum(entry.seconds.get(cause, 0) for entry in ledger.entries[0, rank] for cause in causes)


assert waited(0) > SLEEP * STEPS / 2, "rank 0 waited for the one that slept"
assert waited(0) > waited(1), (waited(0), waited(1))
print(f"{STEPS} steps and {8 * STEPS} samples counted, every second in one part, the rank that was waited for found")
