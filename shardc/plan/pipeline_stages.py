"""`PipelineStages`: the stages of a pipeline, and the stage of each parameter of a model.

Stages are assigned before the model is traced, since parameters are placed first: by the order of the model's modules,
which is the order in which they run in most models. The assignment decides where parameters lie. Ops of the graph
follow the parameters that they read (`shardc.passes.lower.stages`), so a model that runs its modules in another order
needs more transfers, but its results are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import accumulate, pairwise

from torch import nn

from shardc.errors import PlanError
from shardc.ir.mesh import Mesh
from shardc.ir.schedules import Schedule
from shardc.plan.entries import Pp
from shardc.plan.value import Plan
from shardc.validate import near

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass(frozen=True)
class PipelineStages:
    """The pipeline stages of a model: the number of stages, and the stage of each parameter and module.

    Args:
        entry: the plan entry.
        mesh: the mesh of all stages.
        rank_of: coordinate of each stage along the axis of ``entry``.
        first: parameter -> the first stage that uses it, whose ranks store it.
        modules: module with parameters -> its stage; None if its parameters belong to several stages. Parameters that
            are tied to another module's do not count.
    """

    entry: Pp
    mesh: Mesh
    rank_of: tuple[int, ...]
    first: Mapping[str, int]
    modules: Mapping[str, int | None]

    @classmethod
    def of(cls, plan: Plan, mesh: Mesh, model: nn.Module) -> PipelineStages | None:
        """Return the pipeline stages of ``model`` on ``mesh``; None if ``plan`` has no pipeline.

        Raises:
            PlanError: the plan has one microbatch only, the schedule does not have these numbers of ranks and
                microbatches, or as for `stages_of`.
        """
        entry: Pp | None = plan.setting("pp")
        if entry is None:
            return None
        if plan.setting("microbatches") == 1:
            raise PlanError(
                "the stages of a pipeline run microbatches, and the plan does not say how many there are",
                plan_entry=str(entry),
                fix="write pp(..., microbatches=8)",
            )
        lists = entry.lists(mesh.size(entry.axis), plan.setting("microbatches"))
        first = stages_of(entry, lists.stages, model)
        return cls(entry, mesh, lists.rank_of, first, _of_modules(first, model))

    def of_module(self, name: str) -> int | None:
        """Return the pipeline stage of a module. A module without parameters belongs to the stage of the innermost
        module around it that has some.

        None if its parameters belong to several stages.
        """
        while name and name not in self.modules:
            name = name.rpartition(".")[0]
        return self.modules.get(name)

    def order(self, microbatches: int, trains: bool = True) -> Schedule:
        """Return the pipeline schedule of a training step (``trains``) or of a call without gradients: the actions of
        each rank in order.
        """
        return self.entry.lists(self.ranks, microbatches, trains)

    @property
    def ranks(self) -> int:
        """Return the size of the axis of the stages."""
        return self.mesh.size(self.entry.axis)

    @property
    def count(self) -> int:
        """Return the number of stages."""
        return len(self.rank_of)

    @property
    def owners(self) -> dict[str, int]:
        """Return which ranks store each parameter: name -> their coordinate along the axis of pipeline stages."""
        return {name: self.rank_of[stage] for name, stage in self.first.items()}


def stages_of(entry: Pp, count: int, model: nn.Module) -> dict[str, int]:
    """Return parameter -> the first stage that uses it.

    Args:
        entry: the plan entry.
        count: number of stages.
        model: the model; its tensors may be on ``meta``.

    Raises:
        PlanError: there are more stages than blocks, or the cuts are not as many as the stages need, match no module,
            or are not in the order of the model's modules.
    """
    blocks = list(blocks_of(model))
    if entry.cut == "auto":
        parts = [name for name, _ in blocks]
        starts = _balanced(entry, count, [_work(modules) for _, modules in blocks])
    else:
        parts = [name for name, module in model.named_modules() if _direct(module)]
        starts = _cuts(entry, count, parts, [name for name, _ in blocks])
    ranges = pairwise([*starts, len(parts)])
    stage = {parts[at]: k for k, (low, high) in enumerate(ranges) for at in range(low, high)}
    out: dict[int, tuple[str, int]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        at = stage[next(module for module in _inside(name) if module in stage)]
        first, lowest = out.get(id(param), (name, at))
        out[id(param)] = first, min(lowest, at)
    return dict(out.values())


def _of_modules(first: Mapping[str, int], model: nn.Module) -> dict[str, int | None]:
    """Return the pipeline stage of each module that has parameters, as `PipelineStages` stores them: module name ->
    stage.

    Args:
        first: parameter -> the first stage that uses it.
    """
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    stages: dict[str, set[int]] = {}
    for several in names.values():
        for name in several:
            for module in _inside(name):
                of_module = stages.setdefault(module, set())
                if len(several) == 1:
                    of_module.add(first[name])
    return {module: next(iter(at)) if len(at) == 1 else None for module, at in stages.items()}


def _direct(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of ``module`` itself, without those of its submodules."""
    return [param for param in module._parameters.values() if param is not None]


