"""`Owned`: tensors that lie on one coordinate of a mesh dim, on real ranks; each result is that of one device."""

from __future__ import annotations

import copy
import io
import pickle
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardc import _compat
from shardc.ir.mesh import Mesh
from shardc.runtime import dtensor_ops, gathered
from shardc.runtime.owned import Owned
from tests.ranks import device_mesh, run_ranks

R = Replicate()
# Mesh -> (shape, placements) of each tensor; None: a scalar. A tensor of every owner, with splits of both dims beside.
CASES: dict[Mesh, list[tuple[tuple[int, ...], tuple[Placement, ...]]]] = {
    Mesh(pp=2): [((6, 4), (Owned(0),)), ((5, 3), (Owned(1),)), ((5,), (Owned(1),)), ((), (R,)), ((1,), (Owned(0),))],
    Mesh(pp=2, dp=2): [
        ((6, 4), (Owned(0), Shard(0))),
        ((5, 3), (Owned(1), Shard(0))),
        ((5, 3), (Owned(0), Shard(1))),
        ((5,), (Owned(1), R)),
        ((1,), (Owned(1), Shard(0))),
        ((), (R, R)),
        ((12, 2), (Owned(1), _StridedShard(0, split_factor=3))),
    ],
    Mesh(dp=2, pp=2): [
        ((6, 4), (Shard(0), Owned(1))),
        ((5, 3), (Shard(1), Owned(0))),
        ((5,), (R, Owned(1))),
        ((12, 2), (_StridedShard(0, split_factor=3), Owned(0))),
    ],
}


def laid(value: Tensor, mesh: DeviceMesh, placements: tuple[Placement, ...]) -> DTensor:
    """The DTensor of ``value``, cut by torch for what is not `Owned`."""
    local = value
    for mesh_dim, placement in enumerate(placements):
        at = mesh.get_local_rank(mesh_dim)
        if isinstance(placement, Owned):
            local = local if at == placement.owner else local[:0]
        elif not isinstance(placement, Replicate):
            pieces, _ = placement._split_tensor(local, mesh.size(mesh_dim), with_padding=False)  # type: ignore[attr-defined]
            local = pieces[at]
    meta = TensorMeta(value.shape, value.stride(), value.dtype)
    spec = _compat.dtensor_spec(mesh, placements, meta)
    return DTensor(local.clone(), spec, requires_grad=False)


def prepared(mesh: Mesh) -> tuple[DeviceMesh, list[Tensor], list[DTensor]]:
    on = device_mesh(mesh)
    dtensor_ops.install(on)
    torch.manual_seed(0)
    values = [torch.randn(shape, dtype=torch.float64) for shape, _ in CASES[mesh]]
    return on, values, [laid(x, on, placements) for x, (_, placements) in zip(values, CASES[mesh], strict=True)]


def check_same(shards: list[DTensor], expected: list[Tensor], placements: list[tuple[Placement, ...]]) -> None:
    """Checks values and placements, and that no rank has rows which it does not own."""
    for x, value, where in zip(shards, expected, placements, strict=True):
        assert x.placements == where and x.shape == value.shape
        torch.testing.assert_close(x._local_tensor, laid(value, x.device_mesh, where)._local_tensor, rtol=1e-12, atol=0)
        torch.testing.assert_close(x.full_tensor(), value, rtol=1e-12, atol=0)


def check_ops(mesh: Mesh) -> None:
    """Elementwise ops stay where they are; others gather."""
    on, values, shards = prepared(mesh)
    placements = [where for _, where in CASES[mesh]]
    check_same(shards, values, placements)
    check_same([x * 2 + x.abs() for x in shards], [x * 2 + x.abs() for x in values], placements)
    check_same([torch.zeros_like(x) for x in shards], [torch.zeros_like(x) for x in values], placements)
    check_same([copy.deepcopy(x) for x in shards], values, placements)
    check_same([x.detach().clone().requires_grad_() for x in shards], values, placements)
    check_same([x.float() for x in shards], [x.float() for x in values], placements)
    check_same(list(torch._foreach_mul(shards, 3.0)), [x * 3 for x in values], placements)
    for x, value in zip(shards, values, strict=True):
        for order in (1.0, 2.0, 3.0, float("inf")):
            expected = torch.linalg.vector_norm(value, order)
            torch.testing.assert_close(torch.linalg.vector_norm(x, order).full_tensor(), expected)
        assert torch.equal(x, laid(value, on, x.placements))
        for function in (torch.sum, torch.mean, torch.amax, lambda x: x.flatten()[-1], lambda x: x.T @ x):
            if value.ndim == 2:
                torch.testing.assert_close(function(x).full_tensor(), function(value))
        with torch.no_grad():
            x.copy_(value + 1)
    check_same(shards, [x + 1 for x in values], placements)


def check_moves(mesh: Mesh) -> None:
    """From any placements to any others of the same tensor, and the gradient of the move."""
    on, values, _ = prepared(mesh)
    value = values[1]  # of which no dim divides
    for source, target in product(product([R, Shard(0), Shard(1), Owned(1)], repeat=on.ndim), repeat=2):
        start = laid(value, on, source).requires_grad_()
        moved = start.redistribute(on, target)
        check_same([moved.detach()], [value], [target])
        (moved * 2).sum().backward()
        check_same([start.grad.redistribute(on, source)], [torch.full_like(value, 2)], [source])


