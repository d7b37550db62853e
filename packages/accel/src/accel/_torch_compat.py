"""Every private name of torch that this package uses, with what it is for and what would replace it.

``tests/test_torch_compat.py`` fails when torch drops one. Supported: torch >= 2.6; the newest tested version is 2.13.
Modules of torch that are slow to import are imported where they are needed.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import ShardingStrategy
    from torch.distributed.tensor import DTensor, Placement
    from torch.optim import Optimizer

# -- tensors ---------------------------------------------------------------------------------------------------------

# One kernel for many tensors. torch.nn.utils.clip_grads_with_norm_ would do for scaling, but takes parameters, not
# gradients; torch.nn.utils.get_total_norm has no dtype to add up in.
foreach_div_ = torch._foreach_div_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm

_CLIPPING = torch.nn.utils.clip_grad


def before_torch_clips(check: Callable[[list[torch.Tensor], float], None]) -> None:
    """Have torch call a function with the parameters whose gradients it is about to clip, and the limit of their norm.

    torch has no hook for it. Its functions end in one private one, also where a script has imported them before.
    """
    clip = _CLIPPING._clip_grads_with_norm_
    if getattr(clip, "checks", None) is check:
        return

    @functools.wraps(clip)
    def checked(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> Any:
        chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        check(chosen, max_norm)
        return clip(chosen, max_norm, *args, **kwargs)

    checked.checks = check  # type: ignore[attr-defined]
    _CLIPPING._clip_grads_with_norm_ = checked
    torch.nn.utils.clip_grads_with_norm_ = checked


def before_torch_clips_values(check: Callable[[list[torch.Tensor]], None]) -> None:
    """Do the same for ``clip_grad_value_``, except where a script has imported the function before."""
    clip = _CLIPPING.clip_grad_value_
    if getattr(clip, "checks", None) is check:
        return

    @functools.wraps(clip)
    def checked(parameters: Any, *args: Any, **kwargs: Any) -> None:
        chosen = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        check(chosen)
        clip(chosen, *args, **kwargs)

    checked.checks = check  # type: ignore[attr-defined]
    _CLIPPING.clip_grad_value_ = torch.nn.utils.clip_grad_value_ = checked


# Tensors without values, which models are traced with; the public name is of a mode only.
FakeTensor = torch._subclasses.FakeTensor

# A tensor subclass without storage, for a DTensor that is saved in another shape.
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass

# -- torch.compile ---------------------------------------------------------------------------------------------------

# What torch.compile, FSDP 1 and activation checkpointing add to the names of parameters.
NAME_PREFIXES = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")

# Module and name of the class of what ``torch.compile(module)`` returns; it has no public name. Importing the module
# takes a second, so it is looked up among the imported ones.
OPTIMIZED_MODULE = ("torch._dynamo.eval_frame", "OptimizedModule")

# The attribute of such an object that holds the module inside; there is no public one.
ORIGINAL_MODULE = "_orig_mod"

# The attribute that holds what ``module.compile()`` has compiled, or None; there is no public query.
COMPILED_CALL = "_compiled_call_impl"

# -- process groups --------------------------------------------------------------------------------------------------


def get_backend(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the object of the library below a process group, which frees itself without the GIL; no public name."""
    try:
        return group._get_backend(device)
    except RuntimeError:
        return group  # that of a plug-in may have no library below it


def default_store() -> dist.Store:
    """Return the store of the default process group; ``dist`` has no public accessor."""
    store: dist.Store = dist.distributed_c10d._get_default_store()
    return store


def forget_quorum(manager: Any) -> None:
    """Have torchft's manager set up its group at the next quorum, whatever its number; it has no public method."""
    manager._quorum_id = -1


@contextlib.contextmanager
def managers_that_listen_at(address: str, store: str, reach: Callable[[str], str]) -> Iterator[None]:
    """Have torchft's managers listen at one address; they have no argument for it, and listen at all.

    Args:
        address: host and port at which the server of a manager that is made in the block listens.
        store: host and port of its store as others reach it, where that is not as this process reaches it.
        reach: how this process reaches the manager with an address, from here on.
    """
    manager: Any = importlib.import_module("torchft.manager")
    coordination: Any = importlib.import_module("torchft.coordination")

    def serve(**given: Any) -> Any:
        return coordination.ManagerServer(**{**given, "bind": address, "store_addr": store})

    def connect(manager_address: str, **given: Any) -> Any:
        return coordination.ManagerClient(reach(manager_address), **given)

    manager.ManagerServer, manager.ManagerClient = serve, connect
    try:
        yield
    finally:
        manager.ManagerServer = coordination.ManagerServer


