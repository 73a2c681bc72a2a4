"""The pipeline as a value: what runs is its tuple, which a user prints, cuts and extends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import shardc
from shardc.errors import InputError, VerifyError
from shardc.ir.layout import Layout
from shardc.passes import Bucket, Hook, Pipeline, Propagate, Simplify
from shardc.passes.layout.greedy import Greedy
from shardc.passes.layout.propagate import Problem


@dataclass(frozen=True)
class Noted:
    """Notes its name. And no more."""

    name: str
    notes: list[str]

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        self.notes.append(self.name)
        return gm


def pipeline(*names: str) -> tuple[Pipeline, list[str]]:
    notes: list[str] = []
    return Pipeline(tuple(Noted(name, notes) for name in names)), notes


def lower(options: shardc.Options) -> shardc.Program:
    module = shardc.compile(
        nn.Linear(8, 8), shardc.Mesh(dp=2), shardc.fsdp("dp"), loss=F.mse_loss, options=options, backend="eager"
    )
    program = module.lower(torch.empty(4, 8), torch.empty(4, 8))
    assert len(program.step()) == 2
    return program


def test_the_tuple_is_what_runs() -> None:
    made, notes = pipeline("a", "b", "c")
    made.run(fx.GraphModule({}, fx.Graph()))
    assert notes == ["a", "b", "c"]


def test_hooks_stand_around_every_pass() -> None:
    made, notes = pipeline("a", "b")

    class Both(Hook):
        def before(self, stage: str, gm: fx.GraphModule) -> None:
            notes.append(f"before {stage}")

        def after(self, stage: str, gm: fx.GraphModule) -> None:
            notes.append(f"after {stage}")

    made.run(fx.GraphModule({}, fx.Graph()), Both())
    assert notes == ["before a", "a", "after a", "before b", "b", "after b"]


def test_cut_extend_and_reorder() -> None:
    made, notes = pipeline("a", "b", "c")
    other = Noted("other", notes)
    assert made.before("b", other).names == ("a", "other", "b", "c")
    assert made.after("b", other).names == ("a", "b", "other", "c")
    assert made.without("a", "c").names == ("b",)
    assert made.until("b").names == ("a",) and made.behind("b").names == ("c",)
    assert (made.behind("a") + made.until("b")).names == ("b", "c", "a")
    new = Noted("b", [])
    assert made.replaced(new).passes == (made.passes[0], new, made.passes[2])
    assert made.names == ("a", "b", "c"), "the pipeline itself stays"


def test_as_text() -> None:
    made, _ = pipeline("a", "longer")
    assert str(made) == "a       Notes its name\nlonger  Notes its name"


def test_a_wrong_name() -> None:
    made, notes = pipeline("bucket", "schedule")
    with pytest.raises(InputError, match="there is no pass 'buckets'\n  fix: did you mean 'bucket'"):
        made.after("buckets", Noted("x", notes))
    with pytest.raises(InputError, match="2 passes are called 'bucket'"):
        made.after("schedule", Noted("bucket", notes))
    with pytest.raises(InputError, match="the pipeline has no Bucket"):
        made[Bucket]


def test_a_users_pipeline() -> None:
    notes: list[str] = []

    def edit(made: Pipeline) -> Pipeline:
        assert isinstance(made[Simplify], Simplify)
        return (
            made.without("simplify")
            .after("hoist_grad_epilogue", Noted("mine", notes))
            .after("schedule", Noted("last", notes))
        )

    program = lower(shardc.Options(pipeline=edit))
    assert notes == ["mine", "last", "last"]  # once on the joint graph, then on each half
    assert "simplify" not in program.stages
    stages = list(program.stages)
    assert stages[stages.index("mine") - 1] == "hoist_grad_epilogue" and "last.backward" in stages


def test_a_users_hook_sees_every_stage() -> None:
    seen: list[str] = []

    class Seen(Hook):
        def after(self, stage: str, gm: fx.GraphModule) -> None:
            seen.append(stage)

    program = lower(shardc.Options(hooks=(Seen(),)))
    assert seen == ["capture", *program.pipeline.until("partition").names, *2 * program.halves.names]


def test_layouts_chosen_in_another_way() -> None:
    seen: list[Problem] = []

    def chooser(problem: Problem, graph: fx.Graph) -> Mapping[fx.Node, Layout]:
        seen.append(problem)
        return Greedy()(problem, graph)

    def edit(made: Pipeline) -> Pipeline:
        return made.replaced(replace(made[Propagate], chooser=chooser))

    program = lower(shardc.Options(pipeline=edit))
    assert [problem.batch_axes for problem in seen] == [("dp",)]
    assert program.text("localize") == lower(shardc.Options()).text("localize")


def test_a_users_pass_behind_collectives_is_in_the_reduction_too() -> None:
    notes: list[str] = []

    def edit(made: Pipeline) -> Pipeline:
        return made.before("offload", Noted("mine", notes)).before("seed", Noted("early", notes))

    program = lower(shardc.Options(pipeline=edit))
    before = len(notes)
    sums = Layout.whole(program.mesh, (8, 8)).replace(partial=[("dp", "sum")])
    program.reduction([("weight", sums, torch.float32)])
    assert notes[before:] == ["mine"]


@dataclass(frozen=True)
class OnLocalShapes:
    """Needs local shapes."""

    name = "on_local_shapes"
    requires = ("localize",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        return gm


@dataclass(frozen=True)
class Reorders:
    """Breaks what later passes require: moves the last op to the front of the graph."""

    name = "reorders"

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        calls = [node for node in gm.graph.nodes if node.op == "call_function"]
        calls[0].prepend(calls[-1])
        return gm


def test_a_pass_runs_behind_those_that_it_requires() -> None:
    assert lower(shardc.Options(pipeline=lambda passes: passes.before("offload", OnLocalShapes())))
    too_early = (
        "'on_local_shapes' requires 'localize', which runs after it\n  fix: insert it behind that one: passes.after"
    )
    with pytest.raises(InputError, match=too_early):
        lower(shardc.Options(pipeline=lambda passes: passes.before("reshard", OnLocalShapes())))
    with pytest.raises(InputError, match="'localize' requires 'collectives', which is not in the pipeline"):
        lower(shardc.Options(pipeline=lambda passes: passes.without("keep_part", "collectives")))


@pytest.mark.parametrize("last", ["canonicalize", "reshard", "hoist_grad_epilogue", "skip_regather", "schedule"])
def test_a_pass_that_breaks_what_later_ones_require_is_told_which(last: str) -> None:
    wrong = (
        r"after reorders: .*is not above it(.|\n)*fix: mend the pass 'reorders': what runs after it requires that "
        "placeholders come first, operands before their users"
    )
    with pytest.raises(VerifyError, match=wrong):
        lower(shardc.Options(pipeline=lambda passes: passes.after(last, Reorders())))
