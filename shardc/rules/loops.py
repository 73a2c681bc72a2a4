"""`Loops` names the factors of one call and builds its `Spec`; rules in Python (not in notation) are written with it.

A rule gives each dim of each operand and result its factors. Dims with the same factor are split together:

    loops = Loops(call)  # aten.mm: operands [I, K] and [K, J], result [I, J]
    i, k, j = loops.dim("i", I), loops.dim("k", K, "sum"), loops.dim("j", J)
    return loops.spec([(i, k), (k, j)], [(i, j)], linear=[{0}, {1}])
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import gcd, prod

from shardc.rules.notation import WHOLE
from shardc.rules.rule import Call
from shardc.rules.spec import Dims, Factors, Spec

FREE = ""


class Loops:
    """Collects the factors of one call: their names, sizes and kinds; `spec` builds the `Spec`.

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
        self._sizes: dict[str, int] = {}
        self._kinds: dict[str, str] = {}
        self._indexed: set[str] = set()

    def dim(self, name: str, size: int, kind: str = FREE) -> Factors:
        """Declare a loop of the op and its kind (see `Loops`); return it as the factors of a dim, none for size 1."""
        if size == 1:
            return ()
        before = self._sizes.setdefault(name, size)
        assert before == size, f"factor {name} of {self.call.name} has two sizes"
        if kind != FREE:
            self._kinds[name] = kind
        return (name,)

    def indexed(self, name: str, size: int, kind: str = FREE) -> Factors:
        """Declare a factor as `dim` does, of a dim that the op indexes: it may be padded at its end only."""
        self._indexed.add(name)
        return self.dim(name, size, kind)

    def dims(
        self, prefix: str, shape: Sequence[int], kind: str = FREE, but: Mapping[int, Factors] | None = None
    ) -> Dims:
        """Declare one factor per dim: ``prefix0``, ``prefix1``, ...; ``but`` gives the factors of some dims."""
        return tuple(
            but[i] if but and i in but else self.dim(f"{prefix}{i}", size, kind) for i, size in enumerate(shape)
        )

    def blocks(self, name: str, size: int, block: int, shared: str = "block") -> Factors:
        """Return the factors of a dim cut into blocks of ``block`` elements: the number of blocks (own factor, whole),
        and factor ``shared`` within a block. With ``block`` 0 the dim is whole.
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
        """Return the `Spec` with these factors; raises RuleError if they do not multiply up to the call's shapes."""
        spec = Spec(
            tuple(operands),
            tuple(results),
            tuple(sorted(self._sizes.items())),
            tuple((f, kind) for f, kind in self._kinds.items() if kind != WHOLE),
            frozenset(f for f, kind in self._kinds.items() if kind == WHOLE),
            tuple(frozenset(group) for group in linear),
            moves,
            replicated=frozenset(replicated),
            indexed=frozenset(self._indexed),
        )
        spec.check(self.shapes, self.result_shapes, self.call.name)
        return spec

    def broadcast(self, shape: Sequence[int], result: Sequence[int], prefix: str = "d") -> Dims:
        """Return the factors of an operand of ``shape`` that broadcasts to ``result``: ``prefix0``, ``prefix1``, ..."""
        lead = len(result) - len(shape)
        return tuple(
            () if size == 1 else self.dim(f"{prefix}{lead + i}", result[lead + i]) for i, size in enumerate(shape)
        )

    def regroup(self, before: Sequence[int], after: Sequence[int]) -> tuple[Dims, Dims]:
        """Return the factors of a tensor before and after a view from shape ``before`` to shape ``after``.

        Common factors are taken off both shapes, first from the major end, then from the minor end. What remains is
        whole on each side. Example: [6, 4] viewed as [4, 6] shares a major factor of 2 and a minor one of 2, which
        leaves 3 x 2 viewed as 2 x 3.
        """
        assert prod(before) == prod(after), f"{list(before)} cannot be viewed as {list(after)}"
        if prod(before) == 0:
            return self.dims("before", before, WHOLE), self.dims("after", after, WHOLE)
        left, right = _Run(before), _Run(after)
        shared = 0
        for end in (_MAJOR, _MINOR):
            while (size := gcd(left.size(end), right.size(end))) > 1:
                factor = self.dim(f"v{shared}", size)
                left.take(end, factor, size)
                right.take(end, factor, size)
                shared += 1
        left.finish(lambda at, size: self.dim(f"before{at}", size, WHOLE))
        right.finish(lambda at, size: self.dim(f"after{at}", size, WHOLE))
        return left.dims(), right.dims()


def mixed(call: Call, dims: Iterable[int], *, linear: Iterable[Iterable[int]] = (), moves: bool = False) -> Spec:
    """Return the spec of an op that mixes elements along ``dims`` only: these are whole and may change size."""
    loops = Loops(call)
    ndim = len(loops.shapes[0])
    whole = {d % ndim for d in dims} if ndim else set()

    def factors(shape: Sequence[int]) -> Dims:
        return loops.dims("d", shape, but={i: loops.dim(f"x{i}.{shape[i]}", shape[i], WHOLE) for i in whole})

    return loops.spec(
        list(map(factors, loops.shapes)), list(map(factors, loops.result_shapes)), linear=linear, moves=moves
    )


_MAJOR, _MINOR = 0, -1


class _Run:
    """The dims of one shape, from which `Loops.regroup` takes factors at both ends."""

    def __init__(self, shape: Sequence[int]) -> None:
        self._left = [(at, size) for at, size in enumerate(shape) if size > 1]
        self._major: list[Factors] = [()] * len(shape)
        self._minor: list[Factors] = [()] * len(shape)

    def size(self, end: int) -> int:
        """Return the size that is left of the outermost dim at ``end``; 1 if nothing is left."""
        return self._left[end][1] if self._left else 1

    def take(self, end: int, factor: Factors, size: int) -> None:
        """Move ``factor`` from the outermost dim at ``end`` to the factors of that dim."""
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
        """Make what remains of each dim one factor, named by ``name(dim, size)``."""
        for at, size in self._left:
            self._major[at] += name(at, size)

    def dims(self) -> Dims:
        return tuple(major + minor for major, minor in zip(self._major, self._minor, strict=True))
