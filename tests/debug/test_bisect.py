"""Bisect: right programs are right after every stage; of planted miscompiles the pass and the node are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import shardc
from examples.models import convnet, llama
from shardc import passes
from shardc.__main__ import main
from shardc.debug.bisect_passes import Verdict, bisect
from shardc.errors import InputError
from shardc.ir import graph as ir
from tests.passes.test_planted import MESH, SIZE, Net, Plant, argument, drop, named, swap

aten = torch.ops.aten
ROOT = Path(__file__).parents[2]
PLAN = shardc.fsdp("dp") | shardc.tp("tp", colwise=["up*", "head"], rowwise=["down*"])


def verdict(
    model: nn.Module, args: tuple[Any, ...], mesh: shardc.Mesh, plan: shardc.Plan, loss: Any = None, **options: Any
) -> Verdict:
    model = model.double()
    args = tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args)
    made = shardc.compile(
        model, mesh, plan, loss=loss, backend="eager", options=shardc.Options(verify=False, **options)
    )
    program = made.lower(*args)
    return bisect(program, model, *args, loss=loss)


def of_net() -> Verdict:
    torch.manual_seed(0)
    return verdict(Net(), (torch.randn(8, SIZE), torch.randint(SIZE, (8,))), MESH, PLAN, F.cross_entropy)


# --- right programs


def test_a_decoder_is_right_after_every_stage() -> None:
    torch.manual_seed(0)
    config = llama.LlamaConfig(layers=1)
    plan = shardc.fsdp("dp") | llama.llama_tp("tp", sequence=True)
    found = verdict(llama.Llama(config), llama.batch(config), MESH, plan, llama.loss)
    assert found.stage is None and all(c.error < 1e-13 for c in found.checked)
    assert {c.stage for c in found.checked} >= {
        "capture",
        "canonicalize",
        "hoist_grad_epilogue",
        "partition",
        "schedule.backward",
    }


@pytest.mark.slow
def test_outputs_that_are_split_padded_and_buffers() -> None:
    """A batch of 16 over three ranks, without a loss: tangents of a split output; running statistics of norms."""
    torch.manual_seed(0)
    model, (x,) = convnet.tiny()
    found = verdict(model.train(), (x,), shardc.Mesh(dp=3), shardc.fsdp("dp"))
    assert found.stage is None and all(c.error < 1e-13 for c in found.checked)


@pytest.mark.parametrize(
    "setting", [{"reduce": "sum"}, {"grad_scale": 3.0}, {"dtensor_outputs": True}], ids=["sum", "scale", "dtensor"]
)
def test_whatever_the_plan_makes_of_gradients_from_outside(setting: dict[str, Any]) -> None:
    torch.manual_seed(0)
    found = verdict(Net(), (torch.randn(8, SIZE),), MESH, PLAN | shardc.Plan(**setting))
    assert found.stage is None, found.text()


class Tables(Net):
    """Has buffers that forward reads alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(1, 2, SIZE))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        return super().forward(x * self.scale)


def test_buffers_that_forward_leaves_as_they_are() -> None:
    found = verdict(Tables(), (torch.randn(8, SIZE),), MESH, PLAN)
    assert found.stage is None, found.text()


# --- planted miscompiles


def spoil(monkeypatch: pytest.MonkeyPatch, which: type, plant: Plant) -> None:
    """The pass does its work, then ``plant``, wherever the node is that it is about."""
    work: Any = which.__call__

    def spoilt(self: Any, gm: fx.GraphModule) -> fx.GraphModule:
        made = work(self, gm)
        try:
            plant(made)
        except StopIteration:
            pass  # the other half
        return made

    monkeypatch.setattr(which, "__call__", spoilt)


def op(name: str, target: Any) -> Plant:
    """``name`` calls ``target`` instead."""

    def plant(gm: fx.GraphModule) -> None:
        named(gm, name).target = target

    return plant


def scaled(name: str, factor: float) -> Plant:
    """Uses of ``name`` take a multiple of it: a value that every check of types lets through."""

    def plant(gm: fx.GraphModule) -> None:
        node = named(gm, name)
        with gm.graph.inserting_after(node):
            wrong = gm.graph.call_function(aten.mul.Tensor, (node, factor))
        wrong.meta = dict(node.meta)
        record = ir.info(node)
        needs = None if record.needs is None else (ir.layout(node),)
        ir.set_info(wrong, ir.Info(f"{record.name}.wrong", record.value, record.origin, needs=needs))
        node.replace_all_uses_with(wrong, delete_user_cb=lambda user: user is not wrong)

    return plant


