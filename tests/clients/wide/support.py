"""What the cases share: tiny models, a tokenizer and data made here, and digests of what a program wrote."""

from __future__ import annotations

import hashlib
import pydoc_data.topics
from pathlib import Path
from typing import Any

import torch
from harness import RANK, digest

# The index has torchvision only as built for CUDA. Beside a CPU build of torch its operators do not load, and importing
# it fails where it describes the shapes of these two; with their signatures, what is Python in it can be used.
_OPERATORS = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

TEXT = pydoc_data.topics.topics["assignment"] + pydoc_data.topics.topics["integers"]
SENTENCES = [" ".join(line.split()) for line in TEXT.split(".") if 20 < len(line) < 200]


def tokenizer(**more: Any) -> Any:
    """A tokenizer of bytes, and of the marks that chat models use."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    marks = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*marks, *letters])}
    fast = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    names = ("pad_token", "bos_token", "eos_token", "unk_token", "mask_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=fast, model_max_length=512, **dict(zip(names, marks, strict=True)), **more
    )


def llama_config(**more: Any) -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    marks = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaConfig(**{"vocab_size": 264, "max_position_embeddings": 512, **sizes, **marks, **more})


def bert_config(**more: Any) -> Any:
    from transformers import BertConfig

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertConfig(**{"vocab_size": 264, "max_position_embeddings": 512, "pad_token_id": 0, **sizes, **more})


def saved(folder: Path, model: Any, **more: Any) -> str:
    """A folder with a model and the tokenizer, as a hub has them; each rank of a run makes its own."""
    target = folder / f"model-{RANK}-{type(model).__name__}"
    model.save_pretrained(target)
    tokenizer(**more).save_pretrained(target)
    return str(target)


def digits(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images of digits, (count, 1, 8, 8) from 0 to 1, and which they are."""
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.images[:count], dtype=torch.float32)[:, None] / 16, torch.tensor(data.target[:count])


def file_digests(folder: Path) -> dict[str, str]:
    """The files below a folder with the first digits of their SHA-256; of a safetensors file, that of names and values.

    accel pads the header of a safetensors file to 64 bytes, which docs/migration.md has a row about.
    """
    from safetensors.torch import load_file

    def content(path: Path) -> bytes:
        if path.suffix != ".safetensors":
            return path.read_bytes()
        return "".join(name + digest(value) for name, value in sorted(load_file(path).items())).encode()

    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        path.relative_to(folder).as_posix(): "digest " + hashlib.sha256(content(path)).hexdigest()[:12]
        for path in found
    }
