"""The record of a saved program, ``program.json``: its schema, and how it and the files beside it are read."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from shardc.errors import PrecompiledError
from shardc.ir.arena import MemoryPlan
from shardc.ir.reads import Constant, Read
from shardc.ir.returned import Returned
from shardc.runtime.torch_global_state import TorchGlobalState
from shardc.validate import Range, checked

VERSION = 9
RECORD, ARTIFACTS = "program.json", "inductor.bin"
HALVES = ("forward", "backward", "inference")
LARGEST_TEXT = 1 << 30  # bytes of a file that is parsed
_COPY = "copy the files themselves into the folder"
AGAIN = "compile and save the program again"

Count = Annotated[int, Range(0, 1 << 50)]
Sizes = tuple[Count, ...]
Plain = bool | int | float | str | None


@dataclass(frozen=True)
class TensorType:
    """A placeholder's tensor on one rank."""

    shape: Sizes
    stride: Sizes
    dtype: torch.dtype
    device: str


@dataclass(frozen=True)
class Fixed:
    """A placeholder's value that is not a tensor."""

    constant: Plain


@dataclass(frozen=True)
class Held:
    """A constant that is saved outside of the graph's text; entries are in the order of their bytes."""

    name: str
    shape: Sizes
    stride: Sizes
    dtype: torch.dtype
    device: str
    bytes: Count


@dataclass(frozen=True)
class Half:
    """The data of a forward, backward or inference graph that its text does not contain.

    Args:
        placeholders: (name in the graph, value).
        reads: of a backward, (placeholder, kind, name) of the forward input that it reads; see `shardc.ir.graph.READS`.
    """

    placeholders: tuple[tuple[str, TensorType | Fixed], ...]
    constants: tuple[Held, ...]
    reads: tuple[tuple[str, Literal["param", "buffer", "input"], str], ...]
    memory: MemoryPlan


@dataclass(frozen=True)
class TensorLeaf:
    """A tensor argument of the call that a program was compiled for."""

    shape: Sizes
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class ConstantLeaf:
    """A constant argument of the call that a program was compiled for."""

    constant: Plain
    kind: Literal["bool", "int", "float", "str", "NoneType"]


@dataclass(frozen=True)
class Call:
    """The signature of the call that a program was compiled for; `tree_spec` reads ``spec``."""

    names: tuple[str, ...]
    leaves: tuple[TensorLeaf | ConstantLeaf, ...]
    spec: Any
    modes: tuple[bool, ...]
    grads: tuple[bool, ...]
    dtypes: tuple[torch.dtype, ...]
    surroundings: TorchGlobalState
    reads: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Record:
    """A saved program without its graphs.

    Args:
        mesh: axes and sizes.
        plan: as `shardc.plan.plan_file` writes it.
        traced, sets: the traced code, and the attributes that the first call sets, as in `shardc.ir.reads.Reads`.
        files: the other files -> their sha256.
    """

    shardc_program: int
    torch: str
    mesh: tuple[tuple[str, Annotated[int, Range(1, 1 << 20)]], ...]
    plan: Any
    device: str
    model: Mapping[str, str]
    signature: Call
    reads: tuple[Read, ...]
    traced: tuple[tuple[str, str], ...]
    sets: tuple[tuple[str, Constant], ...]
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
    record: Record = checked(content, Record, str(path), PrecompiledError, tables=True, fix=AGAIN)
    halves = set(record.halves)
    if halves not in ({"inference"}, set(HALVES), set(HALVES) if evaluates else {"forward", "backward"}):
        raise PrecompiledError(f"{path} has the halves {sorted(halves)}", fix=AGAIN)
    needed = {f"{half}.txt" for half in halves}
    needed |= {constants(half) for half, said in record.halves.items() if said.constants}
    if set(record.files) - {ARTIFACTS} != needed:
        raise PrecompiledError(f"{path} lists {sorted(record.files)}; it is of {sorted(needed)}", fix=AGAIN)
    return record


def constants(half: str) -> str:
    """Return the name of the file with a half's large constants."""
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
