"""The user's interface to the search: `auto` in place of a plan, and `find_plan`. `search_once` runs a search on rank
0.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardc._compat import PyTree, pytree
from shardc.capture import as_module, loss_arity
from shardc.cost.hardware import Hardware
from shardc.cost.hardware import find as find_hardware
from shardc.errors import InputError, MeshError, PlanError, ShardcError, ShardcWarning
from shardc.ir.gc_control import uncollected
from shardc.ir.mesh import Mesh, split_part
from shardc.passes.options import Options
from shardc.plan.entries import Pp
from shardc.plan.pipeline_stages import blocks_of
from shardc.plan.resolve import check_axes, resolve_params
from shardc.plan.value import Plan
from shardc.runtime.events import Event
from shardc.runtime.groups import Groups
from shardc.runtime.inputs import takes_loss
from shardc.search.captured_model import CapturedModel, ModelCall
from shardc.search.meshes import SearchOverMeshes, meshes_of, with_stages
from shardc.search.result import Report, SearchResult
from shardc.search.stage_search import AXIS
from shardc.validate import Bytes, Range, check_fields, checked


def search_once(
    request: Auto,
    model: nn.Module,
    mesh: DeviceMesh | Mesh,
    loss: Callable[..., Any] | None,
    device: torch.device,
    options: Options,
    groups: Groups | None,
) -> SearchResult:
    """Search a plan for a model to compile. Rank 0 searches, and the other ranks receive its plan.

    Args:
        request: the search that the user asked for.
        model, mesh, loss, device, options: as for `shardc.compile`.
        groups: the process groups of the mesh; None if there is one process.

    Raises:
        ShardcError: the error of the search; ranks other than 0 raise it as a PlanError.
        MeshError: the ranks search with different models or limits.
    """
    source = request.source(model, loss, device)
    if groups is None or groups.consistency.alone:
        return request.search(source, mesh, options).brief()
    error: ShardcError | None = None
    result: SearchResult | None = None
    text = ""
    if groups.rank == 0:
        try:
            result = request.search(source, mesh, options).brief()
            text = json.dumps({"plan": _rest(result.plan, request.plan).to_json()})
        except ShardcError as raised:
            error, text = raised, json.dumps({"error": str(raised)})
    shapes = "\n".join(f"{name} of shape {list(shape)}" for name, (shape, _) in source.shapes.items())
    inputs = "\n".join(f"{name} of shape {list(shape)}" for name, shape in source.inputs)
    event = Event((("event", f"search by {request}"), ("parameters", shapes), ("input shapes", inputs)))
    reply = json.loads(groups.consistency.exchange(event, text, {0})[0])
    if error is not None:
        raise error
    if "error" in reply:
        raise PlanError(f"the mesh's first rank found no plan: {reply['error']}")
    rest = Plan.from_json(reply["plan"])
    user_plan = request.plan if rest.setting("pp") is None else unstaged(request.plan)
    return result or SearchResult(user_plan | rest, Mesh.of(mesh), hand=request.plan)


def unstaged(plan: Plan) -> Plan:
    """Return ``plan`` without its entry of pipeline stages (``pp``). A search writes another in its place."""
    return Plan.of(entry for entry in plan.entries if not isinstance(entry, Pp))


def _rest(plan: Plan, base: Plan) -> Plan:
    """Return the plan of those entries of ``plan`` that ``base`` does not have, to be sent to other ranks. (The user's
    entries, in ``base``, may have classes that only the user's program defines.)
    """
    return Plan.of(entry for entry in plan.entries if entry not in base.entries)


Memory = Annotated[int | str, Bytes()]
Size = Annotated[int, Range(1)]


@dataclass(frozen=True)
class Auto:
    """A request to search for the plan, from `auto`. Combined with a plan by ``|``, the search keeps the entries of
    that plan.

    Args:
        memory: memory of a rank in bytes; None: that of the hardware.
        hardware: the hardware of the prediction: a name, a file written by ``calibrate``, or a `Hardware`. None: "cpu"
            for a DeviceMesh of CPU ranks, else "h100".
        ranks: number of ranks that the mesh must have; None: any.
        inputs: example inputs of one call at global shapes, those of the loss last; ``meta`` tensors are enough. A
            mapping gives them by name.
        plan: the entries that the user gave.
    """

    memory: Memory | None = None
    hardware: str | Hardware | None = None
    ranks: Size | None = None
    inputs: PyTree = field(default=None, compare=False, repr=False)
    plan: Plan = field(default_factory=Plan)

    def __post_init__(self) -> None:
        check_fields(self, what="auto")
        if isinstance(self.hardware, str):
            find_hardware(self.hardware)

    def __or__(self, other: Plan) -> Auto:
        return replace(self, plan=self.plan | other) if isinstance(other, Plan) else NotImplemented

    def __ror__(self, other: Plan) -> Auto:
        return replace(self, plan=other | self.plan) if isinstance(other, Plan) else NotImplemented

    def __str__(self) -> str:
        hardware = self.hardware.name if isinstance(self.hardware, Hardware) else self.hardware
        settings = {"memory": self.memory, "hardware": hardware, "ranks": self.ranks}
        arguments = [f"{name}={value!r}" for name, value in settings.items() if value is not None]
        return " | ".join([f"auto({', '.join(arguments)})", *([str(self.plan)] if self.plan else [])])

    def described(self, mesh: DeviceMesh | Mesh | None) -> Hardware:
        """Return the `Hardware` of the prediction for ``mesh``: the user's, else CPU for CPU ranks, else H100."""
        if isinstance(self.hardware, Hardware):
            return self.hardware
        on_cpu = isinstance(mesh, DeviceMesh) and mesh.device_type == "cpu"
        return find_hardware(self.hardware or ("cpu" if on_cpu else "h100"))

    def source(self, model: nn.Module, loss: Callable[..., Any] | None, device: torch.device) -> ModelCall:
        """Return a `ModelCall`: ``model``, the example inputs of the search, and the loss and device to compile it for.

        Raises:
            InputError: there are no example inputs.
        """
        if self.inputs is None:
            raise InputError(
                "a search needs example inputs, and shardc.auto() was given none: parameters are sharded before "
                "the first call",
                fix="write shardc.auto(inputs=(tokens, targets)), at global shapes; meta tensors are enough",
            )
        if isinstance(self.inputs, Mapping):
            return ModelCall(model, (), dict(self.inputs), loss, device)
        several = isinstance(self.inputs, tuple | list)
        return ModelCall(model, tuple(self.inputs) if several else (self.inputs,), {}, loss, device)

    @uncollected()
    def search(
        self,
        source: ModelCall,
        mesh: DeviceMesh | Mesh | None,
        options: Options | None = None,
        axes: int = 2,
        report: Report | None = None,
    ) -> SearchResult:
        """Search for the fastest plan that fits in memory, on ``mesh`` or, if that is None, on any mesh of `ranks`
        ranks. Return it as `SearchResult`.

        Args:
            source: the model and its example inputs.
            mesh: the mesh, or None.
            options: the options to compile with.
            axes: largest number of mesh axes, if meshes are searched.
            report: called with each plan that is scheduled.

        Raises:
            InputError: the inputs do not match the model, or neither mesh nor ranks are given.
            MeshError: the mesh does not have `ranks`, or is larger than the hardware description covers.
            PlanError: no plan fits in memory, the user's entries do not match model or mesh.
        """
        if (plan := self.plan.on(Mesh(dp=1) if mesh is None else Mesh.of(mesh))) != self.plan:
            return replace(self, plan=plan).search(source, mesh, options, axes, report)
        arity = None if source.loss is None else loss_arity(source.loss)
        if not takes_loss(source.model, source.args, source.kwargs, arity):
            source = replace(source, loss=None)
        described = self.described(mesh).at(torch.get_float32_matmul_precision())
        meshes = self.meshes(mesh, described, axes, sum(1 for _ in blocks_of(source.model)))
        first = next(iter(meshes))
        described.check(first)
        chosen = replace(options or Options(), verify=False, hooks=(), dump=None)
        if chosen.bucket_size is None and not described.is_host:
            chosen = replace(chosen, bucket_size=described)  # as the program that runs on it has
        memory = described.memory if self.memory is None else float(self.memory)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShardcWarning)
            inner = first.of_stage(meshes[first]) if meshes[first] else first
            captured_model = CapturedModel.of(source, unstaged(self.plan), inner)
            while captured_model.repeats and not captured_model.folds(inner):
                captured_model = captured_model.more
            result = SearchOverMeshes(captured_model, self.plan, described, memory, chosen, report).run(meshes)
        _warn_unused(result, source)
        return result

    def meshes(self, mesh: DeviceMesh | Mesh | None, described: Hardware, axes: int, blocks: int) -> dict[Mesh, str]:
        """Return the meshes to search, each with its axis of pipeline stages ("" for none). These are ``mesh`` alone,
        or all meshes of `ranks` ranks if ``mesh`` is None.

        Args:
            mesh: the mesh, or None.
            described: the hardware, which has the size of a node.
            axes: largest number of axes.
            blocks: number of blocks of the model.

        Raises:
            MeshError: ``mesh`` does not have `ranks`.
            PlanError: the plan mentions more axes than a mesh may have, or unknown ones.
        """
        pp: Pp | None = self.plan.setting("pp")
        staged = "" if pp is None else pp.axis
        if mesh is not None:
            fixed = Mesh.of(mesh)
            if self.ranks not in (None, fixed.ranks):
                raise MeshError(
                    f"auto(ranks={self.ranks}) does not match the mesh {fixed} of {fixed.ranks} ranks",
                    fix="leave ranks out; the mesh has them",
                )
            check_axes(self.plan, fixed)
            return {fixed: staged}
        if self.ranks is None:
            raise InputError("a search needs a mesh, or a number of ranks", fix="write shardc.auto(ranks=64)")
        required = [axis for axis in self.plan.axes if axis != staged]
        meshes = {} if staged else dict.fromkeys(meshes_of(self.ranks, described.node, axes, required), "")
        if self.plan.setting("microbatches") == 1 or staged:
            axis = staged or AXIS
            meshes |= dict.fromkeys(with_stages(self.ranks, described.node, blocks, axes, required, axis), axis)
        if not meshes:
            raise PlanError(
                f"no mesh of {self.ranks} ranks has the axes {', '.join(self.plan.axes)}, all but the first a power of "
                f"two within a node of {described.node}",
                plan_entry=str(self.plan),
                fix="pass the mesh, as shardc.Mesh(dp=3, tp=5)",
            )
        return meshes


