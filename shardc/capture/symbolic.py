"""Captures a model at symbolic sizes: a single trace, from which the graph at any concrete sizes is derived.

Dynamo and AOTAutograd trace with symbols for some sizes of the inputs, and record a guard for every condition on them
that the model's code or a decomposition evaluates. At sizes that meet the guards, the graph is the trace with numbers
substituted for symbols.
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

from shardc._compat import PyTree
from shardc.capture.dtypes import Dtypes
from shardc.capture.markers import Tag
from shardc.capture.trace import Captured, Loss, Traced, trace
from shardc.errors import CaptureError

Sizes = Mapping[str, int]
_SYMBOLIC = (SymInt, SymFloat, SymBool)


@dataclass(frozen=True)
class Condition:
    """A condition on dynamic sizes that code of the model branches on.

    Args:
        text: the condition, in the names of the sizes: ``"t <= 128"``.
        source: ``file:line`` that evaluated it, or "".
        relation: the condition, in the symbols of the trace.
    """

    text: str
    source: str
    relation: sympy.Basic


@dataclass(frozen=True)
class SymbolicCapture:
    """A model traced at symbolic sizes, and the conditions on the sizes under which the trace is valid.

    Args:
        traced: the joint graph at symbolic sizes, with nodes that compute sizes.
        symbols: name of a size -> its symbol; sizes that must be equal share one.
        conditions: the conditions on the sizes.
    """

    traced: Traced
    symbols: dict[str, sympy.Symbol]
    conditions: tuple[Condition, ...]

    def broken(self, sizes: Sizes) -> Condition | None:
        """Return the first condition of the capture that ``sizes`` (name -> size) do not meet; None if they meet all.
        Names that share a symbol must have equal sizes.
        """
        values = {symbol: sympy.Integer(sizes[name]) for name, symbol in self.symbols.items()}
        # Of names that share a symbol, the last has set its value.
        for name, symbol in self.symbols.items():
            if values[symbol] != sizes[name]:
                first = next(other for other, same in self.symbols.items() if same == symbol)
                return Condition(f"{name} == {first}", "", sympy.Eq(sympy.Symbol(name), symbol))
        return next((c for c in self.conditions if c.relation.xreplace(values) != sympy.true), None)

    def at(self, sizes: Sizes) -> Captured:
        """Return the model as captured at ``sizes`` (name -> size), which must meet the conditions."""
        traced = self.traced
        values = {symbol: sympy.Integer(sizes[name]) for name, symbol in self.symbols.items()}
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        graph = fx.Graph()
        env: dict[fx.Node, fx.node.Argument] = {}
        for node in traced.graph.graph.nodes:
            value = node.meta.get("val")
            # Nodes that compute sizes become numbers.
            if isinstance(value, _SYMBOLIC) and node.op == "call_function":
                env[node] = _number(value, values)
                continue
            copy = env[node] = graph.node_copy(node, lambda n: env[n])  # with numbers as arguments, too
            arguments = pytree.tree_leaves((copy.args, copy.kwargs))
            assert not any(isinstance(x, _SYMBOLIC) for x in arguments), f"{node} takes a symbol that has no node"
            if value is not None:
                with mode:
                    copy.meta["val"] = pytree.tree_map(lambda x: _value_at(x, values), value)
        return replace(traced, graph=fx.GraphModule(traced.graph, graph), fake_mode=mode).annotated()


def capture_symbolic(
    model: nn.Module,
    args: Sequence[PyTree],
    kwargs: dict[str, PyTree],
    dynamic: Mapping[str, Mapping[int, str]],
    *,
    device: torch.device,
    loss: Loss | None = None,
    tags: Sequence[Tag] = (),
    dtypes: Dtypes,
) -> SymbolicCapture:
    """Captures forward and backward as one graph, as `shardc.capture.capture` does, but with symbols for the sizes
    named in ``dynamic``. Returns a `SymbolicCapture`, which gives the graph at any sizes.

    Args:
        dynamic: input -> dim -> the name of its size. If code branches on a size, the example's decides. Names whose
            sizes are equal in the example share a symbol.

    Raises:
        CaptureError: as `capture`'s; code that fixes a size that should be free, with its line.
    """
    env = ShapeEnv()
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)
    symints: dict[str, SymInt] = {}  # by the name of the size
    hints: dict[int, str] = {}  # size in the example -> the first name that has it

    def size(name: str, value: int) -> SymInt:
        # The first name with this size in the example; others share its symbol.
        first = hints.setdefault(value, name)
        if first not in symints:
            source = ConstantSource(name)
            symbol = env.create_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
            symints[first] = env.create_symintnode(symbol, hint=value, source=source)
        symints[name] = symints[first]
        return symints[name]

    def fake(name: str, x: Tensor) -> Tensor:
        named = dynamic.get(name, {})
        shape = [size(named[dim], n) if dim in named else n for dim, n in enumerate(x.shape)]
        return torch.empty(shape, dtype=x.dtype, device=device).requires_grad_(x.requires_grad)

    traced = trace(model, args, kwargs, device, loss, tags, dtypes, mode, fake)
    guards = [*_guards_of(traced.dynamo.shape_env, hints, symints), *_guards_of(env, hints, symints)]
    symbols: dict[str, sympy.Symbol] = {}
    for name, symint in symints.items():
        expr = env.replace(symint.node._expr)  # what guards have made of the symbol: a number if they fix it
        if not isinstance(expr, sympy.Symbol):
            raise _fixed_size_error(model, guards, name, symint.node._expr, expr)
        symbols[name] = expr
    return SymbolicCapture(traced, symbols, tuple(_conditions(env, symbols, guards)))


def _guards_of(env: ShapeEnv, hints: Mapping[int, str], symints: Mapping[str, SymInt]) -> list[tuple[sympy.Basic, str]]:
    """Return (relation between symbols, ``file:line`` that needs it or "") of each guard on sizes that ``env``
    recorded. The symbols are those of ``symints``.

    Dynamo has its own symbols for the sizes of inputs; they are matched by their example sizes.
    """
    backed = getattr(env, "backed_var_to_val", None) or env.var_to_val  # symbol -> example size
    ours = {symbol: symints[hints[int(value)]].node._expr for symbol, value in backed.items() if int(value) in hints}
    return [(guard.expr.xreplace(ours), str(guard.sloc.maybe_user_loc or "")) for guard in env.guards]


def _conditions(
    env: ShapeEnv, symbols: Mapping[str, sympy.Symbol], guards: Sequence[tuple[sympy.Basic, str]]
) -> list[Condition]:
    """Convert guards on sizes (relation, line) and the bounds of the ``symbols`` to conditions in the names of the
    sizes. Those that always hold are left out.
    """
    names = {symbol: sympy.Symbol(name) for name, symbol in reversed(list(symbols.items()))}
    relations = list(guards)
    for symbol in names:
        bounds = env.var_to_range[symbol]
        # torch specialises sizes 0 and 1: a dim of size 1 broadcasts.
        relations.append((sympy.Ge(symbol, max(int(bounds.lower), 2)), ""))
    out: dict[str, Condition] = {}
    for relation, source in relations:
        # In symbols that remain: some were replaced by equal ones during the trace.
        relation = relation.xreplace({free: env.replace(free) for free in relation.free_symbols})
        if relation != sympy.true:
            text = str(relation.xreplace(names))
            out.setdefault(text, Condition(text, source, relation))
    return list(out.values())


def _fixed_size_error(
    model: nn.Module, guards: Sequence[tuple[sympy.Basic, str]], name: str, symbol: sympy.Basic, value: sympy.Basic
) -> CaptureError:
    """Return the error for a size ``name`` that should be free but that the model fixes: its ``symbol`` must be
    ``value``. The line comes from ``guards``.
    """
    source = next((line for relation, line in guards if symbol in relation.free_symbols and line), None)
    return CaptureError(
        f"{type(model).__name__} works at one size of {name!r} only: it must be {value}",
        source=source,
        fix=f"leave {name!r} out of dynamic, or write this line without looking at the size",
    )


def _number(x: Any, values: Mapping[sympy.Symbol, sympy.Integer]) -> Any:
    """Return ``x``, a number in the trace, with the ``values`` of symbols substituted. Return any other value as it
    is.
    """
    if not isinstance(x, _SYMBOLIC):
        return x
    kind = int if isinstance(x, SymInt) else float if isinstance(x, SymFloat) else bool
    return kind(x.node.shape_env.replace(x.node._expr).xreplace(values))


def _value_at(x: object, values: Mapping[sympy.Symbol, sympy.Integer]) -> object:
    """Return ``x``, a fake value of the trace, with the ``values`` of symbols substituted in its shape. Tensors are
    made in the active fake mode.
    """
    if not isinstance(x, Tensor):
        return _number(x, values)
    # Strides by the symbols, too: a value need not be contiguous.
    shape, stride = ([_number(n, values) for n in sizes] for sizes in (x.shape, x.stride()))
    return torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device).requires_grad_(x.requires_grad)
