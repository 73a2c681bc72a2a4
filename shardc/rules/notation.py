"""The notation of a rule: ``"i k, k j -> i j"``.

Operands are separated by commas, dims by spaces. A name is a factor, ``1`` a dim of size 1, ``(a b)`` a dim
made of two factors major to minor, ``...`` the leading dims, aligned at the right and broadcast as in
numpy. What a factor is when it is split stands beside the rule: a reduce op, or ``whole``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from shardc.errors import RuleError
from shardc.rules.rule import Call, Local, Localize, Rule
from shardc.rules.spec import Dims, Spec


def rule(
    op: str,
    text: str,
    *,
    linear: str = "",
    moves: bool = False,
    localize: Localize = Local.same,
    flops: int = 1,
    **factors: str,
) -> Rule:
    """A rule in notation.

    Args:
        op: the op, without ``aten.`` where it is aten's, ``mylib::scale`` otherwise.
        text: the notation.
        linear: operand sets that carry a pending sum, by position: ``"0|1"`` either, ``"0&1"`` both together.
        moves: the op only moves operand 0.
        localize: how it is spelled on local tensors.
        flops: floating-point operations per point of the loop nest.
        factors: ``k="sum"``, ``d="whole"``.

    Raises:
        RuleError: at a call whose shapes the notation does not fit.
    """
    name = op.replace("::", ".") if "::" in op else f"aten.{op.removeprefix('aten.')}"
    operands, results = parse(text)
    sets = tuple(frozenset(int(i) for i in group.split("&")) for group in linear.split("|") if group)

    def spec(call: Call) -> Spec:
        return bind(call, operands, results, factors, sets, moves, flops)

    said = "; ".join(f"{f}: {kind}" for f, kind in factors.items())
    return Rule(name, spec, f"{text}    {said}".rstrip(), localize)


def parse(text: str) -> tuple[tuple[Dims, ...], tuple[Dims, ...]]:
    """The operands and results of a notation; raises RuleError where it cannot be read."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f"rule {text!r} has no '->'", fix='write it as "i k, k j -> i j"')
    return tuple(_side(part) for part in left.split(",")), tuple(_side(part) for part in right.split(","))


def _side(text: str) -> Dims:
    dims: list[tuple[str, ...]] = []
    for group, one in re.findall(r"\(([^()]*)\)|([^\s()]+)", text.strip()):
        names = group.split() if group else [one]
        if not all(re.fullmatch(r"[A-Za-z_]\w*|1|\.\.\.", name) for name in names):
            raise RuleError(f"{text.strip()!r} is not a list of factors")
        dims.append(() if names == ["1"] else tuple(names))
    return tuple(dims)


def bind(
    call: Call,
    operands: tuple[Dims, ...],
    results: tuple[Dims, ...],
    factors: Mapping[str, str],
    linear: tuple[frozenset[int], ...],
    moves: bool,
    flops: int,
) -> Spec:
    """The `Spec` of ``call`` under parsed notation; sizes are read off the shapes."""
    shapes = [v.shape for v in call.operands]
    made = [v.shape for v in call.results if v is not None]
    if len(shapes) != len(operands):
        raise RuleError(f"the rule of {call.name} is for {len(operands)} tensors, the call has {len(shapes)}")
    sizes: dict[str, int] = {}
    left = tuple(_expand(call, dims, shape, sizes) for dims, shape in zip(operands, shapes, strict=True))
    right = tuple(_expand(call, dims, shape, sizes) for dims, shape in zip(results, made, strict=True))
    left, right = (tuple(_only_sized(side, sizes) for side in sides) for sides in (left, right))
    reduce = tuple((f, op) for f, op in factors.items() if op != "whole" and f in sizes)
    whole = frozenset(f for f, op in factors.items() if op == "whole")
    spec = Spec(left, right, tuple(sorted(sizes.items())), reduce, whole, linear, moves, flops)
    spec.check(shapes, made, call.name)
    return spec


def _expand(call: Call, dims: Dims, shape: Iterable[int], sizes: dict[str, int]) -> Dims:
    """``dims`` with ``...`` written out as ``.1 .2`` counted from the right, and sizes noted."""
    shape = tuple(shape)
    if ("...",) in dims:
        at = dims.index(("...",))
        rest = len(shape) - (len(dims) - 1)
        dims = (*dims[:at], *((f".{rest - i}",) for i in range(rest)), *dims[at + 1 :])
    if len(dims) != len(shape):
        raise RuleError(f"the rule of {call.name} is for {len(dims)} dims, the tensor has shape {list(shape)}")
    out = []
    for names, size in zip(dims, shape, strict=True):
        if size == 1:
            out.append(())
            continue
        if len(names) == 1:
            sizes.setdefault(names[0], size)
        out.append(names)
    return tuple(out)


def _only_sized(dims: Dims, sizes: Mapping[str, int]) -> Dims:
    return tuple(tuple(f for f in names if f in sizes) for names in dims)
