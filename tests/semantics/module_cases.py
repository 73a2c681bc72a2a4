"""Samples of torch's module database: each module on one device, and compiled on the simulated ranks of a mesh."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedTensorMixin
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

import shardc
from shardc.capture import CaptureOnce
from tests.semantics.op_cases import alike, objective

NAMES = [info.name.removeprefix("nn.") for info in module_db]
MESH = {"dp": 2}
TINY = 1e-12
PLANS = {
    "fsdp": shardc.fsdp("dp", level=3, threshold=0),
    "microbatches": shardc.fsdp("dp", level=3, threshold=0) | shardc.microbatches(2),
}


class Beside(nn.Module):
    """A module between parameters, added to each row of its inputs with gradients, and a sum of what it returns.

    Args:
        inner: the module.
        tree: the arguments of its call, ``(args, kwargs)``; their tensors are the inputs.
    """

    def __init__(self, inner: nn.Module, tree: Any) -> None:
        super().__init__()
        leaves, self.spec = pytree.tree_flatten(tree)
        self.inner = inner
        self.places = [at for at, x in enumerate(leaves) if isinstance(x, Tensor)]
        self.constants = [None if isinstance(x, Tensor) else x for x in leaves]
        self.examples = [leaves[at].detach().clone() for at in self.places]
        self.shifts = nn.ParameterDict(
            {
                str(at): torch.full_like(x[:1] if x.ndim else x, 1e-3)
                for at, x in enumerate(self.examples)
                if leaves[self.places[at]].requires_grad
            }
        )

    def forward(self, *tensors: Tensor) -> tuple[Tensor, list[Tensor]]:
        leaves = list(self.constants)
        for at, (place, x) in enumerate(zip(self.places, tensors, strict=True)):
            shift = self.shifts[str(at)] if str(at) in self.shifts else None
            leaves[place] = x.clone() if shift is None else x + shift  # some modules write to an input
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        outputs = [x for x in pytree.tree_leaves(self.inner(*args, **kwargs)) if isinstance(x, Tensor)]
        return objective(outputs), [x.detach() for x in outputs]


@dataclass
class Case:
    """One sample of one entry of the database, in training or in evaluation."""

    name: str
    model: Beside
    once: CaptureOnce = field(default_factory=CaptureOnce)

    def tiled(self) -> Case | None:
        """The same with four times as many rows, which the mesh and microbatches divide; None if it does not run."""
        leaves: list[Any] = list(self.model.constants)
        for at, (place, x) in enumerate(zip(self.model.places, self.model.examples, strict=True)):
            leaves[place] = torch.cat([x, x.flip(0), x, x]) if x.ndim else x
            leaves[place].requires_grad_(str(at) in self.model.shifts)
        case = Case(f"{self.name}, tiled", Beside(self.model.inner, pytree.tree_unflatten(leaves, self.model.spec)))
        try:
            alone(case)
        except (RuntimeError, ValueError, AssertionError, IndexError):  # a dim 0 that is not the batch
            return None
        return case


def cases(at: int) -> Iterator[Case]:
    """All samples of entry ``at`` of the database."""
    info = module_db[at]
    for training in (True, False) if info.train_and_eval_differ else (True,):
        torch.manual_seed(0)
        samples = info.module_inputs_func(
            info, device="cpu", dtype=torch.float64, requires_grad=True, training=training
        )
        for number, sample in enumerate(samples):
            constructor, called = sample.constructor_input, sample.forward_input
            if called is None:
                continue
            torch.manual_seed(number)
            kwargs = {"device": "cpu", "dtype": torch.float64} | dict(constructor.kwargs)
            try:
                inner = info.module_cls(*constructor.args, **kwargs)
            except TypeError:  # modules without parameters take neither
                inner = info.module_cls(*constructor.args, **constructor.kwargs)
            mode = "train" if training else "eval"
            model = Beside(inner.double().train(training), ((*called.args,), dict(called.kwargs)))
            yield Case(f"{NAMES[at]} {number} {mode}: {sample.desc}", model)


Results = tuple[list[Tensor], dict[str, Tensor]]  # outputs, and gradients and buffers by name


def alone(case: Case) -> Results:
    """Outputs, gradients and buffers on one device."""
    model = copy.deepcopy(case.model)
    total, outputs = model(*[x.clone() for x in model.examples])
    if total.requires_grad:
        total.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    outputs = outputs if case.model.inner.training else [*outputs, *without_gradients(case)]
    return [total.detach(), *outputs], grads | {name: b.clone() for name, b in model.named_buffers()}


def without_gradients(case: Case) -> list[Tensor]:
    """Outputs on one device under `torch.no_grad`, where some modules take another path in evaluation."""
    with torch.no_grad():
        total, outputs = copy.deepcopy(case.model)(*[x.clone() for x in case.model.examples])
    return [total, *outputs]


def sharded(case: Case, mesh: dict[str, int], plan: shardc.Plan) -> Results:
    """The same on the simulated ranks of ``mesh``; an evaluation is run without gradients too."""
    options = shardc.Options(capture=case.once)
    model = copy.deepcopy(case.model)
    module = shardc.compile(model, shardc.Mesh(mesh), plan, backend="eager", options=options)
    sim = shardc.Simulation(module)
    torch.manual_seed(0)
    total, outputs = sim(*[x.clone() for x in case.model.examples])
    if sim._saved is not None:
        sim.backward()
    if not model.inner.training:
        with torch.no_grad():
            evaluated = sim(*[x.clone() for x in case.model.examples])
        outputs = [*outputs, evaluated[0], *evaluated[1]]
    return [total, *outputs], {name: sim.grad(name) for name in sim.grads} | {
        name: sim.buffer(name) for name in sim.buffers
    }


def is_random(case: Case) -> bool:
    first, second = alone(case), alone(case)
    return any(alike(a, b) is not None for a, b in zip(first[0], second[0], strict=True))


def verdict(case: Case, plan: shardc.Plan, mesh: dict[str, int] = MESH) -> str:
    """``right``, ``whole`` (right, with what was warned of), ``refused`` with the error, or what is wrong."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            lazy = any(isinstance(p, UninitializedTensorMixin) for p in case.model.parameters())
            draws = not lazy and is_random(case)
            outputs, named = sharded(case, mesh, plan)
            one, theirs = sharded(case, {"dp": 1}, PLANS["fsdp"]) if draws else alone(case)
        except shardc.ShardcError as error:
            return f"refused: {error}"
        except Exception as error:
            return f"WRONG: {type(error).__name__}: {error}"
    for place, (a, b) in enumerate(zip(outputs, one, strict=True)):
        if (difference := alike(a, b)) is not None:
            return f"WRONG: output {place} is {difference}"
    for name in named.keys() | theirs.keys():
        if all(x is None or (x.abs() < TINY).all() for x in (named.get(name), theirs.get(name))):
            continue  # terms that cancel, as in the gradients of what is normalised
        if (difference := alike(named.get(name), theirs.get(name))) is not None:
            return f"WRONG: {name} is {difference}"
    texts = [str(w.message) for w in caught if issubclass(w.category, shardc.ShardcWarning)]
    return f"whole: {texts[0]}" if texts else "right"
