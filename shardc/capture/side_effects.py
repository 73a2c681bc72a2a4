"""Handles side effects of forward: those that would change a result of a program raise `CaptureError`, and most others
warn.

Refused are hooks that a trace would leave out or run twice, replaced buffers, and attributes and globals that forward
both sets and reads: a program sets none.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dis
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from sysconfig import get_paths
from types import CodeType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._dynamo.side_effects import SideEffects
from torch._dynamo.variables.base import VariableTracker
from torch._guards import Source, TracingContext

from shardc._compat import PyTree
from shardc.capture.capture_errors import line_with, user_frame
from shardc.errors import CaptureError, ShardcWarning
from shardc.ir.code import calling_line, constant_key
from shardc.ir.guards import BACKWARD_HOOKS, Constant, Lookup, Reads, global_hooks, parse
from shardc.ir.module_paths import name_in

_BACKWARD_FIX = (
    "register a forward hook that registers one on the output instead, which is traced: module.register_forward_hook("
    "lambda module, args, output: output.register_hook(...)); or one on a parameter of the compiled module"
)


def refuse_hooks(model: nn.Module) -> None:
    """Raises CaptureError if ``model`` has backward hooks, or if hooks for all modules are registered. (Forward hooks
    of modules are traced.)
    """
    for path, module in model.named_modules():
        for kind in BACKWARD_HOOKS:  # names of the dicts in which a module has its hooks
            for hook in getattr(module, kind).values():
                what = f"module {path!r}" if path else type(model).__name__
                message = f"{what} has the backward hook {_hook_name(hook)}, which a compiled program cannot run"
                raise CaptureError(message, source=_line(hook), fix=_BACKWARD_FIX)
    for hook in chain.from_iterable(hooks.values() for hooks in global_hooks()):
        raise CaptureError(
            f"the hook {_hook_name(hook)} is registered for all modules, which a compiled program cannot run",
            source=_line(hook),
            fix="register it on the modules that it is for (module.register_forward_hook), or remove it",
        )


def _hook_name(hook: object) -> str:
    """Return the qualified name of a hook, or of its class."""
    return getattr(hook, "__qualname__", type(hook).__qualname__)


def _line(hook: object) -> str | None:
    """Return ``file:line`` of a hook's definition; None for one without Python code."""
    code = getattr(hook, "__code__", None)
    return code and f"{code.co_filename}:{code.co_firstlineno}"


MODEL = "L['self']._modules['model']"
_CHANGES = frozenset({"append", "extend", "insert", "add", "update", "clear", "appendleft"})
_CONSTANTS = (bool, int, float, str, type(None))
# Attributes that torch itself keeps on a module; hooks and tensors have their own checks.
_ATTRIBUTES_OF_TORCH = frozenset(vars(nn.Module()))
_PRESENT: Any = object()  # value of an attribute that code may only test for presence (hasattr)
# Ends a warning of what a forward changes: an attribute, a variable or a global.
NOT_CHANGED = "in forward; the compiled program does not: return what is needed after the call"
_MISSING = (AttributeError, KeyError, IndexError, TypeError)


@dataclass(frozen=True)
class Change:
    """A change of Python state by forward: it sets an attribute or a global, or changes the content of a list or dict
    in one.

    Args:
        expression: as in `Read`; for a global, Dynamo's name of its source.
        name: the attribute.
        value: Dynamo's variable of the new value.
        line: the user's line.
        owner: the expression of the changed object: the module, list or dict.
        stored: Dynamo's attributes of objects that forward makes.
    """

    expression: str
    name: str
    value: VariableTracker
    line: str
    owner: str
    stored: Mapping[VariableTracker, Mapping[str, VariableTracker]] = field(default_factory=dict, repr=False)

    @property
    def tensors(self) -> list[fx.Node]:
        """The traced nodes of all tensors in the new value, also inside of lists, dicts, attributes and closures."""
        # `visit` goes into lists and dicts, but not into attributes that forward has set: these are in ``stored``.
        todo, inside, seen = [self.value], list[VariableTracker](), dict[int, Any]()
        while todo:
            visited = len(inside)
            VariableTracker.visit(inside.append, todo.pop(), seen)
            todo += chain.from_iterable(self.stored.get(variable, {}).values() for variable in inside[visited:])
        proxies = [vars(_traced(variable)).get("proxy") for variable in inside]
        return [proxy.node for proxy in proxies if proxy is not None]

    @property
    def constant(self) -> object:
        """The new value if Dynamo knows it as a constant, else Dynamo's variable (its description of a traced
        value).
        """
        variable = _traced(self.value)
        return variable.as_python_constant() if type(variable).__name__ == "ConstantVariable" else variable


