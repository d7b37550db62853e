"""Products of quantized matrices satisfy the documented error bound for any values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode

from accel_fp8 import E4M3, E5M2, Float8Format, matmul, matmul_error_bound, rounding_error_bound
from accel_fp8.autograd import _rowwise
from accel_fp8.matmul import _in_wider_dtype, computes_in_8_bits, multiply
from accel_fp8.scaling import SMALLEST_AMAX, delayed_scale, largest_of_rows, largest_value, quantize, scale_for
from accel_state import is_torch_version

FORMATS = st.sampled_from([E4M3, E5M2])
SIZES = st.integers(1, 70)


@st.composite
def matrices(draw: st.DrawFn, rows: int, columns: int) -> torch.Tensor:
    """Normal values of any magnitude, some with a few outliers, some with rows of very different sizes, some with
    zeros.
    """
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randn(rows, columns, generator=generator) * 2.0 ** draw(st.integers(-60, 50))
    kind = draw(st.sampled_from(["plain", "outliers", "rows", "zeros", "all zero"]))
    if kind == "outliers":
        values.view(-1)[torch.randint(values.numel(), (3,), generator=generator)] *= 1e4
    elif kind == "rows":
        values *= 2.0 ** torch.randint(-20, 20, (rows, 1), generator=generator)
    elif kind == "zeros":
        values *= (torch.rand(rows, columns, generator=generator) > 0.5).float()
    return torch.zeros_like(values) if kind == "all zero" else values


def fits_into_float32(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether float32 represents every sum of ``a @ b.T``; an overflow is not a rounding error."""
    return bool(((a.double().abs() @ b.double().abs().t()) < torch.finfo(torch.float32).max / 4).all())


@pytest.mark.parametrize("fmt", [E4M3, E5M2])
def test_the_numbers_of_a_format_are_those_of_torch(fmt: Float8Format) -> None:
    info = torch.finfo(fmt.dtype)
    assert fmt.largest == info.max
    assert fmt.unit_roundoff == info.eps / 2
    assert fmt.underflow == info.smallest_normal * info.eps / 2  # half of the smallest subnormal


@given(data=st.data(), fmt=FORMATS, rowwise=st.booleans())
@settings(max_examples=80, deadline=None)
def test_rounding_stays_within_its_bound(data: st.DataObject, fmt: Float8Format, rowwise: bool) -> None:
    x = data.draw(matrices(data.draw(SIZES), data.draw(SIZES)))
    scale = scale_for(largest_of_rows(x) if rowwise else largest_value(x), fmt.dtype)
    back = quantize(x, scale, fmt.dtype).double() / scale.double()
    assert ((back - x.double()).abs() <= rounding_error_bound(x, scale, fmt)).all()


@given(
    data=st.data(),
    formats=st.tuples(FORMATS, st.just(E4M3)),
    rowwise=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=80, deadline=None)
def test_a_product_stays_within_its_bound(
    data: st.DataObject, formats: tuple[Float8Format, Float8Format], rowwise: bool, dtype: torch.dtype
) -> None:
    rows, inner, columns = data.draw(SIZES), data.draw(SIZES), data.draw(SIZES)
    a, b = data.draw(matrices(rows, inner)), data.draw(matrices(columns, inner))
    assume(fits_into_float32(a, b))
    largest = largest_of_rows if rowwise else largest_value
    scale_a, scale_b = scale_for(largest(a), formats[0].dtype), scale_for(largest(b), formats[1].dtype)
    a8, b8 = quantize(a, scale_a, formats[0].dtype), quantize(b, scale_b, formats[1].dtype)
    got = multiply(a8, b8, scale_a.reciprocal(), scale_b.reciprocal(), dtype)
    assert got.dtype is dtype
    bound = matmul_error_bound(a, b.t(), scale_a, scale_b.t(), formats, dtype)
    assert ((got.double() - a.double() @ b.double().t()).abs() <= bound).all()


def test_the_bound_is_not_so_wide_that_anything_passes() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(64, 128, generator=generator), torch.randn(128, 64, generator=generator)
    scales = scale_for(largest_value(a), E4M3.dtype), scale_for(largest_value(b), E4M3.dtype)
    bound = matmul_error_bound(a, b, *scales, (E4M3, E4M3))
    assert (bound / (a.double().abs() @ b.double().abs()) < 0.14).all(), "2 * 2**-4 and a little"


