"""Text generation with tensor and pipeline parallelism, and a cache of keys and values."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from accel_state.errors import ConfigurationError

from ._megatron_compat import parallel_state


def generate(
    engine: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    max_length: int | None = None,
    max_new_tokens: int | None = None,
    **options: Any,
) -> torch.Tensor:
    """See :meth:`accel_megatron.MegatronEngine.megatron_generate`."""
    _check(engine)
    if attention_mask is None or bool(attention_mask.all()):
        return _generate(engine, input_ids, max_length, max_new_tokens, **options)
    if max_new_tokens is None:
        max_new_tokens = (max_length or input_ids.shape[1] + 20) - input_ids.shape[1]
    return _generate_padded(engine, input_ids, attention_mask.bool(), max_new_tokens, options)


def _generate(
    engine: Any,
    input_ids: torch.Tensor,
    max_length: int | None,
    max_new_tokens: int | None,
    num_beams: int | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    length_penalty: float | None = None,
    eos_token_id: int | None = None,
    pad_token_id: int | None = None,
    generator: torch.Generator | None = None,
    add_BOS: bool = False,
    top_p_decay: float | None = None,
    top_p_bound: float | None = None,
) -> torch.Tensor:
    """Continue prompts of one length."""
    config = engine.transformers_model.config
    if add_BOS:
        first = torch.full_like(input_ids[:, :1], config.bos_token_id)
        input_ids = torch.cat([first, input_ids], 1)
    input_ids = input_ids.to(engine.device)
    prompt = input_ids.shape[1]
    if max_new_tokens is None:
        max_new_tokens = (max_length or prompt + 20) - prompt
    total = prompt + max_new_tokens
    limit = engine.architecture.max_length
    if max_new_tokens < 1 or (limit is not None and total > limit):
        raise ConfigurationError(
            f"{max_new_tokens} new tokens after {prompt} are not within the {limit} positions of the model. Choose a "
            "smaller max_new_tokens, and at least 1."
        )
    eos, pad = _special_tokens(config, eos_token_id, pad_token_id)
    chunk = engine.chunks[0]
    if engine.shards_parameters:
        chunk.start_param_sync()  # which the wrapper's forward() does otherwise
    while hasattr(chunk, "module"):
        chunk = chunk.module
    was_training = engine.training
    engine.eval()
    forward = _Forward(engine, chunk)
    try:
        with torch.no_grad():
            if num_beams is not None and num_beams > 1:
                return _beams(forward, input_ids, total, num_beams, length_penalty or 1.0, eos, pad)
            choose = _Sampler(temperature, top_k, top_p, top_p_decay, top_p_bound, generator)
            return _sample(forward, input_ids, total, eos, pad, choose)
    finally:
        engine.train(was_training)


def _special_tokens(config: Any, eos_token_id: int | None, pad_token_id: int | None) -> tuple[Any, int]:
    """Return the token that ends a text, None for none, and the one that follows it."""
    eos = config.eos_token_id if eos_token_id is None else eos_token_id
    eos = eos[0] if isinstance(eos, list) else eos
    pad = pad_token_id if pad_token_id is not None else config.pad_token_id
    return eos, (eos if eos is not None else 0) if pad is None else pad


def _generate_padded(
    engine: Any, input_ids: torch.Tensor, mask: torch.Tensor, max_new_tokens: int, options: dict[str, Any]
) -> torch.Tensor:
    """Prompts of different lengths, those of one length at a time; the result is padded on the same side."""
    special = options.get("eos_token_id"), options.get("pad_token_id")
    _, pad = _special_tokens(engine.transformers_model.config, *special)
    lengths = mask.sum(1)
    places = torch.arange(mask.shape[1], device=mask.device)
    on_the_right = torch.equal(mask, places < lengths[:, None])
    on_the_left = torch.equal(mask, places >= mask.shape[1] - lengths[:, None])
    if not (on_the_right or on_the_left) or not bool(lengths.all()):
        raise ConfigurationError(
            "megatron_generate got an attention_mask with zeros between ones, or with a row of zeros. Pad prompts on "
            "one side, and give each at least one token."
        )
    rows: list[Any] = [None] * len(input_ids)
    for length in lengths.unique().tolist():
        chosen = (lengths == length).nonzero()[:, 0]
        prompts = input_ids[chosen][mask[chosen]].view(-1, length)
        made = _generate(engine, prompts, None, max_new_tokens, **options)
        for index, tokens in zip(chosen.tolist(), made, strict=True):
            rows[index] = tokens
    width = max(len(row) for row in rows)
    if not on_the_right:  # new tokens start at one position
        width = max(mask.shape[1] - length + len(row) for length, row in zip(lengths.tolist(), rows, strict=True))
    result = rows[0].new_full((len(rows), width), pad)
    for index, row in enumerate(rows):
        start = 0 if on_the_right else mask.shape[1] - int(lengths[index])
        result[index, start : start + len(row)] = row
    return result


def _check(engine: Any) -> None:
    plugin = engine.plugin
    if not engine.architecture.generates:
        raise ConfigurationError(
            f"megatron_generate needs a causal language model, and this is a {engine.architecture.hf.model_type}."
        )
    for name, allowed in (("sequence_parallelism", False), ("context_parallel_size", 1)):
        if getattr(plugin, name) not in (None, allowed):
            raise ConfigurationError(
                f"megatron_generate does not work with {name}={getattr(plugin, name)}. Set it to {allowed} in the "
                "settings of the run that generates."
            )
    if len(engine.chunks) > 1:
        raise ConfigurationError(
            "megatron_generate does not work with interleaved stages. Leave num_layers_per_virtual_pipeline_stage out."
        )


class _Forward:
    """A forward pass of the pipeline for some new positions, whose last logits every rank gets."""

    def __init__(self, engine: Any, chunk: Any) -> None:
        self.engine, self.chunk = engine, chunk
        self.group = parallel_state.get_pipeline_model_parallel_group()
        self.peers = dist.get_process_group_ranks(self.group)
        self.rank = self.group.rank()
        self.context: Any = None

    def start(self, rows: int, length: int) -> None:
        from megatron.core.inference.contexts import StaticInferenceContext

        self.context = StaticInferenceContext(rows, length)

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        rows, length = ids.shape
        engine, context = self.engine, self.context
        offset = context.sequence_len_offset
        positions = torch.arange(offset, offset + length, device=ids.device).expand(rows, length)
        if self.rank > 0:
            hidden = torch.empty(
                length, rows, engine.config_core.hidden_size, dtype=engine.config_core.pipeline_dtype, device=ids.device
            )
            dist.recv(hidden, self.peers[self.rank - 1])
            self.chunk.set_input_tensor(hidden)
        output = self.chunk(ids, positions, None, inference_context=context, runtime_gather_output=True)
        context.sequence_len_offset = offset + length
        context.enable_decode_mode()
        size = engine.architecture.vocab_size
        if self.rank + 1 < len(self.peers):
            dist.send(output.contiguous(), self.peers[self.rank + 1])
            logits = torch.empty(rows, size, device=ids.device)
        else:
            logits = output[:, -1, :size].float().contiguous()
        if len(self.peers) > 1:
            dist.broadcast(logits, self.peers[-1], group=self.group)
        return logits

    def reorder(self, rows: torch.Tensor) -> None:
        """Let each row continue another one's cache."""
        for layer, (keys, values) in self.context.key_value_memory_dict.items():
            self.context.key_value_memory_dict[layer] = (keys[:, rows].contiguous(), values[:, rows].contiguous())