def _traced(variable: VariableTracker) -> VariableTracker:
    """Return the variable that stands behind ``variable`` if that is one of Dynamo's lazy variables that was used, else
    ``variable`` itself.
    """
    return variable.realize() if getattr(variable, "is_realized", bool)() is not False else variable


@contextmanager
def changes_recorded() -> Iterator[list[Change]]:
    """Context manager that yields a list. A trace in the block adds a `Change` for each attribute of the model's
    modules, each global and each closure variable that forward sets, and each list or dict in these that it changes.
    """
    changes: list[Change] = []
    # Dynamo's methods for a set attribute, a changed list or dict, and a set closure variable.
    original_attr, original_mutation = SideEffects.store_attr, SideEffects.mutation
    original_cell = SideEffects.store_cell

    def note(self: SideEffects, item: VariableTracker, name: str | None, value: VariableTracker) -> None:
        # Dynamo's source says where ``item`` comes from; what forward makes itself has none.
        source = getattr(item, "source", None)
        source = None if type(source) is Source else source  # of the stack of modes, which has no name
        text = source and (source.name if isinstance(source.name, str) else source.name())
        if not text or not (MODEL in text or text.startswith("G[")):
            return
        expression = text.replace(MODEL, "model") + (f".{name}" if name else "")
        attribute = name or expression.rpartition(".")[2]
        if attribute not in _ATTRIBUTES_OF_TORCH and "_hooks[" not in expression:
            frames = [f"{frame.filename}:{frame.lineno}" for frame in TracingContext.extract_stack()]
            owner, stored = text.replace(MODEL, "model"), self.store_attr_mutations
            changes.append(Change(expression, attribute, value, user_frame(frames), owner, stored))

    def store_attr(self: SideEffects, item: VariableTracker, name: str, value: VariableTracker, *kind: Any) -> None:
        original_attr(self, item, name, value, *kind)
        note(self, item, name, value)

    def mutate(self: SideEffects, var: VariableTracker) -> None:
        original_mutation(self, var)
        note(self, var, None, var)

    def store_cell(self: SideEffects, cell: VariableTracker, value: VariableTracker) -> None:
        original_cell(self, cell, value)
        note(self, cell, "cell_contents", value)

    with (
        patch.object(SideEffects, "store_attr", store_attr),
        patch.object(SideEffects, "mutation", mutate),
        patch.object(SideEffects, "store_cell", store_cell),
    ):
        yield changes


