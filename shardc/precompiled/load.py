"""Loads a saved program: parses its text and checks it; nothing is unpickled unless the folder is trusted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

import torch
from torch import fx, nn

from shardc import _compat
from shardc._compat import PyTree
from shardc.cost.causes import Cause, cause_of
from shardc.custom_ops import function_ops
from shardc.custom_ops.expert_functions import Body, register
from shardc.custom_ops.functional_ops import define_in
from shardc.errors import PrecompiledError
from shardc.ir import executable as step
from shardc.ir import graph as ir
from shardc.ir.arena import PLAN
from shardc.ir.deferred import NOTHING, Deferred
from shardc.ir.executable import AtStage, Executable, Half, Phase, outputs_text, without_stage
from shardc.ir.graph import Role, Value
from shardc.ir.guards import Guards
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.parse import parse
from shardc.ir.schedules import Schedule
from shardc.lower.inductor import fakes, give_values, load_artifacts
from shardc.passes import PlanMemory, PruneUnusedGrads
from shardc.passes.pipeline import Hook, Pipeline
from shardc.plan.pipeline_stages import PipelineStages
from shardc.plan.value import Plan
from shardc.precompiled.program_key import described
from shardc.precompiled.record import (
    AGAIN,
    ARTIFACTS,
    RECORD,
    LargeConstant,
    Record,
    TensorType,
    allowed,
    allowed_op,
    constants,
    read,
    read_record,
    spec_from_json,
    text_file,
)
from shardc.precompiled.save import with_mesh_groups
from shardc.precompiled.timed import Timed, check_steps, phase_named
from shardc.validate import checked
from shardc.verify import check, verify


def backward_for(used: frozenset[int], backward: Half, *hooks: Hook) -> fx.GraphModule:
    """Return the backward graph for a loss that uses only the outputs with the indices ``used``.

    It depends only on the text of ``backward``, which ranks have compared, so a rank that compiled the program and one
    that loaded it derive the same graph.

    Args:
        backward: the backward half for all outputs; it is not changed.
    """
    gm = with_mesh_groups(backward.gm)
    for node in gm.graph.nodes:
        if node.op not in ("placeholder", "output"):
            node.meta = {ir.KEY: node.meta[ir.KEY]}
    ir.output_node(gm.graph).meta.pop(PLAN, None)
    with _compat.no_autocast():
        give_values(gm)
    return Pipeline((PruneUnusedGrads(used), PlanMemory(backward.mesh))).run(gm, *hooks)


_MOST_RANKS = 1 << 20
# In an order in which none saves what one before it takes.
_BACKWARDS = (step.WEIGHT_GRADIENTS, step.INPUT_GRADIENTS, step.BACKWARD, step.LAST_BACKWARD)


class Precompiled(Executable):
    """A program that was loaded from the folder of a saved one. It has local graphs only, not the earlier stages.

    Pass it to `shardc.compile`, which checks that it was compiled for that mesh, plan and model.

    Attributes:
        plan: the plan that it was compiled for.
        folder: the folder that it was loaded from.
        cached: whether Inductor's artifacts were loaded with it.
    """

    deferred: Deferred = NOTHING

    def __init__(self, folder: Path, record: Record, trust: bool) -> None:
        self.folder, self.cached = folder, trust and ARTIFACTS in record.files
        self.key, self.guards = record.key, record.guards
        self.mesh, self.plan = record.key.mesh, record.key.plan
        self.microbatches = int(self.plan.setting("microbatches"))
        if (pp := self.plan.setting("pp")) is not None:
            self.stage_ranks, self.mesh = self.mesh.size(pp.axis), self.mesh.of_stage(pp.axis)
        timed = self.mesh.timed(self.microbatches)
        if timed.ranks > _MOST_RANKS:
            raise PrecompiledError(f"the mesh {timed} has {timed.ranks} ranks")
        inputs = {name: Layout.parse(text, timed) for name, text in record.inputs}
        self.inputs = tuple((name, layout.untimed) for name, layout in inputs.items())
        self.levels: Mapping[str, int] = record.levels
        self.causes: Mapping[str, str] = record.causes
        self.output_spec = spec_from_json(record.output_spec, "the outputs")
        for name, body in record.experts.items():
            if register(Body.from_json(body, allowed_op)).name != name:
                raise PrecompiledError(f"what the record has as the experts {name!r} is something else")
        for name, function in record.functions.items():
            if function_ops.register(function_ops.Function.from_json(function, allowed_op)).name != name:
                raise PrecompiledError(f"what the record has as the function {name!r} is something else")
        self._halves = self._parse_graphs(record)
        if record.timed is not None:
            self._set_timed(record.timed, inputs)
        outputs = self._outputs()
        self.outputs: tuple[Role, ...] = tuple(role for role, _ in outputs)
        self.output_values: tuple[object, ...] = tuple(None if isinstance(x, fx.Node) else x for _, x in outputs)
        self.returned = record.returned
        self._check_ports()
        if record.timed is not None:
            check_steps(self, self.infers)

    def _parse_graphs(self, record: Record) -> dict[Phase, fx.GraphModule]:
        """Return the saved graphs: phase -> graph.

        Raises:
            PrecompiledError: a graph is not what the record says, or the backwards of a stage take other values.
        """
        graphs: dict[Phase, fx.GraphModule] = {}
        # Stage -> name of a placeholder of its backwards in the record -> its name in the parsed graph.
        names: dict[int | None, dict[str, str]] = {}
        # A graph names what it saves by the placeholders of the graphs that take it, which are parsed first.
        order = [*_BACKWARDS, *{without_stage(phase_named(half)): 0 for half in record.halves}]
        for half in sorted(record.halves, key=lambda half: order.index(without_stage(phase_named(half)))):
            phase = phase_named(half)
            of_stage = names.setdefault(phase.stage if isinstance(phase, AtStage) else None, {})
            graphs[phase], parsed_names = self._parse_graph(half, record, of_stage)
            if without_stage(phase) in _BACKWARDS:
                if any(of_stage.get(name, parsed) != parsed for name, parsed in parsed_names.items()):
                    raise PrecompiledError(f"{half} takes other values than the backwards beside it")
                of_stage |= parsed_names
        return graphs

    def _check_ports(self) -> None:
        """Raise PrecompiledError if the inputs, the outputs or what is said of the outputs' memory are not those of the
        call.
        """
        results = sum(role.kind == "output" for role in self.outputs)
        if results != self.output_spec.num_leaves:
            raise PrecompiledError(f"{results} results have {self.output_spec.num_leaves} places")
        named = [at for x in self.returned for at in (x.first, x.same, x.of_output, *x.read_by, *x.leads_to)]
        late = [at for at, x in enumerate(self.returned) if x.same is not None and x.same >= at]
        if len(self.returned) != results or late or not all(at is None or 0 <= at < results for at in named):
            raise PrecompiledError(f"{results} results are said to be {len(self.returned)} outputs")
        inputs, expected = [name for name, _ in self.inputs], [name for name, _ in self.key.call.tensors]
        if inputs != expected:
            raise PrecompiledError(f"the graphs take {inputs}, and the call {expected}")

    @property
    def trains(self) -> bool:
        return any(without_stage(phase) == step.FORWARD for phase in self._halves)

    @property
    def infers(self) -> bool:
        """Return whether the program was saved with graphs for inference."""
        return any(without_stage(phase) == step.INFERENCE for phase in self._halves)

    def order(self, training: bool) -> Schedule:
        order: Schedule = self.plan.setting("pp").lists(self.stage_ranks, self.microbatches, training)
        return order

    def _set_timed(self, timed: Timed, inputs: Mapping[str, Layout]) -> None:
        """Sets the attributes of this program that only programs with microbatches have, from ``timed``, their saved
        record. The layouts ``inputs`` include the axis of microbatches.
        """
        mesh = self.mesh.timed(self.microbatches)
        outputs = {index: Layout.parse(text, mesh) for index, text in timed.outputs}
        self.in_time = {
            "inputs": {name: layout for name, layout in inputs.items() if mesh.time in layout.bound},
            "outputs": outputs,
        }
        if not all(mesh.time in layout.bound for layout in outputs.values()):
            raise PrecompiledError("an output of microbatches is not split over them")
        self.reduce, self.openings, self.gathers_once = timed.reduce, timed.openings, timed.gathers_once
        self.opens_backward, self.loss, self.tangents = timed.opens_backward, timed.loss, dict(timed.tangents)
        self.stage_of = timed.stage_of

    def _outputs(self) -> list[tuple[Role, fx.node.Argument]]:
        """Return the outputs of the model and its updated buffers, as (role, node that computes it)."""
        if self.microbatches == 1:
            first = self._halves[step.FORWARD if self.trains else step.INFERENCE].graph
            return [(role, x) for role, x in ir.outputs(first) if role.kind != "saved"]
        kinds = (step.FORWARD, step.LAST_BACKWARD, step.GRADIENTS) if self.trains else (step.INFERENCE, step.CLOSING)
        split = dict(self.in_time["outputs"])
        outputs: dict[tuple[str, int | str], tuple[Role, fx.node.Argument]] = {}
        graphs = [gm.graph for kind in kinds for phase, gm in self._halves.items() if without_stage(phase) == kind]
        for graph in graphs:
            for role, x in ir.outputs(graph):
                key = role.kind, role.index if role.kind == "output" else role.name
                if key in outputs:
                    continue
                if role.kind == "output" and role.layout is None and isinstance(x, fx.Node):  # of one microbatch
                    layout, part = split.pop(role.index, None), ir.value(x)
                    if layout is None or layout.local_shape != part.shape:
                        raise PrecompiledError(f"the layout {layout} is not that of output {role.index}, {part}")
                    role = replace(role, layout=layout.untimed)
                if role.kind in ("output", "buffer"):
                    outputs[key] = role, x
        if split:
            raise PrecompiledError(f"the graphs have no parts of outputs {sorted(split)}")
        return sorted(outputs.values(), key=lambda output: (output[0].kind != "output", output[0].index))

    def make(self, phase: Phase) -> fx.GraphModule | None:
        """Return the graph of ``phase``: a saved one, or a backward derived for some of the outputs. None if the
        program has none.
        """
        if isinstance(phase, frozenset):
            return backward_for(phase, self.half(step.BACKWARD))
        return self._halves.get(phase)

    def using(self, used: frozenset[int]) -> Executable:
        if used == self.differentiates:
            return self
        if used:
            which, fix = f"gradients of {outputs_text(used)}", "return one loss that contains all terms, or compile"
        else:
            which, fix = "a call without gradients, which takes loops of its own", "for such calls compile"
        raise PrecompiledError(
            f"the program in {self.folder} has no graphs for {which}", fix=f"{fix} the module without precompiled="
        )

    def _parse_graph(
        self, half: str, record: Record, saved: Mapping[str, str]
    ) -> tuple[fx.GraphModule, dict[str, str]]:
        """Return the saved graph named ``half``, and a map of its placeholders: name in ``record`` -> name in the
        graph.

        Args:
            saved: this map for the backward, which has the names of values that a forward saves.
        """
        fields = record.halves[half]
        text = read(self.folder, record, text_file(half)).decode()
        define_in(text)
        gm = parse(text)
        values = fakes([vars(value) for _, value in fields.placeholders])
        for node, (_, value), fake in zip(ir.placeholders(gm.graph), fields.placeholders, values, strict=True):
            parsed = ir.info(node).value
            if isinstance(value, TensorType) and (not isinstance(parsed, Value) or parsed.shape != value.shape):
                raise PrecompiledError(
                    f"the input {node} of {half} is {parsed}, of shape {list(value.shape)} in {RECORD}"
                )
            node.meta["val"] = fake
        verify(gm, self.mesh, "partition")
        check(gm, self.mesh, half, (allowed,))
        if fields.constants:
            fill(gm, fields.constants, read(self.folder, record, constants(half)))
        if any(tensor.is_meta for tensor in gm.buffers()):
            raise PrecompiledError(f"a constant of {half} has no values")
        slots = fields.memory.slots
        if any(not 0 <= n < 1 << 50 for slot in slots for n in (slot.size, slot.start, slot.end, slot.offset)):
            raise PrecompiledError(f"{half} has a place in memory that cannot be")
        placeholders = zip(ir.placeholders(gm.graph), fields.placeholders, strict=True)
        parsed_names = {name: node.name for node, (name, _) in placeholders}
        end = ir.output_node(gm.graph)
        end.meta[PLAN] = fields.memory.renamed(parsed_names, saved)
        end.meta[ir.ROLES] = tuple(
            replace(role, name=saved[role.name]) if role.kind == "saved" else role for role in end.meta[ir.ROLES]
        )
        if not parsed_names.keys() >= {name for name, _, _ in fields.reads}:
            raise PrecompiledError(f"{half} reads what it does not take")
        end.meta[ir.READS] = {parsed_names[name]: Role(kind, of) for name, kind, of in fields.reads}
        return gm, parsed_names

    def cause(self, collective: fx.Node) -> Cause:
        """Return the `Cause` of a collective in one of the local graphs: the plan entry and the source line."""
        return cause_of(self, collective, map(str, self.plan.entries))

    def reduction(self, sums: Sequence[object]) -> Half:
        raise AssertionError("a saved program reduces its own gradients")

    def check(
        self, mesh: Mesh, plan: Plan, model: nn.Module, loss: Callable[..., PyTree] | None, device: torch.device
    ) -> None:
        """Raises PrecompiledError, with the differences, if the saved program was compiled for another mesh, plan,
        model, loss or device.
        """
        now = {"the mesh": str(mesh), "the plan": str(plan), "the device": device.type, **described(model, loss)}
        now |= Guards.of(self.guards.reads, model, loss).reached
        self.key.check(now, self.guards.reached, f"the program in {self.folder}", AGAIN)
        stages = PipelineStages.of(plan, mesh, model)
        if stages is not None and dict(stages.first) != dict(self.stage_of):
            raise PrecompiledError(f"the program in {self.folder} has parameters at other stages", fix=AGAIN)


def load(folder: str | Path, *, trust: bool = False) -> Precompiled:
    """Return the program that ``program.save(folder)`` wrote.

    Without ``trust`` nothing in the folder runs as code: graphs and tables are checked before they are used, and can
    only say which tensor operations and collectives of the mesh run, in which order. A stranger's folder may still
    compute something other than it claims, so do not rely on its results.

    Args:
        folder: where it was saved. Only ``program.json`` and the files that it lists with their hashes are read; they
            must be plain files, since links are not followed.
        trust: also read Inductor's artifacts, if there are any, so that nothing is compiled. They are pickles and
            machine code that run with your rights: pass True only for a folder that nobody else can write.

    Raises:
        PrecompiledError: the folder has no program, or one that is incomplete, changed or of another torch; or a file
            is not that of a program: it calls an op that programs may not call, or a table has unexpected contents.
    """
    folder = Path(checked(folder, str | Path, "folder"))
    checked(trust, bool, "trust")
    try:
        record = read_record(folder)
        program = Precompiled(folder, record, trust)
        artifacts = read(folder, record, ARTIFACTS) if program.cached else None
    except PrecompiledError:
        raise
    except Exception as error:  # any content is possible
        reason = str(error) or type(error).__name__
        raise PrecompiledError(f"the program in {folder} cannot be read: {reason}", fix=AGAIN) from error
    if artifacts is not None:
        load_artifacts(artifacts)
    return program


def fill(gm: fx.GraphModule, entries: Sequence[LargeConstant], data: bytes) -> None:
    """Sets those constants of the loaded graph ``gm`` that are too large for its text: their bytes are in ``data``.

    Args:
        entries: names and types of the constants.
        data: their bytes, one constant after the other.

    Raises:
        PrecompiledError: a constant is not in the graph, or has another type there; or ``data`` has another length.
    """
    types = {str(node.target): ir.value(node) for node in gm.graph.find_nodes(op="get_attr")}
    raw, at = torch.frombuffer(bytearray(data) or bytearray(1), dtype=torch.uint8), 0
    if len(data) != sum(constant.bytes for constant in entries):
        raise PrecompiledError(
            f"the constants have {len(data)} bytes instead of {sum(constant.bytes for constant in entries)}"
        )
    for constant in entries:
        graph_type = types.get(constant.name)
        dtype, shape = constant.type.dtype, constant.type.shape
        size = prod(shape) * dtype.itemsize
        stored_type = dtype, shape, constant.bytes
        if graph_type is None or (graph_type.dtype, graph_type.shape, size) != stored_type:
            raise PrecompiledError(
                f"the constant {constant.name!r} is {graph_type} in the graph, and {dtype}{list(shape)}"
            )
        shaped = raw[at : at + size].clone().view(dtype).reshape(shape)
        owner, _, name = constant.name.rpartition(".")
        setattr(gm.get_submodule(owner), name, shaped.to(constant.type.device))
        at += size
