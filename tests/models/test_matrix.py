"""Every example model under every kind of plan on meshes of 2, 4 and 8 ranks equals one device, in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardc
from examples.models import convnet, gpt2, llama, mlp, vit

STEPS = 3
BATCH = 8


@dataclass(frozen=True)
class Case:
    model: str
    plan: str
    mesh: dict[str, int]

    def __str__(self) -> str:
        return f"{self.model}-{self.plan}-{'x'.join(f'{k}{v}' for k, v in self.mesh.items())}"


def masked(targets: torch.Tensor) -> torch.Tensor:
    """Targets of which the first rows ignore most positions, so that ranks have unequal counts."""
    targets = targets.clone()
    targets[0] = -100
    targets[1, 3:] = -100
    return targets


def token_batch(vocab: int, length: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(vocab, (BATCH, length + 1))
    return tokens[:, :-1].contiguous(), masked(tokens[:, 1:].contiguous())


MODELS: dict[str, tuple[Any, Callable[..., Any], Callable[[], Any]]] = {
    "mlp": (mlp, lambda axis, sequence=False: mlp.mlp_tp(axis), F.mse_loss),
    "llama": (llama, llama.llama_tp, llama.loss),
    "gpt2": (gpt2, gpt2.gpt2_tp, gpt2.loss),
    "vit": (vit, vit.vit_tp, F.cross_entropy),
    "convnet": (convnet, lambda axis, sequence=False: convnet.convnet_channels(axis), F.cross_entropy),
}

PLANS: dict[str, Callable[[Callable[..., Any]], shardc.Plan]] = {
    "ddp": lambda tp: shardc.ddp("dp"),
    "fsdp1": lambda tp: shardc.fsdp("dp", level=1),
    "fsdp2": lambda tp: shardc.fsdp("dp", level=2),
    "fsdp3": lambda tp: shardc.fsdp("dp", level=3),
    "hsdp": lambda tp: shardc.hsdp(shard="dp", replicate="rep"),
    "tp": lambda tp: tp("tp"),
    "tp+sp": lambda tp: tp("tp", sequence=True),
    "fsdp+tp": lambda tp: shardc.fsdp("dp") | tp("tp"),
    "fsdp+tp+sp": lambda tp: shardc.fsdp("dp") | tp("tp", sequence=True),
    "hsdp+tp": lambda tp: shardc.hsdp(shard="dp", replicate="rep") | tp("tp"),
}

MESHES: dict[str, list[dict[str, int]]] = {
    "ddp": [{"dp": 2}, {"dp": 4}, {"dp": 8}],
    "fsdp1": [{"dp": 2}, {"dp": 4}],
    "fsdp2": [{"dp": 2}, {"dp": 8}],
    "fsdp3": [{"dp": 2}, {"dp": 4}, {"dp": 8}],
    "hsdp": [{"rep": 2, "dp": 2}, {"rep": 2, "dp": 4}],
    "tp": [{"tp": 2}, {"tp": 4}, {"tp": 8}],
    "tp+sp": [{"tp": 2}, {"tp": 4}, {"tp": 8}],
    "fsdp+tp": [{"dp": 2, "tp": 2}, {"dp": 2, "tp": 4}],
    "fsdp+tp+sp": [{"dp": 2, "tp": 2}, {"dp": 4, "tp": 2}],
    "hsdp+tp": [{"rep": 2, "dp": 2, "tp": 2}],
}

SEQUENCE_MODELS = ("llama", "gpt2", "vit")


def cases() -> list[Any]:
    """Every model under every plan on every mesh; on meshes but the first of a plan only where there is time.

    Decoders take longest: of theirs, one plan over one axis and one over two are in every run, of the others some more.
    """
    out = []
    for model in MODELS:
        for plan, meshes in MESHES.items():
            if "sp" in plan.split("+") and model not in SEQUENCE_MODELS:
                continue
            for at, mesh in enumerate(meshes):
                everyday = at == 0 or model == "mlp"
                few = ("fsdp3", "fsdp+tp") if model in ("llama", "gpt2") else ("fsdp2", "tp", "tp+sp", "hsdp+tp")
                quick = model == "mlp" or plan in few
                marks = () if everyday and quick else pytest.mark.slow if everyday else pytest.mark.long
                out.append(pytest.param(Case(model, plan, mesh), marks=marks))
    return out


def batch_of(name: str, args: tuple[torch.Tensor, ...], model: nn.Module) -> tuple[torch.Tensor, ...]:
    """Global inputs and targets of one step."""
    if name in ("llama", "gpt2"):
        return token_batch(model(args[0]).shape[-1])
    x = torch.randn(BATCH, *args[0].shape[1:], dtype=torch.float64)
    out = model(x)
    target = torch.randn_like(out) if name == "mlp" else torch.randint(out.shape[-1], (BATCH,))
    return x, target.detach()


def largest_relative(ours: torch.Tensor, theirs: torch.Tensor, floor: float = 1e-12) -> float:
    """Error relative to the largest element, or to ``floor`` where the whole tensor is smaller."""
    scale = theirs.abs().max().clamp_min(floor)
    return ((ours - theirs).abs().max() / scale).item() if theirs.numel() else 0.0


@pytest.mark.parametrize("case", cases(), ids=str)
def test_equals_one_device(case: Case) -> None:
    check(case)


def check(case: Case, chooser: Literal["greedy", "exact"] = "greedy") -> None:
    """Losses, gradients, parameters and buffers of some steps, with layouts that ``chooser`` chose."""
    torch.manual_seed(0)
    source, tp, loss = MODELS[case.model]
    model, args = source.tiny()
    model = model.double().train()
    steps = [batch_of(case.model, args, model) for _ in range(STEPS)]
    model, _ = source.tiny()
    model = model.double().train()

    options = shardc.Options(
        p2p_collectives=case.model != "mlp", layout_solver=chooser
    )  # as on CPU ranks; the MLP as on others
    module = shardc.compile(
        model, shardc.Mesh(case.mesh), PLANS[case.plan](tp), loss=loss, backend="eager", options=options
    )
    sim = shardc.Simulation(module)
    step = sim.optimizers(lambda shards: torch.optim.AdamW(shards, lr=1e-2))
    reference = torch.optim.AdamW(model.parameters(), lr=1e-2)
    names = [name for name, _ in model.named_parameters()]

    for at, (x, y) in enumerate(steps):
        value = loss(model(x), y)
        reference.zero_grad()
        value.backward()
        ours = sim(x, y)
        assert largest_relative(ours, value.detach()) < 1e-9, f"loss of step {at}"
        sim.backward()
        # Some gradients are zero in exact arithmetic (a key bias under softmax): their noise is not an error.
        floor = 1e-6 * max(p.grad.abs().max().item() for p in model.parameters() if p.grad is not None)
        for name in names:
            theirs = model.get_parameter(name).grad
            assert (name in sim.grads) == (theirs is not None), f"{name} has a gradient on one side only"
            if theirs is not None:
                assert largest_relative(sim.grad(name), theirs, floor) < 1e-9, f"gradient of {name} in step {at}"
        reference.step()
        step()
    for name in names:
        theirs = model.get_parameter(name).detach()
        assert largest_relative(sim.param(name), theirs) < 1e-9, f"{name} after {STEPS} steps"
    for name, buffer in model.named_buffers():
        assert largest_relative(sim.buffer(name).double(), buffer.double()) < 1e-9, f"buffer {name}"
    if case.model in ("llama", "gpt2"):
        x = steps[0][0]
        assert largest_relative(sim(x, grad=False), model(x).detach()) < 1e-9, "forward without the loss"
