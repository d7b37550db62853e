"""What the tests of XLA devices run, each in a process of its own, which has not imported torch_xla yet."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

ROOT = Path(__file__).parents[1]
STEPS = 20
MESHES: dict[str, tuple[dict[str, int], int]] = {
    "dp4": ({"dp_replicate_size": 4}, 4),
    "fsdp4": ({"dp_shard_size": 4}, 4),
    "tp4": ({"tp_size": 4}, 1),
    "fsdp2_tp2": ({"dp_shard_size": 2, "tp_size": 2}, 2),
}


class Records(logging.Handler):
    """Keeps the messages of accel."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextlib.contextmanager
def messages() -> Iterator[list[str]]:
    handler, loggers = Records(), [logging.getLogger(name) for name in ("accel", "accel_data")]
    for logger in loggers:
        logger.addHandler(handler)
    yield handler.messages
    for logger in loggers:
        logger.removeHandler(handler)


class Counts:
    """Compilations, cuts, and copies to the host, from torch_xla's own metrics."""

    def __init__(self) -> None:
        import torch_xla.debug.metrics as metrics

        self.metrics = metrics
        self.start = self.now()

    def now(self) -> dict[str, int]:
        copies = self.metrics.metric_data("TransferFromDeviceTime")
        return {
            "compilations": self.metrics.counter_value("UncachedCompile") or 0,
            "cuts": self.metrics.counter_value("MarkStep") or 0,
            "copies": copies[0] if copies else 0,
        }

    def since(self) -> dict[str, int]:
        return {name: value - self.start[name] for name, value in self.now().items()}


def fresh() -> None:
    from accel import Accelerator
    from accel_state import AcceleratorState, GradientState, PartialState

    del Accelerator
    for kind in (AcceleratorState, PartialState, GradientState):
        kind._reset_state()


def values(tensors: list[torch.Tensor]) -> list[float]:
    return [float(tensor) for tensor in tensors]


# -- one device --------------------------------------------------------------------------------------------------------


def digits_run(accelerator: Any) -> dict[str, Any]:
    """20 steps of the digits example with clipping and a schedule, by hand and prepared; then an evaluation."""
    from digits import DigitsNet, digits

    train_set, test_set = digits()

    def build() -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = DigitsNet()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-3)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=STEPS)
        return model, optimizer, schedule, DataLoader(train_set, batch_size=32, drop_last=True)

    model, optimizer, schedule, loader = build()
    expected = []
    for (images, labels), _ in zip(loader, range(STEPS), strict=False):
        loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    model.eval()
    right = sum(
        int((model(images).argmax(1) == labels).sum()) for images, labels in DataLoader(test_set, batch_size=32)
    )

    model, optimizer, schedule, loader = accelerator.prepare(*build())
    with messages() as said:
        test_loader = accelerator.prepare(DataLoader(test_set, batch_size=32))
    losses, counts = [], Counts()
    for step, (images, labels) in enumerate(loader):
        if step == 2:
            counts = Counts()
        loss = functional.cross_entropy(model(images), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step + 1 == STEPS:
            break
    later = counts.since()
    model.eval()
    found, samples, counts = 0, 0, Counts()
    for images, labels in test_loader:
        with torch.no_grad():
            predictions = model(images).argmax(1)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        found, samples = found + (predictions == labels).sum(), samples + len(labels)
    evaluation = counts.since()
    return {
        "losses": values(losses),
        "expected": expected,
        "later": later,
        "evaluation": evaluation,
        "batches": len(test_loader),
        "right": [int(found), right],
        "samples": samples,
        "said": said,
    }


def text_run(accelerator: Any) -> dict[str, Any]:
    """10 optimizer steps of two micro-batches of the text example, on two of its layers and padded to one length."""
    from text_classification import PACKAGES, checkpoint_folder, examples
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    folder = checkpoint_folder()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts, labels = zip(*examples(160)[0][:80], strict=True)
    tokens = tokenizer(list(texts), padding="max_length", truncation=True, max_length=16, return_tensors="pt")
    # Without the mask: Transformers copies it to the host, to see whether it hides anything.
    data = [
        {"input_ids": ids, "labels": torch.tensor(label)}
        for ids, label in zip(tokens["input_ids"], labels, strict=True)
    ]

    def build() -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_pretrained(
            folder,
            num_labels=len(PACKAGES),
            num_hidden_layers=1,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        model.base_model.embeddings.requires_grad_(False)
        chosen = [weight for weight in model.parameters() if weight.requires_grad]
        return model, torch.optim.AdamW(chosen, lr=2e-4), DataLoader(data, batch_size=4)

    model, optimizer, loader = build()
    expected = []
    for number, batch in enumerate(loader):
        loss = model(**batch).loss
        (loss / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
        expected.append(loss.item())
    accelerator.gradient_accumulation_steps = 2
    model, optimizer, loader = accelerator.prepare(*build())
    losses, counts = [], Counts()
    for number, batch in enumerate(loader):
        if number == 4:
            counts = Counts()
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.detach())
    later = counts.since()
    accelerator.gradient_accumulation_steps = 1
    return {"losses": values(losses), "expected": expected, "later": later}


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 8)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.table(tokens)))


