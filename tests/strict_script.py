"""A training script that tests/test_types.py checks with mypy and pyright: the lines marked "error" have one."""

import argparse

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import assert_type

from accel import (
    Accelerator,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
    find_executable_batch_size,
    load_checkpoint_and_dispatch,
    skip_first_batches,
)
from accel.utils import (
    DeepSpeedPlugin,
    extract_model_from_parallel,
    gather,
    pad_across_processes,
    reduce,
    send_to_device,
)
from accel_data import PreparedLoader
from accel_state import PartialState, RNGType
from accel_track import JSONLinesTracker, LoggerType

Sample = tuple[torch.Tensor, ...]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out

    def generate(self, length: int) -> list[int]:
        return list(range(length))


parser = argparse.ArgumentParser()
parser.add_argument("--mixed_precision")
args = parser.parse_args()
Accelerator(log_with="jsonl", rng_types=["torch", RNGType.PYTHON], strategy="ddp", dynamo_backend="inductor")
Accelerator(log_with=["jsonl", LoggerType.WANDB, JSONLinesTracker])
accelerator = Accelerator(mixed_precision=args.mixed_precision, fsdp_plugin=FullyShardedDataParallelPlugin())
Accelerator(mixed_precision="bf16", deepspeed_plugin={"a": DeepSpeedPlugin()}, parallelism_config=ParallelismConfig())

net, data = Net(), DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2)
adam = AdamW(net.parameters())
schedule = LambdaLR(adam, lambda step: 1.0)

assert_type(accelerator.prepare(net), Net)
assert_type(accelerator.prepare(net, device_placement=[False]), Net)
model, optimizer, loader, scheduler = accelerator.prepare(net, adam, data, schedule)
assert_type(model, Net)
assert_type(optimizer, AdamW)
assert_type(loader, DataLoader[Sample])
assert_type(scheduler, LambdaLR)
eight = accelerator.prepare(net, adam, data, schedule, net, adam, data, schedule)
assert_type(eight, tuple[Net, AdamW, DataLoader[Sample], LambdaLR, Net, AdamW, DataLoader[Sample], LambdaLR])
parts: list[nn.Module] = [net, net]
assert_type(accelerator.prepare(*parts), tuple[nn.Module, ...])

assert_type(accelerator.prepare_model(net), Net)
assert_type(accelerator.unwrap_model(model), Net)
assert_type(extract_model_from_parallel(model), Net)
assert_type(load_checkpoint_and_dispatch(net, "folder", device_map="auto"), Net)
tokens: list[int] = model.generate(3)
prepared = accelerator.prepare_data_loader(data)
assert_type(prepared, PreparedLoader[Sample])
assert_type(accelerator.skip_first_batches(prepared, 1), PreparedLoader[Sample])
assert_type(skip_first_batches(data, 1), DataLoader[Sample])
prepared.set_epoch(1)
prepared.load_state_dict(prepared.state_dict())
for batch in prepared:
    print(batch, prepared.end_of_dataloader, prepared.remainder)

x = torch.ones(2)
assert_type(accelerator.gather(x), torch.Tensor)
assert_type(accelerator.gather_for_metrics((x, x)), tuple[torch.Tensor, torch.Tensor])
assert_type(accelerator.reduce({"loss": x}, "mean"), dict[str, torch.Tensor])
assert_type(accelerator.pad_across_processes([x]), list[torch.Tensor])
assert_type(gather(x), torch.Tensor)
assert_type(reduce(x, "sum"), torch.Tensor)
assert_type(pad_across_processes(x), torch.Tensor)
assert_type(send_to_device([x], "cpu"), list[torch.Tensor])
with accelerator.split_between_processes(["a", "b"]) as names:
    assert_type(names, list[str])


@accelerator.on_main_process
def report(step: int) -> str:
    return str(step)


@find_executable_batch_size(starting_batch_size=64)
def train(batch_size: int, epochs: int) -> float:
    return batch_size / epochs


assert_type(report(1), str | None)
assert_type(train(2), float)

Accelerator(mixed_precision="bf17")  # error
Accelerator(log_with="typo")  # error
Accelerator(log_with=["jsonl", "typo"])  # error
Accelerator(rng_types=["nonsense"])  # error
Accelerator(dynamo_backend=3)  # error
Accelerator(strategy="fspd")  # error
Accelerator(grad_accum=4)  # error
Accelerator(gradient_accumulation_steps="4")  # error
Accelerator(device_placement="yes")  # error
accelerator.save_state(safe_serialization="x")  # error
accelerator.pad_across_processes(x, dim="x")  # error
Accelerator(fsdp_plugin="nonsense")  # error
Accelerator(deepspeed_plugin="nonsense")  # error
Accelerator(megatron_lm_plugin="nonsense")  # error
Accelerator(torch_tp_plugin="nonsense")  # error
Accelerator(parallelism_config=3)  # error
accelerator.reduce(x, "typo")  # error
reduce(x, "typo")  # error
accelerator.backward(x, reduction="typo")  # error
accelerator.prepare_model(adam)  # error
model.generate("3")  # error
wrong: int = accelerator.gather(x)  # error
report("1")  # error
train(2, epochs=1)  # error
print(accelerator.no_such)  # error
print(PartialState().no_such)  # error
rank: str = PartialState().process_index  # error