@given(data=st.data(), rowwise=st.booleans())
@settings(max_examples=30, deadline=None)
def test_devices_without_the_instruction_get_the_same_numbers(data: st.DataObject, rowwise: bool) -> None:
    a, b = data.draw(matrices(data.draw(SIZES), 48)), data.draw(matrices(data.draw(SIZES), 48))
    assume(fits_into_float32(a, b))
    largest = largest_of_rows if rowwise else largest_value
    scale_a, scale_b = scale_for(largest(a), E5M2.dtype), scale_for(largest(b), E4M3.dtype)
    arguments = (
        quantize(a, scale_a, E5M2.dtype),
        quantize(b, scale_b, E4M3.dtype),
        scale_a.reciprocal(),
        scale_b.reciprocal(),
        torch.float32,
    )
    bound = 2 * matmul_error_bound(a, b.t(), scale_a, scale_b.t(), (E5M2, E4M3))
    assert ((multiply(*arguments).double() - _in_wider_dtype(*arguments).double()).abs() <= bound).all()


def test_bfloat16_is_wide_enough_for_8_bit_values() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    for fmt in (E4M3, E5M2):
        values = every.view(fmt.dtype)
        exact, through = values.float(), values.to(torch.bfloat16).float()
        assert torch.equal(torch.nan_to_num(exact, nan=1.5), torch.nan_to_num(through, nan=1.5))


def test_wider_type_gives_what_was_asked_for() -> None:
    ones = torch.ones(3, 16)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        result = _in_wider_dtype(ones.to(E4M3.dtype), ones.to(E4M3.dtype), torch.tensor(0.5), torch.tensor(2.0), dtype)
        assert result.dtype is dtype and (result == 16).all()


@pytest.mark.skipif(is_torch_version("<", "2.7"), reason="torch 2.6 multiplies 8-bit matrices on GPUs only")
def test_rows_that_are_no_multiple_of_16_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "has_instruction", lambda *_: True)  # torch's kernels for CPUs work, if slowly
    a, b = torch.randn(5, 7), torch.randn(3, 7)
    product = _rowwise(a, b, E4M3.dtype, E4M3.dtype, torch.float64)
    assert product.shape == (5, 3) and product.dtype is torch.float64
    assert torch.allclose(product, a.double() @ b.double().t(), atol=1.0)


def test_products_of_a_cpu_are_computed_in_a_wider_type() -> None:
    """Whatever its kernels take, so that all ranks, and a resumed run, compute the same."""
    assert not computes_in_8_bits(torch.device("cpu"))
    operand, one = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(())
    with _Calls() as calls:
        multiply(operand, operand, one, one, torch.float32)
    assert calls.made and torch._scaled_mm not in calls.made


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_an_overflow_shows_in_everything_computed_with_it(bad: float) -> None:
    x = torch.ones(16, 16)
    x[0, 0] = bad
    scale = scale_for(largest_value(x), E4M3.dtype)
    assert (quantize(x, scale, E4M3.dtype).float() * scale.reciprocal()).isnan().any()
    stored = delayed_scale(torch.tensor(7.0), largest_value(x), E4M3.dtype, 0)
    assert not stored > 0


def test_values_beyond_a_stored_scale_become_the_largest_value() -> None:
    x = torch.tensor([[1.0, -1000.0, 1e30]])
    assert quantize(x, torch.tensor(1.0), E4M3.dtype).float().tolist() == [[1.0, -448.0, 448.0]]


def test_margin_leaves_room_and_tiny_tensors_have_a_finite_scale() -> None:
    assert scale_for(torch.tensor(1.0), E4M3.dtype, margin=3) == 448.0 / 8
    tiny = scale_for(torch.tensor(SMALLEST_AMAX / 1e10), E5M2.dtype)
    assert tiny.isfinite() and tiny.reciprocal() > 0


class _Calls(TorchFunctionMode):
    """The functions of torch that are called, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[object] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.made.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("product", [multiply, _in_wider_dtype])
def test_a_product_does_not_end_with_a_conversion_that_changes_nothing(product) -> None:
    """Compiled by torch 2.11, an autograd function whose forward pass ends so gives no gradient."""
    operand, one = torch.ones(16, 16).to(torch.float8_e4m3fn), torch.ones(())
    with _Calls() as calls:
        product(operand, operand, one, one, torch.float32)
    assert calls.made and calls.made[-1] is not torch.Tensor.to
