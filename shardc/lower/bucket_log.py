"""The collectives of graphs that are lowered, as text for the log ``shardc.buckets``."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from shardc.ir import comm_volume
from shardc.ir import graph as ir
from shardc.ir.executable import Half
from shardc.logs import BUCKETS


def log_collectives(halves: Iterable[Half]) -> None:
    """Log to ``shardc.buckets`` the collectives of each graph by kind and axis: number, tensors, bytes of a rank."""
    if not BUCKETS.isEnabledFor(logging.INFO):
        return
    for half in dict.fromkeys(halves):
        groups: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for node in half.graph.nodes:
            kind = comm_volume.collective_kind(node) if node.op == "call_function" else None
            if kind is not None:
                operands = [x for x in node.all_input_nodes if ir.is_tensor(x)]
                nbytes = sum(ir.value(x).nbytes for x in operands)
                over = ",".join(comm_volume.group_of(node, half.mesh)[0])
                groups.setdefault((kind, over), []).append((len(operands), nbytes))
        for (kind, over), of in groups.items():
            tensors, sizes = sum(count for count, _ in of), [nbytes for _, nbytes in of]
            BUCKETS.info(
                "%s: %d x %s over %s of %d tensors, %s to %s B a rank",
                half.kind, len(of), kind, over, tensors, f"{min(sizes):,}", f"{max(sizes):,}",
            )  # fmt: skip