class _Sampler:
    """Chooses the next tokens: the most likely ones, or random ones of the most likely."""

    def __init__(
        self,
        temperature: float | None,
        top_k: int | None,
        top_p: float | None,
        top_p_decay: float | None,
        top_p_bound: float | None,
        generator: torch.Generator | None,
    ) -> None:
        for name, value, allowed in (
            ("temperature", temperature, temperature is None or temperature > 0),
            ("top_k", top_k, top_k is None or top_k >= 0),
            ("top_p", top_p, top_p is None or 0 <= top_p <= 1),
        ):
            if not allowed:
                raise ConfigurationError(
                    f"{name}={value!r} is not allowed. temperature > 0, top_k >= 0, 0 <= top_p <= 1."
                )
        self.temperature, self.top_k, self.top_p = temperature or 1.0, top_k or 0, top_p or 0.0
        self.decay, self.bound, self.generator = top_p_decay or 1.0, top_p_bound or 0.0, generator
        self.greedy = not self.top_k and not self.top_p

    def __call__(self, logits: torch.Tensor) -> torch.Tensor:
        if self.greedy:
            return logits.argmax(-1)
        logits = logits / self.temperature
        if self.top_k:
            lowest = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < lowest, float("-inf"))
        if self.top_p:
            ordered, order = logits.sort(descending=True)
            before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
            ordered = ordered.masked_fill(before >= self.top_p, float("-inf"))
            logits = torch.full_like(logits, float("-inf")).scatter(1, order, ordered)
            self.top_p = max(self.top_p * self.decay, self.bound)
        chosen = torch.multinomial(logits.softmax(-1), 1, generator=self.generator)[:, 0]
        dist.broadcast(chosen, 0)  # ranks may have other random numbers
        return chosen


