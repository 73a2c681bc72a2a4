# ruff: noqa: E501
"""Bad plans and arguments of `shardc.compile`: the whole message of each error, and the model left as it was."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import Shard

import shardc
from shardc import Mesh, Plan, ddp, fsdp, tp
from shardc.errors import CaptureError, InputError, MeshError, PlanError, ShardcWarning
from tests.unchanged import snapshot

MESH = Mesh(dp=2, tp=2)


class Net(nn.Module):
    """Two layers, a buffer, a frozen parameter, a hook and a child in eval mode, so that there is much to change."""

    def __init__(self, hidden: int = 16) -> None:
        super().__init__()
        self.up = nn.Linear(8, hidden)
        self.down = nn.Linear(hidden, 8)
        self.drop = nn.Dropout(0.5).eval()
        self.register_buffer("scale", torch.ones(8))
        self.up.bias.requires_grad_(False)
        self.down.register_forward_hook(lambda module, args, output: output + 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.down(self.up(x).relu())) * self.scale


def fails(model: Any, act: Callable[[], Any], kind: type[Exception], message: str) -> None:
    """``act`` raises ``kind`` with this whole message, and ``model`` is as it was."""
    before = snapshot(model)
    with pytest.raises(kind) as caught:
        act()
    assert str(caught.value) == message
    assert type(caught.value) is kind
    assert snapshot(model) == before


def compiles_not(plan: Any, kind: type[Exception], message: str, mesh: Any = MESH, **options: Any) -> None:
    model = Net()
    fails(model, lambda: shardc.compile(model, mesh, plan, **{"backend": "eager", **options}), kind, message)


def lowers_not(plan: Plan, kind: type[Exception], message: str, *args: Any, model: nn.Module | None = None) -> None:
    """Neither the model nor the module that `compile` made of it is changed by a `lower` that fails."""
    model = model or Net()
    module = shardc.compile(model, MESH, plan, backend="eager")
    before = snapshot(model)
    fails(module, lambda: module.lower(*args), kind, message)
    assert snapshot(model) == before


def test_a_loss_without_a_signature() -> None:
    compiles_not(
        fsdp("dp"),
        InputError,
        """\
the loss 'sum' has no signature that can be read
  fix: pass a function of Python that calls it, such as lambda output: ...""",
        loss=torch.sum,
    )


# --- the plan


def test_a_glob_that_matches_nothing() -> None:
    compiles_not(
        Plan(params={"uup.weight": ("tp", None)}),
        PlanError,
        """\
'uup.weight' matches no parameter
  plan entry: params["uup.weight"] = ("tp", None)
  fix: did you mean 'up.weight' or 'down.weight'?""",
    )
    compiles_not(
        tp("tp", colwise=["layers.*.attention"]),
        PlanError,
        """\
'layers.*.attention' matches no module with a weight
  plan entry: tp("tp", colwise=["layers.*.attention"])
  fix: there are 'up', 'down'""",
    )
    compiles_not(
        Plan(activations={"dwn.output": "_, @tp"}),
        PlanError,
        """\
'dwn' matches no module
  plan entry: activations["dwn.output"] = "_, @tp"
  fix: did you mean 'down'?""",
    )


def test_an_unknown_axis() -> None:
    compiles_not(
        fsdp("dpp"),
        PlanError,
        """\
unknown mesh axis 'dpp'; the mesh is dp=2 tp=2
  plan entry: fsdp("dpp", level=3)
  fix: did you mean 'dp'?""",
    )
    compiles_not(
        Plan(params={"up.weight": ("model", None)}),
        PlanError,
        """\
unknown mesh axis 'model'; the mesh is dp=2 tp=2
  plan entry: params["up.weight"] = ("model", None)
  fix: use one of ['dp', 'tp']""",
    )


def test_an_axis_used_twice() -> None:
    with pytest.raises(PlanError) as caught:
        Plan(params={"up.weight": ("tp", "tp")})
    assert (
        str(caught.value)
        == """\
