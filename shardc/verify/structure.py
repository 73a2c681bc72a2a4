"""Checks of a graph's structure: records of nodes, their order, their types, and which ops are legal."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import fx

from shardc.ir import grammar
from shardc.ir.graph import KEY, ROLES, Info, Value, info
from shardc.ir.op_traits import communicates
from shardc.verify.subject import Broken, Check, Subject


def records(subject: Subject) -> Broken:
    """Check that every node has a record (`Info`).

    - Each node except the output has an `Info`.
    - Names are unique in the graph.
    - Placeholders have a role, other nodes have none.
    """
    seen: dict[str, fx.Node] = {}
    for node in subject.nodes:
        if node.op == "output":
            continue
        record = node.meta.get(KEY)
        if not isinstance(record, Info):
            yield node, "it carries no Info"
        elif record.name in seen:
            yield node, "its name is taken by a node above"
        elif (node.op == "placeholder") != (record.role is not None):
            yield node, "it has no role" if node.op == "placeholder" else f"an op has the role {record.role}"
        else:
            seen[record.name] = node


def order(subject: Subject) -> Broken:
    """Check that placeholders come first, operands before their users, and the output last.

    - Placeholders come before ops; the only other nodes are constants and the output.
    - Every operand of a node stands before it.
    - The one output node is the last, and has a role for each value.
    """
    above: set[fx.Node] = set()
    calls = False
    last = subject.nodes[-1]
    for node in subject.nodes:
        if node.op == "placeholder" and calls:
            yield node, "a placeholder stands below an op"
        elif node.op not in ("placeholder", "get_attr", "call_function", "output"):
            yield node, f"a {node.op} node is not legal"
        elif missing := [source for source in node.all_input_nodes if source not in above]:
            yield node, f"it uses {grammar.name_text(info(missing[0]).name)}, which is not above it"
        elif (node.op == "output") != (node is last):
            yield node, "the output must be the last node, and there must be one"
        above.add(node)
        calls |= node.op == "call_function"
    roles = last.meta.get(ROLES, ())
    if len(roles) != len(last.args[0]):
        yield last, f"{len(last.args[0])} outputs have {len(roles)} roles"


def types(subject: Subject) -> Broken:
    """Check that the type recorded for each node agrees with its fake value (``meta["val"]``), left by capture or a
    pass.

    - A record is a tuple exactly if the fake value is one.
    - Dtype and shape of each tensor are those of its fake value.
    """
    for node in subject.nodes[:-1]:
        if "val" not in node.meta:
            continue
        record, val = info(node), node.meta["val"]
        many = isinstance(val, tuple | list)
        if many != isinstance(record.value, tuple):
            yield node, f"its value is {grammar.value_text(record.value, '')}, the op makes {type(val).__name__}"
            continue
        vals = val if many else (val,)
        for fake, value in zip(vals, record.values, strict=True):
            if isinstance(fake, torch.Tensor) and (
                value is None or (value.dtype, value.shape) != (fake.dtype, fake.shape)
            ):
                actual = Value(fake.dtype, tuple(fake.shape))
                yield node, f"its value is {grammar.value_text(value, '')}, the op makes {actual}"


def results(subject: Subject) -> Broken:
    """Check that each ``getitem`` has the type of the result that it selects, and that this result exists."""
    for node in subject.calls:
        if node.target is operator.getitem:
            source, index = node.args
            source_value = info(source).value
            if not isinstance(source_value, tuple) or not isinstance(index, int) or not 0 <= index < len(source_value):
                yield node, f"{grammar.name_text(info(source).name)} has no result {index}"
            elif source_value[index] != info(node).value:
                yield node, f"result {index} is {grammar.value_text(source_value[index], '')}"


def legal(*allowed: Callable[..., object], collectives: bool = False) -> Check:
    """Return a check that all ops of a stage are legal: ``getitem``, the ops ``allowed``, and overloads of
    ``torch.ops``.

    Collectives of torch are legal only if ``collectives`` is true, as after localize.
    """

    def legal(subject: Subject) -> Broken:
        """Check that its ops are legal."""
        for node in subject.calls:
            if node.target is operator.getitem or node.target in allowed:
                continue
            target = node.target
            if not grammar.is_torch_op(target):
                yield node, f"{getattr(target, '__name__', target)} is not legal here"
            elif not collectives and communicates(target):
                yield node, "a collective of torch is not legal before localize"

    return legal