def _sample(forward: _Forward, ids: torch.Tensor, total: int, eos: Any, pad: int, choose: _Sampler) -> torch.Tensor:
    forward.start(ids.shape[0], total)
    ended = torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)
    current = ids
    while ids.shape[1] < total:
        chosen = choose(forward(current))
        chosen = chosen.masked_fill(ended, pad)
        ids = torch.cat([ids, chosen[:, None]], 1)
        current = chosen[:, None]
        if eos is not None:
            ended = ended | (chosen == eos)
            if bool(ended.all()):
                break
    return ids


def _beams(
    forward: _Forward, ids: torch.Tensor, total: int, beams: int, penalty: float, eos: Any, pad: int
) -> torch.Tensor:
    """Beam search for one prompt; a hypothesis is rated by its log probability / length ** penalty."""
    if ids.shape[0] != 1:
        raise ConfigurationError(
            f"megatron_generate got {ids.shape[0]} prompts with num_beams={beams}. Search one prompt at a time."
        )
    prompt, device = ids.shape[1], ids.device
    forward.start(beams, total)
    current = ids.expand(beams, -1)
    sequences = current
    scores = torch.full((beams,), -1e9, device=device)
    scores[0] = 0.0
    finished: list[tuple[float, torch.Tensor]] = []
    while True:
        probabilities = forward(current).log_softmax(-1) + scores[:, None]
        words = probabilities.shape[1]
        best, flat = probabilities.view(-1).topk(2 * beams)
        kept: list[tuple[float, int, int]] = []
        length = sequences.shape[1] + 1 - prompt
        for rank, (score, index) in enumerate(zip(best.tolist(), flat.tolist(), strict=True)):
            row, word = divmod(index, words)
            if word == eos:
                if rank < beams:
                    found = torch.cat([sequences[row], sequences.new_tensor([word])])
                    finished.append((score / length**penalty, found))
            elif len(kept) < beams:
                kept.append((score, row, word))
        finished = sorted(finished, key=lambda item: -item[0])[:beams]
        rows = torch.tensor([row for _, row, _ in kept], device=device)
        chosen = torch.tensor([word for _, _, word in kept], device=device)
        scores = torch.tensor([score for score, _, _ in kept], device=device)
        sequences = torch.cat([sequences[rows], chosen[:, None]], 1)
        if sequences.shape[1] >= total:
            finished += [(score / length**penalty, row) for score, row in zip(scores.tolist(), sequences, strict=True)]
            break
        # No hypothesis that is still open can become better than the worst finished one.
        if len(finished) >= beams and finished[-1][0] >= max(scores.tolist()) / length**penalty:
            break
        forward.reorder(rows)
        current = chosen[:, None]
    return max(finished, key=lambda item: item[0])[1][None]
