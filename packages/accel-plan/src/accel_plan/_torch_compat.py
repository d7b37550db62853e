"""Every private name of torch that this package uses, with what it is for and what would replace it.

``tests/test_torch_compat.py`` fails when torch drops one. Supported: torch >= 2.6; the newest tested version is 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist

# Tensors with shapes and without memory that run the code of a real device. The meta device is the public form, but
# FSDP and DTensor do not accept it for training.
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

# Sees every operation below autograd. Documented in the notes on extending PyTorch, but only importable from here.
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# Attention as the memory-efficient kernel of GPUs computes it, of tensors without memory; the public function chooses a
# kernel by the device.
efficient_attention: Any = torch.ops.aten._scaled_dot_product_efficient_attention


def has_meta_collectives() -> bool:
    """Return True if torch's collectives accept tensors without values: in 2.13, not in 2.10. Nothing public tells."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key("c10d::broadcast_", "Meta"))


def fake_store() -> dist.Store:
    """Return the store of the "fake" backend, whose collectives return at once; the backend has no public store."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    store: dist.Store = FakeStore()
    return store


def forget_device_meshes() -> None:
    """Clear DTensor's caches: their results hold device meshes, and an equal mesh of a later world has other groups."""
    from torch.distributed.tensor import debug

    clear: Any = getattr(debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a tensor. ``DTensor.to_local()`` would be recorded by autograd."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def desugars_itself(kind: type) -> bool:
    """Return True if a class of tensors runs other operations for each of its own (DTensor, async collectives)."""
    handler = getattr(kind, "__torch_dispatch__", None)
    return handler not in (None, torch.Tensor.__torch_dispatch__) and not issubclass(kind, FakeTensor)


def schema_of(operator: Any) -> Any:
    """Return the arguments and results of an operator, and which share memory; torch has no public reader."""
    return operator._schema


def storage_id(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage; ``data_ptr()`` is 0 for tensors without memory."""
    return tensor.untyped_storage()._cdata


def live_bytes(reference: StorageWeakRef) -> int:
    """Return bytes of a weakly referenced storage; 0 once it is freed. There is no public way to dereference it."""
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    return 0 if storage is None else storage.nbytes()


def process_group_of(arguments: Iterable[Any]) -> dist.ProcessGroup:
    """Return the process group among a collective operator's arguments: a TorchScript object or a registered name."""
    names = []
    for value in arguments:
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)
        if isinstance(value, str):
            names.append(value)
    # Reductions also take the name of the reduction, before that of the group.
    resolve: Any = dist.distributed_c10d._resolve_process_group
    group: dist.ProcessGroup = resolve(names[-1])
    return group


def fsdp2_units(module: Any) -> list[list[Any]]:
    """Return the parameters that ``fully_shard`` gathers together for a module; its public API does not expose them."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group.fsdp_params for group in groups if group is not None]


def fsdp2_unsharded_bytes(parameter: Any) -> int:
    """Return bytes of a gathered parameter; a DTensor's shape also covers the tensor-parallel ranks."""
    size: torch.Size = parameter._orig_size
    return size.numel() * int(parameter.sharded_param.element_size())


def fsdp2_unsharded_tensors(parameter: Any) -> list[torch.Tensor]:
    """Return a parameter and its gradients while they are gathered; ``module.parameters()`` shows shards only."""
    full = getattr(parameter, "_unsharded_param", None)
    gradient = None if full is None else full.grad
    accumulated = getattr(parameter, "unsharded_accumulated_grad", None)
    return [tensor for tensor in (full, gradient, accumulated) if tensor is not None]


def fsdp2_accumulated_gradient(parameter: Any) -> torch.Tensor | None:
    """Return the gradient of a gathered parameter that is not reduced yet.

    ``parameter.grad`` shows reduced ones only.
    """
    accumulated: torch.Tensor | None = getattr(parameter, "unsharded_accumulated_grad", None)
    return accumulated


def fsdp1_unit_bytes(module: Any) -> int:
    """Return bytes of the flat parameter that FSDP 1 gathers for a module; 0 if it is not sharded.

    There is no public equivalent.
    """
    handle = module._handle
    if handle is None or not handle.uses_sharded_strategy:
        return 0
    return int(handle.flat_param._unpadded_unsharded_size.numel() * handle.flat_param.element_size())


class _AgreedVote:
    def item(self) -> int:
        return 1


def local_pipeline_stage() -> Any:
    """Return a subclass of ``PipelineStage`` that exchanges no shapes with other ranks when it is given them.

    Importing ``torch.distributed.pipelining`` changes the environment, so it is imported only when a plan is made.
    """
    from torch.distributed.pipelining import PipelineStage

    class LocalStage(PipelineStage):
        def _warmup_forward_vote(self, *args: Any, **kwargs: Any) -> Any:
            return _AgreedVote()

        def _warmup_backward_result(self, *args: Any, **kwargs: Any) -> Any:
            return _AgreedVote()

        def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
            return []

    return LocalStage
