"""Parses the text form of a graph (grammar: `shardc.ir.grammar`; printer: `shardc.ir.text`)."""

from __future__ import annotations

import json
import operator
import re
from functools import cache
from keyword import iskeyword
from typing import Any

import torch
from torch import fx

import shardc.ir.comm  # noqa: F401  (defines ops that programs call)
from shardc._compat import LazyGraphModule
from shardc.errors import LayoutError, MeshError, ShardcError, TextError
from shardc.ir import grammar
from shardc.ir.comm_volume import tally
from shardc.ir.grammar import STRING, Reader
from shardc.ir.graph import ROLES, Info, Role, Value, info, set_info
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.ops import MARKERS

TENSOR = re.compile(r"(\w+)(<host>)?(\[[^\]]*\](?:\{[^}]*\})?)(\?)?")
LAYOUT = re.compile(r"\[[^\]]*\](?:\{[^}]*\})?")
NUMBER = re.compile(r"-?(?:\d+\.?\d*(?:e[+-]?\d+)?|inf\b)")
COMPLEX = re.compile(r"(-?(?:[\d.]+(?:e[+-]?\d+)?|inf|nan))([+-](?:[\d.]+(?:e[+-]?\d+)?|inf|nan))j\b")
WORD = re.compile(r"[A-Za-z_][\w.:]*")
KEYWORD = re.compile(r"(\w+)=")
AXIS = re.compile(r"\w+(?::\d+x\d+)?")
ROLE = re.compile(r"(\w+)(?: #(\d+))?(?: (?!%)([\w.$/-]+|\"(?:[^\"\\]|\\.)*\"))?(?: |$)")


def parse(text: str) -> fx.GraphModule:
    """Return the graph of ``text``, with `Info` on its nodes and roles on its output.

    The inverse of `shardc.ir.text.dump`: ``dump(parse(text), mesh) == text``. A localized graph can be run. A ``comm``
    section is optional, and checked if it is there.

    Args:
        text: a program; blank lines and comments are ignored.

    Raises:
        TextError: the text is no program; the error shows the line and the expected text.
    """
    return _Parser(text).program()


def parse_mesh(text: str) -> Mesh:
    """Return the mesh of a program's text, from its first line."""
    return _Parser(text).mesh


NodeValue = Value | tuple[Value | None, ...] | None