@functools.cache
def cpp_log_level() -> ctypes.c_int | None:
    """Return the level of torch's C++ log (2: errors only), which no Python function sets.

    None in a build without it.
    """
    name = {"win32": "c10.dll", "darwin": "libc10.dylib"}.get(sys.platform, "libc10.so")
    try:
        return ctypes.c_int.in_dll(
            ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name)), "FLAGS_caffe2_log_level"
        )
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def quiet_cpp_logs() -> Iterator[None]:
    """Silence the C++ warnings of torch: a store that is gone logs its C++ frames before it raises an error."""
    level = cpp_log_level()
    if level is None:
        yield
        return
    former, level.value = level.value, max(level.value, 2)
    try:
        yield
    finally:
        level.value = former


def symmetric_products(group: dist.ProcessGroup) -> Any:
    """Torch's products that overlap with communication in a group, whose ranks get symmetric memory for them.

    The namespace has ``fused_all_gather_matmul`` and ``fused_matmul_reduce_scatter``, which have no public names.
    """
    memory: Any = importlib.import_module("torch.distributed._symmetric_memory")
    is_needed = not hasattr(memory.enable_symm_mem_for_group, "__deprecated__")  # newer versions do so by themselves
    if is_needed and not memory.is_symm_mem_enabled_for_group(group.group_name):
        memory.enable_symm_mem_for_group(group.group_name)
    return torch.ops.symm_mem


# -- data parallelism -------------------------------------------------------------------------------------------------


def check_reducer(model: nn.parallel.DistributedDataParallel) -> None:
    """Raise RuntimeError if a backward pass has begun to reduce gradients and not ended; the next forward would."""
    model._check_reducer_finalized()


def bucket_parameters(model: nn.parallel.DistributedDataParallel) -> list[list[torch.Tensor]]:
    """Return the parameters of each bucket that gradients are reduced in."""
    return [bucket.parameters() for bucket in model.reducer._get_zeros_like_grad_buckets()]


def rebuild_buckets(model: nn.parallel.DistributedDataParallel) -> None:
    """Build the buckets in the order of the first backward pass; does nothing before it, or a second time."""
    model.reducer._rebuild_buckets()


def finish_forward(model: nn.parallel.DistributedDataParallel, loss: torch.Tensor) -> torch.Tensor:
    """Do what a forward of DDP does with its outputs, so that the reducer reduces the gradients of the loss."""
    outputs: torch.Tensor = model._post_forward(loss)
    return outputs


def tensor_version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place."""
    return tensor._version


# -- loss scaling ----------------------------------------------------------------------------------------------------


def is_unscaled(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool:
    """Return True if ``scaler.unscale_(optimizer)`` was called since the last update.

    Torch only raises on a second call.
    """
    from torch.amp.grad_scaler import OptState

    return bool(scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.UNSCALED)


def has_overflow(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> bool:
    """Return whether the scaler found gradients that are not finite since its last update.

    torch tells fused optimizers so through the step's arguments, and no others.
    """
    return any(bool(found) for found in scaler._found_inf_per_device(optimizer).values())


# -- optimizers ------------------------------------------------------------------------------------------------------


def orthogonalised(matrix: torch.Tensor, settings: Mapping[str, Any]) -> torch.Tensor:
    """Return what ``torch.optim.Muon`` makes of a matrix, in bfloat16; it has no public function for it.

    Args:
        matrix: momentum, which may be changed.
        settings: a parameter group of the optimizer.
    """
    module = importlib.import_module("torch.optim._muon")
    result: torch.Tensor = module._zeropower_via_newtonschulz(
        matrix, settings["ns_coefficients"], settings["ns_steps"], settings["eps"]
    )
    return result


def muon_rate(rate: float, settings: Mapping[str, Any], shape: torch.Size) -> float:
    """Return the learning rate of a matrix of that shape in ``torch.optim.Muon``."""
    module = importlib.import_module("torch.optim._muon")
    adjusted: float = module._adjust_lr(rate, settings["adjust_lr_fn"], shape)
    return adjusted


# -- activation checkpointing ----------------------------------------------------------------------------------------


def checkpoint_wrappers() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``(apply_activation_checkpointing, checkpoint_wrapper)``, which live in a private package."""
    from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as module

    return module.apply_activation_checkpointing, module.checkpoint_wrapper


