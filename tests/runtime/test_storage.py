"""Parameters in storage layout, as DTensors on real ranks: torch's optimizers, norms and checkpoints on them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from shardc.errors import LayoutError
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.runtime.groups import Groups
from shardc.runtime.storage import grad_from_padded, local_indices, padded_local, refill, shard_tensor, to_parameter
from tests.ranks import device_mesh, run_ranks

TWO, FOUR = Mesh(tp=2), Mesh(dp=2, tp=2)

# (true shape, storage layout); the layout's shape is larger where a dim is padded.
CASES: dict[Mesh, list[tuple[tuple[int, ...], str]]] = {
    TWO: [
        ((10,), "[10@tp]"),
        ((9, 3), "[10@tp,3]"),
        ((3, 9), "[3,10@tp]"),
        ((1, 3), "[2@tp,3]"),
        ((24, 2), "[(3 8@tp),2]"),
        ((2, 24), "[2,(3 8@tp)]"),
        ((4, 4), "[4,4]"),
        ((), "[]"),
        ((0, 4), "[0,4]"),
    ],
    FOUR: [
        ((32, 3), "[32@(tp,dp),3]"),
        ((32, 3), "[32@(dp,tp),3]"),
        ((24, 4), "[(3 8@tp),4@dp]"),
        ((24, 4), "[(3 8@(tp,dp)),4]"),
        ((24, 4), "[(3 8@(dp,tp)),4]"),
        ((24, 4), "[(2@dp 3 4@tp),4]"),
        ((9, 3), "[10@dp,4@tp]"),
        ((1, 6), "[2@dp,6@tp]"),
        ((5, 4), "[6@tp,4]"),
    ],
}


class Holder(nn.Module):
    """Named parameters, each with its whole value, storage layout and shape."""

    def __init__(self, mesh: Mesh, cases: list[tuple[tuple[int, ...], str]], make: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.groups = Groups.of(device_mesh(mesh))
        self.storages = [Layout.parse(text, mesh) for _, text in cases]
        self.wholes = [make(shape, dtype=torch.float64) for shape, _ in cases]
        for at, (whole, storage) in enumerate(zip(self.wholes, self.storages, strict=True)):
            padded = shard_tensor(whole, storage, self.groups.rank)
            mesh_of = self.groups.device_mesh
            self.register_parameter(f"p{at}", to_parameter(padded, storage, whole.shape, mesh_of, self.groups.rank))

    def set_grads(self, grads: list[torch.Tensor]) -> None:
        for param, grad, storage in zip(self.parameters(), grads, self.storages, strict=True):
            param.grad = grad_from_padded(shard_tensor(grad, storage, self.groups.rank), param)

    def full(self) -> list[torch.Tensor]:
        return [param.full_tensor().detach() for param in self.parameters()]


def assert_equal(found: list[torch.Tensor], expected: list[torch.Tensor], names: list[str]) -> None:
    for one, other, name in zip(found, expected, names, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12, msg=lambda text, name=name: f"{name}: {text}")


def check_round_trip(mesh: Mesh) -> None:
    holder = Holder(mesh, CASES[mesh], torch.randn)
    names = [text for _, text in CASES[mesh]]
    assert_equal(holder.full(), holder.wholes, names)
    for param, whole, storage in zip(holder.parameters(), holder.wholes, holder.storages, strict=True):
        assert isinstance(param, DTensor) and param.requires_grad and param.is_leaf
        assert param.shape == whole.shape and param.to_local().is_contiguous()
        assert torch.equal(padded_local(param, storage), shard_tensor(whole, storage, holder.groups.rank))


def check_optimizers(mesh: Mesh) -> None:
    """Clipped AdamW steps in each implementation equal those on whole tensors."""
    cases = CASES[mesh]
    names = [text for _, text in cases]
    for options in ({"foreach": True}, {"fused": True}, {"foreach": False}):
        holder = Holder(mesh, cases, torch.randn)
        wholes = [nn.Parameter(whole.clone()) for whole in holder.wholes]
        mine = torch.optim.AdamW(holder.parameters(), lr=0.1, **options)
        theirs = torch.optim.AdamW(wholes, lr=0.1, **options)
        for _ in range(3):
            grads = [torch.randn_like(whole) for whole in holder.wholes]
            holder.set_grads(grads)
            for whole, grad in zip(wholes, grads, strict=True):
                whole.grad = grad.clone()
            norm = nn.utils.clip_grad_norm_(holder.parameters(), 1.0)
            torch.testing.assert_close(norm.full_tensor(), nn.utils.clip_grad_norm_(wholes, 1.0))
            mine.step()
            theirs.step()
        assert_equal(holder.full(), [whole.detach() for whole in wholes], names)
        for param, whole, storage in zip(holder.parameters(), wholes, holder.storages, strict=True):
            # The steps reach the padded tensors that the graphs take, and their pads stay zero.
            expected = shard_tensor(whole.detach(), storage, holder.groups.rank)
            torch.testing.assert_close(padded_local(param, storage), expected, rtol=1e-12, atol=1e-12)


def check_checkpoint(mesh: Mesh, folder: str) -> None:
    """Model and optimizer saved in one set of layouts are loaded in another."""
    cases = CASES[mesh]
    names = [text for _, text in cases]
    saved = Holder(mesh, cases, torch.randn)
    optimizer = torch.optim.AdamW(saved.parameters(), lr=0.1)
    saved.set_grads([torch.randn_like(whole) for whole in saved.wholes])
    optimizer.step()
    model_state, optimizer_state = get_state_dict(saved, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)

    axis, size = mesh.shape[-1]
    others = [(shape, f"[{','.join(map(str, shape))}]") for shape, _ in cases]
    for at, (shape, _) in enumerate(cases):
        if shape and shape[0] > 1:
            rest = "".join(f",{n}" for n in shape[1:])
            others[at] = shape, f"[{-(-shape[0] // size) * size}@{axis}{rest}]"
    loaded = Holder(mesh, others, torch.zeros)
    other_optimizer = torch.optim.AdamW(loaded.parameters(), lr=0.1)
    model_state, optimizer_state = get_state_dict(loaded, other_optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(loaded, other_optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert_equal(loaded.full(), saved.full(), names)
    for key in ("exp_avg", "exp_avg_sq"):
        mine = [optimizer.state[param][key].full_tensor() for param in saved.parameters()]
        theirs = [other_optimizer.state[param][key].full_tensor() for param in loaded.parameters()]
        assert_equal(theirs, mine, names)


def check_buffers(mesh: Mesh) -> None:
    storage, shape, rank = Layout.parse("[10@tp,3]", mesh), (9, 3), dist.get_rank()
    whole, groups = torch.randn(shape), Groups.of(device_mesh(mesh))
    padded = shard_tensor(whole, storage, rank)
    param = to_parameter(padded, storage, shape, groups.device_mesh, rank)
    # The same memory, through steps in place.
    with torch.no_grad():
        param.add_(1)
    assert padded_local(param, storage).data_ptr() == padded.data_ptr()
    assert torch.equal(padded, shard_tensor(whole + 1, storage, rank))
    # A replaced parameter is copied, with its pad zero.
    other = nn.Parameter(DTensor(param.to_local().detach() * 2, param._spec, requires_grad=False))
    assert torch.equal(padded_local(other, storage), shard_tensor((whole + 1) * 2, storage, rank))
    with pytest.raises(LayoutError, match="is a Parameter, not a DTensor"):
        padded_local(nn.Parameter(whole), storage)
    # From meta to values, the same object, tied names included.
    meta = to_parameter(torch.empty(storage.local_shape, device="meta"), storage, shape, groups.device_mesh, rank)
    refill(meta, padded, storage, rank)
    assert padded_local(meta, storage).data_ptr() == padded.data_ptr() and meta.requires_grad
    assert torch.equal(meta.full_tensor().detach(), whole + 1)


def check_uneven_over_two_axes(mesh: Mesh) -> None:
    """10 over (dp, tp) is 3,3,3,1 here; DTensor cuts by dp, then by tp: 3,2,3,2."""
    groups, storage = Groups.of(device_mesh(mesh)), Layout.parse("[12@(dp,tp)]", mesh)
    padded = shard_tensor(torch.arange(10.0), storage, groups.rank)
    even_there = groups.rank in (0, 2)
    if even_there:
        to_parameter(padded, storage, (10,), groups.device_mesh, groups.rank)
        return
    with pytest.raises(
        LayoutError, match=r"split the dim that does not divide over one axis only, not over \['dp', 'tp'\]"
    ):
        to_parameter(padded, storage, (10,), groups.device_mesh, groups.rank)


@pytest.mark.slow
def test_two_ranks() -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = str(Path(folder) / "saved")
        checks = (check_round_trip, check_optimizers, check_buffers, partial(check_checkpoint, folder=saved))
        run_ranks(2, *(partial(check, TWO) for check in checks))


@pytest.mark.slow
def test_four_ranks() -> None:
    with tempfile.TemporaryDirectory() as folder:
        saved = str(Path(folder) / "saved")
        checks = (
            check_round_trip,
            check_optimizers,
            partial(check_checkpoint, folder=saved),
            check_uneven_over_two_axes,
        )
        run_ranks(4, *(partial(check, FOUR) for check in checks))


@pytest.mark.parametrize(("shape", "text"), [(s, t) for cases in CASES.values() for s, t in cases if s])
def test_shards_make_the_whole(shape: tuple[int, ...], text: str) -> None:
    """Every element is held at the index that ``held`` says, and the pads are zero."""
    mesh = TWO if (shape, text) in CASES[TWO] else FOUR
    storage, whole = Layout.parse(text, mesh), torch.arange(1.0, 1 + torch.Size(shape).numel()).view(shape)
    rebuilt = torch.zeros(shape)
    for rank in range(mesh.ranks):
        shard = shard_tensor(whole, storage, rank)
        assert tuple(shard.shape) == storage.local_shape
        index = [
            torch.tensor(list(local_indices(storage, shape, dim, rank)), dtype=torch.long) for dim in range(len(shape))
        ]
        mine = shard[tuple(slice(len(i)) for i in index)]
        rebuilt[torch.meshgrid(*index, indexing="ij")] = mine
        assert shard.sum() == mine.sum()
    assert torch.equal(rebuilt, whole)


def test_a_tensor_that_does_not_fit() -> None:
    with pytest.raises(LayoutError, match=r"a tensor of shape \[11\] does not fit the storage layout \[10@tp\]"):
        shard_tensor(torch.zeros(11), Layout.parse("[10@tp]", TWO), 0)
