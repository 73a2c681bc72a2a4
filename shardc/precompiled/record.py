"""`Record`, the content of a saved program's ``program.json``, and checks of the files in its folder.

A program may come from somebody else, so nothing that a file names is imported or called:

- Ops: those that compute tensors from tensors and numbers (`allowed`). They are functional ops of aten and prims,
  collectives over the mesh's groups, shardc's own ops, and ops of the user's libraries with a registered rule. Other
  ops could read and write files, open sockets or print.
- Pytree structures of arguments and results are JSON:

      "*"                                              a leaf
      {"dict": [["a", "*"], ["b", {"list": ["*"]}]]}   also tuple, OrderedDict, Size
      {"node": "models.Output", "context": [...], "children": ["*"]}

  The class of a ``node`` is looked up by name among those that this process has registered with `torch.utils._pytree`,
  or is a named tuple at the top of an imported module. torch's own `treespec_loads` imports modules that a file names.
"""

from __future__ import annotations

import hashlib
import json
import operator
import os
import re
import stat
import sys
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from shardc._compat import is_dispatched, pytree, spec_children
from shardc.capture import register_caches
from shardc.errors import PrecompiledError
from shardc.ir import grammar
from shardc.ir.arena import MemoryPlan
from shardc.ir.comm_volume import arguments_of, group_axes
from shardc.ir.guards import Guards, Reads
from shardc.ir.mesh import Mesh
from shardc.ir.op_traits import NAMESPACE, OWN_NAMESPACE
from shardc.ir.returned import Returned
from shardc.plan.value import Plan
from shardc.precompiled.program_key import PLAIN, ProgramKey
from shardc.precompiled.timed import Timed, complete
from shardc.rules import is_registered
from shardc.runtime.inputs import Constant, Signature
from shardc.validate import Range, checked, torch_name
from shardc.verify.subject import Broken, Subject

_NAMESPACES = (
    "aten",
    "prims",
    NAMESPACE,
    OWN_NAMESPACE,
    "shardc_random",
    "shardc_checks",
    "shardc_order",
    "shardc_recurrent",
    "shardc_experts",
    "shardc_float8",
    "shardc_function",
    "shardc_attention",
)
_TYPES = re.compile(r"(Optional|List|Tuple)\[(.*)\]")
_VALUES = {"Tensor", "int", "SymInt", "float", "bool", "number", "Scalar", "ScalarType", "Layout", "Device",
           "MemoryFormat", "SymBool", "SymFloat", "Generator", "Any"}  # fmt: skip
# String arguments that are allowed: none of them is a path, code or a message.
_WORDS = {
    "api_name", "approximate", "axis", "body", "cell", "device", "driver", "equation", "group_name", "held",
    "indexing", "interpolation", "method", "mode", "norm", "ord", "over", "padding", "reduce", "reduce_op",
    "rounding_mode", "side", "UPLO",
}  # fmt: skip
_CHECK: torch._ops.OpOverload = torch.ops.aten._linalg_check_errors.default  # the one op without a result
_WORD = re.compile(r"[\w:,.> -]{0,200}", re.ASCII)
# Ops that reinterpret memory, or do not check an index.
_UNCHECKED = re.compile(r"_test|_nested|.*_unsafe$|_reinterpret|_debug|_validate_sparse|.*_make_per_")


def allowed(subject: Subject) -> Broken:
    """Check that a graph calls only ops that a saved program may contain, with arguments that their schemas allow.
    Yields (node, reason) for each violation.
    """
    for node in subject.calls:
        if node.target is operator.getitem:
            continue
        if not grammar.is_torch_op(node.target) or not allowed_op(node.target):
            yield node, f"a saved program may not call {node.target}"
            continue
        target: torch._ops.OpOverload = node.target
        names = [argument.name for argument in target._schema.arguments]
        if len(node.args) > len(names) or not set(node.kwargs) <= set(names[len(node.args) :]):
            yield node, f"its arguments are not those of {target._schema}"
            continue
        for name, value in arguments_of(node).items():
            if isinstance(value, str) and (name not in _WORDS or not _WORD.fullmatch(value)):
                yield node, f"{name}={value!r} is no word"
            elif name == "group_name" and group_axes(value, subject.mesh) is None:
                yield node, f"{value!r} is no group of the mesh {subject.mesh}"


