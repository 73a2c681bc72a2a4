"""Printer of graphs as text, one op per line (grammar: `shardc.ir.grammar`; parser: `shardc.ir.parse`)."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx

from shardc._compat import PyTree, pytree
from shardc.errors import VerifyError
from shardc.ir import grammar, ops
from shardc.ir.comm_volume import tally
from shardc.ir.graph import KEY, ROLES, Info, Role, Value, info, value
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh


def leaf_paths(tree: PyTree) -> list[tuple[Any, ...]]:
    """Return the path to each leaf of the pytree ``tree``, in order: a tuple of keys, positions and attribute names.

    For a class registered without key paths they are its keys (of a mapping) or attributes, if it flattens to the items
    or attributes in order, and positions otherwise.
    """
    try:
        paths, _ = pytree.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
        children = [(_step(path[0]) if path else None, child) for path, child in paths]
    except ValueError:
        values = pytree.tree_leaves(tree, is_leaf=lambda x: x is not tree)
        items = tree.items() if isinstance(tree, Mapping) else getattr(tree, "__dict__", {}).items()
        same = [id(x) for _, x in items] == [id(x) for x in values]
        children = list(items) if same else list(enumerate(values))
    if len(children) == 1 and children[0][1] is tree:
        return [()]
    return [(key, *path) for key, child in children for path in leaf_paths(child)]


def _step(key: object) -> object:
    """Return the key, position or attribute name of one entry of a pytree path."""
    return getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))


NONE_WANTED: Iterator[Layout | None] = iter(())
Line = tuple[str, fx.Node | None]


def dump(gm: fx.GraphModule, mesh: Mesh, *, origins: bool = False) -> str:
    """Return ``gm`` as text, the same to the byte in every process.

    Args:
        gm: a graph whose nodes carry `Info` and whose output node carries its roles.
        mesh: the mesh of its layouts.
        origins: end each op's line with its module, source line and cause.

    Returns:
        The text, which ends in a newline; `shardc.ir.parse.parse` gives the graph back.

    Raises:
        VerifyError: a node has no `Info`, or an op or an argument has no text form.
    """
    comm = [f"  {row}" for row in tally(gm, mesh)]
    body = [text for text, _ in lines(gm, mesh, origins=origins)]
    return "\n".join([*body, *([f"{grammar.COMM}:", *comm] if comm else []), ""])


def lines(gm: fx.GraphModule, mesh: Mesh, *, origins: bool = False) -> list[Line]:
    """Return the lines of `dump`, without its section ``comm``. Each line comes with its node, or None for a
    heading.
    """
    nodes = list(gm.graph.nodes)
    for node in nodes:
        if node.op != "output" and KEY not in node.meta:
            raise VerifyError(f"the node {node.name!r} carries no Info", program=node.format_node())
    placed = any(result.layout is not None for node in nodes[:-1] for result in info(node).tensors)
    unplaced = "?" if placed else ""
    out: list[Line] = [(f"mesh {mesh}".rstrip(), None)]
    if not placed:
        out.append((grammar.NO_LAYOUTS, None))
    out.append((f"{grammar.INPUTS}:", None))
    phase = grammar.INPUTS
    for node in nodes[:-1]:
        record = info(node)
        if node.op == "placeholder":
            text = placeholder_text(record, unplaced)
        else:
            if record.origin.phase != phase:
                phase = record.origin.phase
                out.append((f"{phase}:", None))
            text = op_line(gm, node, unplaced)
        out.append((f"  {text}{origin_text(record) if origins else ''}", node))
    out.append((f"{grammar.OUTPUTS}:", None))
    roles, results = nodes[-1].meta.get(ROLES, ()), nodes[-1].args[0]
    if len(roles) != len(results):
        raise VerifyError(f"{len(results)} outputs have {len(roles)} roles", program=nodes[-1].format_node())
    for role, result in zip(roles, results, strict=True):
        out.append((f"  {role_text(role, '')} = {argument_text(result, iter((role.layout,)))}", nodes[-1]))
    return out


def placeholder_text(record: Info, unplaced: str) -> str:
    """Return a placeholder as text, ``KIND [#INDEX] [ROLE] %name: type``, given its `Info`.

    ``unplaced`` is appended to a tensor without a layout.
    """
    shown = f"{grammar.name_text(record.name)}: {grammar.value_text(record.value, unplaced)}"
    return shown if record.role is None else f"{role_text(record.role, record.name)} {shown}"


def role_text(role: Role, shown_name: str) -> str:
    """Return ``role`` as text, ``KIND [#INDEX] [ROLE]``, where ROLE is its name. An index of 0 is left out, and so is a
    name equal to ``shown_name``.
    """
    index = [f"#{role.index}"] if role.index else []
    name = [grammar.word_text(role.name)] if role.name != shown_name else []
    return " ".join([role.kind, *index, *name])


def op_line(gm: fx.GraphModule, node: fx.Node, unplaced: str = "") -> str:
    """Return the line of an op or a constant: ``%name: type = op(arguments)``. ``unplaced`` is appended to the type of
    a tensor that has no layout.
    """
    record = info(node)
    left = f"{grammar.name_text(record.name)}: {grammar.value_text(record.value, unplaced)}"
    if node.op == "get_attr":
        return f"{left} = {grammar.CONSTANT}({constant_text(gm, str(node.target))})"
    if node.op != "call_function":
        raise VerifyError(f"a {node.op} node has no text form: {node.format_node()}", fix="inline what it calls")
    if node.target is operator.getitem:
        return f"{left} = {argument_text(node.args[0])}[{node.args[1]}]"
    return f"{left} = {grammar.op_text(node.target)}({', '.join(shown_arguments(node))})"


def constant_text(gm: fx.GraphModule, name: str) -> str:
    """Return a tensor attribute of ``gm`` as text: its name and, if it has few elements, its values."""
    content = grammar.small_values(operator.attrgetter(name)(gm))
    return argument_text(name) if content is None else f"{argument_text(name)}, {argument_text(content)}"


def shown_arguments(node: fx.Node) -> list[str]:
    """Return the arguments of an op as texts, in schema order. Arguments that equal the op's default are left out."""
    defaults, positional = grammar.defaults(node.target)
    wants = iter(info(node).needs or ())
    args = list(node.args)
    while args and len(args) <= len(positional) and is_default(defaults, positional[len(args) - 1], args[-1]):
        args.pop()
    shown = [argument_text(arg, wants) for arg in args]
    for key in sorted(node.kwargs, key=grammar.argument_order(node.target)):
        arg = node.kwargs[key]
        if not is_default(defaults, key, arg):
            bare = key == "axis" and node.target in ops.MARKERS.values()
            shown.append(f"{key}={grammar.axes_text(str(arg)) if bare else argument_text(arg, wants)}")
    return shown


def is_default(defaults: Mapping[str, object], name: str, arg: object) -> bool:
    """Return whether ``arg`` equals the default of the argument ``name``. ``defaults`` maps names to defaults."""
    return (
        name in defaults and type(arg) is type(defaults[name]) and repr(arg) == repr(defaults[name])
    )  # -0.0 is not 0.0


def argument_text(arg: fx.node.Argument, wants: Iterator[Layout | None] = NONE_WANTED) -> str:
    """Return one argument of an op as text: a node by its name, a list in brackets, or a constant.

    ``wants`` are the required layouts of the tensors among the arguments, in order.
    """
    if isinstance(arg, fx.Node):
        record = info(arg)
        want = next(wants, None) if isinstance(record.value, Value) else None
        other = want is not None and want != value(arg).layout
        return f"{grammar.name_text(record.name)} as {want}" if other else grammar.name_text(record.name)
    if isinstance(arg, list | tuple):
        return f"[{', '.join(argument_text(element, wants) for element in arg)}]"
    return grammar.constant_text(arg)


def origin_text(record: Info) -> str:
    """Return the comment of an op: ``# module | source | reason [| region N] [| POLICY] [| host ENTRY] [| kept]
    [| regathers NAME]``.

    A dash stands for an empty field.
    """
    origin = record.origin
    parts = [part or "-" for part in (origin.module, origin.source, origin.reason)]
    parts += [f"region {origin.region}"] if origin.region else []
    parts += [origin.policy] if origin.policy else []
    parts += [f"host {origin.host}"] if origin.host else []
    parts += ["kept"] if record.is_kept_part else []
    parts += [f"regathers {record.regathers}"] if record.regathers else []
    return "  # " + " | ".join(parts)