def checkpointed_module(module: nn.Module) -> nn.Module | None:
    """Return the module inside a checkpoint wrapper, or None; no public attribute."""
    return getattr(module, "_checkpoint_wrapped_module", None)


def selective_contexts(policy: Callable[..., Any], counts: Callable[[Any], bool]) -> tuple[Any, Any]:
    """``create_selective_checkpoint_contexts``, whose modes pass on operators that are not counted.

    They compare all operators of the recomputation with those of the forward pass, and have no option against it: a
    module inside that fully_shard was called on is gathered in one of them, and may still be there in the other, and
    kept results of tensor-parallel layers are not computed again.
    """
    from torch.utils.checkpoint import create_selective_checkpoint_contexts

    modes = create_selective_checkpoint_contexts(policy)
    for mode in modes:
        kind: Any = type(mode)
        mode.__class__ = _counting(kind)
        mode.counts = counts
    return modes


@functools.cache
def _counting(kind: Any) -> Any:
    class Counting(kind):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if self.counts(func):
                return super().__torch_dispatch__(func, types, args, kwargs)
            return func(*args, **(kwargs or {}))

    return Counting


def is_in_backward() -> bool:
    """Return True if a backward pass runs in this thread, as when checkpointing computes activations again.

    Torch has no public query.
    """
    return bool(torch._C._current_graph_task_id() != -1)


# -- FSDP 1, which torch has deprecated: fully_shard (FSDP 2) needs none of these ------------------------------------


def hybrid_shard_zero2() -> ShardingStrategy:
    """``HYBRID_SHARD_ZERO2``: SHARD_GRAD_OP in a node, full copies over nodes. A mesh with FSDP 2 replaces it."""
    from torch.distributed.fsdp import ShardingStrategy

    return ShardingStrategy._HYBRID_SHARD_ZERO2


def run_wrap_policy(policy: Any, model: nn.Module, ignored: Iterable[nn.Module]) -> list[nn.Module] | None:
    """Return the modules that a policy object of torch (``CustomPolicy``, ...) chooses; None for a policy function."""
    return list(policy._run_policy(model, set(ignored), {})) if hasattr(policy, "_run_policy") else None


@dataclass(frozen=True)
class FlatParameter:
    """A flat parameter of FSDP 1."""

    flat: Any
    originals: list[nn.Parameter]  # those that were merged into it; empty with ``use_orig_params=False``
    spans: list[tuple[torch.Size, int, int]]  # of each original: its shape, and begin and end of this rank's part
    group: dist.ProcessGroup | None  # the ranks that hold the other parts; None if this rank holds all of it


def flat_parameters(model: nn.Module) -> Iterator[FlatParameter]:
    """Yield the flat parameters of a model wrapped by FSDP 1; torch has no public access to them."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    modules: list[Any] = FullyShardedDataParallel.fsdp_modules(model)
    for handle in [module._handle for module in modules if module._handle is not None]:
        flat = handle.flat_param
        spans = []
        if handle.uses_sharded_strategy and flat._params is not None:
            for shape, part in zip(flat._shapes, flat._shard_param_infos, strict=True):
                begin, end = (part.intra_param_start_idx, part.intra_param_end_idx + 1) if part.in_shard else (0, 0)
                spans.append((torch.Size(shape), begin, end))
        group = handle.process_group if handle.uses_sharded_strategy else None
        yield FlatParameter(flat, list(flat._params or ()), spans, group)


def flat_gradients(flat: Any) -> list[torch.Tensor]:
    """Return what a flat parameter has accumulated.

    While parameters are gathered, FSDP 1 sets reduced gradients aside.
    """
    gradients = (flat.grad, getattr(flat, "_saved_grad_shard", None))
    return [gradient for gradient in gradients if gradient is not None]


def is_about_to_gather(unit: Any) -> bool:
    """Return True if the forward pass of a unit of FSDP 1, which begins, gathers its flat parameter or has done so.

    FSDP 2 reports each communication; see :func:`follow_collectives`.
    """
    handle = unit._handle
    gathered_before = hasattr(handle.flat_param, "_full_param_padded") and not handle.needs_unshard()
    return not gathered_before or bool(handle._prefetched)


def drop_flat_gradients(flat: Any) -> None:
    """Discard what a flat parameter has accumulated."""
    flat.grad = None
    vars(flat).pop("_saved_grad_shard", None)


def free_gathered_flat_parameters(model: nn.Module) -> None:
    """Free the gathered values of flat parameters, so that the next forward pass gathers the sharded ones again.

    FSDP 1 keeps those of the root after a forward pass, also if the sharded ones are changed. FSDP 2: ``reshard()``.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel

    modules: list[Any] = FullyShardedDataParallel.fsdp_modules(model)
    for handle in [module._handle for module in modules if module._handle is not None]:
        if handle.uses_sharded_strategy and hasattr(handle.flat_param, "_full_param_padded"):  # had a forward pass
            handle.reshard(True)
            handle.post_reshard()