@cache
def allowed_op(op: torch._ops.OpOverload) -> bool:
    """Return whether a saved program may call the op ``op``. Its schema decides: for example, only collectives may
    write to their arguments.
    """
    schema = op._schema
    if op.namespace not in _NAMESPACES:
        return is_registered(op)
    # Ops of TorchScript only (aten::save) are not dispatched.
    if op is _CHECK:
        return True
    if not is_dispatched(op) or _UNCHECKED.match(schema.name.partition("::")[2]) or not schema.returns:
        return False
    words = {argument.name for argument in schema.arguments if _kind(argument.type) == "str"}
    kinds = {_kind(x.type) for x in (*schema.arguments, *schema.returns)} - {"str"}
    # Only collectives may write to their arguments.
    return words <= _WORDS and kinds <= _VALUES and (not schema.is_mutable or op.namespace == NAMESPACE)


def is_own(op: Any) -> bool:
    """Return whether ``op`` and its rule are torch's or shardc's, not the user's."""
    plain = op is operator.getitem or grammar.is_torch_op(op) and op.namespace in _NAMESPACES
    return plain and not is_registered(op)


def _kind(kind: object) -> str:
    """Return the innermost type of a schema's argument: of ``Optional[List[int]]``, ``int``."""
    text = str(kind)
    while match := _TYPES.fullmatch(text):
        text = match[2]
    return text


LEAF = "*"
_LISTS: dict[str, type] = {"list": list, "tuple": tuple, "Size": torch.Size}
_DICTS: dict[str, type] = {"dict": dict, "OrderedDict": OrderedDict}
_FIX = (
    "use lists, tuples, dicts, named tuples at the top of a module, and dataclasses that are registered with "
    "torch.utils._pytree"
)
_DEEPEST = 100


def spec_to_json(spec: pytree.TreeSpec, what: str) -> object:
    """Return a pytree structure as JSON data; PrecompiledError if a container class or a key has no JSON form."""
    kind, children = spec.type, [spec_to_json(child, what) for child in spec_children(spec)]
    if spec.is_leaf():
        return LEAF
    for name, container in _LISTS.items():
        if kind is container:
            return {name: children}
    for name, container in _DICTS.items():
        if kind is container:
            if all(type(key) in PLAIN for key in spec.context):
                return {name: [list(pair) for pair in zip(spec.context, children, strict=True)]}
            raise PrecompiledError(f"{what} have a {name} with the keys {spec.context!r}", fix="use strings for keys")
    owner, context = (spec.context, None) if kind is namedtuple else (kind, spec.context)
    name = _name(owner)
    if _class_of(name) is not owner or plain(context) != context:
        raise PrecompiledError(f"the structure of {what} cannot be saved: it has a {name}", fix=_FIX)
    return {"node": name, "context": plain(context), "children": children}


def spec_from_json(data: object, what: str, depth: int = 0) -> pytree.TreeSpec:
    """Return the pytree structure that `spec_to_json` wrote. Raises PrecompiledError for other data or an
    unregistered class.
    """
    if data == LEAF:
        return pytree.tree_flatten(0)[1]
    if depth > _DEEPEST or not isinstance(data, dict):
        raise PrecompiledError(f"{what} are no structure of values")

    def below(items: object) -> list[pytree.TreeSpec]:
        if not isinstance(items, list):
            raise PrecompiledError(f"{what} are no structure of values")
        return [spec_from_json(item, what, depth + 1) for item in items]

    if len(data) == 1:
        ((name, items),) = data.items()
        if name in _LISTS:
            return pytree.TreeSpec(_LISTS[name], None, below(items))
        if name in _DICTS and isinstance(items, list) and all(_is_pair(item) for item in items):
            keys = [key for key, _ in items]
            if len({(type(key), key) for key in keys}) == len(keys):
                return pytree.TreeSpec(_DICTS[name], keys, below([item for _, item in items]))
    elif set(data) == {"node", "context", "children"} and isinstance(data["node"], str):
        cls = _class_of(data["node"])
        if cls is None:
            raise PrecompiledError(
                f"{what} have a {data['node']}, which this program has not registered with pytree",
                fix="import what registers it before the program is loaded",
            )
        if data["context"] != plain(data["context"]):
            raise PrecompiledError(f"{what} have a {data['node']} with a context that is not plain")
        if issubclass(cls, tuple) and hasattr(cls, "_fields"):
            return pytree.TreeSpec(namedtuple, cls, below(data["children"]))
        return pytree.TreeSpec(cls, data["context"], below(data["children"]))
    raise PrecompiledError(f"{what} are no structure of values")