def resume_run(accelerator: Any, folder: Path) -> dict[str, Any]:
    """A tied model with dropout on a shuffled loader, saved after 3 of 8 steps and continued from there."""
    from accel.utils import set_seed

    tokens = torch.randint(0, 12, (64, 5), generator=torch.Generator().manual_seed(1))

    def build() -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = Tied()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return accelerator.prepare(model, optimizer, DataLoader(TensorDataset(tokens), batch_size=8, shuffle=True))

    def train(model: Any, optimizer: Any, loader: Any, save_after: int = 0) -> list[float]:
        losses = []
        for number, (batch,) in enumerate(loader, 1):
            loss = functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            if number == save_after:
                accelerator.save_state(folder / "state")
        return values(losses)

    set_seed(7)
    model, optimizer, loader = build()
    whole = train(model, optimizer, loader, save_after=3)
    tied = model.head.weight is model.table.weight
    accelerator.save_model(model, folder / "model")
    accelerator.save_model(model, folder / "pickled", safe_serialization=False)
    weights = {name: value.cpu() for name, value in accelerator.get_state_dict(model).items()}
    torch.save(weights, folder / "weights.pt")
    accelerator.free_memory()
    model, optimizer, loader = build()
    accelerator.load_state(folder / "state")
    return {"whole": whole, "resumed": train(model, optimizer, loader), "tied": tied}


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(torch.arange(7.0))


