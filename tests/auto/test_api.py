"""`shardc.auto` and `find_plan`: what was found is what is compiled, on every rank; errors that are clear."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss

import shardc
from examples.models import gpt2
from shardc.cost.hardware import H100
from shardc.ir.mesh import Mesh
from shardc.passes.layout.exact.chooser import Weights
from shardc.passes.unfold import NotPeriodic
from shardc.search import plan_search
from shardc.search.captured_model import CapturedModel, ModelCall
from shardc.search.memory_fit import LEAST
from shardc.search.meshes import meshes_of
from shardc.search.plan_search import Search
from shardc.search.result import SearchResult, Trial
from shardc.solver import solve
from shardc.solver.energy import evaluate
from tests.ranks import device_mesh, run_ranks
from tests.sequence.models import Own

LARGE = torch.empty(4096, 512, device="meta")
SMALL = torch.empty(16, 8, device="meta")


def build(width: int, device: str = "meta") -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        return nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))


@pytest.fixture(scope="module")
def found() -> SearchResult:
    return shardc.find_plan(build(512), Mesh(dp=2, tp=2), LARGE, memory="1GB")


def test_it_is_the_fastest_that_fits(found: SearchResult) -> None:
    assert found.mesh == Mesh(dp=2, tp=2)
    assert found.best.fits and found.schedule.seconds == min(t.seconds for t in found.trials if t.fits)
    assert found.form is not None and found.schedule.seconds <= found.form.seconds
    assert found.memory == found.schedule.memory.peak.total
    assert 0 < found.bound <= found.value and 0 <= found.gap < 1e-9 and found.variables > 10
    assert set(found.plan.axes) == {"dp", "tp"}


def test_the_table_has_a_row_for_each_plan(found: SearchResult) -> None:
    head, *rows = found.table().splitlines()
    assert head.split()[:2] == ["mesh", "plan"] and len(rows) == len(found.trials)
    assert str(found).startswith(f"{found.plan}\non dp=2 tp=2: ")


def test_no_solution_is_scheduled_that_costs_more_than_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every schedule hid all that a sum counts: then nothing but the library's forms is left."""
    monkeypatch.setattr(plan_search, "MARGIN", 0.0)
    found = shardc.find_plan(build(512), Mesh(dp=2, tp=2), LARGE, memory="1GB")
    assert found.trials and not any(trial.from_search for trial in found.trials)
    assert found.best is found.form and str(found).startswith(f"{found.plan}\n")


def searched(model: nn.Module, x: torch.Tensor, mesh: Mesh, hand: shardc.Plan | None = None) -> Search:
    hand = hand or shardc.Plan()
    captured_model = CapturedModel.of(
        ModelCall(model, (x,), {}, lambda out: out.mean(), torch.device("meta")), hand, mesh
    )
    return Search(captured_model, mesh, hand, H100, 80e9, shardc.Options(cost=H100))


@pytest.mark.parametrize("hand", [shardc.Plan(), shardc.Plan(activations={"*.0": "~, _"})], ids=["open", "pinned"])
def test_a_solution_costs_its_time_and_its_memory(hand: shardc.Plan) -> None:
    """So what it costs at another price of a byte is known without solving, and a problem is solved at many prices."""
    with torch.device("meta"):
        model = nn.Sequential(*(build(8) for _ in range(6)))
    search = searched(model, SMALL, Mesh(dp=2, tp=2), hand)
    problem = search.problem(("dp",), Weights(of=search.captured_model.weight))
    candidate = search._best_solution(problem, 1e-12, math.inf)
    assert candidate is not None and candidate.bytes > 4 * 6 * 2 * 8 * 32  # a quarter of the parameters, four times
    assert candidate.at(1e-12) == candidate.value
    labels = solve(problem.energy(1e-6)).labels
    apart = evaluate(problem.energy(1e-6), labels) - evaluate(problem.energy(1e-12), labels)
    assert apart == pytest.approx((1e-6 - 1e-12) * problem.bytes(labels), rel=1e-9)
    small = search._best_solution(problem, 1e-6, math.inf)
    assert small is not None and small.bytes < candidate.bytes and small.at(0.0) > candidate.at(0.0)
    assert candidate.at(1e-6) > small.value and small.at(1e-12) > candidate.value
    again = search._best_solution(problem, 1e-12, math.inf)
    assert again is not None and (again.plan, again.borders) == (candidate.plan, candidate.borders)
    assert candidate.borders != small.borders


