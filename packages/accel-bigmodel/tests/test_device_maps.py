"""Device maps: every parameter placed once, limits kept, nothing spilled that fits, the same map each time."""

from __future__ import annotations

import gc
import sys
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from accel_bigmodel import (
    check_device_map,
    check_tied_parameters_on_same_device,
    clean_device_map,
    compute_module_sizes,
    describe_device_map,
    dispatch_model,
    fallback_allocate,
    find_tied_parameters,
    get_balanced_memory,
    get_max_layer_size,
    get_max_memory,
    get_module_size_with_ties,
    infer_auto_device_map,
    init_empty_weights,
    named_device_map,
)
from accel_bigmodel.tied_params import location_of
from accel_state.errors import ConfigurationError

pytestmark = pytest.mark.filterwarnings("ignore:the buffers of the offloaded layers")


class Leaf(nn.Module):
    def __init__(self, size: int, buffer: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device="meta"))
        if buffer:
            self.register_buffer("table", torch.empty(buffer, device="meta"), persistent=buffer % 2 == 0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Block(nn.Module):
    """A block that may have to stay whole, with tensors of its own."""

    def __init__(self, sizes: list[int], direct: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Leaf(size, size % 3) for size in sizes)
        if direct:
            self.scale = nn.Parameter(torch.empty(direct, device="meta"))


class Whole(Block):
    pass


class Model(nn.Module):
    def __init__(self, blocks: list[tuple[list[int], int, bool]], direct: int, ties: list[tuple[int, int]]) -> None:
        super().__init__()
        if direct:
            self.alpha = nn.Parameter(torch.empty(direct, device="meta"))
        self.blocks = nn.ModuleList((Whole if whole else Block)(sizes, own) for sizes, own, whole in blocks)
        leaves = [module for module in self.modules() if isinstance(module, Leaf)]
        for one, other in ties:
            leaves[other % len(leaves)].weight = leaves[one % len(leaves)].weight


BLOCKS = st.lists(
    st.tuples(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(0, 5), st.booleans()),
    min_size=1,
    max_size=6,
)
MODELS = st.builds(
    Model, BLOCKS, st.integers(0, 30), st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=3)
)
LIMITS = st.one_of(
    st.fixed_dictionaries({0: st.integers(0, 1200), 1: st.integers(0, 1200), "cpu": st.integers(0, 1200)}),
    st.fixed_dictionaries({0: st.integers(0, 2000), "cpu": st.integers(0, 2000)}),
    st.fixed_dictionaries({"cpu": st.integers(0, 2000)}),
    st.fixed_dictionaries({0: st.integers(0, 2000), 1: st.integers(0, 2000)}),
)
OPTIONS = st.fixed_dictionaries(
    {"offload_buffers": st.booleans(), "clean_result": st.booleans(), "fallback_allocation": st.booleans()}
)


def tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def bytes_on(model: nn.Module, device_map: dict) -> dict[object, int]:
    """Bytes on each device; a weight that is shared counts once on each."""
    found: dict[object, dict[int, int]] = {}
    for name, tensor in tensors_of(model).items():
        found.setdefault(location_of(name, device_map), {})[id(tensor)] = tensor.numel() * tensor.element_size()
    return {device: sum(sizes.values()) for device, sizes in found.items()}


def entries_for(name: str, device_map: dict) -> list[str]:
    return [entry for entry in device_map if entry == "" or name == entry or name.startswith(f"{entry}.")]


@given(model=MODELS, limits=LIMITS, options=OPTIONS)
def test_every_tensor_has_one_place_and_limits_are_kept(model: Model, limits: dict, options: dict) -> None:
    device_map = infer_auto_device_map(model, limits, no_split_module_classes=["Whole"], **options)
    for name in tensors_of(model):
        assert len(entries_for(name, device_map)) == 1, (name, device_map)
    check_device_map(model, {name: "cpu" for name in device_map})
    for device, size in bytes_on(model, device_map).items():
        assert device == "disk" or size <= limits[device], device_map
    for group in find_tied_parameters(model):
        assert len({location_of(name, device_map) for name in group}) == 1, (group, device_map)
    for name, module in model.named_modules():
        if isinstance(module, Whole):
            inside = {location_of(f"{name}.{tensor}", device_map) for tensor in tensors_of(module)}
            assert len(inside) == 1, (name, device_map)


