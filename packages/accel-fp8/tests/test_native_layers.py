"""Converted layers: their three products against float64, what they preserve, and when they compute in 8 bits."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from accel_fp8 import (
    E4M3,
    E5M2,
    FP8Recipe,
    NativeLinear,
    convert_to_native,
    filter_first_and_last_linear_layers,
    has_native_layers,
    high_precision,
    matmul_error_bound,
    restore_native,
)
from accel_fp8.scaling import largest_of_rows, largest_value, scale_for
from accel_state.errors import ConfigurationError

ALL_SCALINGS = pytest.mark.parametrize("scaling", ["delayed", "dynamic", "rowwise"])


def always(layer: nn.Module, name: str) -> bool:
    return True


def one_layer(inputs: int = 32, outputs: int = 48, bias: bool = True, **settings: object) -> nn.Sequential:
    torch.manual_seed(0)
    recipe = FP8Recipe(backend="native", module_filter_func=always, **settings)  # type: ignore[arg-type]
    return convert_to_native(nn.Sequential(nn.Linear(inputs, outputs, bias=bias)), recipe)  # type: ignore[return-value]


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 16)
    )


def within(got: Tensor, exact: Tensor, bound: Tensor) -> bool:
    return bool(((got.double() - exact).abs() <= bound).all())


@given(
    rows=st.integers(1, 40),
    scaling=st.sampled_from(["delayed", "dynamic", "rowwise"]),
    fp8_format=st.sampled_from(["HYBRID", "E4M3"]),
    override=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    magnitude=st.integers(-30, 20),
    outlier=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_the_three_products_of_a_layer_are_within_the_bound_of_their_formats(
    rows: int,
    scaling: str,
    fp8_format: str,
    override: tuple[bool, bool, bool],
    magnitude: int,
    outlier: bool,
    seed: int,
) -> None:
    model = one_layer(bias=False, scaling=scaling, fp8_format=fp8_format, override_linear_precision=override, margin=0)
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, 32, generator=generator) * 2.0**magnitude).requires_grad_()
    gradient = torch.randn(rows, 48, generator=generator) * 2.0**-magnitude
    if outlier:
        x.data[0, 0] *= 1e4
        gradient[-1, 3] *= 1e3
    weight = model[0].weight
    result = model(x)
    result.backward(gradient)
    backward = E4M3 if fp8_format == "E4M3" else E5M2
    largest = largest_of_rows if scaling == "rowwise" else largest_value

    def check(got: Tensor, a: Tensor, b: Tensor, formats: tuple, exact: bool) -> None:
        scales = scale_for(largest(a), formats[0].dtype), scale_for(largest(b.t()), formats[1].dtype).t()
        bound = matmul_error_bound(a, b, *scales, formats)
        product = a.double() @ b.double()
        # In higher precision the error is that of float32: far below what 8 bits may do.
        limit = 1e-5 * (a.double().abs() @ b.double().abs()) + 1e-30 if exact else bound
        assert within(got, product, limit)

    x_, weight_ = x.detach(), weight.detach()
    assert x.grad is not None and weight.grad is not None
    check(result.detach(), x_, weight_.t(), (E4M3, E4M3), override[0])
    check(x.grad, gradient, weight_, (backward, E4M3), override[1])
    check(weight.grad, gradient.t(), x_, (backward, E4M3), override[2])


@ALL_SCALINGS
def test_inputs_of_any_number_of_dimensions_and_the_gradient_of_the_bias(scaling: str) -> None:
    model = one_layer(scaling=scaling)
    x = torch.randn(2, 3, 5, 32)
    result = model(x)
    assert result.shape == (2, 3, 5, 48)
    assert torch.allclose(result, nn.functional.linear(x, model[0].weight, model[0].bias), atol=0.25)
    result.sum().backward()  # its gradient is a broadcast view of one number
    assert torch.equal(model[0].bias.grad, torch.full((48,), 30.0))


@ALL_SCALINGS
def test_one_vector_no_rows_and_a_transposed_gradient(scaling: str) -> None:
    model = one_layer(scaling=scaling)
    assert model(torch.randn(32)).shape == (48,)
    empty = torch.randn(0, 32, requires_grad=True)
    model(empty).sum().backward()
    assert empty.grad is not None and empty.grad.shape == (0, 32)
    x = torch.randn(6, 32, requires_grad=True)
    model(x).t().contiguous().t().pow(2).sum().backward()
    assert x.grad is not None and x.grad.isfinite().all()


@ALL_SCALINGS
def test_memory_layout_changes_nothing(scaling: str) -> None:
    model, x = one_layer(scaling=scaling), torch.randn(7, 32)
    assert torch.equal(model(x.t().contiguous().t()), model(x))
    expected = model(x)
    model[0].weight.data = model[0].weight.data.t().contiguous().t()
    assert torch.equal(model(x), expected)


@ALL_SCALINGS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_results_and_gradients_have_the_types_of_what_they_belong_to(scaling: str, dtype: torch.dtype) -> None:
    model = one_layer(scaling=scaling).to(dtype)
    x = torch.randn(4, 32, dtype=dtype, requires_grad=True)
    result = model(x)
    assert result.dtype is dtype
    result.float().sum().backward()
    assert x.grad is not None and x.grad.dtype is dtype and model[0].weight.grad.dtype is dtype


@ALL_SCALINGS
def test_under_autocast_the_result_has_its_type_and_the_weights_keep_theirs(scaling: str) -> None:
    model = one_layer(scaling=scaling)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = model(torch.randn(4, 32))
    assert result.dtype is torch.bfloat16
    result.float().sum().backward()
    assert model[0].weight.dtype is torch.float32 and model[0].weight.grad.dtype is torch.float32


@ALL_SCALINGS
def test_weights_or_inputs_that_are_frozen(scaling: str) -> None:
    model = one_layer(scaling=scaling)
    model[0].weight.requires_grad_(False)
    x = torch.randn(4, 32, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None and model[0].weight.grad is None
    model[0].weight.requires_grad_(True)
    model(torch.randn(4, 32)).sum().backward()
    assert model[0].weight.grad is not None


def test_evaluation_is_in_high_precision_unless_asked_otherwise() -> None:
    x = torch.randn(4, 32)
    model = one_layer()
    plain = nn.functional.linear(x, model[0].weight, model[0].bias)
    assert not torch.equal(model(x), plain)
    model.eval()
    assert torch.equal(model(x), plain)
    eager = one_layer(use_autocast_during_eval=True).eval()
    assert not torch.equal(eager(x), plain)
    with high_precision():
        assert torch.equal(eager(x), plain)
        with high_precision(False):
            assert torch.equal(eager(x), plain), "an inner block does not undo an outer one"
    with high_precision(False):
        assert not torch.equal(eager(x), plain)


def test_which_layers_are_converted() -> None:
    model = convert_to_native(stack(), FP8Recipe())
    assert [type(layer) is NativeLinear for layer in model if isinstance(layer, nn.Linear)] == [
        False,
        True,
        False,
        False,
    ]
    chosen = convert_to_native(stack(), FP8Recipe(module_filter_func=lambda layer, name: name in ("0", "4")))
    assert [name for name, layer in chosen.named_modules() if isinstance(layer, NativeLinear)] == ["0"], (
        "30 is not a multiple of 16"
    )
    assert not has_native_layers(convert_to_native(nn.Linear(32, 32), FP8Recipe())), "first and last at once"
    assert not has_native_layers(convert_to_native(nn.ReLU(), FP8Recipe()))


def test_subclasses_whose_forward_is_their_own_are_left_alone() -> None:
    attention = nn.MultiheadAttention(32, 2)
    model = nn.Sequential(nn.Linear(32, 32), attention, nn.Linear(32, 32))
    convert_to_native(model, FP8Recipe())
    assert not has_native_layers(model), "its projection is not called as a layer"


def test_the_filter_by_name() -> None:
    model = stack()
    assert [filter_first_and_last_linear_layers(model, name) for name in ("0", "2", "4", "6")] == [
        False,
        True,
        False,
        False,
    ]
    assert filter_first_and_last_linear_layers(model[0], "0") and not filter_first_and_last_linear_layers(model[4], "4")


def test_a_converted_layer_is_the_same_object_with_the_same_parameters_and_hooks() -> None:
    model = stack()
    layer, weight, names = model[2], model[2].weight, [name for name, _ in model.named_parameters()]
    seen = []
    layer.register_forward_hook(lambda *_: seen.append(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    convert_to_native(model, FP8Recipe(amax_history_len=4))
    assert model[2] is layer and layer.weight is weight and [name for name, _ in model.named_parameters()] == names
    before = weight.detach().clone()
    model(torch.randn(8, 32)).sum().backward()
    optimizer.step()
    assert seen == [1] and not torch.equal(before, weight)
    added = [name for name in model.state_dict() if "fp8" in name]
    assert added == [f"2.fp8_{name}" for name in ("amax_history", "scale", "forward_amax", "gradient_amax", "updates")]
    assert "fp8_format=HYBRID, scaling=delayed" in repr(layer)


def test_restoring_gives_back_the_plain_model() -> None:
    model = stack()
    keys, hooks = list(model.state_dict()), len(model._forward_pre_hooks)
    convert_to_native(model, FP8Recipe())
    restore_native(model)
    assert list(model.state_dict()) == keys and len(model._forward_pre_hooks) == hooks
    assert type(model[2]) is nn.Linear and not has_native_layers(model)
    assert model._ddp_params_and_buffers_to_ignore == []
    x = torch.randn(3, 32)
    assert torch.equal(model(x), stack()(x))
    convert_to_native(model, FP8Recipe(scaling="dynamic"))
    assert has_native_layers(model)


def test_converting_twice_changes_nothing_and_with_other_settings_is_refused() -> None:
    model = convert_to_native(stack(), FP8Recipe())
    hooks = len(model._forward_pre_hooks)
    convert_to_native(model, FP8Recipe())
    assert len(model._forward_pre_hooks) == hooks
    with pytest.raises(ConfigurationError, match=r"converted already.*restore_native"):
        convert_to_native(model, FP8Recipe(margin=1))


def test_copies_and_pickles_train_on_their_own() -> None:
    model = convert_to_native(
        stack(), FP8Recipe(amax_history_len=4, module_filter_func=lambda layer, name: name == "2")
    )
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for _ in range(2):
            twin(torch.randn(8, 32)).sum().backward()
        assert twin[2].fp8_updates == 2 and twin[2].fp8_scale.all()
    assert model[2].fp8_updates == 0, "the hook of a copy belongs to the copy"


def test_meta_models_are_converted_without_memory() -> None:
    with torch.device("meta"):
        model = convert_to_native(nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(3))), FP8Recipe())
    assert all(tensor.is_meta for tensor in model.state_dict().values())


@pytest.mark.parametrize("fp8_format", ["E5M2"])
def test_pure_e5m2_is_refused(fp8_format: str) -> None:
    from accel_fp8 import create_backend

    with pytest.raises(ConfigurationError, match="'E5M2'.*with.*Allowed: HYBRID, E4M3"):
        create_backend(FP8Recipe(backend="native", fp8_format=fp8_format), torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_model_that_changes_its_type_keeps_float32_scales(dtype: torch.dtype) -> None:
    model = one_layer(amax_history_len=2)
    for _ in range(2):
        model(torch.randn(4, 32) * 1e-9).sum().backward()
    scale, history = model[0].fp8_scale.clone(), model[0].fp8_amax_history.clone()
    assert scale.max() > 65504, "more than float16 holds"
    model.to(dtype)
    assert model[0].weight.dtype is dtype and model[0].fp8_updates.dtype is torch.int64
    assert torch.equal(model[0].fp8_scale, scale) and torch.equal(model[0].fp8_amax_history, history)


def test_from_the_meta_device_a_layer_begins_with_empty_histories() -> None:
    with torch.device("meta"):
        model = convert_to_native(nn.Sequential(*(nn.Linear(32, 32) for _ in range(3))), FP8Recipe())
    model.to_empty(device="cpu")
    for layer in model:
        layer.reset_parameters()
    state = model.state_dict()
    assert all(not tensor.any() for name, tensor in state.items() if "fp8" in name)
    model(torch.randn(4, 32)).sum().backward()
    assert model[1].weight.grad.isfinite().all()
