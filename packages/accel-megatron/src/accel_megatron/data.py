"""Megatron-core's indexed datasets: writing them from text, and loaders over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from accel_state.errors import ConfigurationError

from ._megatron_compat import load_core
from .plugin import MegatronLMPlugin


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
            Megatron-core's GPTDatasetConfig.
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
    """What Megatron-core's datasets ask of a tokenizer: the token at the end of documents."""

    def __init__(self, eod: int, vocab_size: int) -> None:
        self.eod, self.pad, self.vocab_size = eod, -1, vocab_size
        self.unique_identifiers = {"class": type(self).__name__, "eod": eod, "vocab_size": vocab_size}


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
        """The position."""
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
    """The datasets of training, validation and test data; None for one without a share. A collective call."""
    if plugin.custom_megatron_datasets_provider_function is not None:
        datasets: Sequence[Any] = plugin.custom_megatron_datasets_provider_function(_sizes(plugin))
        return datasets
    if config.model_type in ("megatron-bert", "t5"):
        raise ConfigurationError(
            f"the datasets of MegatronLMDummyDataLoader are those of causal models, and this is a {config.model_type}. "
            "Pass ordinary loaders to prepare(), or set custom_megatron_datasets_provider_function."
        )
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    given = dict(dummy.dataset_args)
    prefixes, weights = _blend(given.pop("data_path"))
    for prefix in prefixes:
        if not Path(f"{prefix}.bin").is_file() or not Path(f"{prefix}.idx").is_file():
            raise ConfigurationError(
                f"data_path: {prefix}.bin or {prefix}.idx does not exist. Write them with: accel megatron data TEXT "
                f"{prefix} --tokenizer NAME"
            )
    given.pop("micro_batch_size")
    eod = given.pop("eod_id", None)
    eod = getattr(config, "eos_token_id", None) if eod is None else eod
    if eod is None:
        raise ConfigurationError("MegatronLMDummyDataLoader needs eod_id: the model's config has no eos_token_id.")
    settings: dict[str, Any] = {
        "random_seed": given.pop("seed", 1234),
        "sequence_length": given.pop("seq_length", None) or plugin.seq_length,
        "blend": (prefixes, weights),
        "split": given.pop("splits_string", None) or "969,30,1",
        "tokenizer": _Tokenizer(int(eod), config.vocab_size),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": bool(plugin.eod_mask_loss),
        "create_attention_mask": False,
        "path_to_cache": given.pop("path_to_cache", None),
    }
    known = {item.name for item in fields(GPTDatasetConfig)}
    unknown = sorted(set(given) - known)
    if unknown or settings["sequence_length"] is None:
        problem = f"got {', '.join(unknown)}, which GPTDatasetConfig does not have" if unknown else "needs seq_length"
        raise ConfigurationError(f"MegatronLMDummyDataLoader {problem}.")
    dataset_config = GPTDatasetConfig(**{**settings, **given})
    built: Sequence[Any] = BlendedMegatronDatasetBuilder(
        GPTDataset, _sizes(plugin), lambda: True, dataset_config
    ).build()
    return built


def build_loaders(
    dummy: MegatronLMDummyDataLoader,
    plugin: MegatronLMPlugin,
    config: Any,
    ranks: int,
    prepare: Callable[[DataLoader[Any]], Any],
) -> list[MegatronDataLoader | None]:
    """The loaders of training, validation and test data."""
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
        loader: DataLoader[Any] = DataLoader(dataset, batch_size=size * plugin.num_micro_batches, drop_last=True)
        loaders.append(MegatronDataLoader(prepare(loader)))
    return loaders


def write_dataset(
    documents: Iterable[str], prefix: str, encode: Callable[[str], list[int]], eod: int, vocab_size: int
) -> tuple[int, int]:
    """Write ``prefix.bin`` and ``prefix.idx``; returns the number of documents and of tokens.

    Args:
        documents: the texts; empty ones are left out.
        prefix: path without suffix.
        encode: the tokens of a text.
        eod: the token that ends each document.
        vocab_size: decides whether a token takes two or four bytes.
    """
    load_core()
    import numpy as np
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16 if vocab_size < 65500 else np.int32)
    count = tokens = 0
    for text in documents:
        ids = encode(text)
        if ids:
            builder.add_document(torch.tensor([*ids, eod], dtype=torch.int64), [len(ids) + 1])
            count, tokens = count + 1, tokens + len(ids) + 1
    if not count:
        raise ConfigurationError(f"there are no texts to write to {prefix}.bin.")
    builder.finalize(f"{prefix}.idx")
    return count, tokens


def read_documents(path: Path, key: str) -> Iterator[str]:
    """The texts of a file: the values of ``key`` in JSON lines (.jsonl), or else paragraphs."""
    import json

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
