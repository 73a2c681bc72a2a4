"""What a person asks for who has a model, ranks and so much memory, and no plan: `auto` and `find_plan`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from shardc._compat import pytree
from shardc.capture import as_module, loss_arity
from shardc.cost import hardware as known
from shardc.cost.hardware import Hardware
from shardc.errors import InputError, MeshError, PlanError, ShardcWarning
from shardc.ir.mesh import Mesh
from shardc.passes.options import Options
from shardc.plan.resolve import check_axes
from shardc.plan.value import Plan
from shardc.runtime.inputs import takes_loss
from shardc.search.meshes import Ranged, Report, meshes_of
from shardc.search.opened import Model, Opened
from shardc.search.result import Found
from shardc.search.unused import warn_unused
from shardc.validate import Bytes, Range, check_fields, checked

Memory = Annotated[int | str, Bytes()]
Size = Annotated[int, Range(1)]


@dataclass(frozen=True)
class Auto:
    """A search for a plan, in place of one. It composes with plans by ``|``; what they say holds.

    Args:
        memory: bytes that a rank has; None: what the hardware has.
        hardware: what times are predicted for: a name, a file of ``calibrate``'s, or a `Hardware`. None: "cpu" for a
            DeviceMesh of CPU ranks, else "h100".
        ranks: how many the mesh must have; None: as many as it has.
        inputs: example inputs of one call at global shapes, those of the loss at the end; ``meta`` tensors do. A
            mapping goes by name.
        plan: what is given of the plan.
    """

    memory: Memory | None = None
    hardware: str | Hardware | None = None
    ranks: Size | None = None
    inputs: Any = field(default=None, compare=False, repr=False)
    plan: Plan = field(default_factory=Plan)

    def __post_init__(self) -> None:
        check_fields(self, what="auto")
        if isinstance(self.hardware, str):
            known.find(self.hardware)

    def __or__(self, other: Plan) -> Auto:
        return replace(self, plan=self.plan | other) if isinstance(other, Plan) else NotImplemented

    def __ror__(self, other: Plan) -> Auto:
        return replace(self, plan=other | self.plan) if isinstance(other, Plan) else NotImplemented

    def __str__(self) -> str:
        hardware = self.hardware.name if isinstance(self.hardware, Hardware) else self.hardware
        given = {"memory": self.memory, "hardware": hardware, "ranks": self.ranks}
        said = [f"{name}={value!r}" for name, value in given.items() if value is not None]
        return " | ".join([f"auto({', '.join(said)})", *([str(self.plan)] if self.plan else [])])

    def described(self, mesh: DeviceMesh | Mesh | None) -> Hardware:
        """The hardware that times are predicted for."""
        if isinstance(self.hardware, Hardware):
            return self.hardware
        on_cpu = isinstance(mesh, DeviceMesh) and mesh.device_type == "cpu"
        return known.find(self.hardware or ("cpu" if on_cpu else "h100"))

    def source(self, model: nn.Module, loss: Callable[..., Any] | None, device: torch.device) -> Model:
        """The model and its example inputs.

        Raises:
            InputError: there are none.
        """
        if self.inputs is None:
            raise InputError(
                "a plan is found for example inputs, and shardc.auto() was given none: parameters are stored before "
                "the first call",
                fix="write shardc.auto(inputs=(tokens, targets)), at global shapes; tensors on meta do",
            )
        if isinstance(self.inputs, Mapping):
            return Model(model, (), dict(self.inputs), loss, device)
        several = isinstance(self.inputs, tuple | list)
        return Model(model, tuple(self.inputs) if several else (self.inputs,), {}, loss, device)

    def search(
        self,
        source: Model,
        mesh: DeviceMesh | Mesh | None,
        options: Options | None = None,
        axes: int = 2,
        report: Report | None = None,
    ) -> Found:
        """The fastest plan that fits, on ``mesh``, or, without one, on a mesh of `ranks`.

        Args:
            axes: of a mesh, at most, where these are searched.
            report: called with each plan that was scheduled.

        Raises:
            InputError: the inputs are none of the model's; neither mesh nor ranks.
            MeshError: the mesh is not of `ranks`, or larger than the hardware's description.
            PlanError: nothing fits, or the plan does not fit the model or the mesh.
        """
        if (plan := self.plan.on(Mesh(dp=1) if mesh is None else Mesh.of(mesh))) != self.plan:
            return replace(self, plan=plan).search(source, mesh, options, axes, report)
        arity = None if source.loss is None else loss_arity(source.loss)
        if not takes_loss(source.model, source.args, source.kwargs, arity):
            source = replace(source, loss=None)
        described = self.described(mesh)
        meshes = self.meshes(mesh, described, axes)
        described.check(meshes[0])
        chosen = replace(options or Options(), verify=False, hooks=(), dump=None)
        memory = described.memory if self.memory is None else float(self.memory)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShardcWarning)
            opened = Opened.of(source, self.plan, meshes[0])
            while opened.repeats and not opened.folds(meshes[0]):
                opened = opened.more
            found = Ranged(opened, self.plan, described, memory, chosen, report).run(meshes)
        warn_unused(found, source)
        return found

    def meshes(self, mesh: DeviceMesh | Mesh | None, described: Hardware, axes: int) -> list[Mesh]:
        """The meshes to search.

        Raises:
            MeshError: ``mesh`` does not have `ranks`.
            PlanError: the plan speaks of more axes than a mesh may have, or of others.
        """
        if mesh is not None:
            fixed = Mesh.of(mesh)
            if self.ranks not in (None, fixed.ranks):
                raise MeshError(
                    f"auto(ranks={self.ranks}) does not match the mesh {fixed} of {fixed.ranks} ranks",
                    fix="leave ranks out: those of the mesh are meant",
                )
            check_axes(self.plan, fixed)
            return [fixed]
        if self.ranks is None:
            raise InputError("a search needs a mesh, or a number of ranks", fix="write shardc.auto(ranks=64)")
        found = meshes_of(self.ranks, described.node, axes, self.plan.axes)
        if not found:
            raise PlanError(
                f"no mesh of {self.ranks} ranks has the axes {', '.join(self.plan.axes)}, all but the first a power of "
                f"two within a node of {described.node}",
                plan_entry=str(self.plan),
                fix="pass the mesh, as shardc.Mesh(dp=3, tp=5)",
            )
        return found


def auto(
    *,
    memory: int | str | None = None,
    hardware: str | Hardware | None = None,
    ranks: int | None = None,
    inputs: Any = None,
) -> Auto:
    """A plan that is searched for: in place of a plan, and beside entries of one, which hold.

    ``shardc.compile(model, mesh, shardc.auto(memory="80GB", inputs=(tokens, targets)))`` finds where parameters, inputs
    and activations lie so that a step takes the least predicted time of all plans that fit, and compiles it.

    Args:
        memory: bytes that a rank has, or text with a unit; by default what the hardware has.
        hardware: what times are predicted for: a name of `shardc.cost.hardware`, a ``.json`` file of ``calibrate``'s,
            or a `Hardware`. By default "cpu" for a DeviceMesh of CPU ranks, else "h100".
        ranks: how many ranks the mesh must have.
        inputs: example inputs of one call at global shapes, those of the loss at the end. Tensors on ``meta`` do. A
            mapping goes by name. `shardc.compile` needs them, because it stores parameters before the first call.

    Raises:
        InputError: a value of another type or out of range.
        MeshError: no hardware of that name.

    >>> from shardc.plan import tp
    >>> print(auto(memory="80GB") | tp("tp", colwise=["*.up"], rowwise=["*.down"]))
    auto(memory=80000000000) | tp("tp", colwise=["*.up"], rowwise=["*.down"])
    """
    return Auto(memory, hardware, ranks, inputs)


def find_plan(
    model: nn.Module | Callable[..., Any],
    mesh: DeviceMesh | Mesh | int,
    *args: Any,
    loss: Callable[..., Any] | None = None,
    memory: int | str | None = None,
    hardware: str | Hardware | None = None,
    plan: Plan | None = None,
    axes: int = 2,
    options: Options | None = None,
    report: Report | None = None,
    **kwargs: Any,
) -> Found:
    """Searches for the fastest plan, by prediction, that fits; compiles nothing and needs no devices.

    Args:
        model: as for `shardc.compile`.
        mesh: a mesh, or a number of ranks, whose meshes are searched too.
        *args: example inputs of one call at global shapes, those of the loss at the end; ``meta`` tensors do.
        loss: as for `shardc.compile`.
        memory: as for `shardc.auto`.
        hardware: as for `shardc.auto`.
        plan: what is given; it holds.
        axes: of a mesh, at most, where ranks are given.
        options: what the plan will be compiled with.
        report: called with a `Trial` for each plan that was scheduled, as they come.
        **kwargs: example inputs by name.

    Returns:
        A `Found`: its ``plan`` and ``mesh`` are what to compile.

    Raises:
        PlanError: nothing fits; the text says what the plan that needs least takes. Or ``plan`` does not fit the model.
    """
    checked(options, Options | None, "options", fix="pass shardc.Options(...)")
    ranks, on = (mesh, None) if isinstance(mesh, int) else (None, mesh)
    if on is not None:
        Mesh.of(on)  # or an error that says what a mesh is
    if not callable(model) or isinstance(model, type):
        raise InputError(f"{model!r} is not a model", fix="pass an nn.Module or a function of tensors")
    if not any(isinstance(x, Tensor) for x in pytree.tree_leaves((args, kwargs))):
        raise InputError("a plan is found for example inputs, and find_plan was given none", fix="pass them at the end")
    asked = Auto(memory, hardware, ranks, (), plan or Plan())
    module = model if isinstance(model, nn.Module) else as_module(model)
    placed = [x.device for x in [*module.parameters(), *module.buffers()] if not x.is_meta]
    source = Model(module, args, kwargs, loss, placed[0] if placed else torch.device("cpu"))
    return asked.search(source, on, options, axes, report)