def set_sync_gradients(modules: Sequence[Any], flags: Sequence[bool]) -> list[bool]:
    """Set whether backward passes of FSDP 1 modules reduce gradients; returns the flags before.

    Its public ``no_sync()`` covers a forward with its backward pass only. FSDP 2: ``set_requires_gradient_sync``.
    """
    before = [bool(module._sync_gradients) for module in modules]
    for module, flag in zip(modules, flags, strict=True):
        module._sync_gradients = flag
    return before


def check_before_loading(model: nn.Module, check: Any) -> None:
    """Register a hook that ``load_state_dict`` calls before those of torch, which gather the parameters of FSDP 1.

    Public functions append hooks only, and an error of a later one would leave the parameters gathered.
    """
    handle = model.register_load_state_dict_pre_hook(check)
    hooks: Any = model._load_state_dict_pre_hooks
    hooks.move_to_end(handle.id, last=False)


def attach_reductions(model: nn.Module, users: Mapping[Any, int]) -> None:
    """Attach the hooks with which FSDP 1 reduces gradients to the nodes of a backward pass that begins.

    torch attaches them in the first forward pass with gradients after a backward pass. With mixed precision each
    forward pass has nodes of its own, so it silently loses gradients where no backward pass follows the first one.

    Args:
        model: wrapped by FSDP 1.
        users: the nodes of the backward pass that accumulate gradients, each with the lowest sequence number of the
            nodes that it follows.
    """
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp._runtime_utils import _post_backward_hook

    modules: list[Any] = FullyShardedDataParallel.fsdp_modules(model)
    for module in [module for module in modules if module._handle is not None]:
        flat: Any = module._handle.flat_param
        node, *hooks = getattr(flat, "_post_backward_hook_state", (None,))
        if not hooks or node in users:
            continue
        hooks[0].remove()
        del flat._post_backward_hook_state
        own = [other for other in users if other.variable is flat]
        if own:
            last = min(own, key=lambda other: users[other])  # the backward pass reaches the first forward pass last
            hook = last.register_hook(functools.partial(_post_backward_hook, module, module._handle))
            flat._post_backward_hook_state = (last, hook)


# -- FSDP 2 ----------------------------------------------------------------------------------------------------------


def fsdp2_groups(model: nn.Module) -> Iterator[Any]:
    """Yield the groups of parameters of a model that ``fully_shard`` gathers together."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            # torch 2.11 made a list of it.
            groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
            yield from (group for group in groups if group is not None)


class _FollowedCollective:
    """A collective of a unit, which calls ``note`` before each communication."""

    def __init__(self, collective: Any, note: Callable[[], None]) -> None:
        self.collective, self.note, self.allocate = collective, note, collective.allocate

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.note()
        return self.collective(*args, **kwargs)


def follow_collectives(unit: Any, gathers: Callable[[], None], reduces: Callable[[], None]) -> None:
    """Call functions before each all-gather and reduce-scatter of one of :func:`fsdp2_groups`.

    torch can replace them in public (``set_custom_all_gather``), but not return the current ones. Versions without that
    have no such objects.
    """
    for name, note in (("_all_gather_comm", gathers), ("_reduce_scatter_comm", reduces)):
        if hasattr(unit, name):
            setattr(unit, name, _FollowedCollective(getattr(unit, name), note))


def process_groups_of_unit(unit: Any) -> list[Any]:
    """Return the process groups over which one of :func:`fsdp2_groups` is sharded, and replicated."""
    names = ("shard_process_group", "replicate_process_group")
    groups = (getattr(unit.mesh_info, name, None) for name in names)
    return [group for group in groups if group is not None]


def fsdp2_parameters(model: nn.Module) -> Iterator[tuple[nn.Parameter, Any]]:
    """Yield the sharded parameters of a model, each with the object in which ``fully_shard`` keeps its state.

    There is no public access to gradients that are accumulated but not reduced yet.
    """
    for group in fsdp2_groups(model):
        for holder in group.fsdp_params:
            yield holder.sharded_param, holder


def forms_of_parameter(holder: Any) -> list[nn.Parameter]:
    """Return a parameter of :func:`fsdp2_parameters` sharded, gathered, and sharded after a forward pass; a module
    has one of them at a time.
    """
    later = (gathered_parameter(holder), getattr(holder, "_sharded_post_forward_param", None))
    return [holder.sharded_param, *(parameter for parameter in later if parameter is not None)]


def choose_gradient_dtypes(group: Any) -> None:
    """Choose the dtypes of a group's gradients again: torch does it once, from what is trainable before the first
    forward pass, and reduces those of a group that was frozen then in the dtype of the computation.
    """
    group._init_mp_dtypes()


def gathered_parameter(holder: Any) -> nn.Parameter | None:
    """Return the gathered parameter of :func:`fsdp2_parameters`, None before the first forward pass."""
    return getattr(holder, "_unsharded_param", None)


def unreduced_gradients(holder: Any) -> list[torch.Tensor]:
    """Full gradients not reduced yet: in the dtype of the reduction if that differs, else in the parameter's."""
    gathered = gathered_parameter(holder)
    gradient = None if gathered is None else gathered.grad
    accumulated = getattr(holder, "unsharded_accumulated_grad", None)
    # From torch 2.15 on, both are the parameter's.
    found = (gradient,) if accumulated is gradient else (accumulated, gradient)
    return [gradient for gradient in found if gradient is not None]


