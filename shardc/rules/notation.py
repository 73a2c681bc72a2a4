"""The notation of rules (`rule`), as in einops: ``"i k, k j -> i j"``, and the builder of factors in Python (`Loops`).

Operands are separated by commas, dims by spaces. A name is a factor, ``1`` a dim of size 1, ``(a b)`` a dim
of two factors, major to minor, ``...`` any number of leading dims, aligned at the right and broadcast as in
NumPy. The kind of a factor is given beside the text: a reduce op, or ``whole`` if it must not be split.

    rule("mm", "i k, k j -> i j", k="sum", linear="0|1")  # k split: the result is a partial sum over k's axis
    rule("view_as_real", "... -> ... parts", parts="whole", linear="0")

A rule that the notation cannot express is a function that declares the factors of a call with `Loops`, for each dim of
each operand and result. Dims with the same factor are split together:

    loops = Loops(call)  # aten.mm: operands [I, K] and [K, J], result [I, J]
    i, k, j = loops.dim("i", I), loops.dim("k", K, "sum"), loops.dim("j", J)
    return loops.spec([(i, k), (k, j)], [(i, j)], linear=[{0}, {1}])
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import gcd, prod

from shardc.errors import RuleError
from shardc.ir.layout import REDUCE_OPS
from shardc.rules.rule import Call, Local, Localize, Rule, SpecOf
from shardc.rules.spec import Dims, Factors, Spec

FREE = ""


class Loops:
    """Builder of the `Spec` of one call, which collects its factors (loops, like einsum letters): names, sizes and
    kinds.

    The kind of a factor is ``FREE`` (it may be split if every result carries it), ``WHOLE`` (never split), or the
    reduce op of the partial results that its split leaves.

    Attributes:
        shapes, names: shape and argument name of each operand.
        result_shapes: shape of each result that is a tensor.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.shapes = [v.shape for v in call.operands]
        self.names = [name for name, _ in call.named_operands()]
        self.result_shapes = [v.shape for v in call.results if v is not None]
        # Of the factors declared so far, by name; kinds of those that are not FREE.
        self._sizes: dict[str, int] = {}
        self._kinds: dict[str, str] = {}
        self._indexed: set[str] = set()
        self._ordered: set[str] = set()

    def dim(self, name: str, size: int, kind: str = FREE) -> Factors:
        """Declare a factor and its kind (see `Loops`); return it as the factors of a dim: ``(name,)``, or () for size
        1. A factor of several dims is declared for each of them, with the same size.
        """
        if size == 1:
            return ()
        before = self._sizes.setdefault(name, size)
        assert before == size, f"factor {name} of {self.call.name} has two sizes"
        if kind != FREE:
            self._kinds[name] = kind
        return (name,)

    def indexed(self, name: str, size: int, kind: str = FREE) -> Factors:
        """Declare and return the factor of a dim that the op indexes (see `dim`). Such a dim may be padded only at its
        end.
        """
        self._indexed.add(name)
        return self.dim(name, size, kind)

    def ordered(self, name: str, size: int, kind: str = FREE) -> Factors:
        """Declare and return a factor that must be split, if at all, into one contiguous piece per rank, in rank order.
        It may be padded only at its end, as with `indexed`.
        """
        self._ordered.add(name)
        return self.indexed(name, size, kind)

    def dims(
        self, prefix: str, shape: Sequence[int], kind: str = FREE, but: Mapping[int, Factors] | None = None
    ) -> Dims:
        """Declare one factor per dim of ``shape``, named ``prefix0``, ``prefix1``, ...; return the factors of each dim.
        ``but``: dim -> factors that already exist, for dims that need no new one.
        """
        return tuple(
            but[i] if but and i in but else self.dim(f"{prefix}{i}", size, kind) for i, size in enumerate(shape)
        )

    def blocks(self, name: str, size: int, block: int, shared: str = "block") -> Factors:
        """Declare and return the two factors of a dim that consists of blocks of ``block`` elements: the number of
        blocks (named after ``name``), and the position in a block (named ``shared``).

        Dims with the same ``shared`` are split together, inside every block. The number of blocks must not be split,
        so that such dims may have different numbers. If ``block`` is 0, the dim is a single factor, not to be split.
        """
        if not block:
            return self.dim(name, size, WHOLE)
        return (*self.dim(f"{name}.count", size // block, WHOLE), *self.dim(shared, block))

    def spec(
        self,
        operands: Sequence[Dims],
        results: Sequence[Dims],
        *,
        linear: Iterable[Iterable[int]] = (),
        moves: bool = False,
        replicated: Iterable[int] = (),
    ) -> Spec:
        """Return the `Spec` with the factors declared so far; raises RuleError if they do not multiply up to the call's
        shapes. Keywords as in `Spec`.
        """
        spec = Spec(
            operands=tuple(operands),
            results=tuple(results),
            sizes=tuple(sorted(self._sizes.items())),
            reduce=tuple((f, kind) for f, kind in self._kinds.items() if kind != WHOLE),
            whole=frozenset(f for f, kind in self._kinds.items() if kind == WHOLE),
            linear=tuple(frozenset(group) for group in linear),
            moves=moves,
            replicated=frozenset(replicated),
            indexed=frozenset(self._indexed),
            ordered=frozenset(self._ordered),
        )
        spec.check(self.shapes, self.result_shapes, self.call.name)
        return spec

    def broadcast(self, shape: Sequence[int], result: Sequence[int], prefix: str = "d") -> Dims:
        """Declare and return the factors of an operand of ``shape`` that broadcasts to the shape ``result``:
        ``prefix0``, ``prefix1``, ..., numbered by dims of the result. A dim of size 1 has none.
        """
        lead = len(result) - len(shape)  # dims of the result that the operand lacks
        return tuple(
            () if size == 1 else self.dim(f"{prefix}{lead + i}", result[lead + i]) for i, size in enumerate(shape)
        )

    def regroup(self, before: Sequence[int], after: Sequence[int]) -> tuple[Dims, Dims]:
        """Return (factors of each dim of ``before``, factors of each dim of ``after``), for a view from the first shape
        to the second.

        Common factors are taken off both shapes, first from the major end, then from the minor end. What remains is
        whole on each side. Example: [6, 4] viewed as [4, 6] shares a major factor of 2 and a minor one of 2, which
        leaves 3 x 2 viewed as 2 x 3.
        """
        assert prod(before) == prod(after), f"{list(before)} cannot be viewed as {list(after)}"
        if prod(before) == 0:  # no elements to split
            return self.dims("before", before, WHOLE), self.dims("after", after, WHOLE)
        left, right = _Run(before), _Run(after)
        shared = 0  # number of common factors so far
        for end in (_MAJOR, _MINOR):
            while (size := gcd(left.size(end), right.size(end))) > 1:
                factor = self.dim(f"v{shared}", size)
                left.take(end, factor, size)
                right.take(end, factor, size)
                shared += 1
        # What is left of a dim has no counterpart on the other side.
        left.finish(lambda at, size: self.dim(f"before{at}", size, WHOLE))
        right.finish(lambda at, size: self.dim(f"after{at}", size, WHOLE))
        return left.dims(), right.dims()


def broadcast_factors(dims: Dims, shape: Sequence[int]) -> Dims:
    """Return the factors of an operand of ``shape`` that broadcasts to a tensor with the factors ``dims``: those of the
    last dims, and none for a dim of size 1.
    """
    last = dims[len(dims) - len(shape) :]
    return tuple(() if size == 1 else factors for size, factors in zip(shape, last, strict=True))


def mixed(dims_of: Callable[[Call], Iterable[int]], *, linear: bool = False, moves: bool = False) -> SpecOf:
    """Return the spec function of ops that mix elements along the dims ``dims_of(call)`` only, such as a sort. These
    dims must not be split and may change size. ``linear``: operand 0 may be a partial sum; ``moves`` is as in `Spec`.
    """

    def spec(call: Call) -> Spec:
        loops = Loops(call)
        ndim = len(loops.shapes[0])
        whole = {d % ndim for d in dims_of(call)} if ndim else set()

        def factors(shape: Sequence[int]) -> Dims:
            # Named by size as well, since operand and result may differ in it.
            return loops.dims("d", shape, but={i: loops.dim(f"x{i}.{shape[i]}", shape[i], WHOLE) for i in whole})

        operands, results = list(map(factors, loops.shapes)), list(map(factors, loops.result_shapes))
        return loops.spec(operands, results, linear=[{0}] if linear else (), moves=moves)

    return spec


_MAJOR, _MINOR = 0, -1  # ends of a shape, as indices in the list of its dims


class _Run:
    """The state of one shape in `Loops.regroup`: which of its dims still have to be divided into factors. Factors are
    taken from the major end and from the minor end.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        # (dim, size that is still to be divided) of each dim that is not fully divided.
        self._left = [(at, size) for at, size in enumerate(shape) if size > 1]
        # For each dim, its factors so far: those taken from its major end, and those from its minor end.
        self._major: list[Factors] = [()] * len(shape)
        self._minor: list[Factors] = [()] * len(shape)

    def size(self, end: int) -> int:
        """Return what is left to divide of the next dim at the major or minor ``end``; 1 if all dims are divided into
        factors.
        """
        return self._left[end][1] if self._left else 1

    def take(self, end: int, factor: Factors, size: int) -> None:
        """Take ``factor``, of size ``size``, from the first undivided dim at the major or minor ``end``: add it to the
        factors of that dim, and divide what is left of the dim.
        """
        at, left = self._left[end]
        if end == _MAJOR:
            self._major[at] += factor
        else:
            self._minor[at] = factor + self._minor[at]
        if left == size:
            self._left.pop(end)
        else:
            self._left[end] = (at, left // size)

    def finish(self, name: Callable[[int, int], Factors]) -> None:
        """Give each dim that is not yet fully divided a last factor ``name(dim, size)``, for the size that is left of
        the dim.
        """
        for at, size in self._left:
            self._major[at] += name(at, size)

    def dims(self) -> Dims:
        """Return the factors of each dim."""
        return tuple(major + minor for major, minor in zip(self._major, self._minor, strict=True))


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
        op: name of the op, without ``aten.`` for an aten op; ``mylib::scale`` for others.
        text: the factors of each operand's and result's dims, such as "i k, k j -> i j" (see the module).
        linear: sets of operands, by position, that may be partial sums: ``"0|1"`` either, ``"0&1"`` both together.
        moves: the op only moves the elements of operand 0.
        localize: emits the op on local tensors; without it a factor that only results have is whole.
        factors: kinds of factors: the reduction that a split leaves pending (``k="sum"``), or ``d="whole"`` for one
            that must not be split. Others may be split where every result has them.

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
        # The op itself gives such a dim its full size on every rank.
        kinds |= dict.fromkeys(_names(results) - _names(operands), WHOLE)

    def spec(call: Call) -> Spec:
        return bind(call, operands, results, kinds, sets, moves)

    kinds_text = "; ".join(f"{f}: {kind}" for f, kind in factors.items())
    return Rule(name, spec, f"{text}    {kinds_text}".rstrip(), localize)


def _check(op: str, text: str, sides: tuple[Dims, ...], factors: Mapping[str, str]) -> None:
    """Raise RuleError if a key of ``factors`` (name of a factor -> its kind) is not in ``sides``, the dims of each
    operand and result in ``text``, or if its value is neither a reduce op nor "whole".
    """
    for factor, kind in factors.items():
        if factor not in _names(sides):
            raise RuleError(f"the rule {text!r} of {op} has no factor {factor!r}", fix="name a factor of the text")
        if kind not in (*REDUCE_OPS, WHOLE):
            raise RuleError(f"the rule of {op} says {factor}: {kind!r}", fix=f"say one of {(*REDUCE_OPS, WHOLE)}")


def _names(sides: tuple[Dims, ...]) -> set[str]:
    """Return the names of the factors in ``sides``, which has the dims of each operand or result."""
    return {name for dims in sides for names in dims for name in names} - {"..."}


def parse(text: str) -> tuple[tuple[Dims, ...], tuple[Dims, ...]]:
    """Return (factors of each operand's dims, factors of each result's dims) of a rule's ``text``, such as "i k, k j ->
    i j"; raises RuleError if it cannot be read.
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f"rule {text!r} has no '->'", fix='write it as "i k, k j -> i j"')
    return tuple(_side(part) for part in left.split(",")), tuple(_side(part) for part in right.split(","))


def _side(text: str) -> Dims:
    """Return the factors of each dim of an operand or result, given its ``text``: for "i (j k) 1" they are (i,), (j, k)
    and ().
    """
    dims: list[tuple[str, ...]] = []
    # Names in parentheses, or a single name.
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
    """Return the `Spec` of ``call`` from its rule's notation: ``operands`` and ``results`` have the factor names of
    each dim (`parse`), ``factors`` maps a name to its kind. Sizes are read from the call's shapes. ``linear`` and
    ``moves`` are as in `Spec`.
    """
    shapes = [v.shape for v in call.operands]
    result_shapes = [v.shape for v in call.results if v is not None]
    for kind, sides, tensors in (("operands", operands, shapes), ("results", results, result_shapes)):
        if len(sides) != len(tensors):
            raise RuleError(
                f"the rule of {call.name} is for {len(sides)} {kind}, the call has {len(tensors)}",
                fix="separate the operands, and the results, by commas, one for each tensor",
            )
    sizes: dict[str, int] = {}  # factor -> size, filled in by the next lines
    left = tuple(_expand(call, dims, shape, sizes) for dims, shape in zip(operands, shapes, strict=True))
    right = tuple(_expand(call, dims, shape, sizes) for dims, shape in zip(results, result_shapes, strict=True))
    _complete(sizes, left + right, [*shapes, *result_shapes])
    sizes = {name: size for name, size in sizes.items() if size != 1}  # a `Spec` has no factors of size 1
    left, right = (tuple(_only_sized(dims, sizes) for dims in side) for side in (left, right))
    reduce = tuple((f, op) for f, op in factors.items() if op != WHOLE and f in sizes)
    whole = frozenset(f for f, op in factors.items() if op == WHOLE)
    spec = Spec(
        operands=left, results=right, sizes=tuple(sorted(sizes.items())), reduce=reduce, whole=whole, linear=linear,
        moves=moves,
    )  # fmt: skip
    spec.check(shapes, result_shapes, call.name)
    return spec


def _expand(call: Call, dims: Dims, shape: Iterable[int], sizes: dict[str, int]) -> Dims:
    """Replace ``...`` in the notation ``dims`` of a tensor by factors ``.1``, ``.2``, ..., numbered from the right, and
    return the result. The size of each factor is added to ``sizes``.
    """
    shape = tuple(shape)
    if ("...",) in dims:
        at = dims.index(("...",))
        rest = len(shape) - (len(dims) - 1)  # number of dims that ``...`` stands for
        # Numbered from the right, so that operands with fewer dims broadcast as in NumPy.
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
    """Return ``dims``, the factors of each dim, as text in the notation, such as "i (j k) 1"."""
    return " ".join(names[0] if len(names) == 1 else f"({' '.join(names)})" if names else "1" for names in dims)


def _complete(sizes: dict[str, int], sides: Iterable[Dims], shapes: Iterable[Iterable[int]]) -> None:
    """Add missing sizes of factors to ``sizes``, in place. If all other factors of a dim have sizes, the missing factor
    has the size of the dim divided by theirs.
    """
    for dims, shape in zip(sides, shapes, strict=True):
        for names, size in zip(dims, shape, strict=True):
            unknown = [name for name in names if name not in sizes]
            product = prod(sizes[name] for name in names if name in sizes)
            if len(unknown) == 1 and product and size % product == 0:
                sizes[unknown[0]] = size // product


def _only_sized(dims: Dims, sizes: Mapping[str, int]) -> Dims:
    """Return ``dims`` (names of the factors of each dim) with only the factors that are in ``sizes``."""
    return tuple(tuple(name for name in names if name in sizes) for names in dims)