spec ("tp", "tp") uses axis 'tp' twice
  plan entry: params["up.weight"] = ('tp', 'tp')
  fix: split or reduce over each axis once; give the specs of several tensors as a list"""
    )
    compiles_not(
        ddp("dp") | tp("dp", colwise=["up"]),
        PlanError,
        """\
axis 'dp' is given to TP and to ddp("dp")
  plan entry: tp("dp", colwise=["up"])
  fix: use one axis for the batch and another for TP""",
    )


def test_a_spec_of_the_wrong_rank() -> None:
    compiles_not(
        Plan(params={"*.bias": ("tp", None)}),
        PlanError,
        """\
spec ("tp", None) has 2 dims, parameter 'up.bias' of shape (16,) has 1
  plan entry: params["*.bias"] = ("tp", None)
  fix: give one item for each dim of the tensor""",
    )
    compiles_not(
        Plan(params={"up.weight": (Shard(0),)}),
        PlanError,
        """\
(Shard(0),) has 1 placements, the mesh dp=2 tp=2 has 2 axes
  plan entry: params["up.weight"] = (Shard(0),)
  fix: give one placement for each mesh axis""",
    )


def warned(act: Callable[[], Any]) -> tuple[Any, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = act()
    return made, [str(w.message) for w in caught if issubclass(w.category, ShardcWarning)]


def test_a_parameter_dim_that_does_not_divide_is_split_padded() -> None:
    model = Net(hidden=15)
    before = snapshot(model)
    module, said = warned(lambda: shardc.compile(model, MESH, tp("tp", colwise=["up"]), backend="eager"))
    assert said == [] and snapshot(model) == before
    program = module.lower(torch.empty(4, 8))
    assert "param %up.weight: f32[16@tp,8]\n  param %up.bias: f32[16@tp]\n" in program.text("seed")
    assert "%up.mm: f32[4,16@tp] = mm(%x, %up.t)" in program.text("collectives")


def test_a_parameter_dim_of_one_element_stays_whole() -> None:
    module, said = warned(lambda: shardc.compile(Net(hidden=1), MESH, tp("tp", colwise=["up"]), backend="eager"))
    assert said == [
        """\
dim 0 of parameter 'up.weight' of shape (1, 8) does not divide over axis 'tp' of size 2; the parameter stays whole on tp
  plan entry: tp("tp", colwise=["up"])""",
        """\
dim 0 of parameter 'up.bias' of shape (1,) does not divide over axis 'tp' of size 2; the parameter stays whole on tp
  plan entry: tp("tp", colwise=["up"])""",
    ]
    assert "param %up.weight: f32[1,8]\n  param %up.bias: f32[1]\n" in module.lower(torch.empty(4, 8)).text("seed")


def test_a_storage_dim_that_does_not_divide_is_padded() -> None:
    module, said = warned(lambda: shardc.compile(Odd(), Mesh(dp=2), fsdp("dp"), backend="eager"))
    text = module.lower(torch.empty(4, 7)).text("seed")
    assert said == []
    assert "param %odd.weight: f32[6@dp,7]\n  param %odd.bias: f32[6@dp]\n" in text
    assert "%odd.weight.unpadded: f32[5,7] = unpad(%odd.weight.full, dim=0, size=5)" in text


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.odd = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.odd(x)


def test_an_activation_dim_of_one_element_stays_whole() -> None:
    plan = ddp("dp") | Plan(activations={"odd.output": "~, ~, @tp"})
    module = shardc.compile(Odd(), MESH, plan, backend="eager")
    program, said = warned(lambda: module.lower(torch.empty(4, 5, 7)))
    assert "f32[4@dp,5,6@tp]" in program.text("propagate") and said == []
    plan = ddp("dp") | Plan(activations={"odd.output": "~, @tp, ~"})
    module = shardc.compile(Odd(), MESH, plan, backend="eager")
    program, said = warned(lambda: module.lower(torch.empty(4, 1, 7)))
    assert (
        said[0]
        == """\
