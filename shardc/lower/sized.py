"""Compiles a local graph once for many sizes, within the guards that Inductor adds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import sympy
from torch import Tensor
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from shardc.ir.executable import Half
from shardc.ir.sized import SIZED, At
from shardc.lower.inductor import lowered_for


def lowered_at_any_sizes(half: Half) -> tuple[Callable[[list[Tensor]], Sequence[Any]], str] | None:
    """Return a callable for ``half`` at any sizes, and its source; None if its graph has no symbolic form."""
    at: At | None = half.gm.meta.get(SIZED)
    if at is None:
        return None
    units = at.units
    compiled = next((one for holds, one in at.graph.compiled if holds(units)), None)
    if compiled is None:
        env = ShapeEnv()
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=env)
        # Torch takes 0 and 1 for sizes of their own: what has one element is broadcast.
        symbols = {name: _symbol(env, name, unit) if unit > 1 else unit for name, unit in units.items()}
        with mode:
            inputs = at.graph.inputs(symbols)
        compiled = lowered_for(at.graph.symbolic(half.gm), inputs, half.kind)
        at.graph.compiled.append((partial(_holds, env, symbols), compiled))
    code, source = compiled
    sizes = list(units.values())

    def run(inputs: list[Tensor]) -> Sequence[Any]:
        both: list[Any] = [*sizes, *inputs]
        inputs.clear()
        return code(both)

    return run, source


def _symbol(env: ShapeEnv, name: str, value: int) -> Any:
    source = ConstantSource(name)
    symbol = env.create_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    return env.create_symintnode(symbol, hint=value, source=source)


def _holds(env: ShapeEnv, symbols: Mapping[str, Any], units: Mapping[str, int]) -> bool:
    """Return whether the guards of a compilation hold for ``units``."""
    fixed = {name: x for name, x in symbols.items() if isinstance(x, int)}
    if any(units[name] != x if name in fixed else units[name] < 2 for name, x in symbols.items()):
        return False
    values = {x.node._expr: sympy.Integer(units[name]) for name, x in symbols.items() if name not in fixed}
    return all(guard.expr.xreplace(values) == sympy.true for guard in env.guards)