def changed_reads(
    changes: Iterable[Change],
    reads: Reads,
    model: nn.Module,
    loss: Callable[..., object] | None,
    code: Iterable[CodeType],
    retrace: Callable[[dict[str, Constant]], Reads | None],
) -> Reads:
    """Check that the changes of Python state in forward leave the values that each call reads unchanged. Return
    ``reads``, joined with those of a second trace if the check needs one.

    A table that the first call fills, from no input, has the same value in each call. So has a constant that forward
    sets to the same value, if the graph traced with that value is the same.

    Args:
        changes: attributes and globals that the trace set, with expressions in the terms of ``reads`` (see
            `expressed`).
        retrace: traces the model with these constants set; returns its reads, or None if the graph differs.

    Raises:
        CaptureError: forward reads and changes an attribute or a global whose value may differ from call to call.
    """
    changes = list(changes)
    # Expression -> its latest value. Only attributes can be set for a second trace; items of a list cannot.
    latest = {change.expression: change.constant for change in changes if parse(change.expression)[0] == "attribute"}
    constants = {name: value for name, value in latest.items() if isinstance(value, _CONSTANTS)}
    refused: CaptureError | None = None  # raised unless a second trace, with `constants` set, gives the same graph
    lookup, loaded = Lookup(model, loss, reads.scopes), None
    read_expressions = {read.expression for read in reads.entries}
    # Attributes that code tests for presence (hasattr).
    presence_checks = {f"{read.expression}.{read.key}" for read in reads.entries if read.what in ("has", "own")}
    for change in changes:
        if change.expression not in read_expressions | presence_checks:
            continue  # it is not read, or only after this call has set it
        try:
            before, absent = lookup(parse(change.expression)), False  # `_PRESENT` if this is the second trace
        except _MISSING:
            before, absent = None, True
        if before is _PRESENT or change.expression not in (presence_checks if absent else read_expressions):
            continue  # it is not read, or is there and stays there
        # A table that is filled from no input has the same value in each call.
        fills_table = before is None or isinstance(before, (dict, list, set))
        if fills_table and change.tensors and not any(map(_depends_on_inputs, change.tensors)):
            continue
        loaded = loaded_names(code) if loaded is None else loaded
        name = _variable(change, lookup)
        # Code that only changes the object in place (`self.count += 1`) computes nothing from its value.
        if not name.isidentifier() or name in loaded:
            error = reads_and_changes(change.expression, change.name, change.line or None)
            if absent:  # later calls find it set, and so does the second trace
                refused = refused or error
                constants.setdefault(change.expression, _PRESENT)
                continue
            if change.expression not in constants or not isinstance(before, _CONSTANTS):
                raise error  # no constant that a second trace could start from
            value = constants[change.expression]
            if constant_key(value) != constant_key(before):
                refused = refused or error
    if refused is None:
        return reads
    second_reads = retrace(constants)
    joined = None if second_reads is None else reads.joined(second_reads)
    if joined is None:
        raise refused
    # `sets`: constants that the first call sets in the user's model without an effect on the capture.
    read_of_model = {entry.expression for entry in joined.entries if entry.expression.startswith("model")} - {
        name for name, value in constants.items() if value is _PRESENT
    }
    return replace(joined, sets=tuple((name, constants[name]) for name in sorted(constants.keys() & read_of_model)))


def _variable(change: Change, lookup: Lookup) -> str:
    """Return the name in the user's code of what ``change`` sets: an attribute, a global or a closure variable.

    Args:
        lookup: evaluates expressions.
    """
    # A closure variable is ``function.__closure__[place].cell_contents``: its name is in the function's code.
    function, cell, place = change.expression.removesuffix(".cell_contents").rpartition(".__closure__[")
    if not cell or not change.expression.endswith(".cell_contents"):
        return change.name
    names: tuple[str, ...] = lookup(parse(function)).__code__.co_freevars
    return names[int(place.rstrip("]"))]


def _attribute_text(expression: str) -> str:
    """Return how an error should call the attribute or global that ``expression`` names, such as "the attribute
    'layers.0.count'".
    """
    if attribute := name_in(expression, "model"):
        path = re.sub(r"_modules\['([^']+)'\]", r"\1", attribute)
        return f"the attribute {path!r}"
    name = re.sub(r"module\('([^']+)'\)", r"\1", expression)
    return f"the global {re.sub(r'scope[(][^)]+[)]', '', name)}"


def reads_and_changes(expression: str, name: str, line: str | None) -> CaptureError:
    """Return the error for an attribute or global that forward both reads and changes. ``expression`` is its
    expression, ``name`` its bare name.
    """
    fix = "make it a buffer (a tensor) of the model that forward changes in place, or pass it as an input"
    if name_in(expression, "model"):
        fix = (
            f"make it a buffer (a tensor) that forward changes in place, as by self.{name}.add_(1) or "
            f"self.{name}.copy_(new), or pass it as an input"
        )
    return CaptureError(
        f"forward reads and changes {_attribute_text(expression)}, which a compiled program does not "
        "change: each call would compute with its first value",
        source=line,
        fix=fix,
    )


