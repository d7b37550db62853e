"""What the snippets of the documentation need besides the names of ``run_snippets.py``."""

from __future__ import annotations

# Pages whose snippets other tests run.
RUN_ELSEWHERE = {
    "docs/extending.md": "tests/test_extending.py",
    "packages/accel-bigmodel/README.md": "tests/test_readmes.py",
    "packages/accel-data/README.md": "tests/test_readmes.py",
    "packages/accel-fp8/README.md": "tests/test_readmes.py",
    "packages/accel-quant/README.md": "tests/test_readmes.py",
    # Transformers must find a distribution called accelerate, which only that environment has.
    "docs/guides/compat.md": "tests/clients/trainer_cases.py, by scripts/test-clients",
    # Needs Megatron-core.
    "docs/guides/megatron.md": "packages/accel-megatron/tests, by scripts/test-megatron",
}

_SMALL_MODEL = """
def build_model():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
"""

# Code that runs before a snippet, by its page and how it starts; "fresh" is the prelude again.
SETUP: dict[tuple[str, str], str] = {
    ("docs/guides/checkpoints.md", "accelerator.load_state("): "accelerator.save_state()",
    ("docs/guides/deepspeed.md", "from accel.utils import DummyOptim"): """
max_train_steps, warmup_steps = 100, 10
from transformers import get_scheduler
""",
    ("docs/guides/deepspeed.md", "accelerator.unwrap_model(model).save_pretrained("): """
from transformers import BertConfig, BertModel
model = accelerator.prepare(BertModel(BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                                                 intermediate_size=16, vocab_size=32)))
""",
    ("docs/guides/elastic.md", "model, optimizer, scheduler, loader = accelerator.prepare("): """
project = ProjectConfiguration("run", automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, project_config=project)
""",
    ("docs/guides/inference.md", "from accel_bigmodel import init_empty_weights"): """
def ModelClass(_):
    return nn.Linear(10, 2)
accelerator.save_model(ModelClass(...), "checkpoint")
inputs = features
""",
    ("docs/guides/inference.md", "tokenizer.padding_side"): """
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
words = Tokenizer(models.WordLevel({"<pad>": 0, "a": 1, "dog": 2}, unk_token="a"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>")
tokenizer.model_input_names = ["input_ids", "attention_mask"]
model = LlamaForCausalLM(LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                     num_attention_heads=2, pad_token_id=0))
prompts = ["a dog", "dog"]
""",
    ("docs/guides/inference.md", "class Scale(ModelHook)"): """
from accel_bigmodel import ModelHook, add_hook_to_module, remove_hook_from_module
module = nn.Linear(2, 2)
""",
    ("docs/guides/launching.md", "from accel_launch import notebook_launcher"): """
model_name = "bert"
def train(name="bert", lr=0.1):
    assert (name, lr) == ("bert", 0.1)
""",
    ("docs/index.md", "from accel import init_empty_weights"): f"""{_SMALL_MODEL}
accelerator.save_model(build_model(), "checkpoint")
inputs = torch.randn(2, 64)
""",
    ("docs/guides/performance.md", "loader = DataLoader("): "dataset = TensorDataset(features, labels)",
    ("docs/guides/pipelined-inference.md", "from accel_bigmodel import prepare_pippy"): f"""{_SMALL_MODEL}
input_ids = torch.randn(4, 64)
""",
    ("docs/guides/quantization.md", "from accel_bigmodel import init_empty_weights"): f"""{_SMALL_MODEL}
accelerator.save_model(build_model(), "checkpoint")
""",
    ("docs/guides/sharding.md", "if accelerator.is_main_process:"): """
from transformers import LlamaConfig, LlamaForCausalLM
path = "llama"
LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                             num_attention_heads=2)).save_pretrained(path)
""",
    ("docs/guides/tpu.md", "from accel import notebook_launcher"): """
def create_model():
    return nn.Linear(2, 1)
def training_function(model):
    assert model.in_features == 2
""",
    ("docs/guides/training.md", "for batch in loader:\n    with accelerator.accumulate(model):\n        logits"): """
model, optimizer = nn.Embedding(8, 8), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
tokens = torch.randint(0, 8, (2, 5))
loader = [{"input_ids": tokens, "labels": tokens}]
""",
    ("docs/guides/training.md", "for inputs, targets in evaluation_loader:"): "fresh",
    ("docs/guides/world_size.md", "from accel import Accelerator, DataLoaderConfiguration"): """
dataset = TensorDataset(torch.randn(130, 10), torch.randint(0, 2, (130,)))
""",
    ("packages/accel-launch/README.md", "from accel_launch import debug_launcher"): """
model_name = "bert"
def train(name, lr):
    assert (name, lr) == ("bert", 0.1)
""",
    ("packages/accel-track/README.md", "import torch\nimport torch.distributed"): """
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
""",
}