dim 1 of output of module 'odd' of shape (4, 1, 5): 1 elements do not divide over axis 'tp' of size 2; the dim stays whole on tp
  plan entry: activations["odd.output"] = "~, @tp, ~"
  fix: make the size a multiple of 2, or leave tp off"""
    )


def test_an_input_dim_of_one_element_stays_whole() -> None:
    module = shardc.compile(Odd(), MESH, ddp("dp"), backend="eager")
    program, said = warned(lambda: module.lower(torch.empty(1, 7)))
    assert "input %x: f32[1,7]" in program.text("seed")
    assert (
        said[0]
        == """\
dim 0 of input 'x' of shape (1, 7): 1 elements do not divide over axis 'dp' of size 2; the dim stays whole on dp
  plan entry: ddp("dp")
  fix: make the size a multiple of 2, or leave dp off"""
    )


def test_an_entry_for_what_is_not_there() -> None:
    x = torch.empty(4, 8)
    lowers_not(
        Plan(inputs={"tokens": "@dp, _"}),
        PlanError,
        """\
there is no input 'tokens'
  plan entry: inputs["tokens"] = "@dp, _"
  fix: the inputs are 'x'""",
        x,
    )
    lowers_not(
        Plan(outputs={"logits": "@dp, _"}),
        PlanError,
        """\
there is no output 'logits'
  plan entry: outputs["logits"] = "@dp, _"
  fix: the outputs are '0'""",
        x,
    )
    lowers_not(
        Plan(activations={"up.output": [None, "@dp, _"]}),
        PlanError,
        """\
output 1 of module 'up' is not a tensor of the program
  plan entry: activations["up.output[1]"] = "@dp, _"
  fix: name a module that the model calls, and a tensor that it takes or returns there and that is used""",
        x,
    )


def test_a_plan_file_with_an_unknown_key(tmp_path: Any) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"shardc_plan": 1, "calls": [{"fsdp": {"axis": "dp", "levle": 3}}]}')
    with pytest.raises(PlanError) as caught:
        Plan.load(path)
    assert (
        str(caught.value)
        == f"""\
unknown key 'levle' in fsdp
  source: {path}
  fix: did you mean 'level' or 'levels'?"""
    )


# --- the other arguments


def test_arguments_of_the_wrong_kind() -> None:
    compiles_not(
        fsdp("dp"),
        InputError,
        "backend is 'indcutor', not 'inductor' or 'eager'\n  fix: did you mean 'inductor'?",
        backend="indcutor",
    )
    compiles_not(fsdp("dp"), InputError, "backend is 'tvm', not 'inductor' or 'eager'", backend="tvm")
    compiles_not(
        "fsdp", InputError, "'fsdp' is not a plan\n  fix: pass shardc.fsdp(\"dp\"), shardc.Plan(...), or several with |"
    )
    compiles_not(
        fsdp("dp"),
        InputError,
        "options is {'strict': True}, not an Options or None\n  fix: pass shardc.Options(...)",
        options={"strict": True},
    )
    compiles_not(
        fsdp("dp"), MeshError, "'dp=2' is not a mesh\n  fix: pass a DeviceMesh or shardc.Mesh(dp=2, tp=4)", mesh="dp=2"
    )
    with pytest.raises(InputError, match="3 is not a model\n  fix: pass an nn.Module or a function of tensors"):
        shardc.compile(3, MESH, fsdp("dp"))  # type: ignore[arg-type]


def test_a_model_on_two_devices() -> None:
    model = Net()
    with FakeTensorMode():
        model.up.bias = nn.Parameter(torch.empty(16, device="cuda:1"))
    fails(
        model,
        lambda: shardc.compile(model, MESH, fsdp("dp")),
        CaptureError,
        """\
the model is on several devices: 'scale' on cpu, 'up.bias' on cuda:1
  fix: move it to one device, or build it on meta""",
    )