@contextmanager
def assigned(model: nn.Module, values: dict[str, Constant]) -> Iterator[None]:
    """Context manager in which attributes and globals have other values. ``values`` maps their expressions (as in
    `Read`) to these values.
    """
    lookup = Lookup(model)
    places = [(lookup(parse(name)[1]), parse(name)[2], value) for name, value in values.items()]
    absent = object()  # stands for an attribute that is not there
    # A closure's cell has no ``__dict__``.
    # As in the instance: an attribute of its class is not there, and is deleted in the end.
    before: list[Any] = [
        vars(owner).get(name, absent) if hasattr(owner, "__dict__") else getattr(owner, name, absent)
        for owner, name, _ in places
    ]
    try:
        for owner, name, value in places:
            setattr(owner, name, value)
        yield
    finally:
        for (owner, name, _), value in zip(places, before, strict=True):
            delattr(owner, name) if value is absent else setattr(owner, name, value)


def _depends_on_inputs(node: fx.Node) -> bool:
    """Return whether the value of ``node`` depends on an input of its graph."""
    todo, seen = [node], set()
    while todo:
        current = todo.pop()
        if current.op == "placeholder":
            return True
        if current not in seen:
            seen.add(current)
            todo += current.all_input_nodes
    return False


def loaded_names(code: Iterable[CodeType]) -> set[str]:
    """Return the names of attributes and globals that ``code`` reads. Reads that only serve to change what they read
    (``self.count += 1``) do not count.
    """
    names: set[str] = set()
    for code_object in code:
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(code_object)))
        except (OSError, TypeError, SyntaxError, ValueError):
            if not code_object.co_filename.startswith("<"):  # else made by Dynamo itself
                names |= _loaded_by_bytecode(code_object)
            continue
        attributes, variables = _names_read(tree)
        names |= attributes | variables - {*code_object.co_varnames, *code_object.co_cellvars}
    return names


def _loaded_by_bytecode(code: CodeType) -> set[str]:
    """Return the names that ``code`` reads, as `loaded_names` does, from its bytecode. It is for code whose source is
    missing or part of a line.
    """
    steps = pairwise([*dis.get_instructions(code), None])  # (instruction, the next one)
    loads = [(step.argval, after) for step, after in steps if step is not None and step.opname.startswith("LOAD_")]
    named = {name for name, after in loads if isinstance(name, str) and getattr(after, "argval", None) not in _CHANGES}
    return named & {*code.co_names, *code.co_freevars}


def _names_read(tree: ast.AST) -> tuple[set[str], set[str]]:
    """Return (names of attributes, names of variables) that the code ``tree`` reads. Reads that only serve to change
    what they read (``self.count += 1``) do not count.
    """
    ignored = _reads_to_change(tree)
    reads = [x for x in ast.walk(tree) if x not in ignored]
    attributes = {x.attr for x in reads if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Load)}
    for call in reads:
        match call:
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=name), *_]):
                attributes.add(str(name))
    return attributes, {x.id for x in reads if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)}


def _reads_to_change(tree: ast.AST) -> set[ast.AST]:
    """Return the nodes of ``tree`` that read an object only to change it: ``self.count`` in ``self.count += 1``,
    ``self.cache[key] = value`` and ``self.count.append(y)``, if the result of this call is not used.
    """
    nodes: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.AugAssign):  # the target, without its subscripts
            nodes |= {x for x in ast.walk(node.target) if _name(x) == _name(node.target) != ""}
        elif isinstance(node, ast.Assign):
            for target in node.targets:  # also ``self.count = self.count + 1``
                nodes |= {x for x in ast.walk(node.value) if _name(x) == _name(target) != ""}
                # ``self.cache[key] = value``: ``self.cache`` is read only to be changed.
                nodes.update(ast.walk(target.value) if isinstance(target, ast.Subscript) else ())
        elif isinstance(node, ast.Expr | ast.Lambda):
            call = node.value if isinstance(node, ast.Expr) else node.body  # of a statement or a lambda
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in _CHANGES:
                place = call.func.value
                nodes |= {call.func, *(ast.walk(place) if isinstance(place, ast.Attribute | ast.Name) else ())}
    return nodes


