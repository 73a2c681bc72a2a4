"""Grammar of the text form: prints and reads names, ops, types and arguments.

A program (``shardc.ir.text.dump`` prints it, ``shardc.ir.parse.parse`` reads it)::

    program  := "mesh" (AXIS "=" INT)*  ["no layouts"]  inputs  section*  outputs  [comm]
    inputs   := "inputs:"  placeholder*
    section  := ("forward" | "backward") ":"  line*
    outputs  := "outputs:" output*
    comm     := "comm:"    (KIND "(" AXIS,* ")" "x" INT INT "B/rank")*

    placeholder := [KIND ["#" INDEX] [ROLE]] NAME ":" type
    line        := NAME ":" type "=" (OP "(" argument,* ")" | NAME "[" INT "]" | "constant" "(" STRING ["," values] ")")
    output      := KIND ["#" INDEX] [ROLE] "=" argument
    type        := DTYPE ["<host>"] layout ["?"] | "None" | "(" type,* ")"
    argument    := [KEYWORD "="] (NAME ["as" layout] | INT | FLOAT | STRING | WORD | "[" argument,* "]" | AXES)

NAME is ``%`` and a qualified name, quoted if it has other characters than letters, digits, ``_``, ``.``,
``-``, ``/`` and ``$``. ROLE is left out if it is the NAME (empty, for an output), INDEX if it is 0. ``<host>`` marks a
tensor in host memory. ``?`` marks a tensor without a layout in a program in which others have one; ``no layouts`` says
that none has (otherwise bare sizes mean a replicated tensor). ``as`` gives the layout that an op or the caller requires
of a value that has another. WORD is ``None``, ``True``, ``False``, ``inf``, ``nan``, a dtype, a device, a memory format
or a ``torch.layout``. AXES (the keyword ``axis`` of the ops in ``shardc.ir.ops``) are bare: ``dp`` or ``(dp,tp)``. A
constant shows its name and, if it is small, its values. ``#`` after a line starts a comment; a comment ``# module |
source | cause`` is the node's origin, with ``| region N`` for an op of checkpoint region N, ``| must_save`` or
``| must_recompute`` by a policy, and ``| host ENTRY`` if a plan entry keeps what backward reads of it in host memory.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NoReturn, TypeAlias, TypeGuard, TypeVar

import torch

from shardc._compat import OpOverload
from shardc.errors import TextError, VerifyError
from shardc.ir.graph import DTYPE_NAMES, NEEDED_BY, Origin, Value
from shardc.ir.ops import MARKERS
from shardc.validate import DTYPES as TORCH_DTYPES
from shardc.validate import torch_name

T = TypeVar("T")
Target: TypeAlias = (
    "OpOverload[..., object] | Callable[..., object]"  # of a node: an op of torch, a marker op or getitem
)

STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
INTEGER = re.compile(r"\d+")
# The cause of an op, and the tags that may follow it.
TAGS = re.compile(
    r"(.*?)(?: \| region (\d+))?(?: \| (must_\w+))?(?: \| host (.+?))?(?: \| (kept))?(?: \| regathers (.+))?", re.DOTALL
)


class Reader:
    """Reads one line of the text form, from left to right. Errors show the position and the text that was expected
    there.
    """

    def __init__(self, line: str, number: int) -> None:
        self.line, self.number, self.at = line, number, 0

    def fail(self, expected: str, at: int | None = None) -> NoReturn:
        """Raise a TextError that says what was ``expected`` at position ``at``; by default at the current position."""
        self.at = self.at if at is None else at
        rest = self.line[self.at :].strip()
        raise TextError(
            f"line {self.number}: expected {expected}, found {repr(rest) if rest else 'the end of the line'}",
            program=f"{self.line}\n{' ' * self.at}^",
        )

    def skip(self) -> None:
        """Skip spaces."""
        while self.line.startswith(" ", self.at):
            self.at += 1

    def take(self, literal: str) -> bool:
        """Read the text ``literal`` if it comes next, after any spaces. Return whether it does."""
        line, at = self.line, self.at
        while line.startswith(" ", at):
            at += 1
        matches = line.startswith(literal, at)
        self.at = at + len(literal) * matches
        return matches

    def expect(self, literal: str) -> None:
        """Read the text ``literal``. Raise TextError if it does not come next."""
        if not self.take(literal):
            self.fail(repr(literal))

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Read text that matches ``pattern``, after any spaces. Return the match, or None if there is none here."""
        self.skip()
        match = pattern.match(self.line, self.at)
        self.at = match.end() if match else self.at
        return match

    def read(self, pattern: re.Pattern[str], convert: Callable[[re.Match[str]], T | None], expected: str) -> T:
        """Read text that matches ``pattern``, and return what ``convert`` makes of the match. TextError, which says
        what was ``expected``, if there is no match or ``convert`` returns None.
        """
        start = self.at
        match = self.match(pattern)
        result = convert(match) if match else None
        return self.fail(expected, start) if result is None else result

    def end(self) -> None:
        """Check that nothing but a comment follows on the line. Raise TextError if something does."""
        self.skip()
        if self.at < len(self.line) and self.line[self.at] != "#":
            self.fail("the end of the line")

    def listed(self, close: str, read_item: Callable[[], T]) -> list[T]:
        """Read a list: items separated by commas, up to the text ``close``. ``read_item`` reads one item; return all of
        them.
        """
        out: list[T] = []
        while not self.take(close):
            if out:
                self.expect(",")
            out.append(read_item())
        return out

    def word(self) -> str | None:
        """Read a word, with or without quotes, and return it without quotes. None if no word comes next."""
        if quoted := self.match(STRING):
            return str(json.loads(quoted[0]))
        bare = self.match(BARE)
        return bare[0] if bare else None

    def integer(self, what: str) -> int:
        """Read an integer and return it. If none comes next, raise a TextError that says ``what`` was expected."""
        match = self.match(INTEGER)
        return int(match[0]) if match else self.fail(what)

    def provenance(self, phase: str) -> dict[str, Any]:
        """Parse the comment at the line's end, as `shardc.ir.text.origin_text` writes it. Return it as fields of
        `Info`: ``origin``, ``is_kept_part``, ``regathers``.
        """
        parts = self.line[self.at :].strip().removeprefix("# ").split(" | ", 2)
        if len(parts) != 3:
            return {"origin": Origin(phase=phase)}
        match = TAGS.fullmatch(parts[2])
        assert match is not None
        reason, region, policy, host, is_kept, regathers = match.groups()
        module, source, reason = ("" if part == "-" else part for part in (*parts[:2], reason))
        consumer = reason.removeprefix(NEEDED_BY) if reason.startswith(NEEDED_BY) else ""
        cause = "" if consumer else reason
        origin = Origin(module, source, phase, cause, int(region or 0), consumer, policy or "", host or "")
        return {"origin": origin, "is_kept_part": bool(is_kept), "regathers": regathers or ""}