def check_pickles(mesh: Mesh) -> None:
    on, values, shards = prepared(mesh)
    for x, value in zip(shards, values, strict=True):
        again = pickle.loads(pickle.dumps(x.placements))
        assert again == x.placements and hash(again) == hash(x.placements) and repr(again) == repr(x.placements)
        buffer = io.BytesIO()
        torch.save(x, buffer)
        buffer.seek(0)
        check_same([torch.load(buffer, weights_only=True)], [value], [x.placements])
    assert len({(Owned(0),), (Owned(1),), (Shard(0),)}) == 3 and str(Owned(1)) == "Owned(1)"
    assert (Owned(0),) != (Shard(0),) != (Owned(0),)
    assert gathered.box_indices(laid(torch.zeros(4), on, (Owned(0), *[R] * (on.ndim - 1))))[0].numel() == (
        0 if on.get_local_rank(0) else 4
    )


def trained(
    params: list[nn.Parameter], grads: list[list[Tensor]], adamw: Callable[..., torch.optim.Optimizer], foreach: bool
) -> tuple[list[Tensor], list[Tensor], torch.optim.Optimizer]:
    """Three clipped steps; returns (parameters, norms, the optimizer)."""
    optimizer, norms = adamw(params, lr=0.1), []
    for step in grads:
        for param, grad in zip(params, step, strict=True):
            param.grad = grad.clone()
        norms.append(nn.utils.clip_grad_norm_(params, 1.0, foreach=foreach))
        optimizer.step()
    return [x.detach() for x in params], norms, optimizer


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def check_optimizers(mesh: Mesh) -> None:
    on, values, shards = prepared(mesh)
    placements = [where for _, where in CASES[mesh]]
    grads = [[torch.randn_like(x) for x in values] for _ in range(3)]
    kinds = [{"foreach": True}, {"foreach": False}, {"fused": True}, {"foreach": True, "amsgrad": True}]
    for kind, foreach in product(kinds, (True, False)):
        adamw = partial(torch.optim.AdamW, **kind)
        expected, norms, one = trained([nn.Parameter(x.clone()) for x in values], grads, adamw, foreach)
        params = [nn.Parameter(x.clone()) for x in shards]
        parts = [[laid(x, on, where) for x, where in zip(step, placements, strict=True)] for step in grads]
        actual, theirs, optimizer = trained(params, parts, adamw, foreach)
        check_same(actual, expected, placements)
        for norm, value in zip(theirs, norms, strict=True):
            torch.testing.assert_close(whole(norm), value, rtol=1e-12, atol=0)
        for param, before in zip(params, one.param_groups[0]["params"], strict=True):
            state, wanted = optimizer.state[param], one.state[before]
            assert state.keys() == wanted.keys()
            check_same([state["exp_avg_sq"]], [wanted["exp_avg_sq"]], [param.placements])


def on_plain(value: Tensor) -> DTensor:
    """``value`` as FSDP lays it on all ranks of the world."""
    mesh = device_mesh(Mesh(fsdp=dist.get_world_size()))
    where = (Shard(0),) if value.ndim else (R,)
    return laid(value, mesh, where)


def check_checkpoints(mesh: Mesh, folder: Path) -> None:
    """Saved from stages, loaded into one axis of FSDP and whole tensors; and back."""
    gathered.install_checkpointing()
    on, values, shards = prepared(mesh)
    placements = [where for _, where in CASES[mesh]]

    def named(tensors: list[Tensor]) -> dict[str, Tensor]:
        return {f"w{at}": x for at, x in enumerate(tensors)}

    def loaded(at: str, into: list[Tensor]) -> Mapping[str, Tensor]:
        state = named(into)
        dcp.load(state, checkpoint_id=folder / at)
        return state

    dcp.save(named(shards), checkpoint_id=folder / "stages")
    for x, value in zip(
        loaded("stages", [on_plain(torch.zeros_like(x)) for x in values]).values(), values, strict=True
    ):
        assert torch.equal(whole(x), value)
    for x, value in zip(loaded("stages", [torch.zeros_like(x) for x in values]).values(), values, strict=True):
        assert torch.equal(x, value)
    check_same(list(loaded("stages", [torch.zeros_like(x) for x in shards]).values()), values, placements)
    dcp.save(named([on_plain(x + 1) for x in values]), checkpoint_id=folder / "plain")
    check_same(
        list(loaded("plain", [torch.zeros_like(x) for x in shards]).values()), [x + 1 for x in values], placements
    )


def checks(mesh: Mesh, folder: str) -> list[Callable[[], None]]:
    of = [check_ops, check_pickles, check_optimizers]
    return [*(partial(check, mesh) for check in of), partial(check_checkpoints, mesh, Path(folder))]


def test_stages_of_one_rank() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(2, *checks(Mesh(pp=2), folder), partial(check_moves, Mesh(pp=2)))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [Mesh(pp=2, dp=2), Mesh(dp=2, pp=2)], ids=str)
def test_stages_of_two_ranks(mesh: Mesh) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(4, *checks(mesh, folder), partial(check_moves, mesh))
