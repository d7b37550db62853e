"""accel-compat alone, with scripts that import accelerate, and Transformers' Trainer: the weights of plain PyTorch."""

import importlib.util
import subprocess
import sys
from pathlib import Path

ACCELERATE = """
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), 0.1)
loader = DataLoader(torch.arange(64.0).view(16, 4) / 64, batch_size=4 // accelerator.num_processes)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for rows in loader:
    accelerator.backward(model(rows).square().mean())
    optimizer.step()
    optimizer.zero_grad()
weights = accelerator.unwrap_model(model).weight
if accelerator.is_main_process:
    print([f"{value:.5f}" for value in weights.flatten().tolist()])
"""
PLAIN = """
import torch
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), 0.1)
for rows in (torch.arange(64.0).view(16, 4) / 64).split(4):
    model(rows).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print([f"{value:.5f}" for value in model.weight.flatten().tolist()])
"""
TRAINER = """
import torch, transformers
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

def build():
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=64, **shape))

tokens = torch.randint(64, (4, 8), generator=torch.Generator().manual_seed(1))
rows = [{"input_ids": row, "labels": row} for row in tokens]
trained, plain = build(), build()
arguments = TrainingArguments(
    "out",
    max_steps=4, per_device_train_batch_size=4, optim="sgd", learning_rate=0.1, lr_scheduler_type="constant",
    use_cpu=True,
    weight_decay=0.0, max_grad_norm=0.0, report_to="none", save_strategy="no", disable_tqdm=True,
)
trainer = Trainer(trained, arguments, train_dataset=rows)
assert type(trainer.accelerator).__module__.startswith("accel."), type(trainer.accelerator)
trainer.train()
optimizer = torch.optim.SGD(plain.parameters(), 0.1)
for _ in range(4):
    plain(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
moved = build().state_dict()
for key, value in plain.state_dict().items():
    torch.testing.assert_close(trained.state_dict()[key], value, rtol=1e-5, atol=1e-7)
    assert not torch.equal(value, moved[key]), key
"""


def output(*command: str) -> str:
    """Standard output of a Python command that must succeed."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done.stdout.strip()


assert importlib.util.find_spec("accelerate") is None, "Accelerate is not installed"
Path("script.py").write_text(ACCELERATE)
Path("plain.py").write_text(PLAIN)
Path("trainer.py").write_text(TRAINER)
expected = output("plain.py")
launch = ("-m", "accel_launch", "launch", "--cpu", "-q", "--as-accelerate", "--num_processes")
for processes in ("1", "2"):
    assert output(*launch, processes, "script.py") == expected, processes
print("a script that imports accelerate, in one and two processes: equals plain PyTorch")
if importlib.util.find_spec("transformers"):
    output(*launch, "1", "trainer.py")
    print("Trainer: the weights of a plain loop")
