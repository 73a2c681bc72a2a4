"""What the ruler measured, as ratios, a Markdown table and JSON."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tabulate import tabulate

LIMIT = "limit"
OURS = "shardc"
HEADERS = (
    "row", "median ms", "min ms", "x limit", "x best peer", "first step s", "peak MiB", "collectives", "sent MB",
    "last loss", "off by",
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """One row, measured on one size of work; or the error that kept it from running.

    Args:
        size, family: of the work, and of the rows that took turns; the limit is in every family.
        kind, name: of the row.
        seconds: of each timed step, on its slowest rank.
        issued: of each timed step's call, on the rank that took longest: an accelerator may be at work still then.
        first_seconds: of building the row and its first step, compilation included, on the slowest rank.
        peak_bytes: memory that training takes at its peak, on the rank that takes most.
        sent_bytes: what a rank writes to its sockets in a step (the median step of the rank that writes most).
        collectives: how many a rank starts in a step. Of peers a send and a receive count one each; of shardc, whose
            collectives are several messages here, those of its graphs.
        loss: of the last step, over the global batch.
        error: why there are no numbers; empty if there are.
    """

    size: str
    family: str
    kind: str
    name: str
    seconds: tuple[float, ...] = ()
    first_seconds: float = 0.0
    peak_bytes: int = 0
    sent_bytes: int = 0
    collectives: int = 0
    loss: float = 0.0
    error: str = ""
    issued: tuple[float, ...] = ()

    @property
    def median(self) -> float:
        """Seconds of the median step."""
        return statistics.median(self.seconds)

    @property
    def minimum(self) -> float:
        """Seconds of the fastest step."""
        return min(self.seconds)


def fastest(results: Iterable[Result], kinds: Iterable[str] | None = None) -> Result | None:
    """The row of these kinds with the least median; by default of all kinds but the limit and shardc."""
    wanted = None if kinds is None else set(kinds)

    def counts(result: Result) -> bool:
        return result.kind in wanted if wanted is not None else result.kind not in (LIMIT, OURS)

    return min((r for r in results if not r.error and counts(r)), key=lambda r: r.median, default=None)


def ratio(result: Result, other: Result | None) -> float | None:
    """How many times as long as the other's the median step is; None if there is no other."""
    return result.median / other.median if other is not None else None


def verdicts(results: Sequence[Result]) -> list[str]:
    """For each row of shardc in one family, its ratio to the best peer of every kind and to the limit."""
    lines = []
    kinds = list(dict.fromkeys(r.kind for r in results if r.kind != OURS))
    for result in results:
        if result.kind != OURS or result.error:
            continue
        others = [best for kind in kinds if (best := fastest(results, [kind])) is not None]
        said = [f"{ratio(result, other):.2f}x of {other.name}" for other in others]
        if said:
            lines.append(f"{result.name}: {', '.join(said)}")
    return lines


def table(results: Sequence[Result], single: float) -> str:
    """A Markdown table of one family; ``single`` is the last loss of the same training on one device."""
    limit, best = fastest(results, [LIMIT]), fastest(results)
    rows = [_cells(r, limit, best, single) for r in results]
    right = ("left", *["right"] * (len(HEADERS) - 1))
    return tabulate(rows, HEADERS, tablefmt="github", disable_numparse=True, colalign=right)


def _cells(result: Result, limit: Result | None, best: Result | None, single: float) -> list[Any]:
    if result.error:
        return [result.name, *[None] * (len(HEADERS) - 1)]
    # Each rank of the limit trains on its own, so its loss is another training's.
    off = None if result.kind == LIMIT else f"{abs(result.loss - single) / abs(single):.0e}"
    return [
        result.name,
        f"{result.median * 1e3:.0f}",
        f"{result.minimum * 1e3:.0f}",
        *(None if other is None else f"{ratio(result, other):.2f}" for other in (limit, best)),
        f"{result.first_seconds:.1f}",
        f"{result.peak_bytes / 2**20:.0f}",
        result.collectives,
        f"{result.sent_bytes / 1e6:.2f}",
        f"{result.loss:.5f}",
        off,
    ]


def markdown(results: Sequence[Result], single: dict[str, float], conditions: Sequence[str]) -> str:
    """The whole report: the conditions, then a section for each size and family."""
    parts = ["# One training step, side by side", "\n".join(f"- {line}" for line in conditions)]
    for size, family in dict.fromkeys((r.size, r.family) for r in results):
        group = [r for r in results if (r.size, r.family) == (size, family)]
        parts.append(f"## {size}, {family}")
        parts.append(f"The last loss of the same training on one device: {single[size]:.5f}.")
        parts.append(table(group, single[size]))
        failed = [f"{r.name} did not run: {r.error}" for r in group if r.error]
        lines = [f"- {line}" for line in (*verdicts(group), *failed)]
        if lines:
            parts.append("\n".join(lines))
    return "\n\n".join(parts) + "\n"


def to_json(results: Sequence[Result], single: dict[str, float], conditions: Sequence[str]) -> str:
    """The same as JSON, with every timed step's seconds."""
    content = {"conditions": list(conditions), "single_device_loss": single, "rows": [asdict(r) for r in results]}
    return json.dumps(content, indent=1) + "\n"
