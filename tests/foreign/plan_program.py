"""accel-plan alone, on a model of the user's own file: bytes are those that plain PyTorch holds and sends."""

import json
import subprocess
import sys
from pathlib import Path

MODEL = '''
import torch
from torch import nn
from transformers import PreTrainedModel, PretrainedConfig

class OwnConfig(PretrainedConfig):
    model_type = "own"
    def __init__(self, width=48, **rest):
        self.width = width
        super().__init__(**rest)

class OwnForCausalLM(PreTrainedModel):
    """Looks words up, mixes them, and predicts the next one."""
    config_class = OwnConfig
    def __init__(self, config):
        super().__init__(config)
        self.words = nn.Embedding(config.vocab_size, config.width)
        self.mix = nn.Linear(config.width, 3 * config.width + 1)
        self.out = nn.Linear(3 * config.width + 1, config.vocab_size, bias=False)
        self.post_init()
    def forward(self, input_ids, labels=None, **_):
        logits = self.out(torch.relu(self.mix(self.words(input_ids))))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}
'''
CONFIG = {
    "model_type": "own",
    "architectures": ["OwnForCausalLM"],
    "auto_map": {"AutoConfig": "modeling_own.OwnConfig", "AutoModel": "modeling_own.OwnForCausalLM"},
    "vocab_size": 97,
    "width": 48,
}


def plan(*options: str) -> dict:
    """What `accel plan --json` prints."""
    command = [sys.executable, "-m", "accel_launch", "plan", "run.yaml", "--model", "own", "--trust_remote_code"]
    done = subprocess.run(
        [*command, "--seq_length", "16", "--json", *options], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, (done.stdout, done.stderr)
    return json.loads(done.stdout)


own = Path("own")
own.mkdir()
(own / "modeling_own.py").write_text(MODEL)
(own / "config.json").write_text(json.dumps(CONFIG))
Path("run.yaml").write_text("compute_environment: LOCAL_MACHINE\nuse_cpu: true\nmixed_precision: 'no'\n")

import torch  # noqa: E402

sys.path.insert(0, "own")
import modeling_own  # noqa: E402

model = modeling_own.OwnForCausalLM(modeling_own.OwnConfig(width=48, vocab_size=97))
optimizer = torch.optim.AdamW(model.parameters())
tokens = torch.randint(97, (1, 16))
model(tokens, labels=tokens)["loss"].backward()
optimizer.step()
# DDP on two ranks: each holds what this process holds, and all-reduces the gradients (a ring sends 2 S (n-1) / n).
held = {
    "parameters": sum(value.nbytes for value in model.parameters()),
    "gradients": sum(value.grad.nbytes for value in model.parameters()),
    "state": sum(value.nbytes for state in optimizer.state.values() for value in state.values() if value.ndim),
}
report = plan("--num_processes", "2", "--rank", "1")
memory = report["memory"]
assert {"parameters": memory["weights"], "gradients": memory["gradients"], "state": memory["optimizer"]} == held
(reduced,) = report["collectives"]
assert (reduced["kind"], reduced["sent"]) == ("all-reduce", held["gradients"]), reduced
assert report["batch"]["samples"] == [1] and report["parameters"] == sum(value.numel() for value in model.parameters())
print(f"a model of a file: the {sum(held.values())} bytes of a plain step, held and sent")
