"""What `make gpu` found: a row for each case, on disk as soon as it is known."""

from __future__ import annotations

import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tabulate import tabulate

HEADERS = ("section", "case", "result", "s", "what was seen")


class Skipped(Exception):
    """The case cannot be tried here; the text says why."""


@dataclass(frozen=True)
class Row:
    """One case.

    Args:
        section, case: its names.
        result: "ok", "wrong", "failed", "skipped", or "stopped" where its time was over.
        seconds: that it took.
        note: in a line, what was seen.
        numbers: the same for programs.
    """

    section: str
    case: str
    result: str
    seconds: float = 0.0
    note: str = ""
    numbers: dict[str, Any] = field(default_factory=dict)


def append(path: Path, record: dict[str, Any]) -> None:
    """Writes one line of JSON behind what is there; nothing of it is lost if the process ends."""
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> tuple[list[Row], list[tuple[str, str]]]:
    """The rows of a file, and the (section, case) that were started and have none."""
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    rows = [Row(**line) for line in lines if "result" in line]
    done = {(row.section, row.case) for row in rows}
    started = [(line["section"], line["case"]) for line in lines if "result" not in line]
    return rows, [each for each in started if each not in done]


def one_line(error: BaseException | str) -> str:
    """An error as it stands in a table."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:300]


Run = Callable[[], tuple[str, dict[str, Any]]]


def tried(path: Path | None, section: str, case: str, seconds: int, run: Run) -> Row:
    """Runs one case, which gives a note and numbers, and writes its row; a failure is a row too.

    Args:
        path: of the rows; None (a rank other than the first) writes nothing.
        seconds: after which it is stopped, where Python still runs then.
    """
    if path is not None:
        append(path, {"section": section, "case": case})
    began = time.monotonic()
    try:
        with _limit(seconds):
            note, numbers = run()
        found = Row(section, case, "ok", note=note, numbers=numbers)
    except Skipped as why:
        found = Row(section, case, "skipped", note=one_line(str(why)))
    except AssertionError as error:
        found = Row(section, case, "wrong", note=one_line(error))
    except TimeoutError as error:
        found = Row(section, case, "stopped", note=one_line(error))
    except Exception as error:
        traceback.print_exc()  # for the log
        found = Row(section, case, "failed", note=one_line(error))
    row = Row(**{**asdict(found), "seconds": round(time.monotonic() - began, 1)})
    if path is not None:
        append(path, asdict(row))
    return row


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def over(*_: Any) -> None:
        raise TimeoutError(f"stopped after {seconds} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def table(rows: Iterable[Row]) -> str:
    """The rows as a Markdown table."""
    cells = [(row.section, row.case, row.result, f"{row.seconds:.0f}", row.note.replace("|", "/")) for row in rows]
    return tabulate(cells, HEADERS, "github", disable_numparse=True)