CASES: dict[str, tuple[type, Plant, str, str]] = {
    "another op": (passes.Canonicalize, op("relu", aten.neg.default), "canonicalize", "relu"),
    "a gradient scaled": (passes.Objective, scaled("d.head.mm", 2.0), "objective", "d.down1.mm"),
    "a change where data only moves": (passes.Propagate, scaled("up1.mm", -1.0), "propagate", "up1.mm.wrong"),
    "a factor among layouts": (passes.Precision, scaled("up1.mm", -1.0), "precision", "up1.add"),
    "a dropped all-reduce": (passes.Collectives, drop("down0.mm.summed"), "collectives", "down0.add"),
    "a stale gather": (
        passes.Collectives, swap("up1.weight.full", "up0.weight.full", "up1.t"), "collectives", "up1.mm",
    ),
    "an all-reduce over the wrong axis": (
        passes.Localize, argument("down0.mm.summed", "group_name", "shardc:dp"), "localize", "down0.mm.summed",
    ),
    "max instead of sum": (passes.Localize, argument("sum.summed", "reduce_op", "max"), "localize", "sum.summed"),
    "a gradient that is not reduced": (passes.Localize, drop("sum.2.summed"), "localize", "div"),
    "in the backward half": (passes.Bucket, op("d.down0.mm", aten.sub.Tensor), "bucket.backward", "d.down0.mm"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_pass_and_the_node_are_named(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    which, plant, stage, node = CASES[case]
    spoil(monkeypatch, which, plant)
    found = of_net()
    assert (found.stage, found.node) == (stage, node), found.text()
    assert found.checked[-1].stage == stage and all(c.error < 1e-13 for c in found.checked[:-1])
    assert any(line.startswith(">") for line in found.program.splitlines())


def test_what_cannot_be_compared_says_why() -> None:
    with pytest.raises(InputError, match="'0.weight' has no values"):
        with torch.device("meta"):
            verdict(nn.Sequential(nn.Linear(4, 4)), (torch.empty(4, 4),), shardc.Mesh(dp=2), shardc.ddp("dp"))
    with pytest.raises(InputError, match="the plan computes in lower precision than one device"):
        low = shardc.ddp("dp") | shardc.precision(param=torch.bfloat16)
        verdict(nn.Linear(4, 4), (torch.randn(4, 4),), shardc.Mesh(dp=2), low)
    dropout = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    with pytest.raises(InputError, match="the model draws random numbers"):
        verdict(dropout, (torch.randn(4, 4),), shardc.Mesh(dp=2), shardc.ddp("dp"))


# --- the command


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main([arguments[0], *arguments[1:], "--mesh", "dp=2", "--plan", 'fsdp("dp")'])
    return code, *capsys.readouterr()


def test_the_command_names_the_stage(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    target = f"{ROOT / 'examples/models/mlp.py'}:tiny"
    code, out, err = command(capsys, "bisect", target)
    assert (code, err) == (0, "") and out.startswith("every stage computes what one device does\n")
    spoil(monkeypatch, passes.Seed, op("layers.0.relu", aten.neg.default))
    code, out, err = command(capsys, "bisect", target)
    assert (code, err) == (1, "") and out.startswith("seed is the first that does not, at %layers.0.relu: ")
    code, out, err = command(capsys, "bisect", target, "--passes", "0:3")
    assert (code, err) == (0, "") and [line.split()[0] for line in out.splitlines()[3:6]] == [
        "capture", "experts", "attention"
    ]  # fmt: skip


def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    target = f"{ROOT / 'examples/models/mlp.py'}:"
    for name, arguments, message in [
        ("example", [], f"{target}example has no values; use a target with real values on the CPU"),
        ("tiny", ["--passes", "3"], "--passes 3: no range; write it as 0:3"),
        ("tiny", ["--passes", "90:"], "--passes 90:: the range is empty; they are 0 capture, 1 experts, "),
    ]:
        code, out, err = command(capsys, "bisect", target + name, *arguments)
        assert (code, out) == (2, "") and err.startswith(f"shardc: error: {message}") and err.count("\n") == 1


def test_dump_stops_after_some_passes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = f"{ROOT / 'examples/models/mlp.py'}:example"
    _, stopped, _ = command(capsys, "dump", target, "--passes", "0:7")
    _, named_stage, _ = command(capsys, "dump", target, "--stage", "seed")
    assert stopped == named_stage != ""
    command(capsys, "dump", target, "--passes", "4:7", "--out", str(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["04_canonicalize.txt", "05_float8.txt", "06_seed.txt"]
