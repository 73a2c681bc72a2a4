"""What a model's forward sets on its modules; what it reads too is refused, since a program sets nothing."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any
from unittest.mock import patch

from torch import nn
from torch._dynamo.side_effects import SideEffects
from torch._guards import TracingContext

from shardc.capture.source import users_own
from shardc.errors import CaptureError
from shardc.ir.reads import Lookup, Reads, parse

MODEL = "L['self']._modules['model']"
_CHANGES = frozenset({"append", "extend", "insert", "add", "update", "clear", "setdefault", "appendleft"})
# Of a config of transformers: which loss goes with the labels, a string that the first call chooses where it is None.
_CHOSEN_ONCE = frozenset({"problem_type"})
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


def refuse_changed_reads(
    changes: Iterable[Change], reads: Reads, model: nn.Module, loss: Any, code: Iterable[CodeType]
) -> None:
    """Raises CaptureError for an attribute that forward reads and changes: one device has another value in each call.

    A table that is filled at the first call, and does not depend on what comes in, is the same in each call.
    """
    at, loaded = Lookup(model, loss, reads.scopes), None
    seen = {read.expression for read in reads.found}
    for change in changes:
        if change.expression not in seen:
            continue  # what is read is what this call has set
        try:
            before = at(parse(change.expression))
        except _MISSING:
            continue
        if change.name in _CHOSEN_ONCE and "/transformers/" in change.line:
            continue
        filled = before is None or isinstance(before, (dict, list, set))
        if filled and change.tensors and not any(map(_of_inputs, change.tensors)):
            continue
        loaded = _loaded(code) if loaded is None else loaded
        if loaded is None or change.name in loaded:
            path = re.sub(r"_modules\['([^']+)'\]", r"\1", change.expression.removeprefix("model."))
            raise CaptureError(
                f"forward reads and changes the attribute {path!r}, which a compiled program does not change: each "
                "call would compute with its first value",
                source=change.line or None,
                fix=f"make it a buffer (a tensor) that forward changes in place, as by self.{change.name}.add_(1) or "
                f"self.{change.name}.copy_(new), or pass it as an input",
            )


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
