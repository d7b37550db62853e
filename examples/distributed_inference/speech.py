"""Transcribe recordings of different lengths on several processes, and gather tensors instead of objects.

    accel launch --cpu --num_processes 2 examples/distributed_inference/speech.py

The recordings are sine tones, and the "transcript" is a class for each frame of 160 samples, found with a filter bank:
the shapes are those of speech recognition. Ranks have different numbers of recordings and frames, so results are
padded to one shape before they are gathered.
"""

from __future__ import annotations

import torch

from accel import PartialState
from accel.utils import gather, pad_across_processes

RATE, FRAME, PADDING = 16_000, 160, -1
PITCHES = torch.tensor([400.0, 800.0, 1200.0, 2000.0])


def recording(index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A signal of 5 to 9 tones, and the number of the tone in each frame."""
    dice = torch.Generator().manual_seed(index)
    tones = torch.randint(0, len(PITCHES), (5 + index % 5,), generator=dice)
    frames = tones.repeat_interleave(10)
    time = torch.arange(len(frames) * FRAME) / RATE
    return torch.sin(2 * torch.pi * PITCHES[frames].repeat_interleave(FRAME) * time), frames


def transcribe(signal: torch.Tensor) -> torch.Tensor:
    """The tone with the most energy in each frame."""
    time = torch.arange(FRAME, device=signal.device) / RATE
    angles = 2 * torch.pi * PITCHES.to(signal.device)[:, None] * time
    frames = signal.reshape(-1, FRAME)
    energy = (frames @ torch.cos(angles).T) ** 2 + (frames @ torch.sin(angles).T) ** 2
    return energy.argmax(dim=1)


def main() -> None:
    state = PartialState()
    with state.split_between_processes(list(range(7)), apply_padding=True) as indices:
        rows = [transcribe(recording(index)[0].to(state.device)) for index in indices]
    transcripts = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)
    transcripts = gather(pad_across_processes(transcripts, dim=1, pad_index=PADDING))[:7].cpu()  # drops the padding
    correct = total = 0
    for index, row in enumerate(transcripts):
        expected = recording(index)[1]
        correct += int((row[row != PADDING] == expected).sum())
        total += len(expected)
    state.print(f"transcripts of shape {tuple(transcripts.shape)}")
    state.print(f"frames recognised: {correct} of {total}")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
