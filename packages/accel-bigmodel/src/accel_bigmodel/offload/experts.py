"""Reading single experts of mixture-of-experts layers, whose weights hold all experts in one tensor."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accel_state.errors import ConfigurationError

from ..checkpoint.safetensors_file import SafetensorsFile
from ..tensors import as_dtype
from .store import OffloadedWeightsLoader, load_offloaded_weight


@dataclass
class _Piece:
    """A part of an expert's weight: bytes of a file, and where they go."""

    file: SafetensorsFile | Path
    start: int
    shape: tuple[int, ...]
    offset: int  # along ExpertWeights.dim


class ExpertWeights:
    """One weight of all experts of a layer, in memory or in files.

    Args:
        source: the mapping that holds it.
        name: its name there.
    """

    def __init__(self, source: Mapping[str, torch.Tensor], name: str) -> None:
        self.name = name
        self.dim: int = 0
        self.value: torch.Tensor | None = None
        self._stack: Any = None
        self._file: SafetensorsFile | Path | None = None
        self._start = 0
        info = source.index.get(name) if isinstance(source, OffloadedWeightsLoader) else None
        if not isinstance(source, OffloadedWeightsLoader) or name in source.state_dict or info is None:
            self.value = source[name]
            self.shape: tuple[int, ...] = tuple(self.value.shape)
            self.stored_dtype: torch.dtype = self.value.dtype
        elif "stack" in info:
            self._stack = info["stack"]
            self.dim, self.shape, self.stored_dtype = self._stack.dim, self._stack.shape, self._stack.dtype
        elif info.get("safetensors_file") is not None:
            opened = source.open_file(info["safetensors_file"])
            entry = opened.entries[info.get("weight_name", name)]
            self._file = opened
            self.shape, self.stored_dtype, self._start = entry.shape, entry.dtype, entry.start
        else:
            assert source.save_folder is not None
            path = source.save_folder / f"{info.get('file', name)}.dat"
            load_offloaded_weight(path, info)  # compares the sizes
            self._file = path
            self.shape, self.stored_dtype = tuple(info["shape"]), as_dtype(info["dtype"])
        converts = self.value is None and info is not None and "dtype" in info
        self.dtype: torch.dtype | Any = as_dtype(info["dtype"]) if converts and info is not None else self.stored_dtype

    @property
    def expert_nbytes(self) -> int:
        """Size of one expert as it is used."""
        return torch.Size(self.shape[1:]).numel() * self.dtype.itemsize

    @property
    def is_stacked(self) -> bool:
        """True if the file holds the tensor as it is used, so that a mapping of it can be computed with."""
        return self._stack is None and self.stored_dtype == self.dtype

    def _pieces(self, expert: int) -> Iterator[_Piece]:
        if self._stack is None:
            assert self._file is not None
            nbytes = torch.Size(self.shape[1:]).numel() * self.stored_dtype.itemsize
            yield _Piece(self._file, self._start + expert * nbytes, self.shape[1:], 0)
            return
        offset = 0
        for file, name in self._stack.of_expert(expert):
            entry = file.entries[name]
            yield _Piece(file, entry.start, entry.shape, offset)
            offset += entry.shape[self.dim]

    def read_ahead(self, experts: Sequence[int]) -> None:
        """Ask the operating system to start reading some experts.

        Unlike the pages of whole modules (see ``read_sequentially``) these are short ranges apart from each other. With
        all of them requested at once, reading them one after another measured 2 to 6 times the bandwidth of mapping and
        populating each, and 1.2 to 1.7 times that of reading without requests.
        """
        if self.value is not None:
            return
        for expert in experts:
            for piece in self._pieces(expert):
                if isinstance(piece.file, SafetensorsFile):
                    nbytes = torch.Size(piece.shape).numel() * self.stored_dtype.itemsize
                    piece.file.read_ahead_bytes(piece.start, nbytes)

    def read_into(self, expert: int, out: torch.Tensor) -> None:
        """Read one expert into a tensor of the shape of one expert, on any device."""
        if self.value is not None:
            out.copy_(self.value[expert], non_blocking=True)
            return
        for piece in self._pieces(expert):
            target = out.narrow(self.dim, piece.offset, piece.shape[self.dim])
            if target.device.type == "cpu" and target.dtype == self.stored_dtype and target.is_contiguous():
                _read_bytes(piece, target)
            else:
                stored = torch.empty(piece.shape, dtype=self.stored_dtype)
                _read_bytes(piece, stored)
                target.copy_(stored)


def _read_bytes(piece: _Piece, out: torch.Tensor) -> None:
    values: Any = out.reshape(-1).view(torch.uint8).numpy()
    memory = memoryview(values)
    if isinstance(piece.file, SafetensorsFile):
        piece.file.read_bytes(piece.start, memory)
        return
    with open(piece.file, "rb") as file:
        file.seek(piece.start)
        if file.readinto(memory) < len(memory):
            raise ConfigurationError(f"{piece.file} has been truncated since the model was dispatched")


class ExpertPool:
    """Memory for some experts of a layer. Reads those that are missing, over those that were used longest ago.

    Args:
        weights: the weights of the layer's experts, by name.
        capacity: number of experts.
        device: where they are.
    """

    def __init__(self, weights: Mapping[str, ExpertWeights], capacity: int, device: torch.device) -> None:
        self.weights = weights
        self.capacity = capacity
        self.tensors: dict[str, torch.Tensor] = {
            name: torch.empty((capacity, *weight.shape[1:]), dtype=weight.dtype, device=device)
            for name, weight in weights.items()
        }
        self.places: OrderedDict[int, int] = OrderedDict()  # of each expert; the one used last is last

    def take(self, experts: Sequence[int], other: ExpertPool | None = None) -> None:
        """Bring experts into the pool, at most ``capacity``; those that ``other`` holds are copied from it."""
        missing = [expert for expert in experts if expert not in self.places]
        held = {} if other is None else other.places
        for weight in self.weights.values():
            weight.read_ahead([expert for expert in missing if expert not in held])
        for expert in experts:
            if expert in self.places:
                self.places.move_to_end(expert)
        wanted = set(experts)
        taken = set(self.places.values())
        free = [place for place in range(self.capacity) if place not in taken]
        for expert in missing:
            if not free:
                oldest = next(candidate for candidate in self.places if candidate not in wanted)
                free.append(self.places.pop(oldest))
            place = free.pop(0)
            for name, weight in self.weights.items():
                if other is not None and expert in held:
                    self.tensors[name][place].copy_(other.tensors[name][held[expert]])
                else:
                    weight.read_into(expert, self.tensors[name][place])
            self.places[expert] = place
