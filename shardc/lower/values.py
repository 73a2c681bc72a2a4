"""Computes the fake tensors of a graph that was parsed from text, which gives them at placeholders only."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from shardc.ir.segments import type_of


def give_values(gm: fx.GraphModule) -> None:
    """Set a fake tensor on each node of a local graph that has none; equal calls share one."""
    kinds: dict[Any, int] = {}
    seen: dict[int, str] = {}  # what is shared is looked at once
    values: dict[Any, Any] = {}
    examples = [node.meta.get("val") for node in gm.graph.find_nodes(op="placeholder")]
    mode = next((x.fake_mode for x in examples if isinstance(x, FakeTensor)), None) or FakeTensorMode()

    def kind(node: fx.Node) -> str:
        value = node.meta["val"]
        if id(value) not in seen:
            seen[id(value)] = f"%{kinds.setdefault(type_of(value), len(kinds))}"
        return seen[id(value)]

    for node in gm.graph.nodes:
        if "val" in node.meta or node.op == "output":
            continue
        if node.op == "get_attr":
            node.meta["val"] = mode.from_tensor(attrgetter(str(node.target))(gm), static_shapes=True)
            continue
        key = node.target, repr(fx.node.map_arg((node.args, node.kwargs), kind))
        if key not in values:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda x: x.meta["val"])
            with mode:
                values[key] = node.target(*args, **kwargs)
        node.meta["val"] = values[key]
