"""What a model's forward sets on its modules; what it reads too is refused, since a program sets nothing."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import CodeType
from typing import Any
from unittest.mock import patch

from torch import nn
from torch._dynamo.side_effects import SideEffects
from torch._guards import TracingContext

from shardc.capture.source import users_own
from shardc.errors import CaptureError
from shardc.ir.reads import Constant, Lookup, Reads, parse

MODEL = "L['self']._modules['model']"
_CHANGES = frozenset({"append", "extend", "insert", "add", "update", "clear", "setdefault", "appendleft"})
_CONSTANTS = (bool, int, float, str, type(None))
_TORCHS = frozenset(vars(nn.Module()))  # what torch keeps on a module; hooks and tensors are looked after elsewhere
_MISSING = (AttributeError, KeyError, IndexError, TypeError)


@dataclass(frozen=True)
class Change:
    """An attribute that forward sets, or a list or dict there that it changes.

    Args:
        expression: as in `Read`.
        name: of the attribute.
        value: Dynamo's variable for what it is afterwards.
        line: the user's line.
        owner: the expression of what is changed: the module, or the list or dict.
    """

    expression: str
    name: str
    value: Any
    line: str
    owner: str

    @property
    def tensors(self) -> list[Any]:
        """The nodes of the tensors in the new value."""
        items = vars(self.value.realize()).get("items")
        inside = list(items.values()) if isinstance(items, dict) else items if isinstance(items, list) else []
        proxies = [vars(each.realize()).get("proxy") for each in (self.value, *inside)]
        return [proxy.node for proxy in proxies if proxy is not None]

    @property
    def constant(self) -> Any:
        """The new value where it is a constant; else what is none."""
        variable = self.value.realize()
        return variable.as_python_constant() if type(variable).__name__ == "ConstantVariable" else variable


@contextmanager
def changes_recorded() -> Iterator[list[Change]]:
    """What the trace in the block sets on the model's modules."""
    found: list[Change] = []
    store, mutation = SideEffects.store_attr, SideEffects.mutation

    def note(item: Any, name: str | None, value: Any) -> None:
        source = getattr(item, "source", None)
        text = source and (source.name if isinstance(source.name, str) else source.name())
        if not text or not text.startswith(MODEL):
            return
        own = text.replace(MODEL, "model") + (f".{name}" if name else "")
        attribute = name or own.rpartition(".")[2]
        if attribute.isidentifier() and attribute not in _TORCHS and "_hooks[" not in own:
            frames = [f"{frame.filename}:{frame.lineno}" for frame in TracingContext.extract_stack()]
            found.append(Change(own, attribute, value, users_own(frames), text.replace(MODEL, "model")))

    def store_attr(self: Any, item: Any, name: str, value: Any, *kind: Any) -> None:
        store(self, item, name, value, *kind)
        note(item, name, value)

    def mutate(self: Any, var: Any) -> None:
        mutation(self, var)
        note(var, None, var)

    with patch.object(SideEffects, "store_attr", store_attr), patch.object(SideEffects, "mutation", mutate):
        yield found


def changed_reads(
    changes: Iterable[Change],
    reads: Reads,
    model: nn.Module,
    loss: Any,
    code: Iterable[CodeType],
    settles: Callable[[dict[str, Constant]], Reads | None],
) -> Reads:
    """What a trace reads, where it may change what it reads: one device has another value in the next call.

    A table that is filled at the first call, and does not depend on what comes in, is the same in each call. So is a
    constant with which the model does the same, and which it leaves as it is.

    Args:
        settles: what a trace reads of the model with such constants; None where it does something else.

    Raises:
        CaptureError: an attribute that may have another value in each call.
    """
    changes = list(changes)
    after = {change.expression: change.constant for change in changes if parse(change.expression)[0] == "attribute"}
    constants = {name: value for name, value in after.items() if isinstance(value, _CONSTANTS)}
    refused: CaptureError | None = None
    at, loaded = Lookup(model, loss, reads.scopes), None
    seen = {read.expression for read in reads.found}
    for change in changes:
        if change.expression not in seen:
            continue  # what is read is what this call has set
        try:
            before = at(parse(change.expression))
        except _MISSING:
            continue
        filled = before is None or isinstance(before, (dict, list, set))
        if filled and change.tensors and not any(map(_of_inputs, change.tensors)):
            continue
        loaded = _loaded(code) if loaded is None else loaded
        if loaded is None or change.name in loaded:
            path = re.sub(r"_modules\['([^']+)'\]", r"\1", change.expression.removeprefix("model."))
            error = CaptureError(
                f"forward reads and changes the attribute {path!r}, which a compiled program does not change: each "
                "call would compute with its first value",
                source=change.line or None,
                fix=f"make it a buffer (a tensor) that forward changes in place, as by self.{change.name}.add_(1) or "
                f"self.{change.name}.copy_(new), or pass it as an input",
            )
            if change.expression not in constants or not isinstance(before, _CONSTANTS):
                raise error
            value = constants[change.expression]
            if type(value) is not type(before) or value != before:
                refused = refused or error
    if refused is None:
        return reads
    settled = settles(constants)
    both = None if settled is None else reads.joined(settled)
    if both is None:
        raise refused
    read = {each.expression for each in both.found}
    return replace(both, sets=tuple((name, value) for name, value in sorted(constants.items()) if name in read))


@contextmanager
def assigned(model: nn.Module, values: dict[str, Constant]) -> Iterator[None]:
    """Has attributes of a model, by the expressions for them, be ``values`` in the block."""
    at = Lookup(model)
    places = [(at(parse(name)[1]), parse(name)[2], value) for name, value in values.items()]
    before = [vars(owner).get(name, places) for owner, name, _ in places]
    try:
        for owner, name, value in places:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(places, before, strict=True):
            delattr(owner, name) if value is places else setattr(owner, name, value)


def _of_inputs(node: Any) -> bool:
    """Whether a node is computed of something that comes into the graph."""
    todo, seen = [node], set()
    while todo:
        here = todo.pop()
        if here.op == "placeholder":
            return True
        if here not in seen:
            seen.add(here)
            todo += here.all_input_nodes
    return False


def _loaded(code: Iterable[CodeType]) -> set[str] | None:
    """The names of attributes that ``code`` loads, but to change them or to compute their own next value.

    None where the source of some code cannot be read.
    """
    names: set[str] = set()
    for each in code:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(each)))
        except (OSError, TypeError, SyntaxError, ValueError):
            if each.co_filename.startswith("<"):
                continue  # made by Dynamo itself
            return None
        _Loads(names).visit(tree)
    return names


class _Loads(ast.NodeVisitor):
    def __init__(self, names: set[str]) -> None:
        self._names = names
        self._targets: list[str] = []

    def visit_Assign(self, node: ast.Assign) -> None:
        targets = [target.attr for target in node.targets if isinstance(target, ast.Attribute)]
        for target in node.targets:
            # ``self.cache[key] = value`` loads the attribute to change it.
            self.visit(target.slice if isinstance(target, ast.Subscript) else target)
        self._targets += targets
        self.visit(node.value)
        del self._targets[len(self._targets) - len(targets) :]

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _CHANGES:
            held = call.func.value
            for part in (*call.args, *call.keywords, *([] if isinstance(held, ast.Attribute) else [held])):
                self.visit(part)
        else:
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if isinstance(node.ctx, ast.Load) and node.attr not in self._targets:
            self._names.add(node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr") and len(node.args) > 1:
            name = node.args[1]
            self._names.update([str(name.value)] if isinstance(name, ast.Constant) else [])
        self.generic_visit(node)
