"""Never more bytes than DTensor's ``redistribute``, as ``benchmarks/reshard.py`` counts them."""

from __future__ import annotations

import logging
import warnings

from benchmarks.reshard import compare_bytes
from shardc.ir.mesh import Mesh


def test_never_more_bytes_and_fewer_for_moved_and_strided_dims() -> None:
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows = compare_bytes(Mesh(a=2, b=2), (16, 16), (4,))
    finally:
        logging.disable(logging.NOTSET)
    assert {name: row.more for name, row in rows.items()} == dict.fromkeys(rows, 0)
    assert rows["Shard(a) -> Shard(b)"].fewer == rows["Shard(a) -> Shard(b)"].pairs == 32
    assert rows["strided or fused"].shardc < rows["strided or fused"].dtensor
