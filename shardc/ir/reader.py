"""Scanner for one line of the text form; errors name the position and what was expected."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

from shardc.errors import TextError
from shardc.ir import grammar
from shardc.ir.graph import NEEDED_BY, Origin

STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
INTEGER = re.compile(r"\d+")
# The reason of an op, and what may stand behind it.
TAGS = re.compile(r"(.*?)(?: \| region (\d+))?(?: \| (kept))?(?: \| regathers (.+))?", re.DOTALL)


class Reader:
    """Scans one line from left to right."""

    def __init__(self, line: str, number: int) -> None:
        self.line, self.number, self.at = line, number, 0

    def fail(self, expected: str) -> NoReturn:
        rest = self.line[self.at :].strip()
        raise TextError(
            f"line {self.number}: expected {expected}, found {repr(rest) if rest else 'the end of the line'}",
            program=f"{self.line}\n{' ' * self.at}^",
        )

    def skip(self) -> None:
        while self.line.startswith(" ", self.at):
            self.at += 1

    def take(self, literal: str) -> bool:
        """Skip ``literal`` if it is next; return whether it was."""
        line, at = self.line, self.at
        while line.startswith(" ", at):
            at += 1
        matches = line.startswith(literal, at)
        self.at = at + len(literal) * matches
        return matches

    def expect(self, literal: str) -> None:
        if not self.take(literal):
            self.fail(repr(literal))

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        self.skip()
        match = pattern.match(self.line, self.at)
        self.at = match.end() if match else self.at
        return match

    def end(self) -> None:
        """Check that nothing but a comment follows."""
        self.skip()
        if self.at < len(self.line) and self.line[self.at] != "#":
            self.fail("the end of the line")

    def listed(self, close: str, read_item: Callable[[], Any]) -> list[Any]:
        """Parse items by ``read_item``, separated by commas, up to ``close``."""
        out: list[Any] = []
        while not self.take(close):
            if out:
                self.expect(",")
            out.append(read_item())
        return out

    def word(self) -> str | None:
        """Parse a bare or a quoted word."""
        if quoted := self.match(STRING):
            return str(json.loads(quoted[0]))
        bare = self.match(grammar.BARE)
        return bare[0] if bare else None

    def integer(self, what: str) -> int:
        match = self.match(INTEGER)
        return int(match[0]) if match else self.fail(what)

    def provenance(self, phase: str) -> dict[str, Any]:
        """Parse the comment at the end, if there is one, to fields of `Info` (`shardc.ir.text.origin_text`)."""
        parts = self.line[self.at :].strip().removeprefix("# ").split(" | ", 2)
        if len(parts) != 3:
            return {"origin": Origin(phase=phase)}
        match = TAGS.fullmatch(parts[2])
        assert match is not None
        reason, region, is_kept, regathers = match.groups()
        module, source, reason = ("" if part == "-" else part for part in (*parts[:2], reason))
        consumer = reason.removeprefix(NEEDED_BY) if reason.startswith(NEEDED_BY) else ""
        origin = Origin(module, source, phase, "" if consumer else reason, int(region or 0), consumer)
        return {"origin": origin, "kept": bool(is_kept), "regathers": regathers or ""}