def _class_of(name: str) -> type | None:
    """Return the container class ``name`` (module and name) that pytree knows: a registered class or a named tuple.
    None if there is none.
    """
    if (cls := registered().get(name)) is not None:
        return cls
    module, _, attribute = name.rpartition(".")
    candidate: object = vars(sys.modules[module]).get(attribute) if module in sys.modules else None
    if not isinstance(candidate, type) or not issubclass(candidate, tuple) or _name(candidate) != name:
        return None
    scope = getattr(candidate.__new__, "__globals__", {})  # globals that only code generated by `namedtuple` has
    return candidate if str(scope.get("__name__")).startswith("namedtuple_") and hasattr(candidate, "_fields") else None


def registered() -> dict[str, type]:
    """Return name -> class of the container classes that are registered with pytree. Classes of torch's internals and
    ambiguous names are left out.
    """
    register_caches()
    kinds = [kind for kind in (*pytree.SUPPORTED_NODES, *pytree.SUPPORTED_SERIALIZED_TYPES) if isinstance(kind, type)]
    out: dict[str, type] = {}
    for kind in dict.fromkeys(kinds):
        if kind.__module__ not in ("builtins", "collections") and not kind.__module__.startswith("torch._"):
            out[_name(kind)] = kind if _name(kind) not in out else type(None)
    return {name: kind for name, kind in out.items() if kind is not type(None)}


def plain(context: object) -> object:
    """Return a copy of a pytree ``context`` without what JSON cannot hold: other values become ``[]``, and dict entries
    whose key is not text are left out. The context can be saved if it equals the copy.
    """
    if isinstance(context, dict):
        return {key: plain(value) for key, value in context.items() if isinstance(key, str)}
    if isinstance(context, list):
        return [plain(value) for value in context]
    return context if type(context) in PLAIN else []


def _name(kind: type) -> str:
    """Return the qualified name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_pair(item: object) -> bool:
    """Whether ``item`` is a list [key, value] with a plain key."""
    return isinstance(item, list) and len(item) == 2 and type(item[0]) in PLAIN


VERSION = 15
RECORD, ARTIFACTS = "program.json", "inductor.bin"
LARGEST_TEXT = 1 << 30  # bytes of a file that is parsed
_COPY = "copy the files themselves into the folder"
AGAIN = "compile and save the program again"

Count = Annotated[int, Range(0, 1 << 50)]
Sizes = tuple[Count, ...]


@dataclass(frozen=True)
class TensorType:
    """Shape, strides, dtype and device of a tensor on one rank."""

    shape: Sizes
    stride: Sizes
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, x: Tensor) -> TensorType:
        return cls(tuple(x.shape), x.stride(), x.dtype, str(x.device))


@dataclass(frozen=True)
class Fixed:
    """A placeholder's value that is not a tensor: a number, a string or None."""

    constant: bool | int | float | str | None


@dataclass(frozen=True)
class LargeConstant:
    """A large constant of a saved graph: its name, type and number of bytes. The bytes of all these constants lie in
    one file, in the order of the record.
    """

    name: str
    type: TensorType
    bytes: Count


@dataclass(frozen=True)
class Half:
    """The data of a saved graph that its text does not contain: types of placeholders, large constants, memory plan.

    Args:
        placeholders: (name in the graph, type or value).
        constants: the large constants, in the order of their bytes.
        reads: for a backward, (placeholder, kind, name) of each forward input that it reads (`shardc.ir.graph.READS`).
        memory: the plan of the arena for results of collectives.
    """

    placeholders: tuple[tuple[str, TensorType | Fixed], ...]
    constants: tuple[LargeConstant, ...]
    reads: tuple[tuple[str, Literal["param", "buffer", "input"], str], ...]
    memory: MemoryPlan


