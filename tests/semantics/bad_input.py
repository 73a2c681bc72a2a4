"""What people pass by mistake: what is done, the error that must come, and what its message must say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.parallel import ColwiseParallel

import shardc
from shardc.cost.model import CostModel
from shardc.errors import (
    InputError,
    MeshError,
    PlanError,
    PrecompiledError,
    ShardcError,
)

DP, TP, BOTH = shardc.Mesh(dp=2), shardc.Mesh(tp=2), shardc.Mesh(dp=2, tp=2)
Case = tuple[Callable[[], object], type[ShardcError], str]
X = torch.rand(8, 8)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def compiled(plan: Any = None, mesh: Any = DP, model: Any = None, **said: Any) -> Any:
    said.setdefault("backend", "eager")
    return shardc.compile(Mlp() if model is None else model, mesh, shardc.fsdp("dp") if plan is None else plan, **said)


def sharded() -> Mlp:
    """A model of which one parameter is cut already."""
    mesh = DeviceMesh("cpu", torch.arange(2), _init_backend=False, _rank=0)
    model = Mlp()
    model.up.weight = nn.Parameter(DTensor.from_local(torch.ones(8, 8), mesh, [Shard(0)], run_check=False))
    return model


def lowered(*args: Any, **said: Any) -> Any:
    return compiled(**said).lower(*args)


def planned(plan: Callable[[], Any], mesh: Any = DP) -> Callable[[], object]:
    return lambda: compiled(plan(), mesh)


def options(**said: Any) -> Callable[[], object]:
    return lambda: shardc.Options(**said)


COMPILE: dict[str, Case] = {
    "a class for a model": (lambda: compiled(model=nn.Linear), InputError, "Linear.* is a class"),
    "a string for a model": (lambda: compiled(model="llama"), InputError, "'llama' is not a model"),
    "no model": (lambda: shardc.compile(None, DP, shardc.fsdp("dp")), InputError, "None is not a model"),
    "a compiled model": (lambda: compiled(model=compiled()), InputError, "Mlp.* is compiled already"),
    "a model of torch.compile": (
        lambda: compiled(model=torch.compile(Mlp())),
        InputError,
        "Mlp is wrapped",
    ),
    "a model with DTensors on other axes": (
        lambda: compiled(model=sharded()),
        InputError,
        "'up.weight' is a DTensor on",
    ),
    "a dict for a mesh": (lambda: compiled(mesh={"dp": 2}), MeshError, "{'dp': 2} is not a mesh"),
    "a number for a mesh": (lambda: compiled(mesh=2), MeshError, "2 is not a mesh"),
    "no mesh": (lambda: compiled(mesh=None), MeshError, "None is not a mesh"),
    "a string for a plan": (lambda: compiled("fsdp"), InputError, "'fsdp' is not a plan"),
    "plan functions uncalled": (lambda: compiled(shardc.fsdp), InputError, "is not a plan"),
    "a dict of styles": (
        lambda: compiled({"up": ColwiseParallel()}),
        InputError,
        r"is not a plan(.|\n)*shardc\.Plan\.from_styles",
    ),
    "a list of plans": (lambda: compiled([shardc.fsdp("dp")]), InputError, "is not a plan"),
    "a backend misspelt": (
        lambda: compiled(backend="inducter"),
        InputError,
        "backend.*'inducter'(.|\n)*did you mean 'ind",
    ),
    "no backend": (lambda: compiled(backend=None), InputError, "backend"),
    "options as a dict": (lambda: compiled(options={"strict": True}), InputError, "options.*{'strict': True}"),
    "a string for a loss": (lambda: compiled(loss="mse"), InputError, "loss is 'mse'"),
    "a loss's class": (lambda: compiled(loss=nn.MSELoss), InputError, "loss.*MSELoss.* is a class"),
    "dynamic as a list": (lambda: compiled(dynamic=["x"]), InputError, "dynamic"),
    "dynamic of another input": (lambda: compiled(dynamic={"y": {0: "n"}}), InputError, "'y'"),
    "dynamic of no dim": (lambda: lowered(X, dynamic={"x": {5: "n"}}), InputError, "dim 5.*'x'|5.*'x'|'x'.*5"),
    "a name for a dim's number": (lambda: compiled(dynamic={"x": {"batch": "n"}}), InputError, "'batch'"),
    "precompiled as a number": (lambda: compiled(precompiled=3), InputError, "precompiled.*3"),
    "precompiled that is not there": (lambda: compiled(precompiled="/nowhere"), PrecompiledError, "/nowhere"),
    "a list of folders": (lambda: compiled(precompiled=["/nowhere"]), PrecompiledError, "/nowhere"),
    "a plan of another mesh": (lambda: compiled(mesh=TP), (MeshError, PlanError), "'dp'"),  # type: ignore[dict-item]
    "folding what runs, misspelt": (lambda: compiled(options=shardc.Options(fold="yes")), InputError, "fold"),
}

OPTIONS: dict[str, Case] = {
    "strict as text": (options(strict="yes"), InputError, "strict is 'yes', not True or False"),
    "cost as a dict": (options(cost={"latency": 1}), InputError, "cost"),
    "cost as a path": (options(cost="cost.json"), InputError, "cost is 'cost.json'"),
    "verify as a number": (options(verify=2), InputError, "verify is 2"),
    "a bucket of -2": (options(bucket_size=-2), InputError, "bucket_size is -2, not a number of bytes, or -1"),
    "a bucket of half a byte": (options(bucket_size=0.5), InputError, "bucket_size is 0.5"),
    "a bucket without a unit": (options(bucket_size="8"), InputError, "bucket_size is '8'(.|\n)*MiB"),
    "a bucket of megabits": (options(bucket_size="8 Mbit"), InputError, "bucket_size is '8 Mbit'"),
    "a negative unit": (options(bucket_size="-8MB"), InputError, "bucket_size is '-8MB'"),
    "a bucket that is true": (options(bucket_size=True), InputError, "bucket_size is True"),
    "a flight of text": (options(max_in_flight="much"), InputError, "max_in_flight is 'much'"),
    "a flight of -5": (options(max_in_flight=-5), InputError, "max_in_flight is -5"),
    "no budget": (options(memory_budget=None), InputError, "memory_budget is None"),
    "a budget of -8": (options(memory_budget=-8), InputError, "memory_budget is -8"),
    "a budget of nan": (options(memory_budget=float("nan")), InputError, "memory_budget is nan"),
    "overlap as a number": (options(overlap=1), InputError, "overlap is 1"),
    "direct as text": (options(p2p_collectives="gloo"), InputError, "p2p_collectives is 'gloo'"),
    "skip_comm misspelt": (options(skip_comm=("gathr",)), InputError, "is 'gathr'(.|\n)*did you mean 'gather'"),
    "fold as a number": (options(fold=4), InputError, "fold is 4"),
    "capture uncallable": (options(capture="once"), InputError, "capture is 'once'"),
    "dump as a number": (options(dump=7), InputError, "dump is 7"),
    "dump that is true": (options(dump=True), InputError, "dump is True"),
    "a cost of negative latency": (lambda: CostModel(latency=-1.0), InputError, "latency is -1.0"),
    "a cost of no bandwidth": (lambda: CostModel(bandwidth=0), InputError, "bandwidth is 0"),
    "a cost of text": (lambda: CostModel(flops="1e12"), InputError, "flops is '1e12'"),  # type: ignore[arg-type]
}

MESHES: dict[str, Case] = {
    "a size of 0": (lambda: shardc.Mesh(dp=0), MeshError, "'dp'.*0"),
    "a negative size": (lambda: shardc.Mesh(dp=-2), MeshError, "'dp'.*-2"),
    "half a rank": (lambda: shardc.Mesh(dp=2.5), MeshError, "'dp'.*2.5"),  # type: ignore[arg-type]
    "a size as text": (lambda: shardc.Mesh(dp="2"), MeshError, "'dp'.*'2'"),  # type: ignore[arg-type]
    "a size that is true": (lambda: shardc.Mesh(dp=True), MeshError, "'dp'.*True"),
    "a name with a space": (lambda: shardc.Mesh({"d p": 2}), MeshError, "'d p'"),
    "a name that is a number": (lambda: shardc.Mesh({1: 2}), MeshError, "1 .*identifier|axis 1"),  # type: ignore[dict-item]
    "an axis twice": (lambda: shardc.Mesh([("dp", 2), ("dp", 4)]), MeshError, "'dp' is there twice"),
    "text": (lambda: shardc.Mesh("dp=2"), MeshError, "'dp=2'"),  # type: ignore[arg-type]
    "sizes without names": (lambda: shardc.Mesh([2, 4]), MeshError, r"\[2, 4\]"),  # type: ignore[list-item]
    "an axis that it has not": (lambda: DP.size("tp"), MeshError, "unknown mesh axis 'tp'"),
}

PLANS: dict[str, Case] = {
    "fsdp over an axis that is not there": (planned(lambda: shardc.fsdp("pp")), PlanError, "'pp'"),
    "fsdp over a number": (lambda: shardc.fsdp(0), PlanError, "0 is not the name"),  # type: ignore[arg-type]
    "fsdp over nothing": (lambda: shardc.fsdp(()), PlanError, "needs an axis"),
    "fsdp over an empty name": (lambda: shardc.fsdp(""), PlanError, "'' is not the name"),
    "fsdp over one axis twice": (lambda: shardc.fsdp(("dp", "dp")), PlanError, "'dp' is used twice"),
    "level 4": (lambda: shardc.fsdp("dp", level=4), PlanError, "level is 4, not 1 or 2 or 3"),
    "level as text": (lambda: shardc.fsdp("dp", level="3"), PlanError, "level is '3'"),  # type: ignore[arg-type]
    "level that is true": (lambda: shardc.fsdp("dp", level=True), PlanError, "level is True"),
    "a threshold below 0": (lambda: shardc.fsdp("dp", threshold=-1), PlanError, "threshold is -1"),
    "a threshold of text": (lambda: shardc.fsdp("dp", threshold="big"), PlanError, "threshold is 'big'"),
    "a threshold of floats": (lambda: shardc.fsdp("dp", threshold=1e6), PlanError, "threshold is 1000000.0"),  # type: ignore[arg-type]
    "a shard size of 0": (lambda: shardc.fsdp("dp", shard_size=0), PlanError, "shard_size is 0"),
    "a shard size of text": (lambda: shardc.fsdp("dp", shard_size="2"), PlanError, "shard_size is '2'"),  # type: ignore[arg-type]
    "a shard size that does not divide": (planned(lambda: shardc.fsdp("dp", shard_size=3)), PlanError, "3"),
    "overrides as a list": (lambda: shardc.fsdp("dp", overrides=["up"]), PlanError, "overrides"),  # type: ignore[arg-type]
    "overrides of text": (lambda: shardc.fsdp("dp", overrides={"up.*": "all"}), PlanError, "overrides.*'all'"),  # type: ignore[dict-item]
    "overrides that match nothing": (planned(lambda: shardc.fsdp("dp", overrides={"u.*": 1})), PlanError, "u\\.\\*"),
    "hsdp over one axis": (lambda: shardc.hsdp("dp", "dp"), PlanError, "'dp' is used twice"),
    "hsdp over None": (lambda: shardc.hsdp(None), PlanError, "None is not the name"),  # type: ignore[arg-type]
    "hsdp of level 0": (lambda: shardc.hsdp("dp", "rep", level=0), PlanError, "level is 0"),
    "hsdp of an axis that is not there": (planned(shardc.hsdp), PlanError, "'rep'"),
    "ddp over a list of lists": (lambda: shardc.ddp([["dp"]]), PlanError, r"\['dp'\]"),  # type: ignore[list-item]
    "ddp over an axis that is not there": (planned(lambda: shardc.ddp("d")), PlanError, "'d'"),
    "tp of one name as text": (lambda: shardc.tp("tp", colwise="up"), PlanError, "colwise.*'up'"),
    "tp of a module": (lambda: shardc.tp("tp", colwise=[nn.Linear(2, 2)]), PlanError, "colwise.*Linear"),  # type: ignore[list-item]
    "tp of numbers": (lambda: shardc.tp("tp", rowwise=3), PlanError, "rowwise is 3"),  # type: ignore[arg-type]
    "tp of a name that matches nothing": (planned(lambda: shardc.tp("tp", colwise=["upp"]), TP), PlanError, "upp"),
    "one module both ways": (planned(lambda: shardc.tp("tp", ["up"], ["up"]), TP), PlanError, "up.*colwise.*rowwise"),
    "tp over two axes": (lambda: shardc.tp(("tp", "cp")), PlanError, "tp"),  # type: ignore[arg-type]
    "precision by name": (lambda: shardc.precision("bf16"), PlanError, "param is 'bf16'"),  # type: ignore[arg-type]
    "precision of integers": (lambda: shardc.precision(torch.int32), PlanError, "param.*int32.*floating"),
    "precision of a flag as text": (
        lambda: shardc.precision(keep_low_precision_grads="no"),
        PlanError,
        "keep_low_precision_grads is 'no'",  # type: ignore[arg-type]
    ),
    "offload to the moon": (lambda: shardc.offload(to="moon"), PlanError, "to is 'moon'"),
    "offload to a place misspelt": (lambda: shardc.offload(to="hosts"), PlanError, "did you mean 'host'"),
    "offload of what is not there": (planned(lambda: shardc.fsdp("dp") | shardc.offload("x.*")), PlanError, "x\\.\\*"),
    "offload of a number": (lambda: shardc.offload(3), PlanError, "names is 3"),  # type: ignore[arg-type]
    "pinned as text": (lambda: shardc.offload(pin_memory="yes"), PlanError, "pin_memory is 'yes'"),  # type: ignore[arg-type]
    "params as a list": (lambda: shardc.Plan(params=["up.weight"]), PlanError, "params"),  # type: ignore[arg-type]
    "params of a number": (lambda: shardc.Plan(params={"up.weight": 3}), PlanError, "3 is not a spec"),
    "params of another rank": (planned(lambda: shardc.Plan(params={"up.weight": ("dp",)})), PlanError, "up.weight"),
    "params of an axis that is not there": (
        planned(lambda: shardc.Plan(params={"up.weight": ("x", None)})),
        PlanError,
        "'x'",
    ),
    "params that match nothing": (planned(lambda: shardc.Plan(params={"upp": ("dp", None)})), PlanError, "upp"),
    "an axis twice in a spec": (lambda: shardc.Plan(params={"w": ("dp", "dp")}), PlanError, "'dp'"),
    "a placement of no dim": (planned(lambda: shardc.Plan(params={"up.weight": (Shard(4),)})), PlanError, "4"),
    "too many placements": (
        planned(lambda: shardc.Plan(params={"up.weight": (Shard(0), Shard(1))})),
        PlanError,
        "up.weight|placements",
    ),
    "a parameter that is a partial sum": (
        planned(lambda: shardc.Plan(params={"up.weight": (Partial(),)})),
        PlanError,
        "up.weight",
    ),
    "inputs as a number": (lambda: shardc.Plan(inputs=3), PlanError, "3"),
    "inputs of a name that is not there": (
        lambda: lowered(X, plan=shardc.Plan(inputs={"tokens": "@dp, _"})),
        PlanError,
        "tokens",
    ),
    "inputs of another rank": (lambda: lowered(X, plan=shardc.Plan(inputs={"x": "@dp"})), PlanError, "x"),
    "outputs of another rank": (lambda: lowered(X, plan=shardc.Plan(outputs="@dp, _, _")), PlanError, "output"),
    "a layout that cannot be read": (lambda: shardc.Plan(inputs="@dp; _"), PlanError, "@dp; _"),
    "activations as a list": (lambda: shardc.Plan(activations=["up"]), PlanError, "activations"),  # type: ignore[arg-type]
    "activations of what is not there": (planned(lambda: shardc.Plan(activations={"u": "@dp, _"})), PlanError, "'?u'?"),
    "a reduction misspelt": (lambda: shardc.Plan(reduce="avg"), PlanError, "reduce is 'avg'"),
    "a scale as text": (lambda: shardc.Plan(grad_scale="2"), PlanError, "grad_scale is '2'"),  # type: ignore[arg-type]
    "a scale of nan": (lambda: shardc.Plan(grad_scale=float("nan")), PlanError, "grad_scale is nan"),
    "an endless scale": (lambda: shardc.Plan(grad_scale=float("inf")), PlanError, "grad_scale is inf"),
    "dtensor_outputs as text": (lambda: shardc.Plan(dtensor_outputs="yes"), PlanError, "dtensor_outputs is 'yes'"),  # type: ignore[arg-type]
    "accumulate as a number": (lambda: shardc.Plan(accumulate=4), PlanError, "accumulate is 4"),
    "overlap as text": (lambda: shardc.Plan(overlap="no"), PlanError, "overlap is 'no'"),  # type: ignore[arg-type]
    "a bucket as text": (lambda: shardc.Plan(bucket_size="large"), PlanError, "bucket_size is 'large'"),
    "a bucket below -1": (lambda: shardc.Plan(bucket_size=-7), PlanError, "bucket_size is -7"),
    "one axis for two data-parallel entries": (lambda: shardc.fsdp("dp") | shardc.hsdp("dp", "rep"), PlanError, "'dp'"),
}


def file(tmp: Path, name: str, text: str | bytes) -> str:
    path = tmp / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return str(path)


def plan_file(call: Any) -> Callable[[Path], object]:
    text = call if isinstance(call, str) else json.dumps({"shardc_plan": 1, "calls": [call]})
    return lambda tmp: shardc.Plan.load(file(tmp, "plan.json", text))


FILES: dict[str, tuple[Callable[[Path], object], type[ShardcError], str]] = {
    "a plan that is not there": (lambda tmp: shardc.Plan.load(tmp / "no.json"), PlanError, "no.json"),
    "a folder for a plan": (lambda tmp: shardc.Plan.load(tmp), PlanError, "cannot be read"),
    "a plan cut off": (plan_file('{"shardc_plan": 1, "calls": [{"fs'), PlanError, "plan.json is not JSON"),
    "a plan in other bytes": (
        lambda tmp: shardc.Plan.load(file(tmp, "plan.json", b"\xff\xfe\x00")),
        PlanError,
        "plan.json.*not",
    ),
    "a plan too deep": (plan_file("[" * 100_000), PlanError, "plan.json"),
    "a plan that is a list": (plan_file("[1]"), PlanError, "not a plan file"),
    "a plan of another version": (plan_file('{"shardc_plan": 9}'), PlanError, "version 9"),
    "calls that are text": (plan_file('{"shardc_plan": 1, "calls": "fsdp"}'), PlanError, "calls"),
    "a call misspelt": (plan_file({"fspd": {}}), PlanError, "'fspd'(.|\n)*'fsdp'"),
    "an argument misspelt": (plan_file({"fsdp": {"axs": "dp"}}), PlanError, "'axs'(.|\n)*axis"),
    "an argument left out": (plan_file({"tp": {}}), PlanError, "axis"),
    "an argument of another type": (plan_file({"fsdp": {"axis": {"a": 1}}}), PlanError, "axis"),
    "a list for an argument": (plan_file({"fsdp": {"axis": "dp", "level": []}}), PlanError, "level"),
    "overrides of text": (plan_file({"fsdp": {"axis": "dp", "overrides": "x"}}), PlanError, "overrides"),
    "a dtype that is none": (plan_file({"precision": {"param": "onnx"}}), PlanError, "'onnx'"),
    "names that are no names": (plan_file({"tp": {"axis": "tp", "colwise": [1]}}), PlanError, "colwise"),
    "a placement that is none": (
        plan_file({"Plan": {"params": {"w": {"placements": ["Shad(0)"]}}}}),
        PlanError,
        "Shad",
    ),
    "a spec of nested lists": (plan_file({"Plan": {"params": {"w": [[["dp"]]]}}}), PlanError, "spec"),
    "a cost model that is not there": (lambda tmp: CostModel.load(tmp / "no.json"), InputError, "no.json"),
    "a cost model cut off": (lambda tmp: CostModel.load(file(tmp, "c.json", '{"latency": 1,')), InputError, "c.json"),
    "a cost model of text": (
        lambda tmp: CostModel.load(
            file(tmp, "c.json", '{"latency": "1", "bandwidth": 1, "flops": 1, "memory_bandwidth": 1}')
        ),
        InputError,
        "latency",
    ),
    "a program that is not there": (lambda tmp: shardc.load(tmp / "no"), PrecompiledError, "no saved program"),
    "a program of a file": (lambda tmp: shardc.load(file(tmp, "f", "x")), PrecompiledError, "f"),
    "a program of a number": (lambda tmp: shardc.load(3), InputError, "folder is 3"),  # type: ignore[arg-type]
    "trust as text": (lambda tmp: shardc.load(tmp, trust="yes"), InputError, "trust is 'yes'"),  # type: ignore[arg-type]
    "a record cut off": (
        lambda tmp: (file(tmp, "program.json", '{"shardc_program": 2'), shardc.load(tmp)),
        PrecompiledError,
        "not JSON",
    ),
    "saved where a file is": (
        lambda tmp: lowered(X).save(file(tmp, "f", "x")),
        PrecompiledError,
        "f",
    ),
}
