"""Every architecture of the zoo as shipped: outputs, losses and gradients equal one device in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc._compat import pytree
from shardc.errors import CaptureError, PlanError
from tests.models.alike import relative
from tests.models.zoo import ZOO, in_float64

LIMIT = 1e-9
ZERO = torch.zeros(())
TARGETS = ("labels", "return_loss", "start_positions", "end_positions")


def plan_for(model: nn.Module, mesh: dict[str, int]) -> shardc.Plan:
    plan = shardc.fsdp("dp", level=3)
    if "tp" not in mesh:
        return plan
    try:
        return plan | shardc.Plan.from_hf(model, axis="tp")
    except PlanError:
        return plan


def assert_alike(ours: Any, theirs: Any, what: str) -> None:
    mine, spec = pytree.tree_flatten(ours)
    others, expected = pytree.tree_flatten(theirs)
    assert spec == expected, what
    for at, (x, y) in enumerate(zip(mine, others, strict=True)):
        if not isinstance(y, Tensor):
            assert x == y, what
            continue
        assert x.dtype == y.dtype and x.shape == y.shape, f"{what} {at}"
        assert relative(x, y.detach(), 1e-6) < LIMIT, f"{what} {at}"


def loss(output: Any) -> Tensor:
    """The model's own where there is one, or else a sum over all outputs."""
    if isinstance(output, dict) and "loss" in output:
        return output["loss"]
    return sum((x.sum() for x in pytree.tree_leaves(output) if isinstance(x, Tensor) and x.is_floating_point()), ZERO)


class Beside:
    """A model on one device, and in simulation: with `loss` in the program, and without."""

    def __init__(self, name: str, mesh: dict[str, int]) -> None:
        self.one = ZOO[name].build(attn_implementation="eager")
        plan = plan_for(self.one, mesh)
        self.trained, self.bare = (
            shardc.compile(copy.deepcopy(self.one), shardc.Mesh(mesh), plan, loss=given, backend="eager")
            for given in (loss, None)
        )
        self.sim = shardc.Simulation(self.trained)

    def trains(self, inputs: dict[str, Any]) -> None:
        """Loss, buffers and gradients."""
        self.one.zero_grad()
        self.sim.grads.clear()
        value = loss(self.one(**inputs))
        assert_alike(self.sim(**inputs), value, "loss")
        value.backward()
        self.sim.backward()
        largest = max(p.grad.abs().max().item() for p in self.one.parameters() if p.grad is not None)
        for name, param in self.one.named_parameters():
            assert (name in self.sim.grads) == (param.grad is not None), f"{name} has a gradient on one side only"
            if param.grad is not None:
                assert relative(self.sim.grad(name), param.grad, 1e-6 * largest) < LIMIT, f"gradient of {name}"
        for name, buffer in self.one.named_buffers():
            assert relative(self.sim.buffer(name), buffer, 1e-6) < LIMIT, f"buffer {name}"

    def evaluates(self, inputs: dict[str, Any]) -> None:
        """All outputs."""
        one, module = copy.deepcopy(self.one).eval(), self.bare.eval()
        module.load_state_dict(one.state_dict())
        with torch.no_grad():
            assert_alike(shardc.Simulation(module)(**inputs, grad=False), one(**inputs), "output")


def check(name: str, mesh: dict[str, int], mode: str, beside: Beside | None = None) -> None:
    case = beside or Beside(name, mesh)
    batch = ZOO[name].batch()
    bare = {key: x for key, x in batch.items() if key not in TARGETS}
    if case.one.config.is_encoder_decoder:
        bare["decoder_input_ids"] = batch["labels"].clamp_min(3)
    if mode == "with labels" and ZOO[name].task == "ForCTC":  # the library selects labels, as many as there are
        with pytest.raises(CaptureError, match="loss_ctc.py"):
            case.trains(batch)
    elif mode == "with labels":
        case.trains(batch)
    elif mode == "as tuples":
        case.trains(bare | {"return_dict": False})
    elif mode == "evaluated":
        case.evaluates(bare)
    else:
        case.evaluates(bare | {"output_hidden_states": True, "output_attentions": True})


MESHES = {"fsdp": {"dp": 2}, "fsdp+tp": {"dp": 2, "tp": 2}}
MODES = ("with labels", "as tuples", "evaluated", "with states")


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ZOO)
def test_equals_one_device(name: str, mesh: str) -> None:
    case = Beside(name, MESHES[mesh])
    with in_float64():
        for mode in MODES:
            torch.manual_seed(1)
            check(name, MESHES[mesh], mode, case)


FEW = [("llama", "with states"), ("phi3", "evaluated"), ("resnet", "with labels"), ("wav2vec2", "as tuples")]


@pytest.mark.parametrize(("name", "mode"), [*FEW, pytest.param("bart", "with states", marks=pytest.mark.slow)])
def test_a_few_equal_one_device(name: str, mode: str) -> None:
    with in_float64():
        check(name, MESHES["fsdp+tp"], mode)


class Wraps(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch)


def test_layers_that_are_skipped_at_random() -> None:
    batch = ZOO["bart"].batch()
    model = Wraps(ZOO["bart"].build(encoder_layerdrop=0.5))
    module = shardc.compile(model, shardc.Mesh(dp=2), shardc.fsdp("dp"), loss=loss, backend="eager")
    with pytest.raises(CaptureError, match=r"skip \(encoder_layerdrop of its config\)") as caught:
        module.lower(**batch)
    assert "make the model of a config with encoder_layerdrop=0.0" in str(caught.value)
    module.eval()
    module.lower(**batch)


class Checked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 4)

    def forward(self, ids: Tensor, limit: Tensor | None = None) -> Tensor:
        if limit is not None and ids.max() >= limit:
            raise ValueError(f"ids are below {limit}")
        if ids.min() < 0 or ids.max() >= 8:
            raise IndexError("no such id")
        return self.table(ids).sum(-1)


def test_what_only_raises_is_left_out() -> None:
    """A branch that depends on values and does more than raise is an error."""
    ids, model = torch.randint(8, (4, 3)), Checked().double()
    module = shardc.compile(model, shardc.Mesh(dp=2), shardc.fsdp("dp", threshold=0), backend="eager")
    sim = shardc.Simulation(module)
    with pytest.warns(shardc.ShardcWarning, match=r"test_zoo\.py:\d+ raises where values are wrong"):
        found = sim(ids, torch.tensor(8), grad=False)
    torch.testing.assert_close(found, model(ids).detach())
    with pytest.raises(CaptureError, match="ata-dependent branching"):
        shardc.compile(lambda x: x if x.sum() > 0 else -x, shardc.Mesh(dp=2), shardc.ddp("dp")).lower(torch.ones(4))
