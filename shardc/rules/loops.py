"""Loops: the factors of one call, collected while its rule names the dims."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import gcd, prod

from shardc.rules.notation import WHOLE
from shardc.rules.rule import Call
from shardc.rules.spec import Dims, Factors, Spec

FREE = ""


class Loops:
    """Names factors and notes their sizes; `spec` makes the `Spec`.

    A factor's kind is ``FREE`` (split it where every result carries it), ``WHOLE`` (never split) or the reduce
    op of what its split leaves pending.
    """

    def __init__(self, call: Call) -> None:
        self.call = call
        self.shapes = [v.shape for v in call.operands]
        self.names = [name for name, _ in call.named_operands()]
        self.made = [v.shape for v in call.results if v is not None]
        self._sizes: dict[str, int] = {}
        self._kinds: dict[str, str] = {}
        self._indexed: set[str] = set()

    def dim(self, name: str, size: int, kind: str = FREE) -> Factors:
        """A dim that is the one factor ``name``; a size of 1 needs none."""
        if size == 1:
            return ()
        before = self._sizes.setdefault(name, size)
        assert before == size, f"factor {name} of {self.call.name} has two sizes"
        if kind != FREE:
            self._kinds[name] = kind
        return (name,)

    def indexed(self, name: str, size: int, kind: str = FREE) -> Factors:
        """As `dim`, of a dim whose elements the op finds by their place."""
        self._indexed.add(name)
        return self.dim(name, size, kind)

    def dims(
        self, prefix: str, shape: Sequence[int], kind: str = FREE, but: Mapping[int, Factors] | None = None
    ) -> Dims:
        """One factor a dim: ``prefix0``, ``prefix1``, ...; dims in ``but`` have those there."""
        given = but or {}
        return tuple(given[i] if i in given else self.dim(f"{prefix}{i}", size, kind) for i, size in enumerate(shape))

    def blocks(self, name: str, size: int, block: int, shared: str = "block") -> Factors:
        """A dim of ``size`` cut into blocks: their count is whole and its own, the block is the ``shared`` factor."""
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
        aside: Iterable[int] = (),
    ) -> Spec:
        """The `Spec`; raises RuleError where the factors do not make up the call's shapes."""
        spec = Spec(
            tuple(operands),
            tuple(results),
            tuple(sorted(self._sizes.items())),
            tuple((f, kind) for f, kind in self._kinds.items() if kind != WHOLE),
            frozenset(f for f, kind in self._kinds.items() if kind == WHOLE),
            tuple(frozenset(group) for group in linear),
            moves,
            aside=frozenset(aside),
            indexed=frozenset(self._indexed),
        )
        spec.check(self.shapes, self.made, self.call.name)
        return spec

    def broadcast(self, shape: Sequence[int], result: Sequence[int], prefix: str = "d") -> Dims:
        """The dims of an operand of ``shape`` that broadcasts to ``result``, whose dims are ``prefix0``, ..."""
        lead = len(result) - len(shape)
        return tuple(
            () if size == 1 else self.dim(f"{prefix}{lead + i}", result[lead + i]) for i, size in enumerate(shape)
        )

    def regroup(self, before: Sequence[int], after: Sequence[int]) -> tuple[Dims, Dims]:
        """The dims of one run of elements seen at shape ``before`` and at shape ``after``.

        Both are cut from the major and from the minor end into the factors that they share; what lies
        between (6 x 4 seen as 4 x 6 leaves 3 x 2 seen as 2 x 3) is whole on each side.
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
    """The spec of an op whose operands and results are alike but in ``dims``, which are whole and of any size."""
    loops = Loops(call)
    ndim = len(loops.shapes[0])
    whole = {d % ndim for d in dims} if ndim else set()

    def one(shape: Sequence[int]) -> Dims:
        return loops.dims("d", shape, but={i: loops.dim(f"x{i}.{shape[i]}", shape[i], WHOLE) for i in whole})

    operands, results = [one(shape) for shape in loops.shapes], [one(shape) for shape in loops.made]
    return loops.spec(operands, results, linear=linear, moves=moves)


_MAJOR, _MINOR = 0, -1


class _Run:
    """The dims of one shape, eaten from both ends."""

    def __init__(self, shape: Sequence[int]) -> None:
        self._left = [(at, size) for at, size in enumerate(shape) if size > 1]
        self._major: list[Factors] = [()] * len(shape)
        self._minor: list[Factors] = [()] * len(shape)

    def size(self, end: int) -> int:
        return self._left[end][1] if self._left else 1

    def take(self, end: int, factor: Factors, size: int) -> None:
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
        """What no end could take becomes one factor a dim."""
        for at, size in self._left:
            self._major[at] += name(at, size)

    def dims(self) -> Dims:
        return tuple(major + minor for major, minor in zip(self._major, self._minor, strict=True))