def auto(
    *,
    memory: int | str | None = None,
    hardware: str | Hardware | None = None,
    ranks: int | None = None,
    inputs: PyTree = None,
) -> Auto:
    """Search for the plan: pass ``auto()`` to `shardc.compile` in place of a plan, or combine it with plan entries,
    which the search keeps.

    ``shardc.compile(model, mesh, shardc.auto(memory="80GB", inputs=(tokens, targets)))`` searches the layouts of
    parameters, inputs and activations with the least predicted step time that fit in memory, and compiles that plan.

    Args:
        memory: memory of a rank in bytes, or text with a unit; by default that of the hardware.
        hardware: the hardware of the prediction: a name in `shardc.cost.hardware`, a ``.json`` file written by
            ``calibrate``, or a `Hardware`. By default "cpu" for a DeviceMesh of CPU ranks, else "h100".
        ranks: number of ranks that the mesh must have.
        inputs: example inputs of one call at global shapes, those of the loss last. Tensors on ``meta`` are enough. A
            mapping gives them by name. `shardc.compile` needs them, because it shards parameters before the first call.

    Raises:
        InputError: a value has the wrong type or is out of range.
        MeshError: the hardware is unknown.

    >>> from shardc.plan import tp
    >>> print(auto(memory="80GB") | tp("tp", colwise=["*.up"], rowwise=["*.down"]))
    auto(memory=80000000000) | tp("tp", colwise=["*.up"], rowwise=["*.down"])
    """
    return Auto(memory, hardware, ranks, inputs)


