"""The notation of a rule, as in einops: ``"i k, k j -> i j"``.

Operands are separated by commas, dims by spaces. A name is a factor, ``1`` a dim of size 1, ``(a b)`` a dim
of two factors, major to minor, ``...`` any number of leading dims, aligned at the right and broadcast as in
NumPy. The kind of a factor is given beside the text: a reduce op, or ``whole`` if it must not be split.

    rule("mm", "i k, k j -> i j", k="sum", linear="0|1")  # k split: the result is a partial sum over k's axis
    rule("view_as_real", "... -> ... parts", parts="whole", linear="0")
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
    """Return the rule of an op from its notation.

    Args:
        op: the op, without ``aten.`` where it is aten's, ``mylib::scale`` otherwise.
        text: the notation.
        linear: sets of operands, by position, that may be partial sums: ``"0|1"`` either, ``"0&1"`` both together.
        moves: the op only moves the elements of operand 0.
        localize: emits the op on local tensors; without it a factor that only results have is whole.
        factors: kinds of factors: ``k="sum"``, ``d="whole"``.

    Raises:
        RuleError: the text cannot be read, or a factor is not in it; later, a call's shapes do not fit.
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

    kinds_text = "; ".join(f"{f}: {kind}" for f, kind in factors.items())
    return Rule(name, spec, f"{text}    {kinds_text}".rstrip(), localize)


def _check(op: str, text: str, sides: tuple[Dims, ...], factors: Mapping[str, str]) -> None:
    for factor, kind in factors.items():
        if factor not in _names(sides):
            raise RuleError(f"the rule {text!r} of {op} has no factor {factor!r}", fix="name a factor of the text")
        if kind not in (*REDUCE_OPS, WHOLE):
            raise RuleError(f"the rule of {op} says {factor}: {kind!r}", fix=f"say one of {(*REDUCE_OPS, WHOLE)}")


def _names(sides: tuple[Dims, ...]) -> set[str]:
    return {name for dims in sides for names in dims for name in names} - {"..."}


def parse(text: str) -> tuple[tuple[Dims, ...], tuple[Dims, ...]]:
    """Return the factors of the operands and of the results; raises RuleError if the text cannot be read."""
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f"rule {text!r} has no '->'", fix='write it as "i k, k j -> i j"')
    return tuple(_side(part) for part in left.split(",")), tuple(_side(part) for part in right.split(","))


def _side(text: str) -> Dims:
    dims: list[tuple[str, ...]] = []
    for group, single in re.findall(r"\(([^()]*)\)|([^\s()]+)", text.strip()):
        names = group.split() if group else [single]
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
    """Return the `Spec` of ``call`` by parsed notation; sizes of factors are read from the shapes."""
    shapes = [v.shape for v in call.operands]
    result_shapes = [v.shape for v in call.results if v is not None]
    for kind, sides, tensors in (("operands", operands, shapes), ("results", results, result_shapes)):
        if len(sides) != len(tensors):
            raise RuleError(
                f"the rule of {call.name} is for {len(sides)} {kind}, the call has {len(tensors)}",
                fix="separate the operands, and the results, by commas, one for each tensor",
            )
    sizes: dict[str, int] = {}
    left = tuple(_expand(call, dims, shape, sizes) for dims, shape in zip(operands, shapes, strict=True))
    right = tuple(_expand(call, dims, shape, sizes) for dims, shape in zip(results, result_shapes, strict=True))
    _complete(sizes, left + right, [*shapes, *result_shapes])
    sizes = {name: size for name, size in sizes.items() if size != 1}
    left, right = (tuple(_only_sized(dims, sizes) for dims in side) for side in (left, right))
    reduce = tuple((f, op) for f, op in factors.items() if op != WHOLE and f in sizes)
    whole = frozenset(f for f, op in factors.items() if op == WHOLE)
    spec = Spec(left, right, tuple(sorted(sizes.items())), reduce, whole, linear, moves)
    spec.check(shapes, result_shapes, call.name)
    return spec


def _expand(call: Call, dims: Dims, shape: Iterable[int], sizes: dict[str, int]) -> Dims:
    """Replace ``...`` by factors ``.1``, ``.2``, ... counted from the right; note the sizes of factors in ``sizes``."""
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
        # A dim of size 1 broadcasts, so another tensor decides the size of its factor.
        if len(names) == 1 and sizes.get(names[0], 1) == 1:
            sizes[names[0]] = size
        out.append(names if size != 1 else ())
    return tuple(out)


def _shown(dims: Dims) -> str:
    return " ".join(names[0] if len(names) == 1 else f"({' '.join(names)})" if names else "1" for names in dims)


def _complete(sizes: dict[str, int], sides: Iterable[Dims], shapes: Iterable[Iterable[int]]) -> None:
    """Infer the size of a factor that is nowhere a dim alone: what the other factors leave of its dim."""
    for dims, shape in zip(sides, shapes, strict=True):
        for names, size in zip(dims, shape, strict=True):
            unknown = [name for name in names if name not in sizes]
            product = prod(sizes[name] for name in names if name in sizes)
            if len(unknown) == 1 and product and size % product == 0:
                sizes[unknown[0]] = size // product


def _only_sized(dims: Dims, sizes: Mapping[str, int]) -> Dims:
    return tuple(tuple(name for name in names if name in sizes) for names in dims)