def offers(accelerator: Any, folder: Path) -> dict[str, Any]:
    """Everything else that the Accelerator offers."""
    from accel import Accelerator
    from accel.local_sgd import LocalSGD
    from accel.utils import broadcast, broadcast_object_list, gather_object
    from accel_state.collectives.xla import XlaCollectives

    device, results = accelerator.device, {}
    nested = {"a": torch.ones(2, device=device), "b": [torch.tensor([True], device=device)]}
    gathered = accelerator.gather(nested)
    results["gather"] = [gathered["a"].tolist(), gathered["b"][0].tolist()]
    results["reduce"] = accelerator.reduce(nested["a"], "mean", scale=3.0).tolist()
    results["objects"] = [gather_object([1]), broadcast_object_list([2]), broadcast(nested["a"]).tolist()]
    results["padded"] = list(accelerator.pad_across_processes(nested["a"]).shape)
    with accelerator.split_between_processes([1, 2, 3]) as share:
        results["split"] = share
    accelerator.set_trigger()
    results["trigger"] = [accelerator.check_trigger(), accelerator.check_trigger()]
    stream = accelerator.prepare(DataLoader(Stream(), batch_size=4))
    results["stream"] = [[len(batch), *accelerator.gather_for_metrics(batch).tolist()] for batch in stream]
    skipped = accelerator.skip_first_batches(accelerator.prepare(DataLoader(torch.arange(6.0), batch_size=2)), 2)
    results["skipped"] = [batch.tolist() for batch in skipped]
    uneven = accelerator.prepare(DataLoader(torch.arange(3.0), batch_size=2, drop_last=True))
    results["dropped"] = [batch.tolist() for batch in uneven]
    model, optimizer = accelerator.prepare(layer := nn.Linear(2, 1), torch.optim.SGD(layer.parameters(), lr=0.1))
    with accelerator.profile() as profiler, LocalSGD(accelerator, model, local_sgd_steps=2) as local_sgd:
        for _ in range(2):
            accelerator.backward(model(torch.ones(1, 2, device=device)).sum())
            accelerator.clip_grad_value_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            local_sgd.step()
    results["profiled"] = bool(profiler.key_averages())
    compiled = torch.compile(accelerator.unwrap_model(model), backend="openxla")
    batch = torch.ones(1, 2, device=device)
    results["compiled"] = abs(compiled(batch).item() - model(batch).item())
    with messages() as said:
        for length in range(2, 12):
            accelerator.backward(model(torch.ones(length, 2, device=device)).sum())
            optimizer.step()
            optimizer.zero_grad()
    results["recompiled"] = [message for message in said if "were recompiled" in message]
    moved = nn.Linear(2, 1)
    stale = torch.optim.SGD(moved.parameters(), lr=0.1)
    moved.to(device)
    moved, stale = accelerator.prepare(moved, stale)
    accelerator.backward(moved(batch).sum())
    results["stale"] = refusal(stale.step)
    # One replica runs what several would.
    collectives = XlaCollectives(device)
    ones = torch.ones(2, device=device)
    results["replica"] = [
        collectives.all_gather(ones).tolist(),
        collectives.all_reduce(ones.clone(), "max").tolist(),
        collectives.broadcast(torch.tensor([True, False], device=device)).tolist(),
        collectives.all_gather_object({"x": 1}),
        collectives.broadcast_object("y"),
        collectives.barrier(),
    ]
    accelerator.strategy.averages = True
    replica, optimizer = accelerator.prepare(layer := nn.Linear(2, 1), torch.optim.SGD(layer.parameters(), lr=0.1))
    with accelerator.no_sync(replica):
        accelerator.backward(replica(batch).sum())
    alone = recorded(replica.weight.grad).count("all-reduce(")
    accelerator.backward(replica(batch).sum())
    results["averaged"] = [alone, recorded(replica.weight.grad).count("all-reduce("), replica.weight.grad.tolist()]
    accelerator.end_training()
    fresh()
    accelerator = Accelerator(mixed_precision="bf16")
    model, optimizer = accelerator.prepare(layer := nn.Linear(64, 64), torch.optim.SGD(layer.parameters(), lr=0.1))
    inputs = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    plain = functional.linear(inputs, layer.weight.detach().cpu(), layer.bias.detach().cpu())
    with accelerator.autocast():
        inside = functional.linear(inputs.to(device), model.weight).dtype
    output = model(inputs.to(device))
    accelerator.backward(output.square().mean())
    optimizer.step()
    difference = (output.detach().cpu() - plain).abs().max().item()
    results["bf16"] = [str(inside), str(output.dtype), str(model.weight.dtype), difference]
    return results


