"""Megatron-core's indexed datasets: writing them from text, and loaders over them."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from accel_state.errors import ConfigurationError

from ._megatron_compat import load_core
from .architectures.base import IGNORED
from .plugin import MegatronLMPlugin

_SENTINEL = re.compile(r"<extra_id_(\d+)>$")  # of T5
# How words are masked, as Megatron-LM's scripts do by default.
_MASKING = {
    "masking_probability": 0.15,
    "short_sequence_probability": 0.1,
    "masking_do_full_word": True,
    "masking_do_permutation": False,
    "masking_use_longer_ngrams": False,
}


class MegatronLMDummyDataLoader:
    """Stands for loaders over Megatron-core's datasets until ``prepare``.

    Pass it to ``prepare`` three times: the first becomes the loader of the training data, the second of the validation
    data, the third of the test data, in the shares of ``splits_string``. The loaders exist on every rank, can be
    iterated with ``next(loader)``, and start again at their end.

    Args:
        **dataset_kwargs: ``data_path``: the prefix of a ``.bin`` and an ``.idx`` file, or a list of prefixes, or of
            weights and prefixes in turn. ``splits_string``: the shares, such as "949,50,1". ``seq_length``: tokens of a
            sample. ``micro_batch_size``: samples of a micro batch. ``eod_id``: the token at the end of documents (by
            default the model's ``eos_token_id``). ``seed`` (default 1234), ``path_to_cache``, and further fields of
            Megatron-core's GPTDatasetConfig. For a Megatron-BERT or a T5, ``tokenizer``: one of Transformers, its name
            or folder; ``decoder_seq_length`` of T5 (by default ``seq_length``); and further fields of
            BERTMaskedWordPieceDatasetConfig or T5MaskedWordPieceDatasetConfig.
    """

    def __init__(self, **dataset_kwargs: Any) -> None:
        missing = [name for name in ("data_path", "micro_batch_size") if dataset_kwargs.get(name) is None]
        if missing:
            raise ConfigurationError(
                f"MegatronLMDummyDataLoader needs {' and '.join(missing)}: MegatronLMDummyDataLoader(data_path=..., "
                "splits_string='949,50,1', seq_length=1024, micro_batch_size=4)."
            )
        self.dataset_args = dataset_kwargs


class _Tokenizer:
    """What Megatron-core's datasets ask of a tokenizer.

    Args:
        eod: the token at the end of documents.
        vocab_size: number of tokens.
        tokenizer: one of Transformers, for datasets that mask words.
        bos: the token that begins a decoder's input.
    """

    def __init__(self, eod: int | None, vocab_size: int, tokenizer: Any = None, bos: int | None = None) -> None:
        self.eod, self.vocab_size = eod, vocab_size
        self.pad = -1  # which no text has, so that the masks of padding and of losses are exact
        self.unique_identifiers = {"class": type(self).__name__, "eod": eod, "vocab_size": vocab_size}
        if tokenizer is None:
            return
        vocabulary = tokenizer.get_vocab()
        self.inv_vocab = {number: token for token, number in sorted(vocabulary.items(), key=lambda item: item[1])}
        self.cls, self.sep, self.mask = tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.mask_token_id
        self.bos, self.eos = bos, tokenizer.eos_token_id
        sentinels = {int(match[1]): number for token, number in vocabulary.items() if (match := _SENTINEL.match(token))}
        self.additional_special_tokens_ids = [sentinels[index] for index in sorted(sentinels)]
        digest = hashlib.sha256(json.dumps(vocabulary, sort_keys=True).encode()).hexdigest()
        self.unique_identifiers["vocabulary"] = digest


class MegatronDataLoader(DataLoader[Any]):
    """A prepared loader that can be iterated with ``next`` and starts again at its end."""

    def __init__(self, loader: Any) -> None:
        self.__dict__["loader"] = loader
        self.__dict__["_iterator"] = None
        self.__dict__["_is_accelerate_prepared"] = True

    def __getattr__(self, name: str) -> Any:
        if name == "loader":
            raise AttributeError(name)
        return getattr(self.__dict__["loader"], name)

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Any:
        return iter(self.loader)

    def __next__(self) -> Any:
        for _ in range(2):
            if self._iterator is None:
                self.__dict__["_iterator"] = iter(self.loader)
            try:
                return next(self._iterator)  # type: ignore[arg-type]
            except StopIteration:
                self.__dict__["_iterator"] = None
        raise ConfigurationError("the data set has no samples for this split. Change splits_string, or add data.")

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a position of :meth:`state_dict`."""
        self.__dict__["_iterator"] = None
        self.loader.load_state_dict(state)


def _blend(data_path: Any) -> tuple[list[str], list[float] | None]:
    words = data_path.split() if isinstance(data_path, str) else [str(item) for item in data_path]
    if len(words) == 1:
        return words, None
    try:
        weights = [float(word) for word in words[::2]]
    except ValueError:
        return words, None
    if len(words) % 2:
        raise ConfigurationError(f"data_path={data_path!r} must be prefixes, or weights and prefixes in turn.")
    return words[1::2], weights


def _sizes(plugin: MegatronLMPlugin) -> list[int | None]:
    batch = plugin.global_batch_size or 1
    train = plugin.train_samples or (plugin.train_iters or 0) * batch or None
    if train is None:
        return [None, None, None]  # one epoch of each
    evaluations = train // batch // max(plugin.eval_interval, 1) + 1
    return [train, evaluations * plugin.eval_iters * batch, plugin.eval_iters * batch]


def build_datasets(dummy: MegatronLMDummyDataLoader, plugin: MegatronLMPlugin, config: Any) -> Sequence[Any]:
    """Return the datasets of training, validation and test data; None for one without a share. A collective call."""
    if plugin.custom_megatron_datasets_provider_function is not None:
        datasets: Sequence[Any] = plugin.custom_megatron_datasets_provider_function(_sizes(plugin))
        return datasets
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder

    given = dict(dummy.dataset_args)
    prefixes, weights = _blend(given.pop("data_path"))
    for prefix in prefixes:
        if not Path(f"{prefix}.bin").is_file() or not Path(f"{prefix}.idx").is_file():
            raise ConfigurationError(
                f"data_path: {prefix}.bin or {prefix}.idx does not exist. Write them with: accel megatron data TEXT "
                f"{prefix} --tokenizer NAME"
            )
    given.pop("micro_batch_size")
    length = given.pop("seq_length", None) or plugin.seq_length
    if length is None:
        raise ConfigurationError("MegatronLMDummyDataLoader needs seq_length, the number of tokens of a sample.")
    choose = _causal if config.model_type not in _MASKED else _masked
    kind, kind_config, settings = choose(given, plugin, config, length)
    shared = {
        "random_seed": given.pop("seed", 1234),
        "sequence_length": length,
        "blend": (prefixes, weights),
        "split": given.pop("splits_string", None) or "969,30,1",
        "path_to_cache": given.pop("path_to_cache", None),
    }
    unknown = sorted(set(given) - {item.name for item in fields(kind_config)})
    if unknown:
        raise ConfigurationError(
            f"MegatronLMDummyDataLoader got {', '.join(unknown)}, which {kind_config.__name__} does not have."
        )
    dataset_config = kind_config(**{**shared, **settings, **given})
    built: Sequence[Any] = BlendedMegatronDatasetBuilder(kind, _sizes(plugin), lambda: True, dataset_config).build()
    return built


def _causal(
    given: dict[str, Any], plugin: MegatronLMPlugin, config: Any, length: int
) -> tuple[Any, Any, dict[str, Any]]:
    """Return the class of a data set, that of its settings, and the settings; what they use leaves ``given``."""
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    eod = given.pop("eod_id", None)
    eod = getattr(config, "eos_token_id", None) if eod is None else eod
    if eod is None:
        raise ConfigurationError("MegatronLMDummyDataLoader needs eod_id: the model's config has no eos_token_id.")
    settings = {
        "tokenizer": _Tokenizer(int(eod), config.vocab_size),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": bool(plugin.eod_mask_loss),
        "create_attention_mask": False,
    }
    return GPTDataset, GPTDatasetConfig, settings


_MASKED = ("megatron-bert", "t5")


def _masked(
    given: dict[str, Any], plugin: MegatronLMPlugin, config: Any, length: int
) -> tuple[Any, Any, dict[str, Any]]:
    """As :func:`_causal`, for models that predict masked words."""
    from megatron.core.datasets.bert_dataset import BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig
    from megatron.core.datasets.t5_dataset import T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig

    kind = config.model_type
    tokenizer = given.pop("tokenizer", None)
    if tokenizer is None or _sizes(plugin)[0] is None:
        what = "MegatronLMDummyDataLoader(tokenizer=NAME)" if tokenizer is None else "train_iters or train_samples"
        raise ConfigurationError(
            f"the data sets of a {kind} need {what}, since words are masked while samples are built."
        )
    if isinstance(tokenizer, (str, Path)):
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    known = _Tokenizer(None, config.vocab_size, tokenizer, getattr(config, "decoder_start_token_id", None))
    needed = ("cls", "sep", "mask") if kind == "megatron-bert" else ("bos", "eos", "additional_special_tokens_ids")
    missing = [name for name in needed if getattr(known, name) in (None, [])]
    if missing:
        words = {
            "additional_special_tokens_ids": "tokens <extra_id_0>, ...",
            "bos": "decoder_start_token_id (in the config)",
        }
        named = ", ".join(words.get(name, f"{name}_token") for name in missing)
        raise ConfigurationError(f"the tokenizer {type(tokenizer).__name__} has no {named}, which a {kind} needs.")
    if kind == "megatron-bert":
        bert = {"masking_max_ngram": 3, "masking_use_geometric_distribution": False, "classification_head": True}
        settings = {**_MASKING, "tokenizer": known, **bert}
        return BERTMaskedWordPieceDataset, BERTMaskedWordPieceDatasetConfig, settings
    decoder = given.pop("decoder_seq_length", None) or getattr(plugin, "decoder_seq_length", None) or length
    t5 = {"masking_max_ngram": 10, "masking_use_geometric_distribution": True, "sequence_length_decoder": decoder}
    return T5MaskedWordPieceDataset, T5MaskedWordPieceDatasetConfig, {**_MASKING, "tokenizer": known, **t5}


def collate(samples: list[Any]) -> Any:
    """Return a batch of Megatron-core's samples; those of BERT and T5 get the names that Transformers' models take."""
    batch = torch.utils.data.default_collate(samples)
    if not isinstance(batch, dict) or not ("padding_mask" in batch or "enc_mask" in batch):
        return batch
    labels = batch["labels"].masked_fill(batch["loss_mask"] == 0, IGNORED)
    if "enc_mask" in batch:
        named = {"input_ids": "text_enc", "attention_mask": "enc_mask", "decoder_input_ids": "text_dec"}
        return {**{name: batch[key] for name, key in named.items()}, "labels": labels}
    mask = (batch["padding_mask"] == 1).long()
    return {
        "input_ids": batch["text"],
        "attention_mask": mask,
        "token_type_ids": batch["types"] * mask,
        "labels": labels,
        "next_sentence_label": batch["is_random"],
    }


def build_loaders(
    dummy: MegatronLMDummyDataLoader,
    plugin: MegatronLMPlugin,
    config: Any,
    ranks: int,
    prepare: Callable[[DataLoader[Any]], Any],
) -> list[MegatronDataLoader | None]:
    """Return the loaders of training, validation and test data."""
    size = int(dummy.dataset_args["micro_batch_size"])
    plugin.set_training_args(size, ranks)
    loaders: list[MegatronDataLoader | None] = []
    consumed = [*(plugin.consumed_samples or ()), 0, 0, 0]
    for dataset, used in zip(build_datasets(dummy, plugin, config), consumed, strict=False):
        if dataset is None:
            loaders.append(None)
            continue
        if used:
            if used >= len(dataset):
                raise ConfigurationError(
                    f"consumed_samples={plugin.consumed_samples}: {used} of {len(dataset)} samples leave none to use. "
                    "Set train_iters or train_samples to those of the whole training, earlier runs included."
                )
            dataset = torch.utils.data.Subset(dataset, range(used, len(dataset)))
        loader: DataLoader[Any] = DataLoader(
            dataset, batch_size=size * plugin.num_micro_batches, drop_last=True, collate_fn=collate
        )
        loaders.append(MegatronDataLoader(prepare(loader)))
    return loaders


def write_dataset(
    documents: Iterable[str], prefix: str, encode: Callable[[str], list[int]], eod: int | None, vocab_size: int
) -> tuple[int, int]:
    """Write ``prefix.bin`` and ``prefix.idx``; returns the number of documents and of tokens.

    Args:
        documents: the texts; empty ones are left out.
        prefix: path without suffix.
        encode: the tokens of a text.
        eod: the token that ends each document; None to write its sentences one by one, for models that mask words.
        vocab_size: decides whether a token takes two or four bytes.
    """
    load_core()
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16 if vocab_size < 65500 else np.int32)
    count = tokens = 0
    for text in documents:
        parts = [encode(text)] if eod is not None else map(encode, split_sentences(text))
        pieces = [ids if eod is None else [*ids, eod] for ids in parts if ids]
        if pieces:
            flat = [token for ids in pieces for token in ids]
            builder.add_document(torch.tensor(flat, dtype=torch.int64), [len(ids) for ids in pieces])
            count, tokens = count + 1, tokens + len(flat)
    if not count:
        raise ConfigurationError(f"there are no texts to write to {prefix}.bin.")
    builder.finalize(f"{prefix}.idx")
    return count, tokens


def split_sentences(text: str) -> list[str]:
    """Return the sentences of a text, which end at a full stop, a question or exclamation mark, or a line's end."""
    return [part for part in re.split(r"(?<=[.!?])\s+|\n+", text) if part.strip()]


def read_documents(path: Path, key: str) -> Iterator[str]:
    """Yield the texts of a file: the values of ``key`` in JSON lines (.jsonl), or else paragraphs."""
    with path.open(encoding="utf-8") as file:
        if path.suffix in (".jsonl", ".json"):
            for number, line in enumerate(file, start=1):
                if line.strip():
                    entry = json.loads(line)
                    if key not in entry:
                        raise ConfigurationError(f"{path}:{number} has no {key!r}. Choose the key with --key.")
                    yield entry[key]
            return
        paragraph: list[str] = []
        for line in file:
            if line.strip():
                paragraph.append(line)
            elif paragraph:
                yield "".join(paragraph)
                paragraph = []
        if paragraph:
            yield "".join(paragraph)