INPUTS, OUTPUTS, COMM = "inputs", "outputs", "comm"
CONSTANT = "constant"
NO_LAYOUTS = "no layouts"
BARE = re.compile(r"[\w.$/-]+")
WORD = re.compile(r"[A-Za-z_]\w*", re.ASCII)

SMALL = 64  # most elements of a constant whose values are shown
DTYPES = TORCH_DTYPES | {name: dtype for dtype, name in DTYPE_NAMES.items()}
_FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d, torch.strided)
CONSTANTS = {
    "None": None, "True": True, "False": False, "inf": float("inf"), "nan": float("nan"), **DTYPES,
    **{str(value).removeprefix("torch."): value for value in _FORMATS},
}  # fmt: skip
ATTRIBUTE = re.compile(r"(?!__)[A-Za-z_]\w{0,200}(?:\.(?!__)\w{1,200}){0,20}", re.ASCII)  # the name of a constant


# --- names


def word_text(word: str) -> str:
    """Return ``word``, in JSON quotes if it has other characters than a bare word may have (`BARE`)."""
    return word if BARE.fullmatch(word) else json.dumps(word)


def name_text(name: str) -> str:
    """Return the name of a node as text, after ``%``."""
    return "%" + word_text(name)


# --- ops

_OVERLOAD = type(torch.ops.aten.mm.default)


def is_torch_op(target: object) -> TypeGuard[OpOverload[..., object]]:
    """Return whether ``target`` is an overload of ``torch.ops``."""
    return isinstance(target, _OVERLOAD)


