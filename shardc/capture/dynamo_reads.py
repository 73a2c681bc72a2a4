"""Finds in Dynamo's guards what a trace read of Python (attributes, globals, lengths, types). Finds in Dynamo's graph
which memory the model's outputs have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from operator import getitem
from types import CodeType, FunctionType
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, fx, nn
from torch._dynamo import functional_export
from torch._dynamo.convert_frame import CaptureOutput
from torch._dynamo.exc import ObservedAttributeError
from torch._dynamo.guards import GuardBuilder, install_guard
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch._dynamo.variables import ConstDictVariable, UserDefinedObjectVariable
from torch._dynamo.variables.base import VariableTracker
from torch._guards import Guard

from shardc._compat import is_wrapper, traced_code
from shardc.capture.annotate import OUTPUT, SAME, model_name
from shardc.capture.capture_errors import user_frame
from shardc.capture.side_effects import Change
from shardc.capture.slices import memory_of, value_of
from shardc.errors import CaptureError
from shardc.ir.code import is_of_library, module_name
from shardc.ir.guards import Lookup, Read, Reads, argument_scope, parse
from shardc.ir.inner import with_inner
from shardc.ir.kinds import lost_names, why_refused
from shardc.ir.returned import Memory

# What to do about a loss that has, or reads, tensors that need a gradient.
OF_LOSS = (
    "put what is trained into the model, whose forward may take the targets and return the loss; add terms of the "
    "model's parameters to what the compiled module returns; freeze others with requires_grad_(False)"
)


def memories_of(
    traced: fx.GraphModule, root: nn.Module, first_names: dict[str, str], fakes: Sequence[Tensor],
    input_names: Sequence[str],
) -> tuple[tuple[Memory, ...], dict[int, str]]:  # fmt: skip
    """Return (the `Memory` of each output, storage id -> name of the tensor that owns the storage), which are arguments
    of `returned`.

    Dynamo's graph has the ops that one device runs; AOTAutograd's graph is functionalized.

    Args:
        traced: Dynamo's graph of ``root``.
        first_names: every name of a parameter or buffer of ``root`` -> the first name of that tensor.
        fakes, input_names: the fake tensor and the name of each tensor input.
    """
    # Attributes of modules: tensors among them are no parameters, but outputs may lie in their memory.
    attributes = [(f"{path}.{key}", x) for path, module in root.named_modules() for key, x in vars(module).items()]
    tensors = (*attributes, *root.named_parameters(), *root.named_buffers())
    names = {id(x): model_name(first_names.get(name, name)) for name, x in tensors}
    names |= dict(zip(map(id, fakes), input_names, strict=True))
    # For the inputs of the root, all that Dynamo's graph takes, in order: parameters, buffers and other tensors, too.
    feeds = zip(traced.graph.find_nodes(op="placeholder"), traced._dynamo_bytecode_flatten(*fakes), strict=True)
    owners = {memory_of(node): names.get(id(x), "a tensor forward reads") for node, x in feeds if isinstance(x, Tensor)}
    tags = traced.graph.find_nodes(op="call_function", target=torch.ops.shardc.tag.default)
    # `_Root.forward` marks each output by one of these tags.
    outputs = [tag.args[0] for tag in tags if tag.kwargs.get("name") in (OUTPUT, SAME)]
    return tuple(Memory(memory_of(x), *_as_view(x)) for x in outputs), owners


def _as_view(node: fx.Node) -> tuple[bool, bool]:
    """Return (whether ``node`` is a view made by ``as_strided``, whether torch refuses to change ``node`` in place).

    Torch refuses to change a view that a custom autograd function returns, and one whose elements share memory.
    """
    strided = unwritable = False
    memory = memory_of(node)
    # From view to view, up to the tensor that is no view.
    while node.op in ("call_function", "call_method", "call_module") and node.all_input_nodes:
        source = node.all_input_nodes[0]
        # A result of a custom autograd function: a view if it shares memory with an operand.
        if source.target is torch.ops.higher_order.autograd_function_apply and node.target is getitem:
            return strided, unwritable or memory in map(memory_of, source.all_input_nodes)
        if not isinstance(value_of(source), Tensor) or memory_of(source) != memory:
            break
        if node.target in ("as_strided", torch.as_strided):
            strided, unwritable = True, unwritable or _overlaps_itself(value_of(node))
        node = source
    return strided, unwritable


def _overlaps_itself(x: Tensor) -> bool:
    """Return whether two elements of ``x`` may share memory, which its strides tell: a stride is within the span of the
    smaller ones.
    """
    span = 0
    for step, size in sorted((step, size) for step, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if step <= span:
            return True
        span += step * (size - 1)
    return False


What = Literal["value", "type", "length", "keys", "has", "own"]
# Guard kind -> the property that it checks; other guards check a value.
_CHECKED_PROPERTY: dict[str, What] = {
    "TYPE_MATCH": "type",
    "SEQUENCE_LENGTH": "length", "TUPLE_ITERATOR_LEN": "length", "DICT_LENGTH": "length",
    "DICT_KEYS_MATCH": "keys", "DICT_CONST_KEYS": "keys", "MAPPING_KEYS_CHECK": "keys",
    "DICT_CONTAINS": "has", "DICT_NOT_CONTAINS": "has", "SET_CONTAINS": "has", "SET_NOT_CONTAINS": "has",
    "HASATTR": "has", "NOT_PRESENT_IN_GENERIC_DICT": "own",
}  # fmt: skip
# Guards checked elsewhere: arguments, the modules' tensors, torch's global state.
_CHECKED_ELSEWHERE = {
    "DUPLICATE_INPUT", "OBJECT_ALIASING", "EMPTY_NN_MODULE_HOOKS_DICT", "SHAPE_ENV", "WEAKREF_ALIVE", "DATA_PTR_MATCH",
}  # fmt: skip
_STATE_TABLE = re.compile(r"\._(parameters|buffers|modules|\w*hooks\w*)$")
# Modules of the tracing machinery; their registries grow with every import and no model is computed from them.
_TRACING_MODULES = re.compile(r"module\('(shardc|torch\._\w+|torch(\.\w+)*\._pytree)\b")
# The attribute in which nn.Module.compile keeps a compiled forward; it computes the same as forward.
_COMPILED_CALL = "_compiled_call_impl"
_MODEL, _LOSS, _ARGUMENT = (
    "L['self']._modules['model']",
    "L['self']._loss[0]",
    re.compile(r"L\['self'\]\._flat\[(\d+)\]"),
)


@contextmanager
def recorded() -> Iterator[list[CaptureOutput]]:
    """Context manager that yields a list. Each trace in the block adds its `CaptureOutput` (a class of Dynamo) to the
    list; `reads_of` finds in it what the trace read.

    Also adds guards for absent dict keys and absent attributes that code looks up.
    """
    traces: list[CaptureOutput] = []
    original_getattr = UserDefinedObjectVariable.var_getattr
    original_capture = functional_export.fullgraph_capture
    original_lookup = ConstDictVariable.getitem_const_raise_exception_if_absent

    def record(*args: Any, **kwargs: Any) -> Any:
        traces.append(original_capture(*args, **kwargs))
        return traces[-1]

    def guarded_lookup(self: ConstDictVariable, tx: InstructionTranslatorBase, key: VariableTracker) -> VariableTracker:
        if key not in self:
            self.install_dict_contains_guard(tx, [key])
        return original_lookup(self, tx, key)

    def guarded_getattr(self: UserDefinedObjectVariable, tx: InstructionTranslatorBase, name: str) -> VariableTracker:
        try:
            return original_getattr(self, tx, name)
        except ObservedAttributeError:
            if self.source is not None:
                install_guard(self.source.make_guard(partial(GuardBuilder.HASATTR, attr=name)))
            raise

    with (
        patch.object(UserDefinedObjectVariable, "var_getattr", guarded_getattr),
        patch.object(functional_export, "fullgraph_capture", record),
        patch.object(ConstDictVariable, "getitem_const_raise_exception_if_absent", guarded_lookup),
    ):
        yield traces


def _wrapper_code(model: nn.Module) -> set[CodeType]:
    """Return the code objects of the methods of wrapper subclasses in ``model`` (such as ``__torch_dispatch__``).
    Dynamo does not trace them.
    """
    tensors = (*model.parameters(), *model.buffers())
    classes = {type(inner) for x in tensors if is_wrapper(x) for inner in with_inner(x) if is_wrapper(inner)}
    members = [value for cls in classes for base in cls.__mro__ for value in vars(base).values()]
    # `__func__`: of a class method or static method.
    methods = [getattr(value, "__func__", value) for value in members]
    return {method.__code__ for method in methods if isinstance(method, FunctionType)}


def reads_of(
    trace: CaptureOutput,
    model: nn.Module,
    loss: Callable[..., object] | None,
    states: Iterable[Read],
    graph_inputs: Collection[int],
    objects: Mapping[str, object],
) -> Reads:
    """Return the `Reads` of a trace of ``loss(model(...))``: the attributes and globals that it read, the parts of
    ``objects`` (arguments that are no constants, by `argument_scope`), and ``states`` (reads of torch's global state).
    ``graph_inputs`` has the ``id`` of each tensor that the traced graph takes.

    Raises:
        CaptureError: the code asks for the class of a tensor; or it reads a tensor that is no parameter, buffer or
            input of the model and that requires a gradient or is not a plain dense tensor.
    """
    output = trace.graph_capture_output.output_graph
    imported = dict(trace.graph_capture_output.import_sources)  # Dynamo's name of a module -> the module's name
    # Our names of globals of code that cannot be imported, and of arguments -> the globals, the arguments.
    scopes: dict[str, Any] = dict(objects)
    lookup = Lookup(model, loss, scopes)
    reads = {Read("model", "hooks"), *states}
    tensor_ids = {id(inner) for x in (*model.parameters(), *model.buffers()) for inner in with_inner(x)}
    modules = set(model.modules())

    def varies(text: str, guard: Guard) -> bool:
        """Return whether what ``text`` names may differ from call to call. CaptureError if it is a refused tensor."""
        path = parse(text)
        try:
            value = lookup(path)
            # The modes of modules are part of the key of each call.
            if path[0] == "attribute" and path[2] == "training" and lookup(path[1]) in modules:
                return False
        except (AttributeError, KeyError, IndexError, TypeError):
            return False  # such as objects that the trace itself put there
        if not isinstance(value, Tensor):
            return True
        # `functional_call` reads the parameters that it replaces, which the graph then does not take.
        is_unused = value.requires_grad and id(value) not in graph_inputs
        if id(value) in tensor_ids or is_unused:
            return False
        _refuse_tensor(text, value, guard)
        return True

    for guard in output.guards:
        source = guard.originating_source
        guarded = source.name if isinstance(source.name, str) else source.name()
        text = _expression(guarded, imported, output.global_scope, scopes)
        # Not of the model, the loss or a global; or read by the tracer itself.
        if text is None or _TRACING_MODULES.search(text):
            continue
        read = _read_of(guard, text)
        if read is None:
            continue
        # For a variable, `_read_of` adds its name to ``text``, which is os.environ. It may be absent, or come later.
        of_environment_variable = read.expression != text
        if of_environment_variable or varies(text, guard):
            reads.add(read)
    codes = traced_code(trace.graph_capture_output)
    _refuse_class_queries(model, codes)
    return Reads.of(reads, scopes, (*codes, *_wrapper_code(model)))


def expressed(trace: CaptureOutput, changes: Iterable[Change], reads: Reads) -> list[Change]:
    """Return the ``changes`` of Python state with their expressions rewritten from Dynamo's names to those of
    ``reads``. Changes of globals of torch and of libraries, and of objects outside of the model, the loss and globals,
    are left out.
    """
    capture = trace.graph_capture_output
    scope, imported = capture.output_graph.global_scope, dict(capture.import_sources)
    renamed = []
    for change in changes:
        expression, owner = (_expression(x, imported, scope, reads.scopes) for x in (change.expression, change.owner))
        if expression and owner and not any(map(is_of_library, re.findall(r"module\('([^']+)'\)", expression))):
            renamed.append(replace(change, expression=expression, owner=owner))
    return renamed


def _expression(text: str, imported: Mapping[str, str], dynamo_globals: Mapping[str, Any], scopes: Any) -> str | None:
    """Rewrite ``text``, a guard's expression in Dynamo's names, in terms of ``model``, ``loss`` and globals
    (``module('mine').ALPHA``). Return None if it is about another object.

    Args:
        imported: Dynamo's name of an imported module -> the module's name.
        dynamo_globals: Dynamo's global names -> their values, among them the globals of code that cannot be imported.
        scopes: our names of such globals -> the globals, extended; and of arguments -> the arguments.
    """
    text = text.replace(_MODEL, "model").replace(_LOSS, "loss")

    def argument(match: re.Match[str]) -> str:
        scope_name = argument_scope(int(match[1]))
        return f"scope({scope_name!r})" if scope_name in scopes else match[0]

    def renamed(match: re.Match[str]) -> str:
        if match[1] in imported:
            return f"module({module_name(imported[match[1]])!r})"
        if not match[1].startswith("___unnamed_scope"):
            return match[0]
        module_globals = dynamo_globals[match[1]]
        # Of a class from `namedtuple`, which is constant and needs no guard: a "G[" that is left makes the result None.
        if str(module_globals.get("__name__")).startswith("namedtuple_"):
            return "G[0]"
        # By identity: scopes with equal values are different ones.
        at = next((at for at, x in enumerate(scopes.values()) if x is module_globals), len(scopes))
        scope_name = f"globals{at}"
        scopes.setdefault(scope_name, module_globals)
        return f"scope({scope_name!r})"

    text = _ARGUMENT.sub(argument, re.sub(r"G\['(\w+)'\]", renamed, text))
    return text if text and not re.search(r"\b[LG]\[", text) else None


def _read_of(guard: Guard, text: str) -> Read | None:
    """Return the `Read` that ``guard``, on the object that ``text`` names, stands for. None for a guard on what is
    checked in another way.
    """
    # Dynamo's method that makes the guard, maybe a `partial` with the key that is looked up.
    create = guard.create_fn
    kind, keywords = getattr(create, "func", create).__name__, getattr(create, "keywords", {})
    what, key = _CHECKED_PROPERTY.get(kind, "value"), keywords.get("attr", keywords.get("key"))
    if kind in _CHECKED_ELSEWHERE or key == _COMPILED_CALL:
        return None
    if what == "has" and isinstance(key, bytes):  # the presence of an environment variable
        return Read(f"{text}[{key!r}]")
    # A key that is no literal cannot be named in a guard: all keys are compared.
    read = Read(text, what, key) if isinstance(key, (bool, int, float, str, type(None))) else Read(text, "keys")
    # Entries of a module's tables of parameters, buffers, submodules and hooks are checked in another way.
    return None if read.what != "value" and _STATE_TABLE.search(text) else read


def _refuse_tensor(text: str, value: Tensor, guard: Guard) -> None:
    """Raises CaptureError if the traced code reads the tensor ``value``, which ``text`` names and which is no parameter
    of the model, and it needs a gradient or is not a plain dense tensor.
    """
    text = re.sub(r"scope\('argument(\d+)'\)", r"argument \1", text)
    if value.requires_grad:
        of_loss = text.startswith("loss")
        raise CaptureError(
            f"{'the loss' if of_loss else 'forward'} reads {text}, a tensor of shape {list(value.shape)} that needs a "
            "gradient and is no parameter of the compiled model",
            source=_line(guard),
            fix=OF_LOSS
            if of_loss
            else "reach it through self: an attribute, a list of modules, or a function that is an attribute. compile "
            "does not copy objects of your own classes, and copy.deepcopy does not copy functions: these keep the "
            "parameters of the model that they were made with",
        )
    if refused := why_refused(value):
        kind_of_tensor, instead = refused
        fix = f"put in its place {instead.format(text)}"
        raise CaptureError(f"forward reads {text}, which is {kind_of_tensor}", source=_line(guard), fix=fix)


def _line(guard: Any) -> str | None:
    """Return ``file:line`` of the user's code that made Dynamo install ``guard``; None if it is not known."""
    frames = [f"{frame.filename}:{frame.lineno}" for frame in guard.user_stack or guard.stack or ()]
    return user_frame(frames) or None


def _refuse_class_queries(model: nn.Module, codes: Iterable[CodeType]) -> None:
    """Raises CaptureError if traced code names the user's own class of a parameter or buffer (``isinstance(x,
    Quantised)``), or a method that this class adds.

    In the compiled copy, parameters and buffers of the user's own tensor classes are of torch's classes.
    """
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        cls, lost = lost_names(x)  # the user's class, and names that torch's class in its place has not
        for code in codes if cls is not type(x) else ():
            texts = (constant for constant in code.co_consts if isinstance(constant, str))
            if used := lost.intersection((*code.co_names, *texts)):
                raise CaptureError(
                    f"{code.co_name} asks for {', '.join(sorted(used))}; {name!r} is a {cls.__name__}, and the "
                    "tensors of a compiled module are of torch's classes",
                    source=f"{code.co_filename}:{code.co_firstlineno}",
                    fix=f"ask for an attribute of the tensor, as by hasattr({name}, ...): its attributes are kept",
                )
