"""Loading a saved program: the text parsed back, what it is for checked, nothing of it unpickled."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import fx

from shardc.errors import PrecompiledError
from shardc.ir import graph as ir
from shardc.ir.arena import PLAN
from shardc.ir.certificate import Certificate, certify, outputs_text
from shardc.ir.graph import Role, Value
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.parse import parse
from shardc.ir.reads import Reads
from shardc.ir.verify import check, verify
from shardc.lower import fakes, load_artifacts
from shardc.passes import Absent, PlanMemory
from shardc.plan.value import Plan
from shardc.precompiled.allowed import allowed
from shardc.precompiled.identity import Identity, check_same, signature_of
from shardc.precompiled.record import (
    AGAIN,
    ARTIFACTS,
    RECORD,
    Held,
    Record,
    TensorType,
    constants,
    read,
    read_record,
)
from shardc.precompiled.save import untied
from shardc.precompiled.spec import spec_from_json
from shardc.report.causes import Cause, cause_of
from shardc.validate import checked

_MOST_RANKS = 1 << 20


class Precompiled:
    """A program that was saved: its local graphs, without the stages before them.

    It is given to `shardc.compile`, which checks that it is of that mesh, plan and model.

    Attributes:
        mesh, plan: what it was compiled for.
        identity: what call, model and device it was compiled for.
        reads: what of the model and the loss it depends on besides.
        folder: where it lies.
        forward, backward, inference: the local graphs; the first two are None where nothing needs a gradient.
        inputs: (name, layout) of each tensor input.
        outputs: the role (with layout) of each output.
        cached: Inductor's artifacts were loaded with it.
    """

    deferred: frozenset[str] = frozenset()

    def __init__(self, folder: Path, record: Record, trust: bool) -> None:
        self.folder, self.cached = folder, trust and ARTIFACTS in record.files
        self.mesh = Mesh(record.mesh)
        if self.mesh.ranks > _MOST_RANKS:
            raise PrecompiledError(f"the mesh {self.mesh} has {self.mesh.ranks} ranks")
        self.plan = Plan.from_json(json.dumps(record.plan), str(folder / RECORD))
        self.identity = Identity(signature_of(record.signature), record.model, record.device)
        self.reads = Reads(record.reads)
        self.inputs = tuple((name, Layout.parse(text, self.mesh)) for name, text in record.inputs)
        self.levels: Mapping[str, int] = record.levels
        self.causes: Mapping[str, str] = record.causes
        self.output_spec = spec_from_json(record.output_spec, "the outputs")
        halves = {half: self._half(half, record) for half in record.halves}
        self.forward: fx.GraphModule | None = halves.get("forward")
        self.backward: fx.GraphModule | None = halves.get("backward")
        self.inference: fx.GraphModule = halves["inference"]
        if self.forward is not None and self.backward is not None:
            _connect(self.forward, self.backward, [name for name, _ in record.halves["backward"].placeholders])
        given = [(role, x) for role, x in ir.outputs(self.inference.graph)]
        self.outputs: tuple[Role, ...] = tuple(role for role, _ in given)
        self.output_values: tuple[Any, ...] = tuple(None if isinstance(x, fx.Node) else x for _, x in given)
        results = sum(role.kind == "output" for role in self.outputs)
        if results != self.output_spec.num_leaves:
            raise PrecompiledError(f"{results} results have {self.output_spec.num_leaves} places")
        taken = [name for name, _ in self.identity.signature.tensors]
        if [name for name, _ in self.inputs] != taken:
            raise PrecompiledError(f"the graphs take {[name for name, _ in self.inputs]}, and the call {taken}")

    def _half(self, half: str, record: Record) -> fx.GraphModule:
        said = record.halves[half]
        gm = parse(read(self.folder, record, f"{half}.txt").decode())
        for node, (_, value) in zip(ir.placeholders(gm.graph), said.placeholders, strict=True):
            made = ir.info(node).value
            if isinstance(value, TensorType) and (not isinstance(made, Value) or made.shape != value.shape):
                raise PrecompiledError(
                    f"the input {node} of {half} is {made}, of shape {list(value.shape)} in {RECORD}"
                )
        for node, value in zip(
            ir.placeholders(gm.graph), fakes([vars(value) for _, value in said.placeholders]), strict=True
        ):
            node.meta["val"] = value
        verify(gm, self.mesh, "partition")
        check(gm, self.mesh, half, (allowed,))
        if said.constants:
            fill(gm, said.constants, read(self.folder, record, constants(half)))
        if any(tensor.is_meta for tensor in gm.buffers()):
            raise PrecompiledError(f"a constant of {half} has no values")
        slots = said.memory.slots
        if any(not 0 <= n < 1 << 50 for slot in slots for n in (slot.size, slot.start, slot.end, slot.offset)):
            raise PrecompiledError(f"{half} has a place in memory that cannot be")
        ir.output_node(gm.graph).meta[PLAN] = said.memory
        names = zip(ir.placeholders(gm.graph), said.placeholders, strict=True)
        now = {name: node.name for node, (name, _) in names}
        if not now.keys() >= {name for name, _, _ in said.reads}:
            raise PrecompiledError(f"{half} reads what it does not take")
        reads = {now[name]: Role(kind, of) for name, kind, of in said.reads}
        ir.output_node(gm.graph).meta[ir.READS] = reads
        return gm

    def certificate(self, training: bool = True) -> Certificate:
        """The order of the collectives of a training step, or of an evaluation."""
        halves = [("forward", self.forward), ("backward", self.backward)] if training else []
        graphs = [(name, half.graph) for name, half in halves if half is not None]
        return certify(self.mesh, graphs or [("inference", self.inference.graph)])

    def backward_of(self, used: frozenset[int]) -> tuple[fx.GraphModule, Certificate]:
        """The backward for a loss that uses these outputs only (by index), and its certificate."""
        assert self.backward is not None
        made = PlanMemory(self.mesh)(Absent(used)(untied(self.backward)))
        return made, certify(self.mesh, [(f"backward of {outputs_text(used)}", made.graph)])

    def cause(self, collective: fx.Node) -> Cause:
        """Why a collective of one of the local graphs is there."""
        return cause_of(self, collective, map(str, self.plan.entries))

    def reduction(self, sums: Sequence[Any]) -> tuple[fx.GraphModule, Certificate]:
        raise AssertionError("a saved program reduces its own gradients")

    def check(self, mesh: Mesh, plan: Plan, model: Mapping[str, str], device: torch.device) -> None:
        """Raises PrecompiledError, with the difference, where it is not of this mesh, plan, model and device."""
        saved = {"the mesh": str(self.mesh), "the plan": str(self.plan), "the device": self.identity.device}
        now = {"the mesh": str(mesh), "the plan": str(plan), "the device": device.type}
        what = f"the program in {self.folder}"
        check_same(what, {**saved, **self.identity.model}, {**now, **model}, AGAIN)


def load(folder: str | Path, *, trust: bool = False) -> Precompiled:
    """The program that ``program.save(folder)`` wrote.

    Without ``trust`` nothing in the folder runs as code. Its graphs, tables and numbers are read and checked before
    they are used. They can only say which tensor operations and which collectives of the mesh's groups run, in which
    order. A stranger's folder may still compute something else than it says, so do not rely on its results.

    Args:
        folder: where it was saved. Only ``program.json`` and the files that it lists with their hashes are read. They
            must be plain files of the folder: links are not followed.
        trust: also read Inductor's artifacts, if there are any, so that nothing is compiled again. They are pickles
            and machine code that run with your rights: pass True only for a folder that nobody else can write.

    Raises:
        PrecompiledError: nothing was saved there, the save is incomplete or was changed, it is of another torch, or it
            is not a program: it calls an op that no program has, or a table has unexpected contents.
    """
    folder = Path(checked(folder, str | Path, "folder"))
    checked(trust, bool, "trust")
    try:
        record = read_record(folder)
        made = Precompiled(folder, record, trust)
        artifacts = read(folder, record, ARTIFACTS) if made.cached else None
    except PrecompiledError:
        raise
    except Exception as error:  # what a file holds may be wrong in any way
        said = str(error) or type(error).__name__
        raise PrecompiledError(f"the program in {folder} cannot be read: {said}", fix=AGAIN) from error
    if artifacts is not None:
        load_artifacts(artifacts)
    return made


def fill(gm: fx.GraphModule, held: Sequence[Held], data: bytes) -> None:
    """Puts the constants that the text does not show into ``gm``.

    Raises:
        PrecompiledError: one is not in the graph, is of another type there, or there are other bytes than theirs.
    """
    types = {str(node.target): ir.value(node) for node in gm.graph.find_nodes(op="get_attr")}
    raw, at = torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8), 0
    if len(data) != sum(one.bytes for one in held):
        raise PrecompiledError(f"the constants have {len(data)} bytes instead of {sum(one.bytes for one in held)}")
    for one in held:
        known = types.get(one.name)
        size = prod(one.shape) * one.dtype.itemsize
        if known is None or (known.dtype, known.shape, size) != (one.dtype, one.shape, one.bytes):
            raise PrecompiledError(
                f"the constant {one.name!r} is {known} in the graph, and {one.dtype}{list(one.shape)}"
            )
        shaped = raw[at : at + size].clone().view(one.dtype).reshape(one.shape)
        owner, _, name = one.name.rpartition(".")
        setattr(gm.get_submodule(owner), name, shaped.to(one.device))
        at += size


def _connect(forward: fx.GraphModule, backward: fx.GraphModule, names: Sequence[str]) -> None:
    """Gives what the forward saves the names that the backward's placeholders have now, instead of ``names``."""
    now = dict(zip(names, (node.name for node in ir.placeholders(backward.graph)), strict=True))
    output, end = ir.output_node(forward.graph), ir.output_node(backward.graph)
    roles = output.meta[ir.ROLES]
    output.meta[ir.ROLES] = tuple(replace(r, name=now[r.name]) if r.kind == "saved" else r for r in roles)
    slots = output.meta[PLAN].slots
    kept = tuple(replace(slot, saved=tuple(now[name] for name in slot.saved)) for slot in slots)
    output.meta[PLAN] = replace(output.meta[PLAN], slots=kept)
    given = tuple((now.get(name, name), at) for name, at in end.meta[PLAN].given)
    end.meta[PLAN] = replace(end.meta[PLAN], given=given)