@dataclass(frozen=True)
class Record:
    """A saved program without its graphs.

    Args:
        shardc_program: version of the format.
        torch: version of torch.
        key, guards: the cache key of the program, and the values that its capture read.
        inputs: (name, layout as text) of each tensor input; with the axis of microbatches where microbatches split it.
        levels, causes: parameter -> its FSDP level, and the plan entry that set its compute layout.
        output_spec: the JSON of `spec_to_json`.
        returned: how each output aliases other tensors.
        experts: name -> JSON of an expert function that the graphs call.
        functions: name -> JSON of a function of ``cond``, ``scan`` or ``while_loop``, behind those that it calls.
        halves: name of each graph -> its `Half`.
        files: name of each other file -> its sha256.
        timed: the attributes of a program with microbatches; None for another.
    """

    shardc_program: int
    torch: str
    key: ProgramKey
    guards: Guards
    inputs: tuple[tuple[str, str], ...]
    levels: Mapping[str, Annotated[int, Range(0, 3)]]
    causes: Mapping[str, str]
    output_spec: Any
    returned: tuple[Returned, ...]
    experts: Mapping[str, Any]
    functions: Mapping[str, Any]
    halves: Mapping[str, Half]
    files: Mapping[str, str]
    timed: Timed | None


def read_record(folder: Path, evaluates: bool = True) -> Record:
    """Return the `Record` of the program saved in ``folder``. With ``evaluates``, the program must also have its
    inference graph, which runs if no gradients are recorded.

    Raises:
        PrecompiledError: there is none, or it is of another version or torch, or has unexpected contents.
    """
    path = folder / RECORD
    content = _content(folder)
    record: Record = checked(content, Record, str(path), PrecompiledError, tables=True, readers=_READERS, fix=AGAIN)
    _check_arguments(record.key.call)
    if record.guards.reads.scopes or record.guards.reads.unseen:
        raise PrecompiledError(f"{path} has globals of code, or guards that leave values out")
    if (record.key.plan.setting("microbatches") > 1) != (record.timed is not None):
        raise PrecompiledError(f"{path} says other things of microbatches than its plan", fix=AGAIN)
    if not complete(record.halves, record.timed, evaluates):
        raise PrecompiledError(f"{path} has the halves {sorted(record.halves)}", fix=AGAIN)
    needed = {text_file(half) for half in record.halves}
    needed |= {constants(half) for half, fields in record.halves.items() if fields.constants}
    if set(record.files) - {ARTIFACTS} != needed:
        raise PrecompiledError(f"{path} lists {sorted(record.files)}; it is of {sorted(needed)}", fix=AGAIN)
    return record


def _content(folder: Path) -> Any:
    """Return the JSON data of the record in ``folder``. Raises PrecompiledError if there is none, or it is of another
    version of the format or of torch.
    """
    data = _read(folder, RECORD, LARGEST_TEXT)
    if data is None:
        fix = "save one with module.lower(*examples).save(folder)"
        raise PrecompiledError(f"there is no saved program in {folder}", fix=fix)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PrecompiledError(f"{folder / RECORD} is not JSON: {error}", fix=AGAIN) from None
    version = content.get("shardc_program") if isinstance(content, dict) else None
    if version != VERSION or type(version) is not int:
        raise PrecompiledError(f"{folder} has a program of version {version!r}; this is {VERSION}", fix=AGAIN)
    was = content.get("torch")
    if was != torch.__version__:
        raise PrecompiledError(
            f"the program in {folder} is stale: torch was {was} and is {torch.__version__}", fix=AGAIN
        )
    return content