# Snippets that raise here, and the error: what comes before it is checked.
RAISES: dict[tuple[str, str], str] = {
    ("docs/guides/deepspeed.md", "DeepSpeedPlugin(hf_ds_config="): "Set it in one place",
    # These run on several processes in examples/by_feature/{tensor,context,sequence,pipeline}_parallel.py.
    (
        "docs/guides/parallelism.md",
        "from accel import Accelerator, FullyShardedDataParallelPlugin",
    ): "there is 1 process",
    ("docs/guides/parallelism.md", "accelerator = Accelerator(parallelism_config=ParallelismConfig(cp_size=2))"): (
        "there is 1 process"
    ),
    ("docs/guides/parallelism.md", "accelerator = Accelerator(parallelism_config=ParallelismConfig(sp_size=2))"): (
        "there is 1 process"
    ),
    ("docs/guides/parallelism.md", "from accel.parallelism_config import ParallelismConfig"): "there is 1 process",
    ("docs/guides/tpu.md", "from accel import Accelerator, FullyShardedDataParallelPlugin"): "there is 1 process",
}

# Snippets that cannot run here, and why; they are compiled.
NOT_RUN: dict[tuple[str, str], str] = {
    ("docs/guides/checkpoints.md", 'project = ProjectConfiguration(\n    "/local/run"'): (
        "needs an object store: packages/accel/tests/test_object_storage.py"
    ),
    ("docs/guides/parallelism.md", "from accel.utils import causal_lm_loss"): (
        "needs a model on a mesh: packages/accel/tests/test_mesh_loss.py"
    ),
    (
        "docs/guides/parallelism.md",
        "from accel import Accelerator, ParallelismConfig\nfrom accel.utils import TorchTensor",
    ): "needs 8 GPUs: packages/accel/tests/test_async_tp.py",
    ("docs/guides/deepspeed.md", "from accel import Accelerator, DeepSpeedPlugin"): (
        "compiles DeepSpeed's CPU optimizer; packages/accel/tests/test_deepspeed_training.py trains with it"
    ),
    ("docs/guides/deepspeed.md", "accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(zero_stage=3))\nmodel"): (
        "needs sharded parameters: test_deepspeed_models.py"
    ),
    ("docs/guides/deepspeed.md", "plugins = {"): "examples/deepspeed_models.py is the whole script",
    ("docs/guides/inference.md", "model = AutoModelForCausalLM.from_pretrained(folder"): (
        "loads a mixture of experts: packages/accel-bigmodel/tests/test_moe.py"
    ),
    ("docs/guides/inference.md", "model_1, hook_1 = cpu_offload_with_hook"): "needs a GPU",
    (
        "docs/guides/launching.md",
        "notebook_launcher(\n    train,",
    ): "needs two machines: packages/accel-launch/tests/test_notebook.py checks the arguments",
    ("docs/guides/memory-estimator.md", "from accel_bigmodel import estimate_training"): (
        "reads a configuration from the Hub; packages/accel-plan/tests/test_memory_estimate.py uses local ones"
    ),
    ("docs/guides/quantization.md", 'accelerator.save_model(model, "quantized")'): (
        "test_readme.py and examples/quantize.py save and load"
    ),
    ("docs/guides/quantization.md", "device_map = {"): "needs a GPU",
    (
        "docs/tutorials/notebook.md",
        "notebook_launcher(",
    ): "examples/notebook.ipynb does the same: test_feature_examples.py",
    ("docs/guides/tpu.md", "import torch_xla"): "needs torch_xla: tests/test_xla_training.py",
    ("docs/guides/tracking.md", "from accel.utils import TrackingKwargs"): "needs wandb: scripts/test-trackers",
}
