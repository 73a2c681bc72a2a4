"""Fake values from the table are those of a run: in types, in memory that is their own, and where a run is needed."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from shardc.ir.fake_values import fake_result

aten = torch.ops.aten


@pytest.fixture
def mode() -> FakeTensorMode:
    return FakeTensorMode(shape_env=ShapeEnv())


@pytest.fixture
def runs(mode, monkeypatch) -> list[str]:
    """Names of the ops that ran in the mode."""
    ran: list[str] = []
    dispatch = mode.dispatch
    monkeypatch.setattr(mode, "dispatch", lambda func, *rest: (ran.append(func.name()), dispatch(func, *rest))[1])
    return ran


def _tensors(result: object) -> Iterator[Tensor]:
    for x in result if isinstance(result, tuple) else (result,):
        if isinstance(x, Tensor):
            yield x


def _types(result: object) -> list[object]:
    return [
        (type(x), x.shape, x.stride(), x.dtype, x.device, x.storage_offset(), x.untyped_storage().nbytes())
        for x in _tensors(result)
    ]


def _fake(mode: FakeTensorMode, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    with mode:
        return torch.empty(shape, dtype=dtype)


CASES = {
    "mm": (aten.mm.default, lambda x: (x, x.t()), True),
    "strides": (aten.add.Tensor, lambda x: (x.t(), x.t()), True),
    "reduce": (aten.sum.dim_IntList, lambda x: (x, [0], True), True),
    "several": (aten.native_layer_norm.default, lambda x: (x, [6], None, None, 1e-5), True),
    "cat": (aten.cat.default, lambda x: ([x, x], 1), True),
    "gather": (torch.ops._c10d_functional.all_gather_into_tensor.default, lambda x: (x, 2, "group"), True),
    "view": (aten.view.default, lambda x: (x, [6, 4]), False),
    "maybe a view": (aten.reshape.default, lambda x: (x, [6, 4]), False),
    "factory": (aten.full.default, lambda x: ([2, 3], 1.0), False),
    "random": (aten.bernoulli.p, lambda x: (x, 0.5), False),
}


@pytest.mark.parametrize("name", CASES)
def test_results_equal_those_of_a_run(name, mode, runs):
    target, operands, in_table = CASES[name]
    x = _fake(mode, 4, 6)
    with mode:
        args = operands(x)
    first = fake_result(mode, target, args, {})
    runs.clear()
    second = fake_result(mode, target, args, {})
    assert bool(runs) is not in_table
    with mode:
        assert _types(second) == _types(first) == _types(target(*args))
    memory = {tensor.untyped_storage()._cdata for tensor in _tensors(first)}
    if "view" not in name:
        assert not memory & {tensor.untyped_storage()._cdata for tensor in _tensors(second)}
    else:
        assert {tensor.untyped_storage()._cdata for tensor in _tensors(second)} == {x.untyped_storage()._cdata}


def test_equal_numbers_of_other_types_are_other_arguments(mode):
    x = _fake(mode, 3, dtype=torch.int32)
    dtypes = [fake_result(mode, aten.mul.Tensor, (x, value), {}).dtype for value in (1, 1.0, True, 1)]
    assert dtypes == [torch.int32, torch.float32, torch.int32, torch.int32]


def test_the_default_dtype_is_an_argument(mode):
    x = _fake(mode, 3, dtype=torch.int32)
    assert fake_result(mode, aten.mul.Tensor, (x, 1.0), {}).dtype is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert fake_result(mode, aten.mul.Tensor, (x, 1.0), {}).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def test_keywords_are_arguments(mode):
    x = _fake(mode, 3)
    wide = fake_result(mode, aten.sum.default, (x,), {"dtype": torch.float64})
    assert (wide.dtype, fake_result(mode, aten.sum.default, (x,), {}).dtype) == (torch.float64, torch.float32)


def test_symbolic_sizes_run_each_time(mode, runs):
    symbolic = mode.from_tensor(torch.empty(5, 6), static_shapes=False)
    for _ in range(2):
        runs.clear()
        result = fake_result(mode, aten.add.Tensor, (symbolic, 1.0), {})
        assert runs and isinstance(result.shape[0], torch.SymInt)


def test_a_mode_has_a_table_of_its_own(mode):
    other = FakeTensorMode()
    for own in (mode, other, mode, other):
        result = fake_result(own, aten.add.Tensor, (_fake(own, 3), 1.0), {})
        assert isinstance(result, FakeTensor) and result.fake_mode is own
