"""Inputs at the call: cutting, checking, and what the errors say."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.tensor import DTensor, Shard

from shardc.errors import InputError
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.runtime.groups import Groups
from shardc.runtime.inputs import WAYS_OUT, check_constants, check_inputs, local_input, shard_input
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
