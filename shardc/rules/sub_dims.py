"""Sub-dims that several ops share: dims of values as rows of numbers, which are joined and cut where ops meet."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

Row = tuple[int, ...]  # the sub-dims of a dim, major to minor; () for a dim of size 1
Rows = list[Row]  # one for each dim of a value


class SubDims:
    """Sub-dims by number. One may stand for another, to which it was joined, or for the parts into which it was cut.

    Attributes:
        whole: those that must not be split.
    """

    def __init__(self) -> None:
        self._sizes: list[int] = []
        self._stands_for: dict[int, Row] = {}
        self.whole: set[int] = set()

    def new(self, size: int, whole: bool = False) -> Row:
        """Return the row of a new sub-dim."""
        if size == 1:
            return ()
        self._sizes.append(size)
        row = (len(self._sizes) - 1,)
        self.whole.update(row if whole or not size else ())
        return row

    def size(self, sub_dim: int) -> int:
        return self._sizes[sub_dim]

    def leaves(self, row: Iterable[int]) -> Iterator[int]:
        """Yield the sub-dims that ``row`` stands for now."""
        for sub_dim in row:
            if sub_dim in self._stands_for:
                yield from self.leaves(self._stands_for[sub_dim])
            else:
                yield sub_dim

    def keep_whole(self, row: Iterable[int]) -> None:
        self.whole.update(self.leaves(row))

    def join(self, left: Row, right: Row) -> None:
        """Make two rows of the same dim the same, from the minor end; what is cut differently must not be split."""
        a, b = list(self.leaves(left)), list(self.leaves(right))
        while a and b:
            (*a, x), (*b, y) = self.leaves(a), self.leaves(b)
            if x == y:
                continue
            m, n = self._sizes[x], self._sizes[y]
            if not m or not n or (m % n and n % m):
                self.keep_whole([*a, x, *b, y])
                return
            if m > n:
                major, x = self._cut(x, n)
                a.append(major)
            elif n > m:
                major, y = self._cut(y, m)
                b.append(major)
            self._replace(x, (y,))

    def _cut(self, sub_dim: int, size: int) -> Row:
        parts = (*self.new(self._sizes[sub_dim] // size), *self.new(size))
        self._replace(sub_dim, parts)
        return parts

    def _replace(self, sub_dim: int, row: Row) -> None:
        self._stands_for[sub_dim] = row
        if sub_dim in self.whole:
            self.whole.update(row)

    def keep_distinct(self, rows: Sequence[Row]) -> None:
        """Keep whole what stands in more than one of ``rows``, as an axis cannot split two dims of a value."""
        seen: set[int] = set()
        for row in rows:
            leaves = set(self.leaves(row))
            self.whole.update(seen & leaves)
            seen |= leaves