def test_a_form_that_few_blocks_do_not_say_is_captured_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(build(8) for _ in range(6)))
    search, form, program = searched(model, SMALL, Mesh(dp=2)), shardc.fsdp("dp"), CapturedModel.program

    def differs(captured_model: CapturedModel, *given: Any) -> Any:
        if captured_model.repeats:
            raise NotPeriodic("no two blocks are alike")
        return program(captured_model, *given)

    expected = search.schedule(form, search.captured_model)
    monkeypatch.setattr(CapturedModel, "program", differs)
    assert search.schedule(form, search.captured_model, by_hand=False) is None, "six blocks are made of four"
    whole = search.schedule(form, search.captured_model)
    assert whole is not None and expected is not None and whole.seconds == pytest.approx(expected.seconds, rel=1e-9)


@pytest.mark.parametrize("said", [{"overrides": {"8.0.weight": 1}}, {"levels": {"8.*": 2}}], ids=["stored", "gathered"])
def test_a_plan_that_treats_the_last_block_otherwise_is_scheduled_as_it_is_compiled(said: dict[str, Any]) -> None:
    """The last of the few blocks that were captured stands for the last one."""
    with torch.device("meta"):
        model = nn.Sequential(*(build(8) for _ in range(9)))
    search = searched(model, SMALL, Mesh(dp=2))
    plan = shardc.fsdp("dp", **said)
    made = search.schedule(plan, search.captured_model, by_hand=False)
    options = shardc.Options(cost=H100)
    module = shardc.compile(model, search.mesh, plan, loss=lambda out: out.mean(), options=options)
    expected = module.lower(SMALL).schedule(H100)
    assert made is not None and made.seconds == pytest.approx(expected.seconds, rel=1e-9)
    assert made.memory.peak.total == expected.memory.peak.total
    assert [x.sizes for x in made.memory.samples] == [x.sizes for x in expected.memory.samples]
    alike = search.schedule(shardc.fsdp("dp"), search.captured_model)
    assert alike is not None and [x.sizes for x in made.memory.samples] != [x.sizes for x in alike.memory.samples]


@pytest.mark.slow
def test_a_form_under_which_alike_blocks_differ_is_scheduled() -> None:
    """12 heads over 8 ranks: what a block takes over from the one before is laid out in two ways, in turn."""
    config = gpt2.GPT2Config(64, 64, 768, layers=6, heads=12)
    with torch.device("meta"):
        model, (ids, _) = gpt2.GPT2(config), gpt2.batch(config, size=64, length=64, device="meta")
    search, form = searched(model, ids, Mesh(tp=8)), gpt2.gpt2_tp("tp")
    assert search.schedule(form, search.captured_model, by_hand=False) is None
    assert search.schedule(form, search.captured_model) is not None


def test_it_is_what_compile_compiles(found: SearchResult, tmp_path: Path) -> None:
    """The plan by a search, the same from a file, and a second search: one program, as it was predicted."""
    asked, options = shardc.auto(memory="1GB", inputs=LARGE), shardc.Options(bucket_size=H100)  # as on GPUs
    searched = shardc.compile(build(512), found.mesh, asked, options=options)
    assert searched.shardc.cache.build.plan == searched.shardc.search_result.plan == found.plan
    found.plan.save(tmp_path / "plan.json")
    loaded = shardc.compile(build(512), found.mesh, shardc.Plan.load(tmp_path / "plan.json"), options=options)
    assert loaded.shardc.search_result is None
    one, other = searched.lower(LARGE), loaded.lower(LARGE)
    assert [one.text(stage) for stage in one.stages] == [other.text(stage) for stage in other.stages]
    assert other.schedule("h100").seconds == found.schedule.seconds


def test_meshes_are_searched_from_one_capture() -> None:
    came: list[Trial] = []
    found = shardc.find_plan(build(512), 4, LARGE, report=came.append)
    by_mesh = sorted(came, key=lambda trial: len(trial.mesh.axes))
    assert [(t.mesh, t.plan, t.seconds) for t in by_mesh] == [(t.mesh, t.plan, t.seconds) for t in found.trials]
    assert {trial.mesh for trial in came} == {Mesh(dp=4), Mesh(dp=2, tp=2)}


