"""The notation of a rule: ``"i k, k j -> i j"``.

Operands are separated by commas, dims by spaces. A name is a factor, ``1`` a dim of size 1, ``(a b)`` a dim
made of two factors major to minor, ``...`` the leading dims, aligned at the right and broadcast as in
numpy. What a factor is when it is split stands beside the rule: a reduce op, or ``whole``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import prod

from shardc.errors import RuleError
from shardc.ir.layout import REDUCE_OPS
from shardc.rules.rule import Call, Local, Localize, Rule
from shardc.rules.spec import Dims, Spec

WHOLE = "whole"


def rule(
    op: str,
    text: str,
    *,
    linear: str = "",
    moves: bool = False,
    localize: Localize = Local.same,
    **factors: str,
) -> Rule:
    """A rule in notation.

    Args:
        op: the op, without ``aten.`` where it is aten's, ``mylib::scale`` otherwise.
        text: the notation.
        linear: operand sets that carry a pending sum, by position: ``"0|1"`` either, ``"0&1"`` both together.
        moves: the op only moves operand 0.
        localize: how it is spelled on local tensors; without it a factor that only results have is whole.
        factors: ``k="sum"``, ``d="whole"``.

    Raises:
        RuleError: a text that cannot be read, a factor that is not in it; and at a call whose shapes do not fit.
    """
    name = op.replace("::", ".") if "::" in op else f"aten.{op.removeprefix('aten.')}"
    operands, results = parse(text)
    if not all(i.isdigit() for group in linear.split("|") if group for i in group.split("&")):
        raise RuleError(f"linear is {linear!r}, not positions of operands", fix='write "0|1" or "0&1"')
    sets = tuple(frozenset(int(i) for i in group.split("&")) for group in linear.split("|") if group)
    _check(name, text, operands + results, factors)
    kinds = dict(factors)
    if localize is Local.same:
        kinds |= dict.fromkeys(_names(results) - _names(operands), WHOLE)

    def spec(call: Call) -> Spec:
        return bind(call, operands, results, kinds, sets, moves)

    said = "; ".join(f"{f}: {kind}" for f, kind in factors.items())
    return Rule(name, spec, f"{text}    {said}".rstrip(), localize)


def _check(op: str, text: str, sides: tuple[Dims, ...], factors: Mapping[str, str]) -> None:
    for factor, kind in factors.items():
        if factor not in _names(sides):
            raise RuleError(f"the rule {text!r} of {op} has no factor {factor!r}", fix="name a factor of the text")
        if kind not in (*REDUCE_OPS, WHOLE):
            raise RuleError(f"the rule of {op} says {factor}: {kind!r}", fix=f"say one of {(*REDUCE_OPS, WHOLE)}")


def _names(sides: tuple[Dims, ...]) -> set[str]:
    return {name for dims in sides for names in dims for name in names} - {"..."}


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
) -> Spec:
    """The `Spec` of ``call`` under parsed notation; sizes are read off the shapes."""
    shapes = [v.shape for v in call.operands]
    made = [v.shape for v in call.results if v is not None]
    for kind, said, there in (("operands", operands, shapes), ("results", results, made)):
        if len(said) != len(there):
            raise RuleError(
                f"the rule of {call.name} is for {len(said)} {kind}, the call has {len(there)}",
                fix="separate the operands, and the results, by commas, one for each tensor",
            )
    sizes: dict[str, int] = {}
    left = tuple(_expand(call, dims, shape, sizes) for dims, shape in zip(operands, shapes, strict=True))
    right = tuple(_expand(call, dims, shape, sizes) for dims, shape in zip(results, made, strict=True))
    _complete(sizes, left + right, [*shapes, *made])
    sizes = {name: size for name, size in sizes.items() if size != 1}
    left, right = (tuple(_only_sized(side, sizes) for side in sides) for sides in (left, right))
    reduce = tuple((f, op) for f, op in factors.items() if op != WHOLE and f in sizes)
    whole = frozenset(f for f, op in factors.items() if op == WHOLE)
    spec = Spec(left, right, tuple(sorted(sizes.items())), reduce, whole, linear, moves)
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
        raise RuleError(
            f"the rule of {call.name} has {len(dims)} dims ({_shown(dims)}) for a tensor of shape {list(shape)}",
            fix="name a factor for every dim, or write ... for any number of leading dims",
        )
    out = []
    for names, size in zip(dims, shape, strict=True):
        # A dim of size 1 broadcasts to what its factor is elsewhere.
        if len(names) == 1 and sizes.get(names[0], 1) == 1:
            sizes[names[0]] = size
        out.append(names if size != 1 else ())
    return tuple(out)


def _shown(dims: Dims) -> str:
    return " ".join(names[0] if len(names) == 1 else f"({' '.join(names)})" if names else "1" for names in dims)


def _complete(sizes: dict[str, int], sides: Iterable[Dims], shapes: Iterable[Iterable[int]]) -> None:
    """The sizes of factors that stand in no dim of their own: what the others leave of a dim."""
    for dims, shape in zip(sides, shapes, strict=True):
        for names, size in zip(dims, shape, strict=True):
            unknown = [name for name in names if name not in sizes]
            known = prod(sizes[name] for name in names if name in sizes)
            if len(unknown) == 1 and known and size % known == 0:
                sizes[unknown[0]] = size // known


def _only_sized(dims: Dims, sizes: Mapping[str, int]) -> Dims:
    return tuple(tuple(name for name in names if name in sizes) for names in dims)