def _name(node: ast.AST) -> str:
    """Return the name of the attribute or variable in ``node``, without any subscripts: "b" for ``a.b[0]``. "" for
    other expressions.
    """
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def side_effects(
    messages: Iterable[str], model: nn.Module, run: Callable[[], object], sets: Iterable[Change] = ()
) -> list[ShardcWarning]:
    """Return warnings about the side effects of forward that Dynamo reports. May run the model once, to find buffers
    that it replaces.

    Args:
        messages: Dynamo's warnings.
        model: a copy of the model, whose parameters and buffers may be overwritten.
        run: calls the model once on fake tensors.
        sets: the attributes that forward sets on its modules.

    Returns:
        A warning for each module that changes its attributes or fills an empty buffer that it does not save, and for
        globals and variables around hooks.

    Raises:
        CaptureError: forward replaces a buffer by another tensor.
    """
    changed_refs = [ref for text in messages if "side effects" in text for ref in re.findall(r'"([^"]+)"', text)]
    texts: list[str | None] = []
    if any("_buffers" in ref for ref in changed_refs):  # in place, too: ``self.count += 1`` also sets the attribute
        with restored(model) as before:
            with torch.no_grad():
                run()
            texts += replaced_buffers(before, lambda name: line_with(f"self.{name} = ", model))
    # Numbers and other non-tensors that a module sets on itself need no warning: `changed_reads` checks them.
    model_changes = [change for change in sets if change.owner.startswith("model")]
    silent = {change.owner for change in model_changes} - {change.owner for change in model_changes if change.tensors}
    changed_refs = [ref for ref in changed_refs if ref.replace(MODEL, "model") not in silent]
    for ref in changed_refs:
        if "_buffers" not in ref and "_parameters" not in ref:
            owner = ref.replace(MODEL, "model")
            texts.append(_change_text(ref, [x.name for x in model_changes if x.owner == owner and x.tensors]))
    return [ShardcWarning(f"{change} {NOT_CHANGED}") for change in dict.fromkeys(texts) if change is not None]


def changed_arguments(model: nn.Module, args: Sequence[PyTree], kwargs: Mapping[str, PyTree]) -> list[ShardcWarning]:
    """Return a warning for each list or dict among the arguments that the model changes. Runs the model once on fake
    tensors.
    """
    bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
    # (expression, list or dict, its content before) of each, at any depth.
    containers = [(name, x, _contents(x)) for root, arg in bound.items() for name, x in _containers(arg, root)]
    if not containers:
        return []
    # The capture succeeded: an error here is of this run only.
    with restored(model), torch.no_grad(), contextlib.suppress(Exception):
        model(*args, **kwargs)
    changed = [name for name, x, before in containers if _contents(x) != before]
    text = "in forward; the compiled program does not: return the new value instead"
    return [ShardcWarning(f"the model changes its argument {name} {text}") for name in changed]


Container = list[PyTree] | dict[object, PyTree]


def _containers(value: PyTree, name: str) -> Iterator[tuple[str, Container]]:
    """Yields (expression, container) for each list and dict in ``value``, itself included. ``name`` is the expression
    of ``value``.
    """
    if isinstance(value, list | dict):
        yield name, value
    if isinstance(value, list | tuple | dict):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _containers(inner, f"{name}[{key!r}]")


def _contents(value: Container) -> list[tuple[object, int]]:
    """Return the content of a list or dict in comparable form: (key, ``id`` of the value) of each item."""
    return [(key, id(x)) for key, x in (value.items() if isinstance(value, dict) else enumerate(value))]


Before = dict[str, tuple[nn.Module, dict[str, object], dict[str, Tensor | None]]]


