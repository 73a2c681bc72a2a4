"""Canonicalize: graphs before and after."""

from __future__ import annotations

import pytest

from shardc.ir.parse import parse, parse_mesh
from shardc.ir.text import dump
from shardc.passes.layout.canonicalize import Canonicalize

PAIRS = {
    "a pair of transposes, and a reshape that is then a view": (
        """
  %a: f32[6,4] = t(%x)
  %b: f32[4,6] = permute(%a, [1, 0])
  %c: f32[24] = reshape(%b, [24])
""",
        """
  %c: f32[24] = view(%x, [24])
""",
    ),
    "transposes that do not undo each other stay": (
        """
  %a: f32[6,4] = t(%x)
  %b: f32[1,6,4] = unsqueeze(%a, 0)
  %c: f32[1,4,6] = transpose.int(%b, 1, 2)
""",
        """
  %a: f32[6,4] = t(%x)
  %b: f32[1,6,4] = unsqueeze(%a, 0)
  %c: f32[1,4,6] = transpose.int(%b, 1, 2)
""",
    ),
    "identities, a cast to the dtype that is there, a chain of views": (
        """
  %a: f32[4,6] = detach(%x)
  %b: f32[4,6] = _to_copy(%a, dtype=f32)
  %d: f32[2,12] = view(%b, [2, 12])
  %c: f32[24] = view(%d, [24])
""",
        """
  %c: f32[24] = view(%x, [24])
""",
    ),
    "equal moves of one value become one": (
        """
  %a: f32[6,4] = t(%x)
  %b: f32[6,4] = t(%x)
  %c: f32[6,4] = add.Tensor(%a, %b)
""",
        """
  %a: f32[6,4] = t(%x)
  %c: f32[6,4] = add.Tensor(%a, %a)
""",
    ),
    "selections read past what other places were set to": (
        """
  %row: f32[6] = select.int(%x, 0, 1)
  %a: f32[4,6] = select_scatter(%x, %row, 0, 3)
  %b: f32[4,6] = select_scatter(%a, %row, -2, 0)
  %d: f32[4] = select.int(%x, 1, 0)
  %e: f32[4,6] = select_scatter(%b, %d, 1, 5)
  %set: f32[6] = select.int(%b, 0, -1)
  %other: f32[6] = select.int(%b, 0, 2)
  %across: f32[6] = select.int(%e, 0, 2)
  %f: f32[6] = add.Tensor(%set, %other)
  %c: f32[6] = add.Tensor(%f, %across)
""",
        """
  %row: f32[6] = select.int(%x, 0, 1)
  %a: f32[4,6] = select_scatter(%x, %row, 0, 3)
  %b: f32[4,6] = select_scatter(%a, %row, -2, 0)
  %d: f32[4] = select.int(%x, 1, 0)
  %e: f32[4,6] = select_scatter(%b, %d, 1, 5)
  %other: f32[6] = select.int(%x, 0, 2)
  %across: f32[6] = select.int(%e, 0, 2)
  %f: f32[6] = add.Tensor(%row, %other)
  %c: f32[6] = add.Tensor(%f, %across)
""",
    ),
    "a real cast, and what nothing reads": (
        """
  %unused: f32[4,6] = neg(%x)
  %c: f64[4,6] = _to_copy(%x, dtype=f64)
""",
        """
  %c: f64[4,6] = _to_copy(%x, dtype=f64)
""",
    ),
}


@pytest.mark.parametrize("case", PAIRS)
def test_before_and_after(case: str) -> None:
    frame = "mesh dp=2\nno layouts\ninputs:\n  input %x: f32[4,6]\nforward:{}outputs:\n  output = %c\n"
    before, after = (frame.format(text) for text in PAIRS[case])
    assert dump(Canonicalize()(parse(before)), parse_mesh(before)) == after
