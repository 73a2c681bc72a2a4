"""Layouts carried through views and cuts: each rank, computing on its shard alone, gets the shard that the layout says.

A chain of random ops is run twice: on the whole tensor, and rank by rank on shards, through each op's
rule. Views and transposes of powers of two must not move any data; where another op needs a dim whole,
the reshard that it asks for is run too.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from shardc.cost.model import CostModel
from shardc.cost.redistribute import steps
from shardc.ir.graph import Value
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.passes.lower.collectives import lower_collective
from shardc.rules import find_rule, spec_of
from shardc.rules.rule import Call, Local
from shardc.rules.spec import infer, place, project
from shardc.runtime.sim.lockstep import Lockstep, PerRank
from tests.layouts import every_layout

aten = torch.ops.aten
VIEWS = ("merge", "part", "permute", "transpose", "unsqueeze", "squeeze")
CUTS = ("slice", "select", "split", "cat", "expand", "flip")


@dataclass(frozen=True)
class Held:
    """A tensor, and its shards under a layout."""

    whole: torch.Tensor
    shards: PerRank
    layout: Layout


def divisors(size: int) -> list[int]:
    return [d for d in range(1, size + 1) if size % d == 0]


def op_call(draw: st.DrawFn, kind: str, x: torch.Tensor) -> tuple[Any, tuple[Any, ...], Any]:
    """An op of ``kind``, its arguments after the tensor, and (for ops on lists) how many times the tensor is given."""
    shape = list(x.shape)
    dim = draw(st.integers(0, max(x.ndim - 1, 0)))
    if kind == "merge" and x.ndim > 1:
        at = min(dim, x.ndim - 2)
        return aten.reshape.default, ([*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :]],), None
    if kind == "part" and x.ndim:
        major = draw(st.sampled_from(divisors(shape[dim])))
        return aten.reshape.default, ([*shape[:dim], major, shape[dim] // major, *shape[dim + 1 :]],), None
    if kind == "permute":
        return aten.permute.default, (draw(st.permutations(range(x.ndim))),), None
    if kind == "transpose" and x.ndim:
        return aten.transpose.int, (dim, draw(st.integers(0, x.ndim - 1))), None
    if kind == "squeeze" and 1 in shape:
        return aten.squeeze.dim, (shape.index(1),), None
    if kind == "slice" and x.ndim:
        start = draw(st.integers(0, shape[dim] - 1))
        return aten.slice.Tensor, (dim, start, draw(st.integers(start + 1, shape[dim]))), None
    if kind == "select" and x.ndim > 1:
        return aten.select.int, (dim, draw(st.integers(0, shape[dim] - 1))), None
    if kind == "split" and x.ndim:
        return aten.split.Tensor, (draw(st.sampled_from(divisors(shape[dim]))), dim), None
    if kind == "cat" and x.ndim and x.numel() <= 256:
        return aten.cat.default, (dim,), 2
    if kind == "expand" and 1 in shape:
        return aten.expand.default, ([3 if size == 1 else size for size in shape],), None
    if kind == "flip" and x.ndim:
        return aten.flip.default, ([dim],), None
    return aten.unsqueeze.default, (dim,), None


def through(
    sim: Lockstep, held: Held, op: Any, args: tuple[Any, ...], times: int | None, pick: int
) -> tuple[Held, int]:
    """``op`` on the whole and on the shards; also the bytes that had to move before."""
    given = held.whole if times is None else [held.whole] * times
    made = op(given, *args)
    wholes = list(made) if isinstance(made, list | tuple) else [made]
    value = Value(held.whole.dtype, tuple(held.whole.shape))
    operand = value if times is None else (value,) * times
    frozen = tuple(tuple(a) if isinstance(a, list) else a for a in args)
    call = Call(op, (operand, *frozen), (), tuple(Value(w.dtype, tuple(w.shape)) for w in wholes))
    spec, rule = spec_of(call), find_rule(op)
    assert spec is not None and rule is not None
    wanted = Layout(sim.mesh, place(spec, spec.operands[0], project(spec, spec.operands[0], held.layout)))
    results = infer(spec, (wanted,) * len(spec.operands))
    assert not isinstance(results, str), results
    shards, moved = held.shards, 0
    for step in steps(held.layout, wanted, 8, CostModel()):
        shards = lower_collective(step, shards, sim)
        moved += step.wire_bytes(8)
    local = (shards if times is None else [shards] * times, *args)
    out = rule.localize(Local(sim, call, spec, (wanted,) * len(spec.operands), results, local, {}))
    if isinstance(made, list | tuple):
        out = PerRank(each[pick % len(wholes)] for each in out) if isinstance(out, PerRank) else out[pick % len(wholes)]
    return Held(wholes[pick % len(wholes)], out, results[pick % len(wholes)]), moved


def start(draw: st.DrawFn, mesh: Mesh, shapes: list[tuple[int, ...]]) -> tuple[Lockstep, Held]:
    sim, shape = Lockstep(mesh), draw(st.sampled_from(shapes))
    layout = draw(st.sampled_from(every_layout(mesh, shape, [2] * len(shape), ops=())))
    whole = torch.arange(prod(shape), dtype=torch.float64).reshape(shape)
    return sim, Held(whole, sim.shard(whole, layout), layout)


def assert_shards(sim: Lockstep, held: Held, chain: list[str]) -> None:
    assert tuple(held.whole.shape) == held.layout.shape
    assert torch.equal(sim.assemble(held.shards, held.layout), held.whole), chain


@given(st.data())
def test_views_and_transposes_are_local(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from([Mesh(a=2, b=2), Mesh(a=4, b=2)]))
    sim, held = start(data.draw, mesh, [(8, 8), (16, 4), (4, 4, 4)])
    chain = [str(held.layout)]
    for kind in data.draw(st.lists(st.sampled_from(VIEWS), min_size=1, max_size=6)):
        shards = held.layout.shards
        held, moved = through(sim, held, *op_call(data.draw, kind, held.whole), pick=0)
        chain.append(f"{kind} {held.layout}")
        assert moved == 0 and held.layout.shards == shards, chain
        assert_shards(sim, held, chain)


@given(st.data())
def test_chains_of_views_and_cuts_equal_the_whole(data: st.DataObject) -> None:
    mesh = data.draw(st.sampled_from([Mesh(a=2, b=2), Mesh(a=2, b=3)]))
    sim, held = start(data.draw, mesh, [(12, 6), (6, 4, 6), (24,)])
    chain = [str(held.layout)]
    for kind in data.draw(st.lists(st.sampled_from(VIEWS + CUTS), min_size=1, max_size=6)):
        held, _ = through(sim, held, *op_call(data.draw, kind, held.whole), pick=data.draw(st.integers(0, 3)))
        chain.append(f"{kind} {held.layout}")
        assert_shards(sim, held, chain)