@pytest.mark.parametrize("slow", [1e-6, 1e3])
def test_the_mesh_that_promises_most_is_searched_first(slow: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be faster than what is known is not searched; the library's forms are scheduled on all."""
    ran, run = [], Search.run
    monkeypatch.setattr(Search, "least", lambda search: {"dp=4": slow, "dp=2 tp=2": 1e-9}[str(search.mesh)])
    monkeypatch.setattr(Search, "run", lambda search: [ran.append(search.mesh), run(search)][1])
    found = shardc.find_plan(build(512), 4, LARGE)
    assert ran == [Mesh(dp=2, tp=2), Mesh(dp=4)][: 2 if slow < 1 else 1]
    assert {trial.mesh for trial in found.trials} == {Mesh(dp=4), Mesh(dp=2, tp=2)}


@pytest.mark.parametrize("mesh", [Mesh(dp=4), Mesh(dp=2, tp=2)], ids=str)
def test_no_solution_costs_less_than_what_a_mesh_promises(mesh: Mesh) -> None:
    search = searched(build(512), LARGE, mesh)
    least, values = search.least(), []
    for gather in (plan_search.BEST, plan_search.HIDDEN):
        for over in search._storage_axes():
            problem = search.problem(over, Weights(gather, plan_search.HIDDEN, search.captured_model.weight))
            values.append(solve(problem.energy(LEAST)).value)
    assert 0.5 * min(values) < least <= min(values) * (1 + 1e-12)
    storages = search.problem(None, Weights()).storages.values()
    assert set(search._storage_axes()) == {s.bound for ways in storages for c, s in ways if not c.axes}


@pytest.mark.parametrize(
    ("ranks", "node", "axes", "said", "expected"),
    [
        (1, 8, 2, (), [Mesh(dp=1)]),
        (6, 8, 2, (), [Mesh(dp=6), Mesh(dp=3, tp=2)]),
        (64, 8, 2, (), [Mesh(dp=64), Mesh(dp=32, tp=2), Mesh(dp=16, tp=4), Mesh(dp=8, tp=8)]),
        (4, 8, 2, ("tp",), [Mesh(tp=4), Mesh(dp=2, tp=2)]),
        (8, 8, 2, ("dp", "sp"), [Mesh(dp=4, sp=2), Mesh(dp=2, sp=4)]),
        (7, 8, 2, ("dp", "tp"), []),
    ],
)
def test_meshes(ranks: int, node: int, axes: int, said: tuple[str, ...], expected: list[Mesh]) -> None:
    assert meshes_of(ranks, node, axes, said) == expected


# --- what is given holds


@pytest.mark.parametrize(
    "given",
    [
        shardc.fsdp("dp"),
        shardc.tp("tp", colwise=["0"], rowwise=["2"]),
        shardc.Plan(params={"0.weight": (None, None)}),
        shardc.Plan(inputs=[("tp", None)]),
        shardc.Plan(activations={"0:output": (None, "dp")}),
    ],
    ids=str,
)
def test_what_is_given_holds(given: shardc.Plan) -> None:
    auto = shardc.auto(inputs=LARGE) | given
    module = shardc.compile(build(512), Mesh(dp=2, tp=2), auto)
    entries = module.shardc.search_result.plan.entries
    assert all(entry in entries for entry in given.entries)


def test_it_composes_on_both_sides() -> None:
    auto, one, other = shardc.auto(memory="1GB"), shardc.ddp("dp"), shardc.tp("tp", colwise=["0"])
    assert (one | auto | other).plan == one | other
    assert str(one | auto) == 'auto(memory=1000000000) | ddp("dp")'
    assert auto.memory == 10**9


# --- what cannot be


def test_a_limit_that_nothing_fits_says_what_takes_least() -> None:
    with pytest.raises(shardc.ShardcError) as error:
        shardc.find_plan(build(512), Mesh(dp=4), LARGE, memory="1MB")
    assert error.value.what.startswith("no plan on dp=4 fits in 0.001 GB a rank: the smallest that was found takes 0.0")


def test_an_axis_that_nothing_uses_is_named() -> None:
    with pytest.warns(shardc.ShardcWarning) as said:
        shardc.find_plan(build(512), Mesh(dp=2, tp=7), LARGE, plan=shardc.fsdp("dp"))
    (text,) = (str(warning.message) for warning in said)
    assert text.splitlines() == [
        "axis 'tp' of the mesh dp=2 tp=7 is not used: 7 divides no dim; all ranks along it compute the same",
        '  fix: write shardc.auto(...) | shardc.fsdp("tp"), which pads what does not divide, or use a smaller mesh',
    ]
    mended = shardc.find_plan(build(512), Mesh(dp=2, tp=7), LARGE, plan=shardc.fsdp("dp") | shardc.fsdp("tp"))
    assert set(mended.plan.axes) == {"dp", "tp"}


def missing() -> Any:
    return shardc.compile(build(8), Mesh(dp=2), shardc.auto())


def other_ranks() -> Any:
    return shardc.compile(build(8), Mesh(dp=2), shardc.auto(ranks=8, inputs=SMALL))


def twice() -> Any:
    return shardc.find_plan(build(8), Mesh(dp=2), SMALL, plan=shardc.Plan(activations={"0": ("dp", "dp")}))


def both() -> Any:
    plan = shardc.ddp("dp") | shardc.tp("dp", colwise=["0"])
    return shardc.find_plan(build(8), Mesh(dp=2), SMALL, plan=plan)


def no_axis() -> Any:
    return shardc.find_plan(build(8), Mesh(dp=2), SMALL, plan=shardc.fsdp("tp"))


def larger() -> Any:
    return shardc.find_plan(build(8), 10**5, SMALL)


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        (missing, "a search needs example inputs, and shardc.auto() was given none: parameters are sharded before "
         "the first call"),
        (other_ranks, "auto(ranks=8) does not match the mesh dp=2 of 2 ranks"),
        (twice, """spec ("dp", "dp") uses axis 'dp' twice"""),
        (both, """axis 'dp' is given to TP and to ddp("dp")"""),
        (no_axis, "unknown mesh axis 'tp'; the mesh is dp=2"),
        (larger, "the mesh dp=100000 has 100000 ranks; h100 is described for at most 24576"),
        (partial(shardc.auto, hardware="h1000"), "no hardware is called 'h1000'"),
        (partial(shardc.auto, hardware=3), "auto: hardware is 3, not a string or a Hardware or None"),
        (partial(shardc.auto, memory="80 G"), "auto: memory is '80 G', not a number of bytes"),
        (partial(shardc.auto, ranks=0), "auto: ranks is 0, not an integer of 1 or more or None"),
        (partial(shardc.find_plan, build(8), 4), "a search needs example inputs, and find_plan was given none"),
        (partial(shardc.find_plan, build(8), "dp", SMALL), "'dp' is not a mesh"),
        (partial(shardc.find_plan, nn.Linear(8, 8), 4, SMALL, SMALL),
         "Linear.forward(input: torch.Tensor) -> torch.Tensor: too many positional arguments"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(wrong: Any, what: str) -> None:
    with pytest.raises(shardc.ShardcError) as error:
        wrong()
    assert error.value.what == what


def test_a_file_of_other_numbers_is_no_hardware(tmp_path: Path) -> None:
    (tmp_path / "cost.json").write_text('{"latency": 1}')
    with pytest.raises(shardc.ShardcError):
        shardc.auto(hardware=str(tmp_path / "cost.json"))


# --- on real ranks


def train(memory: str) -> None:
    """One step of a plan that was found equals that of one device; all ranks have the first one's plan."""
    mesh = device_mesh(Mesh(dp=2))
    model, x, y = build(8, "cpu").double(), torch.randn(16, 8).double(), torch.randn(16, 8).double()
    auto = shardc.auto(memory=memory, inputs=(x, y), hardware=H100)
    module = shardc.compile(model, mesh, auto, loss=mse_loss, backend="eager")
    plans: list[Any] = [None, None]
    dist.all_gather_object(plans, module.shardc.cache.build.plan.to_json())
    assert plans[0] == plans[1]
    assert bool(module.shardc.search_result.trials) == (dist.get_rank() == 0)
    loss = module(*module.shard_inputs(x, y))
    loss.backward()
    expected = mse_loss(model(x), y)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name, param in model.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).grad.full_tensor(), param.grad)


