"""Megatron-core's datasets: written by the command, read by the loaders of `prepare`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

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


@pytest.fixture(scope="module")
def sentences(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two data sets of sentences, with the tokens of a WordPiece model, and of T5."""
    from pydoc_data.topics import topics

    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("sentences")
    letters = "abcdefghijklmnopqrstuvwxyz"
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "</s>", *(f"<extra_id_{i}>" for i in range(40))]
    vocabulary = {token: number for number, token in enumerate([*special, *letters, *(f"##{x}" for x in letters), "."])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.Lowercase()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]", "eos": "</s>"}
    words = {f"{name}_token": token for name, token in names.items()}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **words).save_pretrained(directory)
    for part in ("first", "second"):
        chosen = sorted(topics)[:6] if part == "first" else sorted(topics)[6:12]
        text = directory / f"{part}.txt"
        text.write_text("\n\n".join(topics[name] for name in chosen), encoding="utf-8")
        run(["data", str(text), str(directory / part), "--tokenizer", str(directory), "--split_sentences"])
    return str(directory)


def compare_with_the_builder(directory: str, cache: str) -> dict[str, Any]:
    """The first batches of `prepare` and the builder's own samples; the losses in Megatron-core and in Transformers."""
    from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig
    from transformers import AutoTokenizer

    from accel import Accelerator
    from accel_megatron.testing import cuda_on_cpu

    cuda_on_cpu()
    loaded = AutoTokenizer.from_pretrained(directory)

    class Own:
        """A tokenizer as Megatron-LM hands it over, with the model's own token of padding."""

        pad, cls, sep, mask, bos, eos, eod = 0, 2, 3, 4, 0, 5, 5
        inv_vocab: ClassVar[Any] = dict(sorted((number, token) for token, number in loaded.get_vocab().items()))
        additional_special_tokens_ids: ClassVar[Any] = list(range(6, 46))
        unique_identifiers: ClassVar[Any] = {"class": "Own"}

    masking = {
        "masking_probability": 0.15,
        "short_sequence_probability": 0.1,
        "masking_do_full_word": True,
        "masking_do_permutation": False,
        "masking_use_longer_ngrams": False,
    }
    kinds: dict[str, Any] = {
        "megatron-bert": (
            BERTMaskedWordPieceDataset,
            BERTMaskedWordPieceDatasetConfig,
            {"masking_max_ngram": 3, "masking_use_geometric_distribution": False, "classification_head": True},
        ),
        "t5": (
            T5MaskedWordPieceDataset,
            T5MaskedWordPieceDatasetConfig,
            {"masking_max_ngram": 10, "masking_use_geometric_distribution": True, "sequence_length_decoder": 48},
        ),
    }
    blend = ["0.3", f"{directory}/first", "0.7", f"{directory}/second"]
    found: dict[str, Any] = {"different": [], "losses": []}
    for name, (kind, kind_config, options) in kinds.items():
        settings = MegatronLMPlugin(train_iters=3, eval_iters=1, eval_interval=10, tp_degree=2)
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=settings)
        given = {"decoder_seq_length": 48} if name == "t5" else {}
        dummy = MegatronLMDummyDataLoader(
            data_path=blend,
            splits_string="80,10,10",
            seq_length=64,
            micro_batch_size=4,
            tokenizer=directory,
            path_to_cache=cache,
            **given,
        )
        model = matrix.create(name)
        engine, _, train, evaluate, _ = accelerator.prepare(model, matrix.optimizer_of(model), dummy, dummy, dummy)
        config = kind_config(
            random_seed=1234,
            sequence_length=64,
            blend=([blend[1], blend[3]], [0.3, 0.7]),
            split="80,10,10",
            path_to_cache=f"{cache}/own",
            tokenizer=Own(),
            **masking,
            **options,
        )
        datasets = BlendedMegatronDatasetBuilder(kind, [12, 4, 4], lambda: True, config).build()
        for loader, dataset in ((train, datasets[0]), (evaluate, datasets[1])):
            batch = next(loader)
            for row in range(4):
                own = {key: torch.as_tensor(value) for key, value in dataset[row].items() if key != "dataset_id"}
                labels = own["labels"].masked_fill(own["loss_mask"] == 0, -100)
                expected = {"labels": labels}
                if name == "t5":
                    expected.update(input_ids=own["text_enc"], decoder_input_ids=own["text_dec"])
                    expected["attention_mask"] = own["enc_mask"]
                else:
                    expected.update(input_ids=own["text"], token_type_ids=own["types"])
                    expected.update(attention_mask=own["padding_mask"], next_sentence_label=own["is_random"])
                found["different"] += [key for key in expected if not torch.equal(batch[key][row], expected[key])]
        plain = matrix.create(name)
        found["losses"].append((engine(**batch).loss.item(), plain(**batch).loss.item()))
        matrix.close(accelerator)
    return found


def test_masked_words(sentences: str, tmp_path: Path) -> None:
    for found in run_world(compare_with_the_builder, 2, sentences, str(tmp_path)):
        assert found["different"] == []
        assert all(abs(left - right) < 1e-5 for left, right in found["losses"])


def test_sentences() -> None:
    from accel_megatron.data import split_sentences

    assert split_sentences("One. Two?  Three\nfour.\n") == ["One.", "Two?", "Three", "four."]


def test_what_is_refused(sentences: str) -> None:
    from accel_megatron.data import build_datasets

    with pytest.raises(ConfigurationError, match="needs data_path and micro_batch_size"):
        MegatronLMDummyDataLoader(seq_length=8)
    given: dict[str, Any] = {"data_path": f"{sentences}/first", "micro_batch_size": 1, "seq_length": 64}
    bert, t5 = (matrix.create(name).config for name in ("megatron-bert", "t5"))
    for options, plugin, config, message in (
        ({}, {"train_iters": 1}, bert, r"need MegatronLMDummyDataLoader\(tokenizer=NAME\)"),
        ({"tokenizer": sentences}, {}, t5, "need train_iters or train_samples"),
        ({"tokenizer": sentences, "seq_length": None}, {"train_iters": 1}, bert, "needs seq_length"),
        ({"tokenizer": sentences, "wrong": 1}, {"train_iters": 1}, bert, "got wrong, which BERTMaskedWord"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            build_datasets(MegatronLMDummyDataLoader(**{**given, **options}), MegatronLMPlugin(**plugin), config)
    with pytest.raises(ConfigurationError, match="missing.txt is not a file"):
        run(["data", "missing.txt", "prefix", "--tokenizer", "none"])