def replaced_buffers(before: Before, line: Callable[[str], str | None]) -> list[str]:
    """Check which buffers a run of the model has set. Return a text for each buffer that was None and is not saved: a
    cache that the run has filled.

    Args:
        before: the modules before the run, as `restored` yields them.
        line: name of a buffer -> the line, ``file:line``, that sets it.

    Raises:
        CaptureError: the run has replaced another buffer.
    """
    texts = []
    for path, (module, _, buffers) in before.items():
        for name, buffer in module._buffers.items():
            if buffer is (had := buffers.get(name)):  # the same tensor, maybe changed in place
                continue
            if had is not None or name not in module._non_persistent_buffers_set:
                raise CaptureError(
                    f"the model replaces the buffer {f'{path}.{name}'.lstrip('.')!r} by another tensor",
                    source=line(name) or calling_line(),
                    fix=f"change it in place, as by self.{name}.copy_(new)",
                )
            texts.append(f"{module_text(path)} fills its empty buffer {name!r}")
    return texts


@contextlib.contextmanager
def restored(model: nn.Module) -> Iterator[Before]:
    """Context manager that gives the modules of ``model`` their attributes and buffers back on exit. Yields what they
    had: module path -> (module, its attributes, its buffers).
    """
    before = {path: (module, dict(module.__dict__), dict(module._buffers)) for path, module in model.named_modules()}
    with contextlib.ExitStack() as stack:
        for module, _, _ in before.values():  # on exit, `patch.dict` restores both dicts
            stack.enter_context(patch.dict(vars(module)))
            stack.enter_context(patch.dict(module._buffers))
        yield before


def _change_text(ref: str, names: Collection[str]) -> str | None:
    """Return the warning text for an object that forward changes. None for globals of an installed library, which may
    keep state there during a call.

    Args:
        ref: the object in Dynamo's notation (``L['self']._modules['model'].count``).
        names: if it is a module, its attributes that forward sets to tensors.
    """
    if ref.startswith("G["):
        # G['__import_pkg_dot_mod'].name: Dynamo's name of a module, then that of the global.
        scope, _, name = ref.removeprefix("G['").partition("']")
        module = next((m for m in sys.modules if f"__import_{m.replace('.', '_dot_')}" == scope), "")
        file = getattr(sys.modules.get(module), "__file__", None) or ""
        installed = any(file.startswith(folder) for key, folder in get_paths().items() if key in ("purelib", "platlib"))
        return None if installed else f"the model changes globals of {module or scope}{name and f' ({name[1:]})'}"
    parts = re.split(r"\._(?:forward|backward)(?:_pre)?_hooks", ref)
    # Without the first one, which is the model in the root module.
    path = ".".join(re.findall(r"_modules\['([^']+)'\]", parts[0])[1:])
    return (
        attributes_text(path, names)
        if len(parts) == 1
        else f"a hook of {module_text(path)} changes variables around it"
    )


def attributes_text(path: str, names: Collection[str]) -> str:
    """Return the warning text for a module (at ``path``) whose forward sets its attributes ``names``. An empty
    ``names`` means that they are unknown.
    """
    listed = ", ".join(map(repr, dict.fromkeys(names)))
    return f"{module_text(path)} changes its attribute{'' if len(set(names)) == 1 else 's'}{listed and f' {listed}'}"


def module_text(path: str) -> str:
    """Return the module at ``path`` as text for a warning: "module 'layers.0'" or "the model"."""
    return f"module {path!r}" if path else "the model"


def print_nothing(*values: object, **how: Any) -> None:
    """Replaces ``print``: does nothing in a trace, prints otherwise."""
    if not torch.compiler.is_compiling():
        _print(*values, **how)


_print = print
OTHER_FORMS = ((builtins, "print", print_nothing),)


def prints(codes: Iterable[CodeType]) -> list[ShardcWarning]:
    """Return a warning for each of the user's functions that calls ``print``. ``codes`` are the functions' code
    objects.
    """
    lines = [f"{code.co_filename}:{code.co_firstlineno}" for code in codes if "print" in code.co_names]
    return [
        ShardcWarning(f"{line} prints in forward; the compiled program does not: print what the module returns")
        for line in dict.fromkeys(lines)
        if not line.startswith(__file__)
    ]
