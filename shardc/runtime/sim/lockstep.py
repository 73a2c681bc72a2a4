"""Execution of a local graph on all ranks of a mesh in lockstep, in one process without a process group.

A value is one tensor per rank (`PerRank`). Local ops run rank by rank; a collective reads the tensors of all ranks of
its group.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import Any, TypeVar

import torch
from torch import fx
from torch._ops import OpOverload

from shardc import _compat
from shardc.custom_ops.random import draw_key
from shardc.errors import MeshError
from shardc.ir.comm import MOVES, group_name
from shardc.ir.comm_volume import group_axes
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh, groups_of
from shardc.ir.op_traits import communicates
from shardc.ir.rewriter import last_uses
from shardc.runtime import shards
from shardc.runtime.shards import COLLECTIVES

Groups = tuple[tuple[int, ...], ...]
T = TypeVar("T")
_VARIANT = re.compile("(_coalesced)?(_out|_)?$")  # suffixes of the names of ops that are variants of a collective


class PerRank(list[Any]):
    """A list with one value per rank: a tensor, or a list of tensors for an op with several results."""


class Lockstep:
    """Runs ops eagerly on all ranks of ``mesh``, one op after the other. Implements the `Builder` interface that
    lowers collectives.
    """

    device = torch.device("cpu")

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._key: torch.Tensor | None = None  # of random ops; drawn at first use

    # --- the builder's interface

    def call(self, target: Callable[..., object], *args: Any, **kwargs: Any) -> Any:
        """Calls ``target`` on every rank with that rank's values of `PerRank` arguments; other arguments are shared. If
        ``target`` is a collective, it runs once for each group of ranks.
        """
        # Copies between host and device (`MOVES`) are local ops.
        if isinstance(target, OpOverload) and communicates(target) and target not in MOVES:
            return self._collective(target, args, kwargs)
        return PerRank(target(*_pick(args, rank), **_pick(kwargs, rank)) for rank in range(self.mesh.ranks))

    def coordinate(self, axes: tuple[str, ...]) -> PerRank:
        """Returns the index of each rank along ``axes``, as int64 [1]."""
        return PerRank(torch.tensor([shards.flat_index(self.mesh, axes, rank)]) for rank in range(self.mesh.ranks))

    def key(self) -> PerRank:
        """Returns the key of random ops. In a simulation it is the same on all ranks and in all calls."""
        if self._key is None:
            self._key = draw_key()
        return PerRank([self._key] * self.mesh.ranks)

    def shape(self, x: PerRank) -> tuple[int, ...]:
        """Returns the shape of a rank's tensor in ``x``, which is the same on every rank."""
        return tuple(x[0].shape)

    def once(self, key: object, make: Callable[[], T]) -> T:
        """Returns ``make()``. Other builders cache the result under ``key``; in an eager run values are made each
        time.
        """
        return make()

    def group(self, axes: tuple[str, ...]) -> tuple[int, str]:
        """Returns (number of ranks, name) of a process group along ``axes``."""
        return prod(self.mesh.size(axis) for axis in axes), group_name(axes)

    # --- global values

    def shard(self, x: torch.Tensor, layout: Layout) -> PerRank:
        """Splits global ``x`` into a shard per rank; see `shardc.runtime.shards.shard`."""
        return PerRank(shards.shard(x, layout))

    def scatter_terms(self, x: torch.Tensor, layout: Layout, generator: torch.Generator) -> PerRank:
        """Splits the global tensor ``x`` into a shard per rank. For a pending reduction, ranks get random terms (see
        `shardc.runtime.shards.scatter_terms`).
        """
        return PerRank(shards.scatter_terms(x, layout, generator))

    def assemble(self, values: Sequence[torch.Tensor], layout: Layout) -> torch.Tensor:
        """Joins a shard per rank into the global tensor; see `shardc.runtime.shards.assemble`."""
        return shards.assemble(values, layout)

    # --- graphs

    @torch.no_grad()
    def values(
        self,
        gm: fx.GraphModule,
        feed: Callable[[fx.Node], PerRank],
        call: Callable[[fx.Node, Mapping[fx.Node, Any]], Any] | None = None,
    ) -> Iterator[tuple[fx.Node, Any]]:
        """Yields each node of a graph with its value on every rank, in order; values are freed after their last use.

        The output comes last, with a list: None for outputs that are no nodes.

        Args:
            feed: returns the value of a placeholder.
            call: executes an op, given the values of its operands; by default on the local tensors of each rank.
        """
        values: dict[fx.Node, Any] = {}
        dead = last_uses(gm.graph)  # node -> the values that it is the last to read
        for node in gm.graph.nodes:
            if node.op == "placeholder":
                values[node] = PerRank(feed(node))
            elif node.op == "get_attr":
                values[node] = PerRank([operator.attrgetter(str(node.target))(gm)] * self.mesh.ranks)
            elif node.op == "output":
                yield node, [values.get(out) if isinstance(out, fx.Node) else None for out in node.args[0]]
                return
            else:
                values[node] = (call or self.execute)(node, values)
            yield node, values[node]
            for read in dead.get(node, ()):
                del values[read]

    def execute(self, node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
        """Executes the op of ``node``, given the ``values`` of its operands."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        with _compat.no_autocast():  # the graph contains its casts
            return self.call(node.target, *args, **kwargs)

    def run(self, gm: fx.GraphModule, inputs: Sequence[Sequence[Any]]) -> list[PerRank | None]:
        """Returns the value of each output of a local graph on every rank; None for outputs that are no nodes.

        Args:
            gm: a graph of aten ops, functional collectives and ``operator.getitem``.
            inputs: for each placeholder, its value on every rank.
        """
        feed = iter(inputs)
        results: list[PerRank | None] = []
        for _, value in self.values(gm, lambda node: PerRank(next(feed))):
            results = value  # the output comes last
        return results

    # --- collectives

    def _collective(self, target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs a functional collective on all ranks, group by group, by its reference in `shardc.runtime.shards`."""
        name = target._opname
        if name == "wait_tensor":
            return args[0]  # in lockstep a collective is done when it is called
        # By name: variants of a collective have their arguments in different places. References take the operand, then
        # the other arguments in the order of the schema, without the group and what only concerns real ranks.
        named = dict(zip((a.name for a in target._schema.arguments), args, strict=False), **kwargs)
        axes = group_axes(named.pop("group_name"), self.mesh)
        if axes is None:
            raise MeshError(f"{name} is over no group of the mesh {self.mesh}: {args} {kwargs}")
        groups = groups_of(self.mesh, axes)
        out = named.pop("out", None)
        named.pop("slots", None)  # memory of the results on a real rank
        x, *options = named.values()
        function = COLLECTIVES[_VARIANT.sub("", name)]
        if isinstance(x, PerRank):
            results = _by_group(function, x, options, groups)
        else:  # a coalesced op takes a list of tensors, and returns one on every rank
            per_tensor = [_by_group(function, tensor, options, groups) for tensor in x]
            results = PerRank([tensor[rank] for tensor in per_tensor] for rank in range(self.mesh.ranks))
        # What the op writes to: its operand if it works in place, else ``out=``, if passed.
        into = x if target._schema.is_mutable and out is None else out
        if into is None:
            return results
        assert isinstance(into, PerRank), f"{target} writes several results in place"
        for old, new in zip(into, results, strict=True):
            old.copy_(new)
        return into


def _pick(x: object, rank: int) -> Any:
    """Returns nested arguments ``x`` with each `PerRank` in them replaced by its value on ``rank``."""
    if isinstance(x, PerRank):
        return x[rank]
    if isinstance(x, (tuple, list)):
        return [_pick(item, rank) for item in x]
    if isinstance(x, dict):
        return {key: _pick(item, rank) for key, item in x.items()}
    return x


def _by_group(
    function: Callable[..., Sequence[torch.Tensor]], x: PerRank, options: Sequence[object], groups: Groups
) -> PerRank:
    """Runs ``function``, the reference of a collective, on the values of each group of ranks. Returns the result of
    every rank.

    Args:
        function: takes the list of a group's tensors and further arguments; returns the result of each of its ranks.
        x, options: its arguments; of a `PerRank` it gets the values of the group's ranks.
    """
    out = PerRank([None] * len(x))
    for ranks in groups:
        group_options = [[option[r] for r in ranks] if isinstance(option, PerRank) else option for option in options]
        for rank, result in zip(ranks, function([x[r] for r in ranks], *group_options), strict=True):
            out[rank] = result
    return out
