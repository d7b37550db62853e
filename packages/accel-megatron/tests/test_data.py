"""Megatron-core's datasets: written by the command, read by the loaders of `prepare`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matrix
import pytest
import torch

from accel_megatron import MegatronLMDummyDataLoader, MegatronLMPlugin
from accel_megatron.command import run
from accel_state.errors import ConfigurationError
from accel_state.testing import run_world


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The texts of Python's help, of which every document is a paragraph, with one token a letter."""
    from pydoc_data.topics import topics

    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("data")
    vocabulary = {chr(code): code for code in range(127)} | {"<end>": 127}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="?").save_pretrained(directory)
    text = "\n\n".join(topics[name] for name in sorted(topics)[:4])
    (directory / "help.txt").write_text(text, encoding="utf-8")
    assert run(["data", str(directory / "help.txt"), str(directory / "help"), "--tokenizer", str(directory)]) == 0
    return str(directory / "help")


def test_the_command_writes_the_documents(dataset: str) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    paragraphs = re.split(r"\n(?:[ \t]*\n)+", Path(f"{dataset}.txt").read_text(encoding="utf-8"))
    written = IndexedDataset(dataset)
    # The tokenizer knows ASCII only.
    paragraphs = [re.sub(r"[^\x00-\x7e]", "?", text.strip("\n")) for text in paragraphs if text.strip()]
    assert len(written) == len(paragraphs)
    for ids, text in zip(written, paragraphs, strict=True):
        assert "".join(map(chr, ids[:-1])).strip("\n") == text and ids[-1] == 127


def train_on(prefix: str, cache: str) -> dict[str, Any]:
    from accel import Accelerator
    from accel_megatron.testing import cuda_on_cpu

    cuda_on_cpu()
    found: dict[str, Any] = {"losses": [], "tokens": []}
    for plugin in ({"use_distributed_optimizer": True}, {"tp_degree": 2, "num_micro_batches": 2}):
        settings = MegatronLMPlugin(train_iters=3, eval_iters=2, eval_interval=10, **plugin)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=settings)
        dummy = MegatronLMDummyDataLoader(
            data_path=prefix,
            splits_string="80,10,10",
            seq_length=32,
            micro_batch_size=2,
            eod_id=127,
            path_to_cache=cache,
        )
        settings.megatron_dataset_flag = True
        model = matrix.create("llama")
        engine, optimizer, train, evaluate, test = accelerator.prepare(
            model, matrix.optimizer_of(model), dummy, dummy, dummy
        )
        found["sizes"] = settings.global_batch_size, len(train), len(evaluate) > 0, len(test) > 0
        tokens, losses = [], []
        for _ in range(3):
            batch = next(train) if train is not None else {}
            tokens.append(accelerator.gather(batch["tokens"]))
            loss = engine(**batch).loss
            losses.append(loss.item())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        engine.eval()
        with torch.no_grad():
            losses.append(engine(**next(evaluate)).loss.item())
        found["losses"].append(losses)
        found["tokens"].append(torch.cat(tokens))
        matrix.close(accelerator)
        # The samples of the first two steps are left out.
        settings = MegatronLMPlugin(train_iters=3, eval_iters=2, eval_interval=10, consumed_samples=[8], **plugin)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=settings)
        model = matrix.create("llama")
        loader = accelerator.prepare(model, matrix.optimizer_of(model), dummy)[2]
        found["continued"] = torch.equal(accelerator.gather(next(loader)["tokens"]), tokens[2])
        matrix.close(accelerator)
    return found


def test_training_on_a_dataset(dataset: str, tmp_path: Path) -> None:
    for found in run_world(train_on, 2, dataset, str(tmp_path)):
        assert found["sizes"][0] == 4 and found["sizes"][1] >= 3 and all(found["sizes"][2:])
        first, second = found["tokens"]
        assert found["continued"]
        # The batches of a step are the same at other parallel sizes.
        assert torch.equal(first, second)
        assert matrix.worst(*found["losses"]) < 1e-5


def test_what_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="needs data_path and micro_batch_size"):
        MegatronLMDummyDataLoader(seq_length=8)
    with pytest.raises(ConfigurationError, match="missing.txt is not a file"):
        run(["data", "missing.txt", "prefix", "--tokenizer", "none"])