@given(model=MODELS, limits=LIMITS, options=OPTIONS)
def test_the_main_device_has_room_for_what_visits_it(model: Model, limits: dict, options: dict) -> None:
    device_map = infer_auto_device_map(model, limits, no_split_module_classes=["Whole"], **options)
    main = next((device for device in (0, 1, "cpu") if limits.get(device)), "disk")
    if main == "disk":
        return
    offloaded = {"disk"} if main == "cpu" else {"cpu", "disk"}
    visiting, buffers = [0], 0
    for name, module in model.named_modules():
        inside_whole = any(isinstance(model.get_submodule(around), Whole) for around in parents(name))
        if isinstance(module, (Whole, Leaf)) and not inside_whole and location_of(name, device_map) in offloaded:
            weights = sum(p.numel() * 4 for p in module.parameters())
            own = sum(b.numel() * 4 for b in module.buffers())
            buffers += 0 if options["offload_buffers"] else own
            visiting.append(weights + own if options["offload_buffers"] else weights)
    resident = bytes_on(model, device_map).get(main, 0)
    largest = max(size for size in visiting if size <= limits[main])
    assert resident + min(largest + buffers, limits[main]) <= limits[main] or resident == 0, device_map


def parents(name: str) -> list[str]:
    parts = name.split(".")[:-1]
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


@given(model=MODELS, options=OPTIONS, spare=st.integers(0, 3))
def test_what_fits_is_not_spilled(model: Model, options: dict, spare: int) -> None:
    total = compute_module_sizes(model)[""]
    limits = {0: total + spare, 1: total, "cpu": total}
    assert set(infer_auto_device_map(model, limits, no_split_module_classes=["Whole"], **options).values()) == {0}
    assert infer_auto_device_map(model, {"cpu": total}) == {"": "cpu"}


@given(model=MODELS, limits=LIMITS, options=OPTIONS)
def test_a_device_is_left_only_when_the_next_layer_does_not_fit(model: Model, limits: dict, options: dict) -> None:
    """Without ties: the first unit on the device after an accelerator would have exceeded that one's limit."""
    if find_tied_parameters(model) or len(limits) < 2 or 1 not in limits:
        return
    device_map = infer_auto_device_map(
        model, {0: limits[0], 1: 10**6}, no_split_module_classes=["Whole"], clean_result=False
    )
    sizes = compute_module_sizes(model)
    second = [name for name, device in device_map.items() if device == 1]
    if second:
        module = dict(model.named_modules()).get(second[0])
        assert bytes_on(model, device_map).get(0, 0) + sizes[second[0]] > limits[0]
        assert module is None or isinstance(module, (Whole, Leaf)), (
            "a block that can be split is split to fill the device"
        )


@given(model=MODELS, limits=LIMITS)
def test_a_clean_map_says_the_same(model: Model, limits: dict) -> None:
    long = infer_auto_device_map(model, limits, clean_result=False)
    short = clean_device_map(dict(long))
    assert len(short) <= len(long)
    assert all(location_of(name, long) == location_of(name, short) for name in tensors_of(model))


