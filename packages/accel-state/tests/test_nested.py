"""Nested data, without processes."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections import OrderedDict, UserDict, UserList, defaultdict, deque, namedtuple
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from accel_state import operations as ops
from accel_state.operations import nested

Point = namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True)
class Frozen:
    a: Any
    b: Any = dataclasses.field(init=False, default=3)


@dataclasses.dataclass
class Both:
    left: Any
    right: Any


class BatchLike(UserDict):
    """A batch object that moves itself, and takes a device only."""

    def to(self, device: Any) -> BatchLike:
        moved = BatchLike({k: v.to(device) for k, v in self.data.items()})
        moved.was_moved = True
        return moved


def tensors() -> st.SearchStrategy[torch.Tensor]:
    shapes = st.lists(st.integers(0, 3), max_size=3)
    dtypes = st.sampled_from([torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.float64])
    return st.builds(lambda shape, dtype: torch.ones(shape).to(dtype), shapes, dtypes)


def nested_data() -> st.SearchStrategy[Any]:
    leaves = tensors() | st.text(max_size=2) | st.none() | st.integers()
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.tuples(inner, inner)
            | st.dictionaries(st.text(max_size=2), inner, max_size=3)
            | st.builds(Point, inner, inner)
            | st.builds(Frozen, inner)
        ),
        max_leaves=8,
    )


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return isinstance(right, torch.Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if dataclasses.is_dataclass(left):
        return all(same(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left))
    return left == right


@given(nested_data())
def test_leaves_and_replacement_are_inverse(data: Any) -> None:
    assert same(nested.replace_leaves(data, nested.leaves(data)), data)


@given(nested_data())
def test_structure_makes_room_of_the_same_shapes(data: Any) -> None:
    room = ops.initialize_tensors(ops.get_data_structure(data))
    assert [(t.shape, t.dtype) for t in nested.leaves(room)] == [(t.shape, t.dtype) for t in nested.leaves(data)]


@given(nested_data())
def test_moving_keeps_everything(data: Any) -> None:
    assert same(ops.send_to_device(data, "cpu"), data)
    on_meta = nested.leaves(ops.send_to_device(data, "meta"))
    assert all(tensor.device.type == "meta" for tensor in on_meta)
    assert len(on_meta) == len(nested.leaves(data))


def test_mappings_keep_what_they_hold_beside_their_items() -> None:
    data = defaultdict(list, {"a": torch.ones(2)})
    moved = ops.send_to_device(data, "meta")
    assert moved.default_factory is list and moved["a"].device.type == "meta" and data["a"].device.type == "cpu"
    assert list(ops.send_to_device(OrderedDict(b=1, a=2), "cpu")) == ["b", "a"]


def test_skipped_keys_stay_where_they_are() -> None:
    data = {"x": torch.ones(1), "inner": {"y": torch.ones(1), "z": torch.ones(1)}}
    moved = ops.send_to_device(data, "meta", skip_keys=["y"])
    assert [moved["x"].device.type, moved["inner"]["y"].device.type, moved["inner"]["z"].device.type] == [
        "meta",
        "cpu",
        "meta",
    ]
    assert ops.send_to_device({"x": torch.ones(1)}, "meta", skip_keys="x")["x"].device.type == "cpu"


def test_batch_objects_move_themselves() -> None:
    moved = ops.send_to_device([BatchLike(a=torch.ones(1))], "cpu")[0]
    assert moved.was_moved


def test_transformers_batches_and_outputs_keep_their_type() -> None:
    transformers = pytest.importorskip("transformers")
    encoding = transformers.BatchEncoding({"input_ids": torch.ones(2, 3)})
    doubled = ops.recursively_apply(lambda t: t * 2, encoding)
    assert (
        type(doubled) is transformers.BatchEncoding
        and doubled["input_ids"].sum() == 12
        and encoding["input_ids"].sum() == 6
    )
    from transformers.modeling_outputs import SequenceClassifierOutput

    output = SequenceClassifierOutput(loss=torch.ones(()).bfloat16(), logits=torch.ones(2).bfloat16())
    converted = ops.convert_to_fp32(output)
    assert type(converted) is SequenceClassifierOutput
    assert converted.logits.dtype == converted["loss"].dtype == torch.float32


def test_other_types_are_refused_where_asked() -> None:
    with pytest.raises(TypeError, match=r"gather accepts tensors.*not a str"):
        nested.check_only_tensors({"a": [torch.ones(1), "text"]}, "gather")
    with pytest.raises(TypeError, match="not a int"):
        ops.recursively_apply(torch.neg, [1], error_on_other_type=True)
    assert ops.recursively_apply(torch.neg, [1, torch.ones(1)])[0] == 1


def test_batch_size() -> None:
    assert ops.find_batch_size({"s": "text", "t": [torch.ones(5, 2)]}) == 5
    with pytest.raises(ValueError, match="empty list"):
        ops.find_batch_size([])
    with pytest.raises(ValueError, match="0-dimensional"):
        ops.find_batch_size(torch.tensor(1))
    with pytest.raises(TypeError, match="without tensors"):
        ops.find_batch_size(["a"])
    assert ops.ignorant_find_batch_size(["a"]) is None and ops.ignorant_find_batch_size(torch.ones(3)) == 3


def test_concatenate_and_slice() -> None:
    pieces = [{"a": [torch.full((2, 1), i)], "p": Point(torch.tensor([i]), torch.tensor([i]))} for i in range(3)]
    joined = ops.concatenate(pieces)
    assert joined["a"][0].flatten().tolist() == [0, 0, 1, 1, 2, 2] and joined["p"].y.tolist() == [0, 1, 2]
    halves = [Both(torch.full((2,), i), [torch.full((1,), i)]) for i in range(2)]
    assert ops.concatenate(halves).left.tolist() == [0, 0, 1, 1] and ops.concatenate(halves).right[0].tolist() == [0, 1]
    assert ops.slice_tensors(joined, slice(1, 3))["a"][0].flatten().tolist() == [0, 1]


def test_concatenate_returns_other_leaves_as_lists() -> None:
    with pytest.warns(UserWarning, match="values of type str as a list"):
        joined = ops.concatenate([{"x": torch.ones(2), "name": "a"}, {"x": torch.ones(1), "name": "b"}])
    assert joined["x"].shape == (3,) and joined["name"] == ["a", "b"]


def test_listify_and_device() -> None:
    assert ops.listify({"a": torch.tensor([1.5]), "b": (torch.tensor(2),)}) == {"a": [1.5], "b": (2,)}
    assert ops.listify(torch.tensor([1.0], dtype=torch.bfloat16)) == [1.0]
    assert ops.find_device([None, {"a": torch.ones(1, device="meta")}]) == torch.device("meta")
    assert ops.find_device(["a"]) is None


def test_padding_a_batch_to_the_number_of_processes() -> None:
    batch = {"x": torch.arange(10).view(5, 2), "other": torch.ones(7), "scalar": torch.tensor(5)}
    padded = ops.pad_input_tensors(batch, 5, 4)
    assert padded["x"].shape == (8, 2) and padded["x"][5:].tolist() == [[8, 9]] * 3 and padded["other"].shape == (7,)
    assert padded["scalar"].item() == 5
    assert ops.pad_input_tensors(torch.ones(2, 3), 3, 2, dim=1).shape == (2, 4)
    with pytest.raises(TypeError, match="str"):
        ops.pad_input_tensors({"x": torch.ones(5), "text": "five"}, 5, 4)


def test_outputs_come_out_in_float32() -> None:
    def forward(x: torch.Tensor) -> dict[str, Any]:
        """Doc."""
        return {"half": x.half(), "ids": x.long(), "text": "t", "double": x.double()}

    wrapped = ops.convert_outputs_to_fp32(forward)
    out = wrapped(torch.ones(2))
    assert [out["half"].dtype, out["ids"].dtype, out["double"].dtype] == [torch.float32, torch.int64, torch.float64]
    assert wrapped.__doc__ == "Doc." and wrapped.__wrapped__ is forward


def test_the_converter_can_be_pickled() -> None:
    import pickle

    converter = pickle.loads(pickle.dumps(ops.ConvertOutputsToFp32(torch.nn.functional.relu)))
    assert converter(torch.ones(1).half()).dtype == torch.float32


def test_leaves_are_freed_without_the_garbage_collector() -> None:
    tensor = torch.ones(2)
    alive = weakref.ref(tensor)
    gc.disable()
    try:
        ops.recursively_apply(lambda leaf: None, {"x": [tensor]})
        nested.leaves({"x": [tensor]})
        del tensor
        assert alive() is None
    finally:
        gc.enable()


class Readable(Mapping):
    """A mapping that is made from something else than a dictionary, and does not change."""

    def __init__(self, names: list[str], *values: Any) -> None:
        self._items = dict(zip(names, values, strict=True))

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Any:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class Pair(tuple):
    def __new__(cls, left: Any, right: Any) -> Pair:
        return super().__new__(cls, (left, right))


class Rows(list):
    def __init__(self, name: str, *rows: Any) -> None:
        super().__init__(rows)
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rows) and self.name == other.name and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]


class Ordered(namedtuple("Ordered", "low high")):
    def __new__(cls, **ends: Any) -> Ordered:
        return super().__new__(cls, *sorted(ends.values()))


def move(data: Any) -> Any:
    return ops.send_to_device(data, "cpu")


@pytest.mark.parametrize(
    "data", [Readable(["a"], torch.ones(1)), Pair(torch.ones(1), torch.ones(1))], ids=["mapping", "tuple"]
)
@pytest.mark.parametrize("operation", [move, ops.reduce, lambda data: ops.concatenate([data, data])])
def test_a_container_that_cannot_be_made_again_is_named(data: Any, operation: Any) -> None:
    with pytest.raises(TypeError, match=f"{type(data).__name__}.* constructor"):
        operation(data)


def test_containers_with_constructors_of_their_own() -> None:
    rows = Rows("name", torch.ones(1), 2)
    moved = move(rows)
    assert moved == rows and moved is not rows
    moved = move(Ordered(a=torch.ones(1), b=torch.zeros(1)))
    assert type(moved) is Ordered and moved.low == 0 and moved.high == 1


def test_a_type_error_of_a_leaf_is_not_put_down_to_its_container() -> None:
    def fail(_: Any) -> Any:
        raise TypeError("of the leaf")

    with pytest.raises(TypeError, match="^of the leaf$"):
        nested.recursively_apply(fail, [torch.ones(1)])


class Settings(MutableMapping[str, Any]):
    """Keeps its items in an attribute, which the default copy shares; its constructor takes something else."""

    def __init__(self, *, name: str, **items: Any) -> None:
        self.name, self.items_of = name, items

    def __getitem__(self, key: str) -> Any:
        return self.items_of[key]

    def __setitem__(self, key: str, value: Any) -> None:
        self.items_of[key] = value

    def __delitem__(self, key: str) -> None:
        del self.items_of[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.items_of)

    def __len__(self) -> int:
        return len(self.items_of)


class Shared(Settings):
    """Its copy cannot be told from it."""

    def __copy__(self) -> Shared:
        return self


def test_a_mapping_with_its_items_in_an_attribute_is_not_changed() -> None:
    data = Settings(name="run", a=torch.zeros(2), b=[torch.ones(1)])
    assert [leaf.tolist() for leaf in nested.leaves(data)] == [[0.0, 0.0], [1.0]]
    doubled = nested.recursively_apply(lambda tensor: tensor + 1, data)
    assert (doubled.name, doubled["a"].tolist(), doubled["b"][0].tolist()) == ("run", [1.0, 1.0], [2.0])
    assert (data["a"].tolist(), data["b"][0].tolist()) == ([0.0, 0.0], [1.0])


def test_a_mapping_whose_copy_shares_its_items_is_refused_unchanged() -> None:
    data = Shared(name="run", a=torch.zeros(2))
    with pytest.raises(TypeError, match="another Shared.*__copy__"):
        nested.recursively_apply(lambda tensor: tensor + 1, data)
    assert data["a"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("operation", [ops.reduce, ops.broadcast])
@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"a": deque([torch.ones(1)])}, "deque"),
        ([UserList([torch.ones(1)])], "UserList"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo"),
        ({"a": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)}, "quantized"),
    ],
)
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_tensors_that_an_operation_would_pass_by_are_refused(operation: Any, data: Any, named: str) -> None:
    """Returned as they are, they would look reduced."""
    with pytest.raises(TypeError, match=named):
        operation(data)
    same = {"text": "a", "none": None, "empty": deque(), "set": {1}, "mask": torch.ones(1)}
    assert operation(same)["set"] == {1}


@pytest.mark.parametrize("value", [5, 0.5, True, "numpy.float32", "numpy.ones"], ids=str)
def test_numbers_and_arrays_are_not_passed_by(value: Any) -> None:
    """Each rank would keep its own, and take it for the sum."""
    if isinstance(value, str):  # numpy is optional
        value = getattr(pytest.importorskip("numpy"), value.removeprefix("numpy."))(2)
    kind = type(value).__name__
    for operation in (lambda data: ops.reduce(data, "sum"), ops.broadcast):
        with pytest.raises(TypeError, match=f"the {kind}.* of this rank as it is. Make a tensor of it"):
            operation({"loss": torch.ones(1), "more": [value]})
    kept = ops.reduce({"name": "a", "none": None, "loss": torch.ones(1)}, "sum")
    assert kept == {"name": "a", "none": None, "loss": torch.ones(1)}
    assert ops.reduce([torch.ones(1), value], "none")[1] is value