def drop_unreduced_gradients(holder: Any) -> None:
    """Discard what :func:`unreduced_gradients` returns."""
    gathered = gathered_parameter(holder)
    if gathered is not None:
        gathered.grad = None
    # From torch 2.15 on that was all of them, and this cannot be assigned.
    if getattr(holder, "unsharded_accumulated_grad", None) is not None:
        holder.unsharded_accumulated_grad = None


# -- DTensor ---------------------------------------------------------------------------------------------------------


def flatten_mesh(mesh: Any, name: str) -> Any:
    """Return the axes of a mesh as one axis, with a process group of its own; torch has announced a public method."""
    return mesh._flatten(name)


def read_whole_scalars() -> None:
    """Have ``item()``, ``float()`` and conditions of a DTensor return the whole value. Every rank must call them.

    torch returns this rank's part of a sum or norm, since it works out no placements for this one operator.
    """
    from torch.distributed.tensor import DTensor

    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = _whole_scalar


def _whole_scalar(operator: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
    return operator(args[0].full_tensor())


# -- what torch 2.6 lacks; all of it is public -----------------------------------------------------------------------


def shard_replicated(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """``distribute_tensor`` of a tensor that all ranks have: nothing is sent, except by torch 2.6."""
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, mesh, placements, **keeps_local(distribute_tensor))


def keeps_local(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the argument with which ``distribute_tensor`` and ``parallelize_module`` send nothing."""
    return {"src_data_rank": None} if "src_data_rank" in inspect.signature(function).parameters else {}


# -- context parallelism ---------------------------------------------------------------------------------------------


def ring_attention_templates() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Torch's ring attention for any kernel, forward and backward; the public one has no CPU kernel. Torch 2.10."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    return _attention._templated_ring_attention, _attention._templated_ring_attention_backward


def has_ring_kernels(device_type: str) -> bool:
    """Return True if a device has the fused attention kernel that torch's ring calls. Devices of plug-ins, and the
    CPU, have none. There is no public question of this kind.
    """
    key = torch._C._dispatch_key_for_device(device_type)
    name = "aten::_scaled_dot_product_flash_attention"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(name, key))


def set_rotate_method(rotation: str) -> None:
    """Set how torch's ``context_parallel`` transfers keys and values; it has no argument for it. Torch 2.7."""
    from torch.distributed.tensor.experimental._attention import set_rotate_method as set_method

    set_method(rotation)


def has_gradient_hooks(parameter: torch.Tensor) -> bool:
    """Return True if a tensor has hooks of its gradient; torch has no function that lists them."""
    return bool(parameter._backward_hooks) or bool(parameter._post_accumulate_grad_hooks)


# -- DeepSpeed's engines ---------------------------------------------------------------------------------------------


def mark_as_stepped(optimizer: Optimizer) -> None:
    """Stop torch's schedulers from warning that a replaced optimizer never steps.

    There is no public way to hand a scheduler to another optimizer.
    """
    optimizer._opt_called = True  # type: ignore[attr-defined]


def extension_build_directory(name: str) -> Path:
    """Return the directory that torch compiles a C++ extension in.

    The documented location depends on the versions of Python and CUDA, which only torch spells out.
    """
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, False))