class _Parser:
    """Parser of a program's text, which it reads line by line into a graph."""

    def __init__(self, text: str) -> None:
        numbered = ((n, line.rstrip()) for n, line in enumerate(text.splitlines(), 1))
        self.readers = [Reader(line, n) for n, line in numbered if line.strip() and not line.lstrip().startswith("#")]
        if not self.readers:
            raise TextError("line 1: expected 'mesh', found nothing", fix="start with a line like: mesh dp=2 tp=2")
        self.mesh = self._mesh(self.readers.pop(0))
        self.placed = True
        self.graph = fx.Graph()
        self.constants: dict[str, torch.Tensor] = {}
        self.layouts: dict[str, Layout] = {}  # by text, of those read so far
        self.values: dict[str, fx.Node] = {}
        self.outputs: list[tuple[Role, fx.node.Argument]] = []
        self.wants: list[tuple[Value, Layout | None]] = []  # (value, required layout) of the line's tensor arguments
        self.comm: list[Reader] = []

    def _mesh(self, reader: Reader) -> Mesh:
        """Parse the first line; return its mesh."""
        reader.expect("mesh")
        axes: list[tuple[str, int]] = []
        while axis := reader.match(re.compile(r"(\w+)=(\d+)")):
            axes.append((axis[1], int(axis[2])))
        reader.end()
        try:
            return Mesh(axes)
        except MeshError as error:
            raise TextError(f"line {reader.number}: {error.what}", program=reader.line) from error

    def program(self) -> fx.GraphModule:
        """Parse the complete text; return its graph."""
        section = ""
        for reader in self.readers:
            try:
                section = self._read(reader, section)
            except (ValueError, OverflowError, RecursionError, ShardcError) as error:
                if isinstance(error, TextError):
                    raise
                reader.fail(f"what can be read ({getattr(error, 'what', error)})")
        last = self.graph.output(tuple(node for _, node in self.outputs))
        last.meta[ROLES] = tuple(role for role, _ in self.outputs)
        gm = LazyGraphModule(self.constants, self.graph)
        self._check_comm(gm)
        return gm

    # --- lines

    def _read(self, reader: Reader, section: str) -> str:
        """Parse one line of the section ``section`` (such as "inputs"); return the section of the next line."""
        if reader.line == grammar.NO_LAYOUTS:
            self.placed = False
        elif heading := re.fullmatch(r"(\w+):", reader.line):
            return heading[1]
        elif section == "":
            reader.fail(f"'{grammar.INPUTS}:'")
        elif section == grammar.INPUTS:
            self._placeholder(reader)
        elif section == grammar.OUTPUTS:
            self._output(reader)
        elif section == grammar.COMM:
            self.comm.append(reader)
        else:
            self._line(reader, section)
        return section

    def _placeholder(self, reader: Reader) -> None:
        """Parse the line of a placeholder, and insert its node."""
        bare = reader.take("%")
        kind, role_name, index = ("", None, 0) if bare else self._role(reader)
        if not bare:
            reader.expect("%")
        name = self._new_name(reader)
        reader.expect(":")
        value = self._type(reader)
        role = None if bare else Role(kind, name if role_name is None else role_name, index)
        node = self.graph.placeholder(_identifier(name))
        node.target = node.name
        self._define(reader, node, name, value, role=role)

    def _output(self, reader: Reader) -> None:
        """Parse the line of an output, and append it to the outputs."""
        kind, name, index = self._role(reader)
        reader.expect("=")
        node = self._argument(reader)
        reader.end()
        (want,) = (layout for _, layout in self.wants) if self.wants else (None,)
        self.wants.clear()
        self.outputs.append((Role(kind, name or "", index, want), node))

    def _line(self, reader: Reader, phase: str) -> None:
        """Parse the line of an op, a getitem or a constant, and insert its node."""
        reader.expect("%")
        name = self._new_name(reader)
        reader.expect(":")
        value = self._type(reader)
        reader.expect("=")
        if reader.take("%"):
            source = self._defined(reader)
            reader.expect("[")
            args: list[fx.node.Argument] = [source, reader.integer("the index of a result")]
            reader.expect("]")
            kwargs: dict[str, fx.node.Argument] = {}
            target: grammar.Target = operator.getitem
        elif reader.take(f"{grammar.CONSTANT}("):
            self._constant(reader, name, value, phase)
            return
        else:
            target = self._op(reader)
            args, kwargs = self._arguments(reader, target)
        needs = self._needs(reader)
        node = self.graph.create_node("call_function", target, tuple(args), kwargs, name=_identifier(name))
        self._define(reader, node, name, value, phase, needs=needs)

    def _constant(self, reader: Reader, name: str, value: NodeValue, phase: str) -> None:
        """Parse a constant after the word ``constant``, and insert its node, which reads an attribute of the graph
        module.
        """
        start = reader.at
        target = reader.word() or ""
        # It becomes source code, in fx: nothing but a name that hides no attribute of `fx.GraphModule` may stand there.
        first, *rest = target.split(".")
        if not grammar.ATTRIBUTE.fullmatch(target) or any(map(iskeyword, (first, *rest))) or first in _attributes():
            reader.fail("the name of the constant", start)
        content = self._argument(reader) if reader.take(",") else None
        reader.expect(")")
        if not isinstance(value, Value):
            reader.fail("a constant to be one tensor")
        # A large constant is not in the text: on ``meta`` it has its type, and nothing runs by mistake.
        tensor = torch.empty(value.shape, dtype=value.dtype, device="meta")
        if content is not None:
            try:
                tensor = torch.tensor(content, dtype=value.dtype).reshape(value.shape)
            except (RuntimeError, TypeError, ValueError, OverflowError) as error:
                reader.fail(f"the values of a {value} ({error})")
        self.constants[target] = tensor
        node = self.graph.create_node("get_attr", target, name=_identifier(name))
        self._define(reader, node, name, value, phase)

    def _define(
        self, reader: Reader, node: fx.Node, name: str, value: NodeValue, phase: str = "forward", **fields: Any
    ) -> None:
        """Record ``node`` under ``name``, with its `Info`. Of its line only a comment may be left, which gives the
        provenance.
        """
        reader.end()
        self.values[name] = set_info(node, Info(name, value, **reader.provenance(phase), **fields))

    def _check_comm(self, gm: fx.GraphModule) -> None:
        """Check that the text's section ``comm``, if there is one, has the lines that the graph would have. Raise
        TextError if not.
        """
        rows = [str(row) for row in tally(gm, self.mesh)]
        for at, reader in enumerate(self.comm):
            if at >= len(rows) or reader.line.strip() != rows[at]:
                reader.fail(repr(rows[at]) if at < len(rows) else "no more collectives")
        if self.comm and len(self.comm) < len(rows):
            last = self.comm[-1]
            last.fail(f"one more line: {rows[len(self.comm)]!r}", len(last.line))

    # --- parts of a line

    def _role(self, reader: Reader) -> tuple[str, str | None, int]:
        """Parse the role of a placeholder or an output; return (kind, name or None, index)."""
        match = reader.match(ROLE) or reader.fail("a kind such as 'param', 'input' or 'output'")
        kind, index, name = match.groups()
        if name is not None and name.startswith('"'):
            name = json.loads(name)
        return kind, name, int(index or 0)

    def _new_name(self, reader: Reader) -> str:
        """Parse a name after ``%`` that is not yet defined; return it."""
        start = reader.at
        name = reader.word()
        if name is None:
            reader.fail("a name")
        return reader.fail(f"a new name (%{name} is defined above)", start) if name in self.values else name

    def _defined(self, reader: Reader) -> fx.Node:
        """Parse a name after ``%``; return its node."""
        start = reader.at
        name = reader.word()
        expected = "the name of a value that is defined above"
        return self.values[name] if name in self.values else reader.fail(expected, start)

    def _use(self, reader: Reader) -> fx.Node:
        """Parse an operand, ``%name`` or ``%name as LAYOUT``, and return its node. The required layout (None if not
        given) is added to ``wants``.
        """
        node = self._defined(reader)
        tensor = info(node).value
        if isinstance(tensor, Value):
            wanted = reader.take("as ")
            self.wants.append((tensor, self._layout(reader, reader.match(LAYOUT), 0) if wanted else None))
        return node

    def _needs(self, reader: Reader) -> tuple[Layout, ...] | None:
        """Return the layouts that the op of the current line requires of its tensor operands. None if the operands
        already have them.
        """
        wants, self.wants = self.wants, []
        if all(want is None for _, want in wants):
            return None
        needs = [tensor.layout if want is None else want for tensor, want in wants]
        if None in needs:
            reader.fail("'as' and a layout for every tensor that has none")
        return tuple(layout for layout in needs if layout is not None)

    def _layout(self, reader: Reader, match: re.Match[str] | None, group: int) -> Layout:
        """Parse ``match[group]``, the text of a layout, and return the layout. TextError if ``match`` is None or the
        text is no layout.
        """
        if match is None:
            reader.fail("a layout such as [16@dp,8]")
        try:
            if match[group] not in self.layouts:
                self.layouts[match[group]] = Layout.parse(match[group], self.mesh)
            return self.layouts[match[group]]
        except (LayoutError, MeshError, ValueError) as error:
            reader.fail(f"a layout on the mesh {self.mesh} ({getattr(error, 'what', error)})", match.start())

    def _type(self, reader: Reader) -> Any:
        """Parse the type of a result; return a `Value`, a tuple of these, or None."""
        if reader.take("("):
            return tuple(reader.listed(")", lambda: self._type(reader)))
        if reader.take("None"):
            return None
        start = reader.at
        match = reader.match(TENSOR)
        dtype = grammar.dtype_of(match[1]) if match else None
        if match is None or dtype is None:
            reader.fail("a type such as f32[16@dp,8]", start)
        layout = self._layout(reader, match, 3)
        placed = self.placed and match[4] is None
        return Value(dtype, layout.shape, layout if placed else None, host=match[2] is not None)

    def _op(self, reader: Reader) -> grammar.Target:
        """Parse the name of an op; return the op."""
        expected = "an op such as mm, sum.dim_IntList or all_gather"
        return reader.read(WORD, lambda match: grammar.op_of(match[0]), expected)

    def _arguments(
        self, reader: Reader, target: grammar.Target
    ) -> tuple[list[fx.node.Argument], dict[str, fx.node.Argument]]:
        """Parse arguments in parentheses; return (positional, by keyword)."""
        args: list[fx.node.Argument] = []
        kwargs: dict[str, fx.node.Argument] = {}

        def read_argument() -> None:
            keyword = reader.match(KEYWORD)
            if keyword is None:
                if kwargs:
                    reader.fail("a keyword argument")
                args.append(self._argument(reader))
            elif keyword[1] == "axis" and target in MARKERS.values():
                kwargs["axis"] = self._axes(reader)
            else:
                kwargs[keyword[1]] = self._argument(reader)

        reader.expect("(")
        reader.listed(")", read_argument)
        return args, kwargs

    def _axes(self, reader: Reader) -> str:
        """Parse the axes of a marker op; return their names, joined by commas."""

        def read_axis() -> str:
            expected = f"an axis of the mesh {self.mesh}"
            return reader.read(AXIS, lambda match: match[0] if match[0] in self.mesh else None, expected)

        return ",".join(reader.listed(")", read_axis)) if reader.take("(") else read_axis()

    def _argument(self, reader: Reader) -> fx.node.Argument:
        """Parse and return one argument: a node, a list, or a constant."""
        if reader.take("%"):
            return self._use(reader)
        if reader.take("["):
            return reader.listed("]", lambda: self._argument(reader))
        if quoted := reader.match(STRING):
            return json.loads(quoted[0])
        if parts := reader.match(COMPLEX):
            return complex(float(parts[1]), float(parts[2]))
        if number := reader.match(NUMBER):
            return int(number[0]) if re.fullmatch(r"-?\d+", number[0]) else float(number[0])
        start = reader.at
        word = reader.match(WORD)
        try:
            return grammar.constant_of(word[0] if word else "")
        except ValueError:
            reader.fail("a value, a number, a string, a list, a dtype, a device or None", start)


def _identifier(name: str) -> str:
    """Return ``name`` as a valid FX node name."""
    text = re.sub(r"\W", "_", name, flags=re.ASCII)
    return f"_{text}" if not text or text[0].isdigit() else text


@cache
def _attributes() -> frozenset[str]:
    """Return the names of all attributes of an `fx.GraphModule`, which may not be names of constants."""
    return frozenset(dir(fx.GraphModule(torch.nn.Module(), fx.Graph())))