@lru_cache(maxsize=4096)
def op_text(op: object) -> str:
    """Return the shortest text that `op_of` reads as ``op``.

    It is ``mm``, ``sum.dim_IntList``, ``_c10d_functional.all_reduce``, or the name of a marker op.

    Raises:
        VerifyError: ``op`` is neither an overload of ``torch.ops`` nor a marker op.
    """
    name = getattr(op, "__name__", str(op))
    if MARKERS.get(name) is op:
        return name
    if is_torch_op(op):
        namespace, _, qualified = op.name().partition("::")
        packet, _, overload = qualified.partition(".")
        overload = overload or "default"
        for parts in ((packet,), (namespace, packet), (packet, overload), (namespace, packet, overload)):
            text = ".".join(parts)
            if op_of(text) is op:
                return text
    raise VerifyError(f"{op!r} is no op of a graph", fix="use torch.ops overloads, operator.getitem and shardc.ir.ops")


@lru_cache(maxsize=4096)
def op_of(text: str) -> Target | None:
    """Return the op that ``text`` names, looked up as a marker op, an aten op, or an op of another namespace; None if
    there is none.
    """
    if text in MARKERS:
        return MARKERS[text]
    parts = text.split(".")
    if len(parts) == 1:
        return _overload_of("aten", parts[0], "default")
    if len(parts) == 2:
        return _overload_of("aten", parts[0], parts[1]) or _overload_of(parts[0], parts[1], "default")
    return _overload_of(*parts) if len(parts) == 3 else None


def _overload_of(namespace: str, packet: str, overload: str) -> OpOverload[..., object] | None:
    """Return the op ``namespace.packet.overload`` of ``torch.ops``; None if there is none."""
    if namespace.startswith("__") or not all(WORD.fullmatch(part) for part in (namespace, packet, overload)):
        return None
    op = getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)
    return op if is_torch_op(op) else None


@lru_cache(maxsize=4096)
def defaults(op: object) -> tuple[dict[str, object], tuple[str, ...]]:
    """Return (argument name -> default, names of the positional arguments) of ``op``, a torch op or a marker op."""
    if not is_torch_op(op):
        return {"op": "sum", "to": ""}, ("x",)
    arguments = op._schema.arguments
    values = {a.name: a.default_value for a in arguments if a.has_default_value()}
    return values, tuple(a.name for a in arguments if not a.kwarg_only)


def argument_order(op: object) -> Callable[[str], int]:
    """Return the key function that sorts argument names into the order of the op's schema."""
    names = [a.name for a in op._schema.arguments] if is_torch_op(op) else []
    return lambda name: names.index(name) if name in names else len(names)


# --- types


def value_text(value: Value | tuple[Value | None, ...] | None, unplaced: str) -> str:
    """Return the type of a node's result as text, such as ``f32[16@dp,8]``. ``unplaced`` is appended to the type of a
    tensor that has no layout.
    """
    if value is None:
        return "None"
    if isinstance(value, tuple):
        return f"({', '.join(value_text(one, unplaced) for one in value)})"
    return str(value) if value.layout is not None else f"{value}{unplaced}"


def dtype_of(word: str) -> torch.dtype | None:
    """Return the dtype named ``word`` in dumps (``f32``) or by torch (``float32``); None if there is none."""
    return DTYPES.get(word)


# --- arguments


def constant_text(value: object) -> str:
    """Return the text of an argument that is neither a node nor a list.

    Raises:
        VerifyError: the text form cannot express it (a tensor, a symbolic size).
    """
    if value is None or type(value) in (bool, int, float):
        return repr(value)
    if type(value) is complex:
        return f"{value.real!r}{value.imag:+}j"
    if isinstance(value, str):
        return json.dumps(value)
    if isinstance(value, torch.dtype):
        return DTYPE_NAMES.get(value) or torch_name(value)
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, torch.memory_format | torch.layout):
        return torch_name(value)
    raise VerifyError(f"an argument {value!r} of type {type(value).__name__} has no text form")


def small_values(tensor: object) -> list[float] | None:
    """Return the elements of a real tensor as a flat list; None if it has more than `SMALL` elements or no data."""
    if type(tensor) is not torch.Tensor or tensor.is_meta or tensor.is_complex() or tensor.numel() > SMALL:
        return None
    flat = tensor.detach().reshape(-1)
    return (flat.double() if flat.is_floating_point() else flat).tolist()


def constant_of(word: str) -> object:
    """Return the value of an unquoted constant; raise ValueError if ``word`` is not a constant."""
    if word in CONSTANTS:
        return CONSTANTS[word]
    try:
        return torch.device(word)
    except RuntimeError as error:
        raise ValueError(word) from error


def axes_text(axis: str) -> str:
    """Return ``axis``, the axes of a marker op, as text: ``dp``, or ``(dp,tp)`` for ``"dp,tp"``, or ``()`` for none."""
    return axis if axis and "," not in axis else f"({axis})"
