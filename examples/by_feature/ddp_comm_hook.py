"""Compress gradients before they are sent between processes.

    accel launch --cpu --num_processes 2 examples/by_feature/ddp_comm_hook.py --hook fp16
    accel launch --cpu --num_processes 2 examples/by_feature/ddp_comm_hook.py --hook power_sgd --wrapper bf16

The hook is a setting of DistributedDataParallel: it has no effect in one process, nor in sharded training.
"""

from __future__ import annotations

import argparse

import torch
from common import digit_loaders, digit_model, evaluate, train_epoch

from accel import Accelerator, DDPCommunicationHookType, DistributedDataParallelKwargs
from accel.utils import set_seed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    hooks = [str(hook.value) for hook in DDPCommunicationHookType]
    parser.add_argument("--hook", choices=hooks, default="power_sgd", help="default: power_sgd")
    parser.add_argument("--wrapper", choices=["no", "fp16", "bf16"], default="no", help="send the result in 16 bits")
    options = parser.parse_args()

    # PowerSGD sends rank-2 approximations after ten exact steps; the other hooks have no state.
    state = {"matrix_approximation_rank": 2, "start_powerSGD_iter": 10} if "power_sgd" in options.hook else {}
    handler = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType(options.hook),
        comm_wrapper=DDPCommunicationHookType(options.wrapper),
        comm_state_option=state,
    )
    accelerator = Accelerator(kwargs_handlers=[handler])
    set_seed(0)
    train_loader, test_loader = digit_loaders(batch_size=16)
    model = digit_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, train_loader, test_loader = accelerator.prepare(model, optimizer, train_loader, test_loader)
    for _ in range(4):
        train_epoch(accelerator, model, optimizer, train_loader)
    accelerator.print(f"{options.hook} accuracy: {evaluate(accelerator, model, test_loader):.3f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