def _check_arguments(call: Signature) -> None:
    """Raise PrecompiledError if a constant of the saved signature is not of its class, or there are not as many
    arguments as names and places.
    """
    for leaf in call.leaves:
        if isinstance(leaf, Constant) and (type(leaf.value) not in PLAIN or type(leaf.value).__name__ != leaf.kind):
            raise PrecompiledError(f"the constant {leaf.value!r} of the arguments is no {leaf.kind}")
    if not len(call.leaves) == len(call.names) == call.spec.num_leaves:
        raise PrecompiledError(
            f"{len(call.leaves)} arguments have {len(call.names)} names and {call.spec.num_leaves} places"
        )


def _mesh(data: object) -> Mesh:
    """Return the mesh that JSON data describe."""
    return Mesh(checked(data, tuple[tuple[str, Annotated[int, Range(1, 1 << 20)]], ...], "the mesh"))


_READERS: dict[type, Callable[[Any], object]] = {
    Mesh: _mesh,
    Plan: lambda data: Plan.from_json(json.dumps(data), RECORD),
    pytree.TreeSpec: lambda data: spec_from_json(data, "the arguments"),
}


def to_json(value: object) -> object:
    """Return the JSON data that `read_record` reads as ``value``: dataclasses are tables, dtypes and devices are text.

    Raises:
        PrecompiledError: a constant of the call, or a value that its capture read, cannot be saved.
    """
    if isinstance(value, Mesh):
        return [list(axis) for axis in value.shape]
    if isinstance(value, Plan):
        return json.loads(value.to_json())
    if isinstance(value, pytree.TreeSpec):
        return spec_to_json(value, "the arguments")
    if isinstance(value, torch.dtype):
        return torch_name(value)
    if isinstance(value, torch.device):
        return str(value)
    if isinstance(value, Signature):
        for name, leaf in zip(value.names, value.leaves, strict=True):
            if isinstance(leaf, Constant) and type(leaf.value) not in PLAIN:
                raise PrecompiledError(
                    f"input {name!r} is the constant {leaf.value!r}, which cannot be saved",
                    fix="pass a tensor, a number, a string or None",
                )
    if isinstance(value, Reads):
        for read in value.entries:
            if "scope(" in read.expression:
                raise PrecompiledError(
                    f"the program depends on {read}, a global of code that cannot be imported",
                    fix="put the code of the model into a file that is imported",
                )
        value = replace(value, scopes={})
    if is_dataclass(value):
        return {field.name: to_json(getattr(value, field.name)) for field in fields(value) if field.init}
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    if hasattr(value, "_asdict"):
        return to_json(value._asdict())
    return list(map(to_json, value)) if isinstance(value, tuple | list) else value


def text_file(half: str) -> str:
    """Return the name of the file with the text of the graph named ``half``."""
    return f"{half.replace(' ', '_')}.txt"


def constants(half: str) -> str:
    """Return the name of the file with the large constants of the graph named ``half``."""
    return f"{half.replace(' ', '_')}.constants.bin"


def read(folder: Path, record: Record, name: str) -> bytes:
    """Return the bytes of the file ``name`` of a saved program. Raises PrecompiledError if the file is missing, a link,
    or changed (its hash is not the one in ``record``).
    """
    data = _read(folder, name, LARGEST_TEXT if name.endswith(".txt") else None)
    if data is None or hashlib.sha256(data).hexdigest() != record.files[name]:
        became = "is missing" if data is None else "changed since it was saved"
        raise PrecompiledError(f"{folder / name} {became}", fix=AGAIN)
    return data


def _read(folder: Path, name: str, most: int | None) -> bytes | None:
    """Return the bytes of a plain file in ``folder``; None if there is no such file. Raises PrecompiledError if it is a
    link or pipe, cannot be read, or has more than ``most`` bytes.
    """
    path = folder / name
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        if path.is_symlink():
            raise PrecompiledError(f"{path} is a link, and a saved program is plain files", fix=_COPY) from None
        raise PrecompiledError(f"{path} cannot be read: {error.strerror}") from None
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        os.close(file)
        raise PrecompiledError(f"{path} is no plain file", fix=_COPY)
    with os.fdopen(file, "rb") as opened:
        if most is not None and status.st_size > most:
            raise PrecompiledError(f"{path} has {status.st_size} bytes, more than {most}")
        return opened.read()
