"""Inputs at the call: cutting, checking, and what the errors say."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
import transformers
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

import shardc
from shardc.errors import InputError
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.runtime.groups import Groups
from shardc.runtime.inputs import WAYS_OUT, Arguments, check_constants, check_inputs, local_input, shard_input
from tests.ranks import device_mesh, run_ranks

MESH = Mesh(dp=2, tp=2)


def layout(text: str) -> Layout:
    return Layout.parse(text, MESH)


def test_shards_of_a_global_input() -> None:
    whole = torch.arange(32.0).view(8, 4).requires_grad_()
    shards = [shard_input(whole, layout("[8@dp,4@tp]"), rank) for rank in range(4)]
    expected = [whole[:4, :2], whole[:4, 2:], whole[4:, :2], whole[4:, 2:]]
    assert all(torch.equal(shard, part) for shard, part in zip(shards, expected, strict=True))
    assert all(shard.requires_grad and shard.is_leaf and shard.is_contiguous() for shard in shards)


def test_global_input_of_another_shape() -> None:
    with pytest.raises(InputError) as caught:
        shard_input(torch.zeros(4, 4), layout("[8@dp,4]"), 0)
    assert caught.value.what == "a global input has shape [4, 4]; the plan lays out [8@dp,4]"


def test_a_wrong_local_shape_shows_both_shapes_and_both_ways_out() -> None:
    names, layouts = ["x", "mask"], [layout("[8@dp,4]"), layout("[8@dp]")]
    check_inputs(names, [torch.zeros(4, 4), torch.zeros(4)], layouts)
    with pytest.raises(InputError) as caught:
        check_inputs(names, [torch.zeros(8, 4), torch.zeros(3)], layouts)
    assert str(caught.value) == (
        "input 'x' has local shape [8, 4], which is the whole global input; "
        "expected local shape [4, 4] (global [8, 4], layout [8@dp,4]); "
        "input 'mask' has local shape [3]; expected local shape [4] (global [8], layout [8@dp])\n"
        f"  fix: {WAYS_OUT}"
    )


def test_a_wrong_dtype_and_a_wrong_number() -> None:
    with pytest.raises(InputError) as caught:
        check_inputs(["x"], [torch.zeros(4)], [layout("[8@dp]")], [torch.int64])
    assert caught.value.what == "input 'x' is torch.float32, expected torch.int64"
    with pytest.raises(InputError) as caught:
        check_inputs(["x", "y"], [torch.zeros(4), torch.zeros(4)], [layout("[8@dp]")])
    assert caught.value.what == "2 tensor inputs (x, y), expected 1"


def test_constants() -> None:
    check_constants(["scale", "causal"], [1.0, True], [1.0, True])
    check_constants(["scale"], [float("nan")], [float("nan")])
    with pytest.raises(InputError, match="input 'scale' is -0.0; the program was captured with 0.0"):
        check_constants(["scale"], [-0.0], [0.0])
    with pytest.raises(InputError) as caught:
        check_constants(["scale", "causal"], [1.0, 1], [1.0, True])
    assert caught.value.what == "input 'causal' is 1; the program was captured with True, which is part of it"


def check_dtensors() -> None:
    mesh = Mesh(dp=2)
    device = device_mesh(mesh)
    rank, whole = Groups.of(device).rank, torch.arange(32.0).view(8, 4)
    given = DTensor.from_local(whole.chunk(2, dim=1)[rank], device, [Shard(1)], run_check=False)
    wanted = Layout.parse("[8@dp,4]", mesh)
    check_inputs(["x"], [given], [wanted])
    assert torch.equal(local_input(given, wanted, device), whole.chunk(2)[rank])
    plain = whole.chunk(2)[rank]
    assert local_input(plain, wanted, device) is plain
    for lazy in (torch._neg_view(plain), plain.to(torch.complex64).conj()):  # a bit beside the memory, which code reads
        taken = local_input(lazy, wanted, device)
        assert torch.equal(taken, lazy) and not (taken.is_neg() or taken.is_conj())
    with pytest.raises(InputError) as caught:
        local_input(given, Layout.parse("[6@dp,4]", mesh), device)
    assert caught.value.what == "a DTensor input has global shape [8, 4], expected [6, 4]"


@pytest.mark.slow
def test_dtensors() -> None:
    run_ranks(2, check_dtensors)


# --- batches of any structure


class Lookup(nn.Module):
    def forward(self, ids: Tensor, mask: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        return ids


class TakesOne(nn.Module):
    def forward(self, batch: Any) -> Tensor:
        return batch


@dataclass(frozen=True)
class Record:
    ids: Tensor
    labels: Tensor


Pair = namedtuple("Pair", "ids labels")  # noqa: PYI024
IDS = torch.arange(12).view(4, 3)
HALF = IDS[:2]


@pytest.mark.parametrize("model", [Lookup, TakesOne])
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"ids": IDS, "labels": IDS}, {"ids": HALF, "labels": HALF}),
        (OrderedDict(labels=IDS, ids=IDS), OrderedDict(labels=HALF, ids=HALF)),
        (Record(IDS, IDS), Record(HALF, HALF)),
        (Pair(IDS, IDS), Pair(HALF, HALF)),
        ([IDS, {"a": (IDS, 3, None)}], [HALF, {"a": (HALF, 3, None)}]),
        ({"rest": [Record(IDS, IDS)]}, {"rest": [Record(HALF, HALF)]}),
        (
            transformers.BatchEncoding({"ids": IDS, "mask": IDS}),
            transformers.BatchEncoding({"ids": HALF, "mask": HALF}),
        ),
        (MappingProxyType({"ids": IDS}), MappingProxyType({"ids": HALF})),
        (IDS, HALF),
    ],
    ids=lambda x: type(x).__name__,
)
def test_a_batch_keeps_its_structure(model: type[nn.Module], given: Any, expected: Any) -> None:
    module = shardc.compile(model(), shardc.Mesh(dp=2), shardc.ddp("dp"))
    same(module.shard_inputs(given), expected)


def same(x: Any, y: Any) -> None:
    """Both have one structure, the same classes and values."""
    assert type(x) is type(y)
    if isinstance(x, Tensor):
        assert torch.equal(x, y)
    elif isinstance(x, list | tuple):
        for left, right in zip(x, y, strict=True):
            same(left, right)
    elif isinstance(x, Record):
        same((x.ids, x.labels), (y.ids, y.labels))
    elif hasattr(x, "items"):
        same(list(x.items()), list(y.items()))
    else:
        assert x == y


def test_a_dict_is_cut_as_keywords() -> None:
    """A plan that speaks of an input by name finds it in a batch; the batch itself is not changed."""
    plan = shardc.Plan(inputs={"ids": (None, "dp"), "labels": ("dp", None)})
    module = shardc.compile(Lookup(), shardc.Mesh(dp=3), plan)
    labels = torch.zeros(6, 2)
    batch = {"labels": labels, "ids": IDS}
    same(module.shard_inputs(batch), {"labels": labels[:2], "ids": IDS[:, :1]})
    assert batch["ids"] is IDS
    same(module.shard_inputs(**batch), ((), {"labels": labels[:2], "ids": IDS[:, :1]}))


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    module = shardc.compile(TakesOne(), shardc.Mesh(dp=2), shardc.ddp("dp"))
    for x, kind in ((torch.eye(4).to_sparse(), "a sparse_coo tensor"), (nested(), "a nested tensor")):
        with pytest.raises(InputError, match=f"input '.*' is {kind}"):
            module.shard_inputs(x)


def nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(1, 3)])


def test_an_object_that_holds_tensors_is_not_passed_uncut() -> None:
    class Box:
        def __init__(self) -> None:
            self.ids = IDS

    module = shardc.compile(TakesOne(), shardc.Mesh(dp=2), shardc.ddp("dp"))
    with pytest.raises(InputError) as caught:
        module.shard_inputs([Box()])
    assert caught.value.what == (
        "a batch has a Box with tensors in its attribute 'ids'; torch's pytrees do not know the class, so they cannot "
        "be cut"
    )


X = torch.ones(2)  # an argument that is a tensor


@pytest.mark.parametrize(
    "args, kwargs",
    [
        ((), {}), ((X,), {}), ((X, None, 1, 1.0, True, "a"), {}), ((X,), {"labels": X, "mask": None}),
        ((X,), {"mask": None, "labels": X}), (([X, 1],), {}), ((X, (X, None)), {"past": {"k": X}}),
        ((torch.Size((2, 3)),), {}), ((torch.nn.Parameter(X),), {}),
    ],
)  # fmt: skip
def test_calls_are_flattened_as_by_pytrees(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _, _, leaves, spec = Arguments.of(args, kwargs)
    expected, whole = pytree.tree_flatten((args, kwargs))
    assert [id(x) for x in leaves] == [id(x) for x in expected]
    assert spec == whole and hash(spec) == hash(whole)
    assert pytree.tree_unflatten(leaves, spec) == pytree.tree_unflatten(expected, whole)