@pytest.mark.slow  # counts every call for models of up to hundreds of blocks; the maps have fast tests
@pytest.mark.parametrize("options", [{}, {"no_split_module_classes": ["TransformerBlock"]}], ids=["split", "whole"])
def test_the_work_grows_as_the_number_of_blocks(options: dict) -> None:
    class TransformerBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 32), nn.Linear(32, 8)

    def calls(count: int) -> int:
        with init_empty_weights():
            model = nn.Sequential(*(TransformerBlock() for _ in range(count)))
        total = compute_module_sizes(model)[""]
        made = 0

        def count_call(frame: object, event: str, argument: object) -> None:
            nonlocal made
            made += event in ("call", "c_call")

        before = sys.getprofile()
        gc.collect()  # what finalizes the garbage of other tests would be counted
        sys.setprofile(count_call)
        try:
            infer_auto_device_map(model, {0: total // 3, 1: total // 4, "cpu": total // 5}, **options)
        finally:
            sys.setprofile(before)
        return made

    # How long it takes is measured in benchmarks/bench_bigmodel.py: 5,000 blocks, in under a second.
    assert calls(1200) < 4.5 * calls(300)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear1, self.batchnorm, self.linear2 = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 5)


def test_splitting_and_options() -> None:
    model = Small()  # 64 + 72 (40 of them buffers) + 100 bytes
    assert infer_auto_device_map(model, {0: 140, 1: 200}) == {"linear1": 0, "batchnorm": 0, "linear2": 1}
    assert infer_auto_device_map(model, {0: 236}) == {"": 0}
    # linear2 visits device 0, which keeps 100 bytes free for it; batchnorm then does not fit, and leaves its 40 bytes
    # of buffers there.
    assert infer_auto_device_map(model, {0: 235}) == {"linear1": 0, "batchnorm": "disk", "linear2": "disk"}
    assert infer_auto_device_map(model, {0: 203}) == {"": "disk"}
    assert infer_auto_device_map(model, {0: 164}, offload_buffers=True) == {
        "linear1": 0,
        "batchnorm": "disk",
        "linear2": "disk",
    }
    assert infer_auto_device_map(model, {0: 118 + 20}, dtype=torch.float16) == {"": 0}
    special = {"dtype": "float16", "special_dtypes": {"linear2.weight": torch.float32}}
    assert infer_auto_device_map(model, {0: 162}, **special) == {"": 0}
    assert infer_auto_device_map(model, {0: 161}, **special) != {"": 0}
    assert infer_auto_device_map(model, {"cpu": "1KB", "disk": "0B"}) == {"": "cpu"}
    # The first layer does not fit: later ones are looked at only when asked.
    model = nn.Sequential(nn.Linear(100, 100), nn.Linear(2, 2), nn.Linear(3, 3))
    assert infer_auto_device_map(model, {0: 100, "cpu": 50000}) == {"": "cpu"}
    found = infer_auto_device_map(model, {0: 100, "cpu": 50000}, fallback_allocation=True)
    assert found == {"0": "cpu", "1": 0, "2": "cpu"}


def test_a_layer_that_is_too_large_does_not_send_the_others_to_the_host() -> None:
    model = nn.ModuleList(Block([sizes] * 4, 0) for sizes in (30, 9, 9, 6))  # of four layers each
    model[0] = Whole([30] * 4, 0)
    limits = {0: 256, 1: 256, "cpu": 10**6}
    whole = {"no_split_module_classes": ["Whole"]}
    assert set(infer_auto_device_map(model, limits, **whole).values()) == {"cpu"}
    found = infer_auto_device_map(model, limits, **whole, skip_too_large=True)
    assert found["0"] == "cpu" and {0, 1} <= set(found.values())
    # The largest layer of the block visits device 0, which keeps 120 bytes free for it.
    assert bytes_on(model, found)[0] <= 256 - 120 < 256 - 48 <= bytes_on(model, found)[1]
    assert named_device_map(model, "auto", {**limits}, ["Whole"]) == found
    # A device that is filled already is not left because of the layer; memory of the host is limited too.
    model = nn.ModuleList([Leaf(9), Leaf(100), Leaf(9), Leaf(9)])
    assert named_device_map(model, "auto", {0: 108, "cpu": 399}) == {"0": 0, "1": "disk", "2": 0, "3": 0}
    assert named_device_map(model, "auto", {"cpu": 399}) == {"0": "cpu", **dict.fromkeys("123", "disk")}


@given(model=MODELS, limits=LIMITS, offload_buffers=st.booleans())
def test_what_is_skipped_fits_on_no_accelerator(model: Model, limits: dict, offload_buffers: bool) -> None:
    options = {"no_split_module_classes": ["Whole"], "offload_buffers": offload_buffers}
    found = infer_auto_device_map(model, limits, **options, skip_too_large=True)
    for name in tensors_of(model):
        assert len(entries_for(name, found)) == 1, (name, found)
    resident, without = bytes_on(model, found), bytes_on(model, infer_auto_device_map(model, limits, **options))
    assert all(device == "disk" or size <= limits[device] for device, size in resident.items())
    accelerators = [device for device in limits if device != "cpu"]
    if not find_tied_parameters(model):
        assert sum(resident.get(one, 0) for one in accelerators) >= sum(without.get(one, 0) for one in accelerators)


def test_a_map_that_is_not_cleaned_names_the_members_of_the_model() -> None:
    model, limits = Small(), {"cpu": 10**6}
    assert infer_auto_device_map(model, limits, clean_result=False) == dict.fromkeys(
        ["linear1", "batchnorm", "linear2"], "cpu"
    )
    assert infer_auto_device_map(model, limits) == {"": "cpu"}
    assert infer_auto_device_map(model.linear1, limits, clean_result=False) == {"weight": "cpu", "bias": "cpu"}
    assert infer_auto_device_map(nn.ReLU(), limits, clean_result=False) == {"": "cpu"}


def test_parts_of_one_device_are_named_together() -> None:
    def cleaned(device_map: dict, top: str = "") -> dict:
        return clean_device_map(dict(device_map), top)

    # The only entry of a module may leave out its other parts.
    assert cleaned({"a.b": 0, "c": 1}) == cleaned({"a.b": 0, "c": 1}, "a") == {"a.b": 0, "c": 1}
    split = {"a.b.x": 0, "a.b.y": 0, "a.c": 1, "d.x": 2, "d.y": 2}
    assert cleaned(split) == {"a.b": 0, "a.c": 1, "d": 2}
    assert cleaned(split, "a") == {"a.b": 0, "a.c": 1, "d.x": 2, "d.y": 2}
    assert cleaned({"ab.c.x": 0, "ab.c.y": 0, "ab.d": 1, "a": 1}, "ab") == {"ab.c": 0, "ab.d": 1, "a": 1}
    assert cleaned({"ab.c.x": 0, "ab.c.y": 0}, "ab.c") == {"ab.c": 0}
    # A module's own entry is for its other parts.
    for top in ("", "a"):
        assert cleaned({"a": 0, "a.b": 1, "a.c": 1}, top) == {"a": 0, "a.b": 1, "a.c": 1}
    assert cleaned({"a": 0, "a.b": 0, "c": 1}) == {"a": 0, "c": 1}


def test_verbose_tells_each_decision(capsys: pytest.CaptureFixture[str]) -> None:
    infer_auto_device_map(Small(), {0: 140, 1: 200}, verbose=True)
    told = capsys.readouterr().out
    assert "linear1: 64 bytes on 0" in told and "linear2: 100 bytes do not fit into the rest of 0" in told


def test_balanced_maps_distribute_the_model_evenly() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(12)))
    total = compute_module_sizes(model)[""]
    limits = dict.fromkeys(range(3), 10 * total)
    sizes = bytes_on(model, named_device_map(model, "balanced", limits))
    assert set(sizes) == {0, 1, 2} and max(sizes.values()) - min(sizes.values()) <= 2 * total // 12
    assert named_device_map(model, "auto", limits) == named_device_map(model, "balanced", limits)
    assert set(named_device_map(model, "sequential", limits).values()) == {0}
    low = bytes_on(model, named_device_map(model, "balanced_low_0", limits))
    assert 0 not in low and set(low) == {1, 2}
    tight = {0: total, 1: total // 3, 2: total // 3}
    assert bytes_on(model, named_device_map(model, "balanced_low_0", tight))[0] < total // 2
    with pytest.raises(ConfigurationError, match="device_map='fast'"):
        named_device_map(model, "fast")
    assert get_balanced_memory(model, {0: 500, "cpu": 700}) == {0: 500, "cpu": 700}


@given(model=MODELS, one=st.integers(1, 2000), two=st.integers(1, 2000), low_zero=st.booleans())
def test_balancing_offloads_nothing_that_fits_otherwise(model: Model, one: int, two: int, low_zero: bool) -> None:
    limits = {0: one, 1: two, "cpu": 10**6}
    balanced = get_balanced_memory(model, limits, ["Whole"], low_zero=low_zero)
    assert all(balanced[device] <= limits[device] for device in limits)
    assert balanced["cpu"] == limits["cpu"] and balanced[1] == limits[1]


def test_limits_are_sizes_of_known_devices() -> None:
    assert get_max_memory({"cpu": "10GB", 1: "3GiB", 0: 5}) == {0: 5, 1: 3 * 2**30, "cpu": 10**10}
    assert list(get_max_memory({"disk": 1, "cpu": 1, 2: 1})) == [2, "cpu", "disk"]
    assert get_max_memory()["cpu"] > 10**6
    free = {"cpu": 0.9 * 20213146710, 0: "1GB", 1: 7}
    assert get_max_memory(free) == {0: 10**9, 1: 7, "cpu": 18191832039}
    assert free == {"cpu": 18191832039, 0: 10**9, 1: 7}, "callers read the bytes from their dictionary"
    assert infer_auto_device_map(Small(), {"cpu": 1000.5}) == {"": "cpu"}
    assert get_balanced_memory(Small(), {0: 1000.5, 1: 1e3, "cpu": 10.0})["cpu"] == 10
    for wrong in ({0: "10 apples"}, {0: -1}, {"gpu": 5}, {0: None}, {0: float("inf")}, {0: float("nan")}):
        with pytest.raises(ConfigurationError, match="max_memory"):
            get_max_memory(wrong)


def test_a_map_that_does_not_fit_the_model_is_refused() -> None:
    model = Small()
    with pytest.raises(ConfigurationError, match="batchnorm.weight.*linear2.bias"):
        check_device_map(model, {"linear1": "cpu", "batchnorm.bias": "cpu", "batchnorm.running_mean": "cpu"})
    with pytest.warns(UserWarning, match="names linear3") as told:
        check_device_map(model, {"": "cpu", "linear3": "disk"})
    assert told[0].filename == __file__
    check_device_map(model, {"": 0})
    with pytest.raises(ConfigurationError, match="'gpu' is not a device"):
        dispatch_model(model, {"": "gpu"})
    with pytest.raises(ConfigurationError, match="this machine has none"):
        dispatch_model(model, {"linear1": 0, "batchnorm": 0, "linear2": "cpu"})
    with pytest.warns(UserWarning, match="names lm_head"):
        dispatch_model(model, {"": "cpu", "lm_head": "disk"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_tensor = {"linear2.weight": "disk", "linear2.bias": "cpu", "batchnorm.running_mean": "cpu"}
        check_device_map(model, {"linear1": "cpu", "batchnorm": torch.device("cpu"), **by_tensor})
        model.again = model.linear1
        model.batchnorm2 = nn.BatchNorm1d(4)
        model.batchnorm2.weight, model.batchnorm2.running_mean = model.batchnorm.weight, model.batchnorm.running_mean
        shared = dict.fromkeys(("again", "batchnorm2.weight", "batchnorm2.running_mean"), "cpu")
        check_device_map(model, {"": "cpu", **shared})


def test_buffers_that_do_not_fit_beside_offloaded_layers_are_warned_of() -> None:
    model = nn.Sequential(nn.BatchNorm1d(100, affine=False), nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="0.*offload_buffers=True"):
        device_map = infer_auto_device_map(model, {0: 100, "cpu": "1MB"})
    assert device_map == {"": "cpu"}
    # 88 bytes of buffers fit alone, and not next to the layer of 80 that visits the device.
    small = nn.Sequential(nn.BatchNorm1d(10, affine=False), nn.Linear(4, 4))
    with pytest.warns(UserWarning, match=r"take 88 bytes on device 0.*\(80 bytes of 100 bytes\)"):
        infer_auto_device_map(small, {0: 100, "cpu": "1MB"})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        infer_auto_device_map(model, {0: 100, "cpu": "1MB"}, offload_buffers=True)
        infer_auto_device_map(model, {0: "1MB", "cpu": "1MB"})


@pytest.mark.parametrize(("shared", "fits"), [("weight", 16), ("table", 13)])
def test_a_layer_that_shares_a_tensor_visits_with_it(shared: str, fits: int) -> None:
    block = Whole([24 if shared == "weight" else 3] * 3, 0)
    first, second, last = block.layers
    if shared == "table":
        for layer in (first, second):
            layer.register_buffer("table", torch.empty(24, device="meta"))
        last.register_buffer("table", first.table)
    else:
        last.weight = first.weight
    last.bias = nn.Parameter(torch.empty(10, device="meta"))
    # The last layer needs 136 or 148 bytes, the others 96 or 108; the block does not fit.
    for size, place in ((fits, 0), (fits + 1, "cpu")):
        model = nn.ModuleList([Leaf(size), block])
        found = infer_auto_device_map(model, {0: 200, "cpu": 10**6}, ["Whole"], offload_buffers=True)
        assert location_of("0.weight", found) == place and location_of("1.layers.2.weight", found) == "cpu"


@pytest.mark.parametrize("name", ["float16", "torch.float16", torch.float16])
def test_dtypes_have_names(name) -> None:
    model = Small()
    sizes = compute_module_sizes(model, special_dtypes={"linear1.weight": name})
    assert sizes["linear1.weight"] == 2 * model.linear1.weight.numel()
    assert compute_module_sizes(model, dtype=name)["linear1"] == 2 * sum(p.numel() for p in model.linear1.parameters())
    every = {weight: name for weight, _ in model.named_parameters()}
    half = compute_module_sizes(model, special_dtypes=every)[""]
    assert infer_auto_device_map(model, {"cpu": half}, special_dtypes=every) == {"": "cpu"}
    assert get_balanced_memory(model, {0: 10**6, 1: 10**6}, dtype=name, special_dtypes=every)[0] < 10**6


DESCRIBED = """\
linear1         0            64 bytes
batchnorm       0            72 bytes
linear2.weight  disk         80 bytes
linear2.bias    cpu          20 bytes
sum             0: 136 bytes, disk: 80 bytes, cpu: 20 bytes"""


def test_the_map_can_be_read() -> None:
    model, device_map = Small(), {"linear1": 0, "batchnorm": 0, "linear2.weight": "disk", "linear2.bias": "cpu"}
    assert describe_device_map(model, device_map) == DESCRIBED
    assert describe_device_map(model, {"": "cpu"}) == "(model)  cpu         236 bytes\nsum      cpu: 236 bytes"
    with pytest.raises(ConfigurationError, match="has no device map"):
        describe_device_map(model)
    model.hf_device_map = device_map
    assert describe_device_map(model) == DESCRIBED


def test_ties_across_devices_are_warned_of() -> None:
    with pytest.warns(UserWarning, match="each holds a copy"):
        check_tied_parameters_on_same_device([["a.w", "b.w"]], {"a": 0, "b": 1})
    check_tied_parameters_on_same_device([["a.w", "b.w"]], {"a": 0, "b.w": 0, "b": 1})


def test_layers_and_fallback() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(4, 4)), nn.Linear(4, 4))
    sizes = compute_module_sizes(model)
    assert get_max_layer_size(list(model.named_children()), sizes, []) == (80, ["0.1", "1"])
    assert get_max_layer_size(list(model.named_children()), sizes, ["Sequential"]) == (104, ["0"])
    name, module, rest = fallback_allocate(list(model.named_children()), sizes, 30)
    assert name == "0.0" and module is model[0][0] and [own for own, _ in rest] == ["0.1", "1"]
    assert fallback_allocate(list(model.named_children()), sizes, "10B")[:2] == (None, None)
    assert fallback_allocate(list(model.named_children()), sizes, 90)[0] == "1"
    assert (
        fallback_allocate(list(model.named_children()), sizes, 30, tied_parameters=[["0.0.weight", "1.weight"]])[0]
        is None
    )
    size, names, modules = get_module_size_with_ties(["1.weight"], sizes["0"], sizes, list(model.named_children())[1:])
    assert (size, names, modules) == (104 - 64 + 80, ["1"], [model[1]])
    assert get_module_size_with_ties([], 7, sizes, []) == (7, [], [])
    with pytest.raises(ConfigurationError, match=r"none of modules_to_treat holds 5\.w"):
        get_module_size_with_ties(["5.w"], 7, sizes, [])


def test_a_map_with_an_index_that_this_machine_lacks() -> None:
    model = nn.Linear(2, 2)
    for index in (1, 3):
        with pytest.raises(ConfigurationError, match=f"'cpu:{index}', and this machine has 1 of cpu"):
            dispatch_model(model, {"": f"cpu:{index}"})
    assert dispatch_model(model, {"": "cpu:0"}) is model
