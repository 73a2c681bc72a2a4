"""Any graph that is dumped and parsed is the same graph."""

from __future__ import annotations

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import fx

from shardc.ir.graph import DTYPE_NAMES, ROLES, Info, Origin, Role, Value, info, set_info
from shardc.ir.layout import Digit, Layout
from shardc.ir.mesh import Mesh
from shardc.ir.parse import parse
from shardc.ir.text import dump

MESH = Mesh(dp=2, tp=2)

names = st.one_of(st.from_regex(r"[a-z]\w{0,4}(\.[\w-]{1,3}){0,2}", fullmatch=True), st.text(min_size=1, max_size=4))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.floats(allow_nan=False),
    st.sampled_from(list(DTYPE_NAMES)),
    st.sampled_from([torch.contiguous_format, torch.strided, torch.device("cpu"), torch.device("cuda:1")]),
    st.text(max_size=6),
)
OPS = [
    getattr(getattr(torch.ops.aten, packet), overload)
    for packet, overload in [("mm", "default"), ("sum", "dim_IntList"), ("add", "Tensor"), ("pad", "default")]
] + [torch.ops.prims.convert_element_type.default, torch.ops._c10d_functional.wait_tensor.default]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    mesh, free = MESH, list(draw(st.permutations(["dp", "tp"])))
    dims = []
    for _ in range(draw(st.integers(0, 3))):
        digits = []
        for _ in range(draw(st.integers(0, 3))):
            bound = draw(st.booleans()) and free
            digits.append(Digit(2, free.pop()) if bound else Digit(draw(st.sampled_from([1, 2, 3, 5]))))
        dims.append(digits)
    op = draw(st.sampled_from(["sum", "max"]))  # one: a sum and a max do not commute
    partial = [(axis, op) for axis in free if draw(st.booleans())]
    return Layout(mesh, dims, partial)


def _nodes(arg: object) -> list[fx.Node]:
    return (
        [arg] if isinstance(arg, fx.Node) else [x for one in arg for x in _nodes(one)] if isinstance(arg, list) else []
    )


@st.composite
def graphs(draw: st.DrawFn) -> fx.GraphModule:
    graph, made = fx.Graph(), []
    unique = iter(draw(st.lists(names, min_size=8, max_size=8, unique=True)))

    def value() -> Value:
        layout = draw(layouts())
        return Value(draw(st.sampled_from(list(DTYPE_NAMES))), layout.shape, layout if draw(st.booleans()) else None)

    def argument(depth: int) -> object:
        kind = draw(st.integers(0, 3 if depth < 2 else 2))
        if kind == 0 and made:
            return draw(st.sampled_from(made))
        return [argument(depth + 1) for _ in range(draw(st.integers(0, 3)))] if kind == 3 else draw(scalars)

    for at in range(draw(st.integers(1, 3))):
        name = next(unique)
        role = draw(
            st.one_of(st.none(), st.builds(Role, st.sampled_from(["param", "input"]), names, st.integers(0, 2)))
        )
        made.append(set_info(graph.placeholder(f"arg{at}"), Info(name, value(), role=role)))
    for _ in range(draw(st.integers(0, 4))):
        op = draw(st.sampled_from(OPS))
        args = tuple(argument(0) for _ in range(draw(st.integers(0, 3))))
        keywords = [*"xyz", *(arg.name for arg in op._schema.arguments[len(args) :])]
        kwargs = {key: argument(0) for key in draw(st.lists(st.sampled_from(keywords), max_size=2, unique=True))}
        node = graph.call_function(op, args, kwargs)
        uses = [
            info(x).value for arg in [*args, *kwargs.values()] for x in _nodes(arg) if isinstance(info(x).value, Value)
        ]
        wants = tuple(draw(layouts()) if one.layout is None else one.layout for one in uses)
        differ = draw(st.booleans()) and any(want != one.layout for want, one in zip(wants, uses, strict=True))
        made_value = (value(), None, value()) if draw(st.booleans()) else value()
        phase = draw(st.sampled_from(["forward", "backward"]))
        record = Info(next(unique), made_value, Origin(phase=phase), needs=wants if differ else None)
        made.append(set_info(node, record))
    picked = draw(st.lists(st.one_of(st.none(), st.sampled_from(made)), max_size=3))
    roles = tuple(Role(draw(st.sampled_from(["output", "grad"])), draw(st.one_of(st.just(""), names))) for _ in picked)
    graph.output(tuple(picked)).meta[ROLES] = roles
    return fx.GraphModule(torch.nn.Module(), graph)


def with_defaults(node: fx.Node, where: dict[fx.Node, fx.Node]) -> dict[str | int, str]:
    """What each argument of a call is, given or by the op's default, as text that tells 1, 1.0 and True apart.

    Nodes are the ones that ``where`` has for them.
    """
    schema = node.target._schema.arguments
    names = [arg.name for arg in schema if not arg.kwarg_only]
    made: dict[str | int, object] = {arg.name: arg.default_value for arg in schema if arg.has_default_value()}
    made.update(
        zip([*names, *range(len(names), len(node.args))], fx.map_arg(node.args, where.__getitem__), strict=False)
    )
    made.update(fx.map_arg(node.kwargs, where.__getitem__))
    return {key: repr(arg) for key, arg in made.items()}


def one_call(op: torch._ops.OpOverload, *args: object, **kwargs: object) -> fx.GraphModule:
    """A graph that calls ``op`` on its input and ``args``."""
    graph = fx.Graph()
    x = set_info(graph.placeholder("x"), Info("x", Value(torch.float32, (4, 4))))
    set_info(graph.call_function(op, (x, *args), kwargs), Info("y", Value(torch.float32, (4,))))
    graph.output(()).meta[ROLES] = ()
    return fx.GraphModule(torch.nn.Module(), graph)


@example(one_call(torch.ops.aten.sum.dim_IntList, [0], False))  # a default given by position is not in the text,
@example(one_call(torch.ops.aten.sum.dim_IntList, [0], keepdim=False))  # nor one given by keyword,
@example(one_call(torch.ops.aten.sum.dim_IntList, [0], 0))  # but what merely equals it is
@example(one_call(torch.ops.aten.elu.default, 1, True))
@example(one_call(torch.ops.aten.scaled_dot_product_attention.default, None, None, None, -0.0))
@given(graphs())
def test_any_graph_round_trips(gm: fx.GraphModule) -> None:
    text = dump(gm, MESH)
    back = parse(text)
    assert dump(back, MESH) == text
    there, here = list(gm.graph.nodes), list(back.graph.nodes)
    assert [info(node) for node in here[:-1]] == [info(node) for node in there[:-1]]
    assert here[-1].meta[ROLES] == there[-1].meta[ROLES]
    where = dict(zip(there, here, strict=True))
    for one, other in zip(there[:-1], here[:-1], strict=True):
        if one.op != "placeholder":
            assert other.target == one.target
            assert with_defaults(other, {node: node for node in here}) == with_defaults(one, where)
