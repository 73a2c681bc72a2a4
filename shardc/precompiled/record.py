"""The record of a saved program, ``program.json``: its fields, and how the files of its folder are written and read."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from shardc._compat import pytree
from shardc.errors import PrecompiledError
from shardc.ir.arena import MemoryPlan
from shardc.ir.mesh import Mesh
from shardc.ir.reads import Guards, Reads
from shardc.ir.returned import Returned
from shardc.plan.value import Plan
from shardc.precompiled.program_key import ProgramKey
from shardc.precompiled.tree_spec import spec_from_json, spec_to_json
from shardc.runtime.signature import Constant, Signature
from shardc.validate import Range, checked

VERSION = 10
RECORD, ARTIFACTS = "program.json", "inductor.bin"
HALVES = ("forward", "backward", "inference")
LARGEST_TEXT = 1 << 30  # bytes of a file that is parsed
_COPY = "copy the files themselves into the folder"
AGAIN = "compile and save the program again"

Count = Annotated[int, Range(0, 1 << 50)]
Sizes = tuple[Count, ...]
PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class TensorType:
    """A tensor on one rank, without values."""

    shape: Sizes
    stride: Sizes
    dtype: torch.dtype
    device: str

    @classmethod
    def of(cls, x: Tensor) -> TensorType:
        return cls(tuple(x.shape), x.stride(), x.dtype, str(x.device))


@dataclass(frozen=True)
class Fixed:
    """A placeholder's value that is not a tensor."""

    constant: bool | int | float | str | None


@dataclass(frozen=True)
class LargeConstant:
    """A constant that the text does not show: where its bytes stand follows from the order."""

    name: str
    type: TensorType
    bytes: Count


@dataclass(frozen=True)
class Half:
    """The data of a forward, backward or inference graph that its text does not contain.

    Args:
        placeholders: (name in the graph, value).
        reads: of a backward, (placeholder, kind, name) of the forward input that it reads; see `shardc.ir.graph.READS`.
    """

    placeholders: tuple[tuple[str, TensorType | Fixed], ...]
    constants: tuple[LargeConstant, ...]
    reads: tuple[tuple[str, Literal["param", "buffer", "input"], str], ...]
    memory: MemoryPlan


@dataclass(frozen=True)
class Record:
    """A saved program without its graphs.

    Args:
        output_spec: read by `shardc.precompiled.tree_spec`.
        files: the other files and their sha256.
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
    halves: Mapping[str, Half]
    files: Mapping[str, str]


def read_record(folder: Path, evaluates: bool = True) -> Record:
    """Return the record in ``folder``.

    Args:
        evaluates: require the inference graph, which runs if no gradients are recorded.

    Raises:
        PrecompiledError: there is none, or it is of another version or torch, or has unexpected contents.
    """
    path = folder / RECORD
    data = _read(folder, RECORD, LARGEST_TEXT)
    if data is None:
        fix = "save one with module.lower(*examples).save(folder)"
        raise PrecompiledError(f"there is no saved program in {folder}", fix=fix)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PrecompiledError(f"{path} is not JSON: {error}", fix=AGAIN) from None
    version = content.get("shardc_program") if isinstance(content, dict) else None
    if version != VERSION or type(version) is not int:
        raise PrecompiledError(f"{folder} has a program of version {version!r}; this is {VERSION}", fix=AGAIN)
    was = content.get("torch")
    if was != torch.__version__:
        raise PrecompiledError(
            f"the program in {folder} is stale: torch was {was} and is {torch.__version__}", fix=AGAIN
        )
    record: Record = checked(content, Record, str(path), PrecompiledError, tables=True, readers=_READERS, fix=AGAIN)
    call = record.key.call
    for leaf in call.leaves:
        if isinstance(leaf, Constant) and (type(leaf.value) not in PLAIN or type(leaf.value).__name__ != leaf.kind):
            raise PrecompiledError(f"the constant {leaf.value!r} of the arguments is no {leaf.kind}")
    if not len(call.leaves) == len(call.names) == call.spec.num_leaves:
        raise PrecompiledError(
            f"{len(call.leaves)} arguments have {len(call.names)} names and {call.spec.num_leaves} places"
        )
    if record.guards.reads.scopes:
        raise PrecompiledError(f"{path} has globals of code")
    halves = set(record.halves)
    if halves not in ({"inference"}, set(HALVES), set(HALVES) if evaluates else {"forward", "backward"}):
        raise PrecompiledError(f"{path} has the halves {sorted(halves)}", fix=AGAIN)
    needed = {f"{half}.txt" for half in halves}
    needed |= {constants(half) for half, fields in record.halves.items() if fields.constants}
    if set(record.files) - {ARTIFACTS} != needed:
        raise PrecompiledError(f"{path} lists {sorted(record.files)}; it is of {sorted(needed)}", fix=AGAIN)
    return record


def _mesh(data: Any) -> Mesh:
    return Mesh(checked(data, tuple[tuple[str, Annotated[int, Range(1, 1 << 20)]], ...], "the mesh"))


_READERS: dict[type, Callable[[Any], Any]] = {
    Mesh: _mesh,
    Plan: lambda data: Plan.from_json(json.dumps(data), RECORD),
    pytree.TreeSpec: lambda data: spec_from_json(data, "the arguments"),
}


def to_json(value: Any) -> Any:
    """What `read_record` reads as ``value``: dataclasses and named tuples are tables, dtypes and devices are text.

    Raises:
        PrecompiledError: a constant of the call, or something that its capture read, has no form on disk.
    """
    if isinstance(value, Mesh):
        return [list(axis) for axis in value.shape]
    if isinstance(value, Plan):
        return json.loads(value.to_json())
    if isinstance(value, pytree.TreeSpec):
        return spec_to_json(value, "the arguments")
    if isinstance(value, torch.dtype | torch.device):
        return str(value).removeprefix("torch.")
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


def constants(half: str) -> str:
    """Return the name of the file with the large constants of the graph named ``half``."""
    return f"{half}.constants.bin"


def read(folder: Path, record: Record, name: str) -> bytes:
    """Return a file of the program; PrecompiledError if it is missing, a link, or differs from the record's hash."""
    data = _read(folder, name, LARGEST_TEXT if name.endswith(".txt") else None)
    if data is None or hashlib.sha256(data).hexdigest() != record.files[name]:
        became = "is missing" if data is None else "changed since it was saved"
        raise PrecompiledError(f"{folder / name} {became}", fix=AGAIN)
    return data


def _read(folder: Path, name: str, most: int | None) -> bytes | None:
    """Return the bytes of a plain file of ``folder``, None if there is none; links and pipes are refused."""
    path = folder / name
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        fix = "copy the files themselves into the folder" if path.is_symlink() else None
        what = (
            "is a link, and a saved program is plain files"
            if path.is_symlink()
            else f"cannot be read: {error.strerror}"
        )
        raise PrecompiledError(f"{path} {what}", fix=fix) from None
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        os.close(file)
        raise PrecompiledError(f"{path} is no plain file", fix=_COPY)
    with os.fdopen(file, "rb") as opened:
        if most is not None and status.st_size > most:
            raise PrecompiledError(f"{path} has {status.st_size} bytes, more than {most}")
        return opened.read()
