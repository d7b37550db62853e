"""Which rank of a Megatron model has which parameters."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from accel_state.errors import ConfigurationError

from .architectures.base import Architecture

LAYER = re.compile(r"^((?:decoder|encoder)\.layers\.)(\d+)\.")
_EXPERT = re.compile(r"(local_experts\.)(\d+)\.")


@dataclass(frozen=True)
class Sizes:
    """The parallel sizes of a Megatron checkpoint.

    Attributes:
        tp: tensor-parallel size.
        pp: number of stages.
        ep: expert-parallel size.
        chunks: model chunks of a stage; more than one if stages are interleaved.
        layers: number of layers of each chunk, in the order of the layers.
    """

    tp: int
    pp: int
    ep: int
    chunks: int
    layers: tuple[int, ...]

    def place(self, target: str, experts: int) -> tuple[int, int, int | None, str]:
        """Return the stage, the chunk and the expert-parallel rank (None: all) of a parameter, and its name there."""
        local, rank = target, None
        expert = _EXPERT.search(target)
        if expert is not None:
            rank, index = divmod(int(expert[2]), experts // self.ep)
            local = _EXPERT.sub(rf"\g<1>{index}.", local)
        layer = LAYER.match(target)
        if layer is None:
            number = 0 if target.startswith("embedding.") else len(self.layers) - 1
        else:
            number, index = 0, int(layer[2])
            while index >= self.layers[number]:
                index -= self.layers[number]
                number += 1
            local = LAYER.sub(rf"\g<1>{index}.", local)
        chunk, stage = divmod(number, self.pp)
        return stage, chunk, rank, local


def places(name: str, sizes: Sizes, experts: int, tied: bool) -> Iterator[tuple[int, int, int | None, str]]:
    """Yield where a parameter is: the last stage has a copy of an embedding that is the output layer too."""
    yield sizes.place(name, experts)
    if tied and sizes.pp > 1 and name == "embedding.word_embeddings.weight":
        yield sizes.pp - 1, sizes.chunks - 1, None, "output_layer.weight"


def sizes_for(
    architecture: Architecture, tp: int, pp: int, ep: int, last: int | None = None, per_chunk: int | None = None
) -> Sizes:
    """Return the sizes of a checkpoint, after a check that they divide the model."""
    settings = architecture.settings()
    layers, chunks = settings["num_layers"], 1
    kind = architecture.hf.model_type
    groups = settings.get("num_query_groups") or settings["num_attention_heads"]
    for name, size, number, what in (
        ("tp_degree", tp, groups, "key-value heads"),
        ("expert_model_parallel_size", ep, settings.get("num_moe_experts") or ep, "experts"),
    ):
        if number % size:
            raise ConfigurationError(
                f"{name}={size} does not divide the {number} {what} of the {kind}. Choose a divisor."
            )
    if last is not None and pp > 1:
        counts = [(layers - last) // (pp - 1)] * (pp - 1) + [last]
        valid = last > 0 and (layers - last) % (pp - 1) == 0 and layers > last
    else:
        per = per_chunk or layers // pp
        valid = per > 0 and layers % (per * pp) == 0
        chunks = layers // (per * pp) if valid else 1
        counts = [per] * (pp * chunks)
    if not valid:
        raise ConfigurationError(
            f"{layers} layers of the {kind} cannot be split over pp_degree={pp} stages with "
            f"decoder_last_pipeline_num_layers={last} and num_layers_per_virtual_pipeline_stage={per_chunk}. Choose "
            "numbers that divide the layers."
        )
    return Sizes(tp, pp, ep, chunks, tuple(counts))