def averages_run(make: Callable[[], Any], folder: Path, parts: int = 1) -> dict[str, Any]:
    """Moving averages over accumulated steps, without interruption and resumed, and torch's AveragedModel.

    Args:
        make: returns an Accelerator with windows of two batches.
        folder: where the state is saved.
        parts: the batches of the loader in a batch of the run.
    """
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    decay, steps, saved = 0.7, 6, 3
    data = torch.randn(steps * 2 * 8, 8, generator=torch.Generator().manual_seed(2))

    def build() -> tuple[Any, ...]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        model[0].bias.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
        return model, optimizer, DataLoader(TensorDataset(data), batch_size=8 // parts)

    model, optimizer, _ = build()
    plain = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
    for step in range(steps):
        for batch in data[step * 16 : step * 16 + 16].split(8):
            (model(batch).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.update_parameters(model)
    loss = plain(data[:8]).square().mean().item()
    differences, counts = [], Counts()
    for resumed in (False, True):
        fresh()
        accelerator = make()
        model, optimizer, loader = accelerator.prepare(*build())
        average = accelerator.moving_average(model, decay)
        if resumed:
            accelerator.load_state(folder)
        for number, (batch,) in enumerate(loader, 2 * saved if resumed else 0):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).square().mean())
                optimizer.step()
                assert average.update() == (number % 2 == 1)
                optimizer.zero_grad()
            if number == 2 * saved - 1:
                accelerator.save_state(folder)
            counts = Counts() if number == 7 else counts
        later = counts.since()
        first = data[:8].to(accelerator.device)
        before = accelerator.get_state_dict(model)
        before = {name: value.cpu().clone() for name, value in before.items()}
        with average.applied():
            differences.append(abs(model(first).square().mean().item() - loss))
            for name, value in accelerator.get_state_dict(model).items():
                differences.append((value.cpu() - plain.module.state_dict()[name]).abs().max().item())
        after = accelerator.get_state_dict(model)
        assert all(torch.equal(value, after[name].cpu()) for name, value in before.items())
        accelerator.end_training()
    return {"difference": max(differences), "later": later}


def recorded(tensor: torch.Tensor) -> str:
    """What is recorded for a tensor and has not run yet."""
    import torch_xla

    return torch_xla._XLAC._get_xla_tensors_hlo([tensor])


def refusal(call: Callable[[], Any]) -> str:
    from accel_state.errors import AccelError

    try:
        call()
    except AccelError as error:
        return str(error)
    return ""


def single(folder: Path) -> dict[str, Any]:
    from accel import Accelerator

    accelerator = Accelerator()
    results = {
        "type": str(accelerator.distributed_type),
        "device": str(accelerator.device),
        "digits": digits_run(accelerator),
    }
    accelerator.free_memory()
    results["text"] = text_run(accelerator)
    accelerator.free_memory()
    results["resume"] = resume_run(accelerator, folder)
    accelerator.free_memory()
    results["offers"] = offers(accelerator, folder)
    results["averages"] = averages_run(lambda: Accelerator(gradient_accumulation_steps=2), folder / "averages")
    return results


# -- four devices of one process ---------------------------------------------------------------------------------------


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=4, attn_implementation="eager")
    )


def sentences() -> torch.Tensor:
    return torch.randint(0, 64, (STEPS * 8, 6), generator=torch.Generator().manual_seed(1))


def steps_of(model: Any, optimizer: Any, loader: Any, accelerator: Any = None) -> tuple[list[torch.Tensor], Any]:
    losses, counts = [], None
    for number, batch in enumerate(loader):
        if number == 2 and accelerator is not None:
            counts = Counts()
        loss = model(input_ids=batch, labels=batch).loss
        if accelerator is None:
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        else:
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, None if counts is None else counts.since()


