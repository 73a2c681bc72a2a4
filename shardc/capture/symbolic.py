"""Capture at symbolic sizes: one trace of a model, from which the graph at any sizes is read off.

Dynamo and AOTAutograd trace with symbols in the place of some sizes of the inputs, and note every condition on them
that the model's code, or a decomposition, looked at. At sizes that meet these conditions the graph is the trace
with numbers in the place of symbols.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import SymBool, SymFloat, SymInt, Tensor, fx, nn
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils import _pytree as pytree

from shardc.capture.dtypes import Dtypes
from shardc.capture.tags import Tag
from shardc.capture.trace import Captured, Loss, Traced, trace
from shardc.errors import CaptureError

Sizes = Mapping[str, int]
_SYMBOLIC = (SymInt, SymFloat, SymBool)


@dataclass(frozen=True)
class Condition:
    """Something that must hold of the sizes.

    Args:
        text: in terms of the names of the sizes: ``"t <= 128"``.
        source: the line that asked, as far as it is known.
    """

    text: str
    source: str
    relation: sympy.Basic


@dataclass(frozen=True)
class SymbolicCapture:
    """A model traced at symbolic sizes.

    Args:
        traced: the joint graph, with nodes that compute sizes.
        symbols: the symbol of each name; several names that must be equal have the same one.
        conditions: what must hold of the sizes.
    """

    traced: Traced
    symbols: dict[str, sympy.Symbol]
    conditions: tuple[Condition, ...]

    def broken(self, sizes: Sizes) -> Condition | None:
        """The first condition that ``sizes`` do not meet, or None; names of one symbol must be of one size."""
        values = {symbol: sympy.Integer(sizes[name]) for name, symbol in self.symbols.items()}
        for name, symbol in self.symbols.items():
            if values[symbol] != sizes[name]:
                first = next(other for other, same in self.symbols.items() if same == symbol)
                return Condition(f"{name} == {first}", "", sympy.Eq(sympy.Symbol(name), symbol))
        return next((c for c in self.conditions if c.relation.xreplace(values) != sympy.true), None)

    def at(self, sizes: Sizes) -> Captured:
        """The model captured at ``sizes``, which meet the conditions."""
        traced = self.traced
        values = {symbol: sympy.Integer(sizes[name]) for name, symbol in self.symbols.items()}
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        graph = fx.Graph()
        env: dict[fx.Node, Any] = {}
        for node in traced.graph.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, _SYMBOLIC) and node.op == "call_function":
                env[node] = _number(value, values)
                continue
            copy = env[node] = graph.node_copy(node, lambda n: env[n])
            copy.args, copy.kwargs = _plain(copy.args), _plain(copy.kwargs)
            if value is not None:
                with mode:
                    copy.meta["val"] = pytree.tree_map(lambda x: _at(x, values), value)
        return replace(traced, graph=fx.GraphModule(traced.graph, graph), fake_mode=mode).annotated()


def capture_symbolic(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    dynamic: Mapping[str, Mapping[int, str]],
    *,
    device: torch.device,
    loss: Loss | None = None,
    tags: Sequence[Tag] = (),
    dtypes: Dtypes,
) -> SymbolicCapture:
    """As `shardc.capture.capture`, with symbols in the place of some sizes.

    Args:
        dynamic: input -> dim -> the name of its size. Where code looks at a size, the example's decides. Names of one
            size in the example are taken for one.

    Raises:
        CaptureError: as `capture`'s; code that fixes a size that should be free, with its line.
    """
    env = ShapeEnv()
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)
    symints: dict[str, SymInt] = {}
    hints: dict[int, str] = {}

    def size(name: str, value: int) -> SymInt:
        first = hints.setdefault(value, name)
        if first not in symints:
            source = ConstantSource(name)
            symbol = env.create_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
            symints[first] = env.create_symintnode(symbol, hint=value, source=source)
        symints[name] = symints[first]
        return symints[name]

    def fake(name: str, x: Tensor) -> Tensor:
        named = dynamic.get(name, {})
        shape: Any = [size(named[dim], n) if dim in named else n for dim, n in enumerate(x.shape)]
        return torch.empty(shape, dtype=x.dtype, device=device).requires_grad_(x.requires_grad)

    traced = trace(model, args, kwargs, device, loss, tags, dtypes, mode, fake)
    guards = [*_guards_of(traced.dynamo.shape_env, hints, symints), *_guards_of(env, hints, symints)]
    symbols: dict[str, sympy.Symbol] = {}
    for name, symint in symints.items():
        expr = env.replace(symint.node._expr)
        if not isinstance(expr, sympy.Symbol):
            raise _fixed(model, guards, name, symint.node._expr, expr)
        symbols[name] = expr
    return SymbolicCapture(traced, symbols, tuple(_conditions(env, symbols, guards)))


def _guards_of(env: Any, hints: Mapping[int, str], symints: Mapping[str, SymInt]) -> list[tuple[sympy.Basic, str]]:
    """What was looked at in ``env``, in the symbols of ``made``, each with its line.

    Dynamo has symbols of its own for the sizes of inputs; the numbers that they stand for tell which is which.
    """
    backed = getattr(env, "backed_var_to_val", None) or env.var_to_val
    ours = {symbol: symints[hints[int(value)]].node._expr for symbol, value in backed.items() if int(value) in hints}
    return [(guard.expr.xreplace(ours), str(guard.sloc.maybe_user_loc or "")) for guard in env.guards]


def _conditions(
    env: ShapeEnv, symbols: Mapping[str, sympy.Symbol], guards: Sequence[tuple[sympy.Basic, str]]
) -> list[Condition]:
    names = {symbol: sympy.Symbol(name) for name, symbol in reversed(list(symbols.items()))}
    relations = list(guards)
    for symbol in names:
        bounds = env.var_to_range[symbol]
        # Torch takes 0 and 1 for sizes of their own: what has one element is broadcast.
        relations.append((sympy.Ge(symbol, max(int(bounds.lower), 2)), ""))
    out: dict[str, Condition] = {}
    for relation, source in relations:
        relation = relation.xreplace({free: env.replace(free) for free in relation.free_symbols})
        if relation != sympy.true:
            text = str(relation.xreplace(names))
            out.setdefault(text, Condition(text, source, relation))
    return list(out.values())


def _fixed(
    model: nn.Module, guards: Sequence[tuple[sympy.Basic, str]], name: str, symbol: sympy.Basic, value: sympy.Basic
) -> CaptureError:
    source = next((line for relation, line in guards if symbol in relation.free_symbols and line), None)
    return CaptureError(
        f"{type(model).__name__} works at one size of {name!r} only: it must be {value}",
        source=source,
        fix=f"leave {name!r} out of dynamic, or write this line without looking at the size",
    )


def _number(x: Any, values: Mapping[sympy.Symbol, sympy.Integer]) -> Any:
    kind = int if isinstance(x, SymInt) else float if isinstance(x, SymFloat) else bool
    return kind(x.node.shape_env.replace(x.node._expr).xreplace(values)) if isinstance(x, _SYMBOLIC) else x


def _at(x: Any, values: Mapping[sympy.Symbol, sympy.Integer]) -> Any:
    """A fake value of the trace at numbers; made in the current fake mode."""
    if not isinstance(x, Tensor):
        return _number(x, values) if isinstance(x, _SYMBOLIC) else x
    shape = [_number(n, values) if isinstance(n, SymInt) else n for n in x.shape]
    stride = [_number(n, values) if isinstance(n, SymInt) else n for n in x.stride()]
    return torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device).requires_grad_(x.requires_grad)


def _plain(arguments: Any) -> Any:
    """Arguments without symbols: none may be left that no node computes."""
    return fx.node.map_aggregate(arguments, _checked)


def _checked(x: Any) -> Any:
    assert not isinstance(x, _SYMBOLIC), f"{x} stands in the trace without a node"
    return x