def cannot() -> None:
    with pytest.raises(shardc.ShardcError, match="fits in 1e-09 GB a rank"):
        train("1B")


def differ() -> None:
    mesh = device_mesh(Mesh(dp=2))
    with pytest.raises(shardc.ShardcError, match="search by auto"):
        shardc.compile(build(8), mesh, shardc.auto(memory=10**9 + dist.get_rank(), inputs=SMALL))


def choose_exactly() -> None:
    """Each rank solves for itself, and all find the same program."""
    mesh = device_mesh(Mesh(dp=2))
    model, x = build(8, "cpu").double(), torch.randn(16, 8).double()
    options = shardc.Options(layout_solver="exact")
    module = shardc.compile(model, mesh, shardc.fsdp("dp"), loss=mse_loss, backend="eager", options=options)
    loss = module(*module.shard_inputs(x, x))
    loss.backward()
    expected = mse_loss(model(x), x)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name, param in model.named_parameters():
        torch.testing.assert_close(module.get_parameter(name).grad.full_tensor(), param.grad)


def test_ranks_take_one_plan() -> None:
    run_ranks(2, partial(train, "1GB"), cannot, differ, choose_exactly)


@pytest.mark.slow
def test_a_split_sequence_is_tried_where_there_is_attention() -> None:
    """With memory for it alone: one sequence has no batch to split, and whole activations do not fit."""
    with torch.device("meta"):
        model = Own(width=512, heads=2, groups=2)
        ids = torch.empty(1, 32768, dtype=torch.int64)
    found = shardc.find_plan(model, Mesh(dp=4), input_ids=ids, labels=ids, memory="400MB")
    assert "cp(" in str(found.plan), found.table()