def mesh(folder: Path) -> dict[str, Any]:
    import torch_xla

    from accel import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig
    from accel.utils import TorchTensorParallelConfig, set_seed

    set_seed(3)  # before it is known how the devices are used
    results: dict[str, Any] = {}
    expected = None
    for name, (sizes, parts) in MESHES.items():
        fresh()
        if name == "fsdp4":
            accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin())
        else:
            accelerator = Accelerator(parallelism_config=ParallelismConfig(**sizes))
        if expected is None:
            reference = llama()
            optimizer = torch.optim.SGD(reference.parameters(), lr=0.5, momentum=0.9)
            expected, _ = steps_of(reference, optimizer, DataLoader(sentences(), batch_size=8))
            torch.save(reference.state_dict(), folder / "expected.pt")
        model = llama()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        loader = DataLoader(sentences(), batch_size=8 // parts)
        model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, loader)
        losses, later = steps_of(model, optimizer, loader, accelerator)
        schedule.step()
        weight = model.model.layers[0].self_attn.q_proj.weight
        shards = [torch_xla._XLAC._get_xla_sharding_spec(weight)]
        shards.append(torch_xla._XLAC._get_xla_sharding_spec(optimizer.state[weight]["momentum_buffer"]))
        accelerator.save_state(folder / name)
        before = {key: value.cpu() for key, value in accelerator.get_state_dict(model).items()}
        with torch.no_grad():
            weight.zero_()
        accelerator.load_state(folder / name)
        after = {key: value.cpu() for key, value in accelerator.get_state_dict(model).items()}
        shards.append(torch_xla._XLAC._get_xla_sharding_spec(optimizer.state[weight]["momentum_buffer"]))
        evaluation = accelerator.prepare(DataLoader(torch.arange(21), batch_size=2))
        samples = [accelerator.gather_for_metrics(batch).tolist() for batch in evaluation]
        results[name] = {
            "losses": values(losses),
            "expected": values(expected),
            "later": later,
            "type": [str(accelerator.distributed_type), accelerator.num_processes, schedule.scheduler.last_epoch],
            "shards": shards,
            "loaded": all(torch.equal(before[key], after[key]) for key in before),
            "names": list(before),
            "batch": loader.total_batch_size,
            "samples": [sample for batch in samples for sample in batch],
        }
        accelerator.end_training()
        plan = TorchTensorParallelConfig(plan={"0": "colwise", "2": "rowwise"}) if "tp_size" in sizes else None
        settings = ParallelismConfig(**sizes, tp_handler=plan)
        results[name]["averages"] = averages_run(
            lambda settings=settings: Accelerator(parallelism_config=settings, gradient_accumulation_steps=2),  # type: ignore[misc]
            folder / f"{name} averages",
            parts,
        )
    results["refused"] = refused()
    return results


def refused() -> list[str]:
    from accel import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig

    answers = []
    for settings in (
        {"parallelism_config": ParallelismConfig(dp_shard_size=3)},
        {"parallelism_config": ParallelismConfig(cp_size=4)},
        {"parallelism_config": ParallelismConfig(tp_size=4, tp_sequence_parallel=True)},
        {"fsdp_plugin": FullyShardedDataParallelPlugin(cpu_offload=True)},
        {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=1)},
    ):
        fresh()
        answers.append(refusal(lambda settings=settings: Accelerator(**settings)))  # type: ignore[misc]
    return answers


def late(folder: Path) -> dict[str, Any]:
    """A mesh that is asked for when a device is in use already."""
    import torch_xla

    from accel import Accelerator, ParallelismConfig

    torch.ones(1, device=torch_xla.device())
    return {"refused": refusal(lambda: Accelerator(parallelism_config=ParallelismConfig(dp_shard_size=4)))}


# -- all ---------------------------------------------------------------------------------------------------------------


def results_of(name: str, folder: str) -> dict[str, Any]:
    """The results of a function of this file."""
    sys.path.insert(0, str(ROOT / "examples"))
    results: dict[str, Any] = globals()[name](Path(folder))
    return results


def printed_by(code: str, folder: str) -> str:
    """What code prints in a folder, with the processes that it starts."""
    os.chdir(folder)
    sys.path.insert(0, folder)
    with open("printed", "w+", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1)
        exec(code, {})
        sys.stdout.flush()
        file.seek(0)
        return file.read()


def doctor(*words: str) -> tuple[int, str]:
    """The exit code of accel doctor, and what it prints."""
    from accel_launch.cli import main

    with contextlib.redirect_stdout(io.StringIO()) as printed:
        return main(["doctor", *words]), printed.getvalue()
