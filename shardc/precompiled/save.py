"""Saves a program: its local graphs as text, its `Record` as JSON, large constants as plain bytes."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from shardc._compat import LazyGraphModule
from shardc.custom_ops.expert_functions import bodies_in, body_of
from shardc.custom_ops.function_ops import function_of, functions_in
from shardc.errors import PrecompiledError, VerifyError
from shardc.ir import grammar
from shardc.ir import graph as ir
from shardc.ir.comm_volume import GROUP_PREFIX
from shardc.ir.executable import Executable
from shardc.ir.text import dump
from shardc.precompiled.program_key import PLAIN, ProgramKey
from shardc.precompiled.record import (
    ARTIFACTS,
    RECORD,
    VERSION,
    Fixed,
    Half,
    LargeConstant,
    Record,
    TensorType,
    allowed,
    constants,
    spec_to_json,
    text_file,
    to_json,
)
from shardc.precompiled.timed import Timed
from shardc.verify import check


def save_program(
    program: Executable, folder: Path, lower_again: Callable[[Path], bytes | None] | None, evaluates: bool = True
) -> list[Path]:
    """Write ``program`` to ``folder`` and return the paths of its files.

    The record, which lists the other files, is renamed last: an interrupted save leaves none, and `load` says so.

    Args:
        lower_again: returns Inductor's artifacts of the program that is saved in a folder; None to save none.
        evaluates: also write the inference graph, which runs if no gradients are recorded.

    Raises:
        PrecompiledError: a part of the program cannot be written to disk, or it leaves its gradients unreduced.
    """
    key = _key_of(program)
    _prepare(folder)
    paths, files = [], {}
    experts: dict[str, object] = {}
    functions: dict[str, object] = {}
    halves: dict[str, Half] = {}

    def write(name: str, data: bytes) -> None:
        paths.append(folder / name)
        paths[-1].write_bytes(data)
        files[name] = hashlib.sha256(data).hexdigest()

    for local_half in program.own_halves(evaluates):
        half, gm = local_half.name, with_mesh_groups(local_half.gm)
        try:
            check(gm, program.mesh, half, (allowed,))
        except VerifyError as error:  # an error now, not when it is loaded
            raise PrecompiledError(f"the program cannot be saved: {error.what}", program=error.program) from None
        write(text_file(half), dump(gm, program.mesh, origins=True).encode())
        experts |= {name: body_of(name).to_json() for name in bodies_in(gm.graph)}
        functions |= {name: function_of(name).to_json() for name in functions_in(gm.graph)}
        reads: Mapping[str, Any] = local_half.reads
        entries, data = _large_constants(gm)
        if data:
            write(constants(half), data)
        halves[half] = Half(
            tuple((node.name, _type_of(node.meta["val"])) for node in ir.placeholders(gm.graph)),
            entries,
            tuple((name, role.kind, role.name) for name, role in reads.items()),
            local_half.plan,
        )
    in_time = program.in_time.get("inputs", {})
    record = Record(
        VERSION, torch.__version__, key, program.guards,
        tuple((name, str(in_time.get(name, layout))) for name, layout in program.inputs), program.levels,
        program.causes, spec_to_json(program.output_spec, "the outputs"), program.returned, experts, functions, halves,
        files,
        Timed.of(program),
    )  # fmt: skip
    _write_record(folder, record)
    artifacts = lower_again(folder) if lower_again is not None else None
    if artifacts is not None:
        write(ARTIFACTS, artifacts)
        _write_record(folder, record)
    return [*paths, folder / RECORD]


def _key_of(program: Executable) -> ProgramKey:
    """Return the key of ``program``. Raises PrecompiledError if the program is not one that can be saved."""
    if program.guards.reads.unseen:
        raise PrecompiledError(
            "the program was captured by running the model on fake tensors: its guards leave values out",
            fix="compile it in each start, or write the model so that Dynamo traces it (a warning says why not)",
        )
    if program.key is None or program.deferred:
        raise PrecompiledError(
            "the program leaves its gradients unreduced" if program.deferred else "the program is of no module",
            fix="save what module.lower(*examples) returns outside of no_sync()",
        )
    key: ProgramKey = program.key
    return key


def _prepare(folder: Path) -> None:
    """Create ``folder``, or remove the record and the artifacts of an earlier program in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise PrecompiledError(f"the folder {folder} cannot be made: {error.strerror}", fix="name another") from None
    (folder / ARTIFACTS).unlink(missing_ok=True)
    (folder / RECORD).unlink(missing_ok=True)


def _write_record(folder: Path, record: Record) -> None:
    """Write the record, in one step: a program without it is incomplete."""
    unfinished = folder / f"{RECORD}.unfinished"
    unfinished.write_text(json.dumps(to_json(record), indent=1) + "\n")
    os.replace(unfinished, folder / RECORD)


def _type_of(value: Any) -> TensorType | Fixed:
    """Return the type of a placeholder's ``value`` for the record: a `TensorType` for a tensor, a `Fixed` with the
    value for a plain constant. Raises PrecompiledError for other values.
    """
    if isinstance(value, Tensor):
        return TensorType.of(value)
    if type(value) not in PLAIN:
        raise PrecompiledError(f"a value of type {type(value).__name__} cannot be saved", fix="compile for fixed sizes")
    return Fixed(value)


def with_mesh_groups(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of ``gm`` whose collectives name the mesh's groups, not the process groups of a runtime."""
    graph = ir.copied(gm.graph)
    for node in graph.nodes:
        if node.op == "call_function":
            node.args = tuple(_mesh_group(arg) for arg in node.args)
            node.kwargs = {key: _mesh_group(arg) for key, arg in node.kwargs.items()}
    return LazyGraphModule(gm, graph)


def _mesh_group(arg: object) -> object:
    """Return a group's name without the number of the runtime's mesh, ``shardc:dp`` for ``shardc.1:dp``; other
    arguments as they are.
    """
    match = re.fullmatch(r"shardc\.\d+:(.*)", arg) if isinstance(arg, str) else None
    return GROUP_PREFIX + match[1] if match else arg


def _large_constants(gm: fx.GraphModule) -> tuple[tuple[LargeConstant, ...], bytes]:
    """Return the constants of a graph that are too large for its text: (their names and types, their bytes one after
    the other).
    """
    out, data = [], b""
    for name in dict.fromkeys(str(node.target) for node in gm.graph.find_nodes(op="get_attr")):
        tensor = gm.get_buffer(name) if name in dict(gm.named_buffers()) else getattr(gm, name)
        if grammar.small_values(tensor) is not None:
            continue
        if not isinstance(tensor, Tensor) or tensor.is_meta:
            raise PrecompiledError(f"the constant {name!r} of the program has no values that could be saved")
        plain = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        raw = bytes(plain.untyped_storage())[plain.storage_offset() : plain.storage_offset() + plain.numel()]
        out.append(LargeConstant(name, TensorType.of(tensor.contiguous()), len(raw)))
        data += raw
    return tuple(out), data