def find_plan(
    model: nn.Module | Callable[..., Any],
    mesh: DeviceMesh | Mesh | int,
    *args: PyTree,
    loss: Callable[..., Any] | None = None,
    memory: int | str | None = None,
    hardware: str | Hardware | None = None,
    plan: Plan | None = None,
    axes: int = 2,
    options: Options | None = None,
    report: Report | None = None,
    **kwargs: PyTree,
) -> SearchResult:
    """Search for the plan with the least predicted step time that fits in memory, without devices; return it as
    `SearchResult`.

    Args:
        model: as for `shardc.compile`.
        mesh: a mesh, or a number of ranks (then all meshes of that size are searched).
        *args: example inputs of one call at global shapes, those of the loss last; ``meta`` tensors are enough.
        loss: as for `shardc.compile`.
        memory: as for `shardc.auto`.
        hardware: as for `shardc.auto`.
        plan: entries that every plan must contain.
        axes: largest number of mesh axes, if ``mesh`` is a number of ranks.
        options: the options with which the plan will be compiled.
        report: called with a `Trial` for each plan when it is scheduled.
        **kwargs: example inputs by name.

    Returns:
        A `SearchResult`; compile its ``plan`` on its ``mesh``.

    Raises:
        PlanError: no plan fits in memory (the text has the memory of the smallest), or ``plan`` does not match the
            model.
    """
    checked(options, Options | None, "options", fix="pass shardc.Options(...)")
    ranks, on = (mesh, None) if isinstance(mesh, int) else (None, mesh)
    if on is not None:
        Mesh.of(on)  # or an error that says what a mesh is
    if not callable(model) or isinstance(model, type):
        raise InputError(f"{model!r} is not a model", fix="pass an nn.Module or a function of tensors")
    if not any(isinstance(x, Tensor) for x in pytree.tree_leaves((args, kwargs))):
        raise InputError("a search needs example inputs, and find_plan was given none", fix="pass them at the end")
    request = Auto(memory, hardware, ranks, (), plan or Plan())
    module = model if isinstance(model, nn.Module) else as_module(model)
    placed = [x.device for x in [*module.parameters(), *module.buffers()] if not x.is_meta]
    source = ModelCall(module, args, kwargs, loss, placed[0] if placed else torch.device("cpu"))
    return request.search(source, on, options, axes, report)


def _warn_unused(result: SearchResult, source: ModelCall) -> None:
    """Warn of each mesh axis over which the plan splits nothing, so that all ranks along it compute the same.

    Warns:
        ShardcWarning: an axis is not used; the text has the reason, and an entry that would use it.
    """
    mesh, plan = result.mesh, result.plan
    used = {split_part(axis)[0] for axis in plan.axes}
    for axis in mesh.axes:
        size = mesh.size(axis)
        if size == 1 or axis in used:
            continue
        params = resolve_params(plan, mesh, source.shapes).values()
        dims = [n for shape in [*(p.compute.shape for p in params), *(s for _, s in source.inputs)] for n in shape]
        why = "to use it would take longer" if any(n % size == 0 for n in dims) else f"{size} divides no dim"
        text = f"axis {axis!r} of the mesh {mesh} is not used: {why}; all ranks along it compute the same"
        fix = f'write shardc.auto(...) | shardc.fsdp("{axis}"), which pads what does not divide, or use a smaller mesh'
        warnings.warn(ShardcWarning(str(PlanError(text, fix=fix))), stacklevel=4)