def _inside(name: str) -> Iterator[str]:
    """Yield the names of the modules around the parameter or module ``name``, the innermost first. The last is "", the
    model itself.
    """
    while name:
        name = name.rpartition(".")[0]
        yield name


def blocks_of(module: nn.Module, name: str = "") -> Iterator[tuple[str, list[nn.Module]]]:
    """Yield the blocks of which pipeline stages consist, in order, as (name, list of the modules in the block). A stage
    has one or more whole blocks.

    A block is an item of an outermost list of modules, or a module that contains no list. A module that contains lists
    and has parameters of its own is a block of these alone.
    """
    if _direct(module):
        yield name, [module]
    for key, child in module.named_children():
        path = f"{name}.{key}" if name else key
        items = [(f"{path}.{at}", item) for at, item in child.named_children()] if isinstance(child, _LISTS) else []
        if not items and any(isinstance(inner, _LISTS) for inner in child.modules()):
            yield from blocks_of(child, path)
            continue
        for at, item in items or [(path, child)]:
            if any(True for _ in item.parameters()):
                yield at, list(item.modules())


def _work(modules: Sequence[nn.Module]) -> int:
    """Return the work of ``modules`` for each sample: the number of weights by which it is multiplied. Embeddings do
    not count.
    """
    return sum(p.numel() for module in modules if not isinstance(module, nn.Embedding) for p in _direct(module))


def _balanced(entry: Pp, count: int, work: Sequence[int]) -> list[int]:
    """Return a balanced cut of the model's blocks into ``count`` stages: the index of the first block of each. The
    stage with the most work has as little as possible.

    Args:
        entry: the plan entry, for the error.
        work: the work of each block, in order.
    """
    if len(work) < count:
        raise PlanError(
            f"{count} stages are asked for, and the model has {len(work)} blocks",
            plan_entry=str(entry),
            fix="use fewer stages, or name the modules that begin stages: cut=[...]",
        )
    before = [0, *accumulate(work)]
    best: dict[tuple[int, int], tuple[int, list[int]]] = {
        (0, 0): (0, [])
    }  # (stages, parts) -> (most work of a stage, their first parts)
    for stages in range(1, count + 1):
        for end in range(stages, len(work) - (count - stages) + 1):
            options = [
                (max(best[stages - 1, start][0], before[end] - before[start]), start)
                for start in range(stages - 1, end)
                if (stages - 1, start) in best
            ]
            most, start = min(options)
            best[stages, end] = most, [*best[stages - 1, start][1], start]
    return best[count, len(work)][1]


def _cuts(entry: Pp, count: int, parts: Sequence[str], blocks: Sequence[str]) -> list[int]:
    """Return where the plan cuts the model into ``count`` stages: the index in ``parts`` at which each stage begins.
    Stage 0 begins at 0, each later stage at the first match of its glob in ``entry.cut``.

    Args:
        parts: names of the modules with parameters of their own, in order.
        blocks: names of the blocks, for suggestions.
    """
    if len(entry.cut) != count - 1:
        raise PlanError(
            f"{len(entry.cut)} cuts are named, and {count} stages need {count - 1}",
            plan_entry=str(entry),
            fix="name the first module of each stage but the first",
        )
    starts = [0]
    for glob in entry.cut:
        at = next(
            (k for k, name in enumerate(parts) if any(fnmatchcase(x, glob) for x in (name, *_inside(name)) if x)), None
        )
        if at is None:
            raise PlanError(
                f"no module with parameters matches the cut {glob!r}", plan_entry=str(entry), fix=near(glob, blocks)
            )
        if at <= starts[-1]:
            raise PlanError(
                f"the cut {glob!r} begins at {parts[at] or 'the model'!r}, which is not behind the cut before it",
                plan_entry=str(entry),
                fix="name the modules in the order in which the model has them, none of them the first",
            )
        starts.append(at)
    return starts
