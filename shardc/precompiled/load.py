"""Loading a saved program: the text parsed back, what it is for checked, nothing of it unpickled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from shardc._compat import pytree
from shardc.analysis.causes import Cause, cause_of
from shardc.analysis.certificate import Certificate, certify
from shardc.errors import PrecompiledError, TextError
from shardc.ir import graph as ir
from shardc.ir.arena import PLAN, MemoryPlan, Slot
from shardc.ir.graph import Role
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.parse import parse
from shardc.lower import fakes, load_artifacts
from shardc.plan.value import Plan
from shardc.precompiled.identity import Identity, check_same, dtype_from_text, signature_from_json
from shardc.precompiled.save import ARTIFACTS, RECORD, VERSION

_AGAIN = "compile and save the program again"


class Precompiled:
    """A program that was saved: its local graphs, without the stages before them.

    It is given to `shardc.compile`, which checks that it is of that mesh, plan and model.

    Attributes:
        mesh, plan: what it was compiled for.
        identity: what call, model and device it was compiled for.
        folder: where it lies.
        forward, backward, inference: the local graphs; the first two are None where nothing needs a gradient.
        inputs: (name, layout) of each tensor input.
        outputs: the role (with layout) of each output.
        cached: Inductor's artifacts were loaded with it.
    """

    deferred: frozenset[str] = frozenset()

    def __init__(self, folder: Path, record: Mapping[str, Any], trust: bool) -> None:
        self.folder, self.cached = folder, trust and ARTIFACTS in record["files"]
        self.mesh = Mesh((name, size) for name, size in record["mesh"])
        self.plan_text = record["plan_text"]
        self.plan = Plan.from_json(json.dumps(record["plan"]), str(folder / RECORD))
        self.identity = Identity(signature_from_json(record["signature"]), record["model"], record["device"])
        self.inputs = tuple((name, Layout.parse(text, self.mesh)) for name, text in record["inputs"])
        self.levels: Mapping[str, int] = record["levels"]
        self.causes: Mapping[str, str] = record["causes"]
        self.output_spec = pytree.treespec_loads(record["output_spec"])
        halves = {half: self._half(half, said) for half, said in record["halves"].items()}
        self.forward: fx.GraphModule | None = halves.get("forward")
        self.backward: fx.GraphModule | None = halves.get("backward")
        self.inference: fx.GraphModule = halves["inference"]
        if self.forward is not None and self.backward is not None:
            _connect(self.forward, self.backward, [name for name, _ in record["halves"]["backward"]["placeholders"]])
        given = [(role, x) for role, x in ir.outputs(self.inference.graph)]
        self.outputs: tuple[Role, ...] = tuple(role for role, _ in given)
        self.output_values: tuple[Any, ...] = tuple(None if isinstance(x, fx.Node) else x for _, x in given)

    def _half(self, half: str, said: Mapping[str, Any]) -> fx.GraphModule:
        gm = parse((self.folder / f"{half}.txt").read_text())
        values = fakes([value for _, value in said["placeholders"]])
        for node, value in zip(ir.placeholders(gm.graph), values, strict=True):
            node.meta["val"] = value
        data, at = bytearray(), 0
        if said["constants"]:
            data = bytearray((self.folder / f"{half}.constants.bin").read_bytes())
        for one in said["constants"]:
            raw = torch.frombuffer(data, dtype=torch.uint8, offset=at, count=one["bytes"]).clone()
            shaped = raw.view(dtype_from_text(one["dtype"])).reshape(one["shape"])
            setattr(gm, one["name"], shaped.to(one["device"]))
            at += one["bytes"]
        slots = (Slot(**{**slot, "saved": tuple(slot["saved"])}) for slot in said["memory"]["slots"])
        given = tuple((name, end) for name, end in said["memory"]["given"])
        ir.output_node(gm.graph).meta[PLAN] = MemoryPlan(tuple(slots), given)
        return gm

    def certificate(self, training: bool = True) -> Certificate:
        """The order of the collectives of a training step, or of an evaluation."""
        halves = [("forward", self.forward), ("backward", self.backward)] if training else []
        graphs = [(name, half.graph) for name, half in halves if half is not None]
        return certify(self.mesh, graphs or [("inference", self.inference.graph)])

    def cause(self, collective: fx.Node) -> Cause:
        """Why a collective of one of the local graphs is there."""
        return cause_of(self, collective, map(str, self.plan.entries))

    def reduction(self, sums: Sequence[Any]) -> tuple[fx.GraphModule, Certificate]:
        raise AssertionError("a saved program reduces its own gradients")

    def check(self, mesh: Mesh, plan: Plan, model: Mapping[str, str], device: torch.device) -> None:
        """Raises PrecompiledError, with the difference, where it is not of this mesh, plan, model and device."""
        saved = {"the mesh": str(self.mesh), "the plan": self.plan_text, "the device": self.identity.device}
        now = {"the mesh": str(mesh), "the plan": str(plan), "the device": device.type}
        what = f"the program in {self.folder}"
        check_same(what, {**saved, **self.identity.model}, {**now, **model}, _AGAIN)


def load(folder: str | Path, *, trust: bool = False) -> Precompiled:
    """The program that ``program.save(folder)`` wrote.

    Args:
        folder: what it was saved to.
        trust: read Inductor's artifacts too, if they lie beside it, so that nothing is lowered and compiled again.
            They are pickled: code in them runs as you. Everything else is text, JSON and bare numbers.

    Raises:
        PrecompiledError: nothing was saved there, the save was cut off or changed since, or it is of another torch.
    """
    folder = Path(folder)
    try:
        record = json.loads((folder / RECORD).read_text())
    except FileNotFoundError:
        fix = "save one with module.lower(*examples).save(folder)"
        raise PrecompiledError(f"there is no saved program in {folder}", fix=fix) from None
    except json.JSONDecodeError as error:
        raise PrecompiledError(f"{folder / RECORD} is not JSON: {error}", fix=_AGAIN) from None
    version = record.get("shardc_program") if isinstance(record, dict) else None
    if version != VERSION:
        raise PrecompiledError(f"{folder} has a program of version {version!r}; this is {VERSION}", fix=_AGAIN)
    check_same(f"the program in {folder}", {"torch": record["torch"]}, {"torch": torch.__version__}, _AGAIN)
    for name, digest in record["files"].items():
        path = folder / name
        if not path.exists() or hashlib.sha256(path.read_bytes()).hexdigest() != digest:
            became = "changed since it was saved" if path.exists() else "is missing"
            raise PrecompiledError(f"{path} {became}", fix=_AGAIN)
    try:
        made = Precompiled(folder, record, trust)
    except (KeyError, TextError) as error:
        raise PrecompiledError(f"the program in {folder} cannot be read: {error}", fix=_AGAIN) from error
    if made.cached:
        load_artifacts((folder / ARTIFACTS).read_bytes())
    return made


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
