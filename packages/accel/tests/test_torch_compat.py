"""Every private name of torch in ``accel._torch_compat`` exists, and means what it is used for."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses import FakeTensorMode

from accel import _torch_compat as compat
from accel_state import is_torch_version
from accel_state.testing import run_world


def test_tensor_operations() -> None:
    tensors = [torch.tensor([3.0, 4.0]), torch.tensor([6.0, 8.0])]
    assert [norm.item() for norm in compat.foreach_norm(tensors, 2, dtype=torch.float32)] == [5.0, 10.0]
    compat.foreach_mul_(tensors, 2.0)
    compat.foreach_div_(tensors, 4.0)
    assert tensors[0].tolist() == [1.5, 2.0]


def test_tensors_count_their_changes() -> None:
    tensor = torch.zeros(2)
    before = compat.tensor_version(tensor)
    tensor.add_(1)
    assert compat.tensor_version(tensor) > before


def test_tensors_without_values() -> None:
    with FakeTensorMode():
        assert isinstance(torch.ones(1), compat.FakeTensor)


def test_wrapper_subclass() -> None:
    from accel.core.fused_dtensor import Packed

    assert compat.make_wrapper_subclass(Packed, torch.Size([2]), dtype=torch.int8).dtype == torch.int8


def test_gradient_hooks() -> None:
    weight = nn.Parameter(torch.ones(1))
    assert not compat.has_gradient_hooks(weight)
    for register in (weight.register_hook, weight.register_post_accumulate_grad_hook):
        handle = register(lambda _: None)
        assert compat.has_gradient_hooks(weight)
        handle.remove()
        assert not compat.has_gradient_hooks(weight)


def test_compiled_modules() -> None:
    model = nn.Linear(2, 2)
    compiled = torch.compile(model)
    module, name = compat.OPTIMIZED_MODULE
    assert isinstance(compiled, getattr(sys.modules[module], name))
    assert getattr(compiled, compat.ORIGINAL_MODULE) is model
    assert getattr(model, compat.COMPILED_CALL) is None
    model.compile()
    assert getattr(model, compat.COMPILED_CALL) is not None
    assert [name for name, _ in compiled.named_parameters()] == [
        f"{compat.NAME_PREFIXES[0]}{n}" for n in ("weight", "bias")
    ]


def buckets_of_ddp() -> None:
    layers = nn.ModuleList([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    model = nn.parallel.DistributedDataParallel(layers)
    first, second = layers.parameters()
    orders = []
    for _ in range(2):
        orders.append([id(parameter) for bucket in compat.bucket_parameters(model) for parameter in bucket])
        loss = second.sum() + first.sum() if orders[0][0] == id(second) else first.sum() + second.sum()
        compat.finish_forward(model, loss).backward()  # the gradient of the last one arrives first
        compat.rebuild_buckets(model)
    assert sorted(orders[0]) == sorted(map(id, (first, second))) and orders[1] == orders[0][::-1]


def test_buckets_of_ddp_follow_the_first_backward_pass() -> None:
    run_world(buckets_of_ddp, 2)


def one_layer_of_two() -> None:
    model = nn.parallel.DistributedDataParallel(nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}))
    compat.check_reducer(model)
    model.module.forward = model.module["a"].forward  # type: ignore[method-assign]
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        compat.check_reducer(model)


def test_reducers_of_ddp_know_whether_they_have_finished() -> None:
    run_world(one_layer_of_two, 2)


def test_selective_checkpointing_that_counts_some_operators_only() -> None:
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint

    def is_product(operator: object) -> bool:
        return "mm" in str(operator)

    def keep(context: object, operator: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        seen.append(str(operator))
        return CheckpointPolicy.MUST_SAVE

    seen: list[str] = []
    passes = iter((0, 1))
    weight = torch.ones(2, 2, requires_grad=True)

    def unit(x: torch.Tensor) -> torch.Tensor:
        if next(passes):  # what was not in the forward pass is refused by torch's own modes
            torch.zeros(1).neg_()
        return (x @ weight).sin()

    contexts = partial(compat.selective_contexts, keep, is_product)
    checkpoint(unit, torch.ones(1, 2), use_reentrant=False, context_fn=contexts).sum().backward()
    torch.testing.assert_close(weight.grad, torch.full((2, 2), 2.0).cos())
    assert set(seen) == {"aten.mm.default"}


def test_grad_scaler() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    assert not compat.is_unscaled(scaler, optimizer)
    scaler.unscale_(optimizer)
    assert compat.is_unscaled(scaler, optimizer)
    # SharedGradScaler overrides it: there is no public way to take the maximum over ranks.
    assert callable(torch.amp.GradScaler._unscale_grads_)


def test_checkpoint_wrappers() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl

    apply, checkpoint = compat.checkpoint_wrappers()
    inner = nn.Linear(2, 2)
    assert compat.checkpointed_module(checkpoint(inner)) is inner
    assert compat.checkpointed_module(inner) is None
    names = [name for name, _ in nn.ModuleList([checkpoint(inner)]).named_modules()]
    assert f"0.{compat.NAME_PREFIXES[2]}".rstrip(".") in names
    assert callable(apply) and CheckpointImpl.NO_REENTRANT


def test_wrap_policies() -> None:
    from torch.distributed.fsdp.wrap import CustomPolicy

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    chosen = compat.run_wrap_policy(CustomPolicy(lambda module: module is model[0]), model, [])
    assert chosen is not None and [*chosen] == [model[0]]
    assert compat.run_wrap_policy(lambda **_: True, model, []) is None
    assert compat.hybrid_shard_zero2().name == "_HYBRID_SHARD_ZERO2"


def fsdp1() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    wrapped = FullyShardedDataParallel(nn.Linear(3, 2), use_orig_params=True, device_id=torch.device("cpu"))
    assert all(name.startswith(compat.NAME_PREFIXES[1]) for name, _ in wrapped.named_parameters())
    (flat,) = compat.flat_parameters(wrapped)
    assert [shape for shape, _, _ in flat.spans] == [(2, 3), (2,)]
    assert [end - begin for _, begin, end in flat.spans] == [parameter.numel() for parameter in flat.originals]
    assert flat.group is not None and flat.group.size() == 2
    wrapped(torch.ones(1, 3)).sum().backward()
    assert compat.flat_gradients(flat.flat)
    compat.drop_flat_gradients(flat.flat)
    assert not compat.flat_gradients(flat.flat)
    # What was reduced before is set aside when parameters are gathered again.
    wrapped(torch.ones(1, 3)).sum().backward()
    loss = wrapped(torch.ones(1, 3)).sum()
    with wrapped.no_sync():
        loss.backward()
    assert compat.set_sync_gradients([wrapped], [False]) == [True]
    assert compat.set_sync_gradients([wrapped], [True]) == [False]
    # A root stays gathered after a forward pass, whatever becomes of the sharded values.
    with torch.no_grad():
        before = wrapped(torch.ones(1, 3))
        flat.flat.zero_()
        assert torch.equal(wrapped(torch.ones(1, 3)), before)
        compat.free_gathered_flat_parameters(wrapped)
        assert wrapped(torch.ones(1, 3)).abs().sum() == 0


def fsdp2() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(nn.Linear(4, 4, bias=False), mesh=init_device_mesh("cpu", (2,)))
    ((parameter, holder),) = compat.fsdp2_parameters(model)
    assert parameter is model.weight and compat.forms_of_parameter(holder) == [parameter]
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 4)).sum().backward()
    assert [gradient.shape for gradient in compat.unreduced_gradients(holder)] == [(4, 4)]
    assert compat.forms_of_parameter(holder) == [parameter, compat.gathered_parameter(holder)]
    for group in compat.fsdp2_groups(model):
        group._orig_dtype = None  # as of a group that was frozen at first
        compat.choose_gradient_dtypes(group)
        assert group._orig_dtype is torch.float32
    compat.drop_unreduced_gradients(holder)
    assert not compat.unreduced_gradients(holder)


def groups() -> None:
    compat.default_store().set("accel/test", "1")
    assert compat.default_store().get("accel/test") == b"1"
    assert isinstance(compat.get_backend(dist.group.WORLD, torch.device("cpu")), dist.ProcessGroupGloo)


NO_FSDP2 = pytest.mark.skipif(not hasattr(torch.cpu.Stream, "record_event"), reason="torch 2.6 has no FSDP 2 on CPUs")


def overlapped() -> None:
    operators = compat.symmetric_products(dist.group.WORLD)
    assert "gather_dim" in str(operators.fused_all_gather_matmul.default._schema)
    assert "scatter_dim" in str(operators.fused_matmul_reduce_scatter.default._schema)


@pytest.mark.parametrize("check", [overlapped, fsdp1, pytest.param(fsdp2, marks=NO_FSDP2), groups])
def test_names_that_need_a_process_group(check) -> None:
    run_world(check, 2)


def test_replaced_optimizers(recwarn: pytest.WarningsRecorder) -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    compat.mark_as_stepped(optimizer)
    scheduler.step()
    assert not [warning for warning in recwarn if "lr_scheduler.step()" in str(warning.message)]


def test_extension_build_directory() -> None:
    assert compat.extension_build_directory("accel_test").name == "accel_test"


@pytest.mark.skipif(is_torch_version("<", "2.10"), reason="context parallelism on CPUs needs torch 2.10")
def test_context_parallelism() -> None:
    forward, backward = compat.ring_attention_templates()
    assert callable(forward) and callable(backward)
    compat.set_rotate_method("allgather")
    assert not compat.has_ring_kernels("cpu")
    # Where torch has kernels for a device, the question names an operator and a key that exist.
    assert torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_dot_product_flash_attention", "Meta")


def flattened_size() -> int:
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b"))
    return int(compat.flatten_mesh(mesh["a", "b"], "ab").size())


def test_flattened_mesh() -> None:
    assert run_world(flattened_size, 2) == [2, 2]


def scalars() -> list[float]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    sharded, copied = (distribute_tensor(torch.tensor([3.0, 4.0]), mesh, [kind]) for kind in (Shard(0), Replicate()))
    compat.read_whole_scalars()
    assert bool((sharded > 3).any()) and copied.max().item() == 4.0
    return [sharded.norm().item(), float(sharded.sum()), sharded.min().item()]


def test_scalars_of_sharded_tensors_are_those_of_whole_ones() -> None:
    assert run_world(scalars, 2) == [[5.0, 7.0, 3.0]] * 2


def test_a_lost_store_logs_no_cpp_frames(capfd: pytest.CaptureFixture[str]) -> None:
    code = "import sys, torch.distributed as d; s = d.TCPStore('127.0.0.1', 0, is_master=True, wait_for_workers=False)"
    code += "; print(s.port, flush=True); sys.stdin.read()"
    server = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()))
    server.kill()
    server.wait()
    with pytest.raises(RuntimeError), compat.quiet_cpp_logs():
        store.check(["key"])
    assert compat.cpp_log_level() is not None and "frame #" not in capfd.readouterr().err
    with pytest.raises(RuntimeError):
        store.check(["key"])
    assert "frame #" in capfd.readouterr().err, "torch writes no frames any more: quiet_cpp_logs can go"


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
def test_a_step_of_muon_by_its_functions() -> None:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(6, 3))
    before, weight.grad = weight.detach().clone(), torch.randn(6, 3)
    optimizer = torch.optim.Muon([weight], lr=0.1, weight_decay=0.0, momentum=0.0)
    optimizer.step()
    settings = optimizer.param_groups[0]
    update = compat.orthogonalised(weight.grad.clone(), settings)
    expected = before.add(update, alpha=-compat.muon_rate(0.1, settings, weight.shape))
    assert torch.equal(weight, expected)
