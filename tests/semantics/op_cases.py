"""Calls of torch's op database as modules: what is split, how, and what the single device makes of it."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import shardc
from shardc.capture import CaptureOnce

MESHES: tuple[dict[str, int], ...] = ({"dp": 2}, {"dp": 3}, {"dp": 2, "tp": 2})
LARGEST = 3000  # elements: what is larger takes its time and says no more
DTYPES = (torch.float64, torch.float32, torch.complex128, torch.int64, torch.bool, torch.bfloat16, torch.float16)
NAMES = [info.name + (f".{info.variant_test_name}" if info.variant_test_name else "") for info in op_db]
# torch's own kernel computes with a sixth in float32.
COARSE = {"nn.functional.hardsigmoid": 1e-6}
# Inductor rounds what is cast to half and back to float32 alone.
COARSE_IN_INDUCTOR = {**COARSE, "half": 1e-3}
# Their values are what the memory held.
UNDEFINED = ("empty", "new_empty")


class Called(nn.Module):
    """One call of ``op``; its tensors are parameters and inputs.

    Args:
        tree: the arguments, ``(args, kwargs)``.
        held: which of the tensors, by place, are parameters.
        undefined: the result's values are those of memory that nobody wrote.
    """

    def __init__(self, op: Callable[..., Any], tree: Any, held: frozenset[int], undefined: bool = False) -> None:
        super().__init__()
        leaves, self.spec = pytree.tree_flatten(tree)
        tensors = [at for at, x in enumerate(leaves) if isinstance(x, Tensor)]
        self.op, self.undefined = op, undefined
        self.held = tuple(at for at in tensors if at in held)
        self.given = tuple(at for at in tensors if at not in held)
        self.leaves = [None if isinstance(x, Tensor) else x for x in leaves]
        self.weights = nn.ParameterList(nn.Parameter(leaves[at].detach().clone()) for at in self.held)
        self.examples = [leaves[at].detach() for at in self.given]

    def operands(self, tensors: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        """The tensors of the call, each with its place, where the inputs are ``tensors``."""
        return [*zip(self.held, self.weights, strict=True), *zip(self.given, tensors, strict=True)]

    def forward(self, *tensors: Tensor) -> tuple[Tensor, list[Tensor]]:
        leaves = list(self.leaves)
        for at, x in self.operands(tensors):
            leaves[at] = x.clone()  # some ops write to what they are given
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        made = self.op(*args, **kwargs)
        outputs = [x for x in pytree.tree_leaves(made) if isinstance(x, Tensor)]
        if self.undefined:
            outputs = [torch.zeros_like(x) for x in outputs]
        outputs = [x.to(torch.complex64) if x.dtype == torch.complex32 else x for x in outputs]
        return objective(outputs), [x.detach() for x in outputs]


class Shifted(Called):
    """One call of ``op`` on inputs; to each that has gradients a small parameter of its shape is added."""

    def __init__(self, op: Callable[..., Any], tree: Any, held: frozenset[int], undefined: bool = False) -> None:
        super().__init__(op, tree, frozenset(), undefined)
        leaves = pytree.tree_leaves(tree)
        shifts = [torch.full_like(leaves[at].detach(), 1e-3) for at in sorted(held)]
        self.weights = nn.ParameterList(map(nn.Parameter, shifts))
        self.shifted = sorted(held)

    def operands(self, tensors: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        places = {at: place for place, at in enumerate(self.shifted)}
        pairs = zip(self.given, tensors, strict=True)
        return [(at, x + self.weights[places[at]] if at in places else x) for at, x in pairs]


def objective(outputs: Sequence[Tensor]) -> Tensor:
    """A sum in which every element has a weight of its own."""
    total = torch.zeros((), dtype=torch.float64)
    for x in outputs:
        if not x.requires_grad:
            continue
        if x.is_complex():
            x = torch.view_as_real(x.resolve_conj())
        weights = torch.arange(1, x.numel() + 1, dtype=torch.float64, device=x.device) / max(x.numel(), 1)
        total = total + (x.double() * weights.view(x.shape)).sum()
    return total


@dataclass
class Case:
    """One sample of one entry of the database.

    Args:
        model: the call as a module.
        expected: outputs of one device, then the gradients of its parameters (None where there is none).
        random: what it draws differs from run to run, so that the oracle is a mesh of one rank.
    """

    name: str
    at: int
    model: Called
    expected: list[Tensor | None]
    random: bool
    once: CaptureOnce = field(default_factory=CaptureOnce)

    def plan(self, mesh: dict[str, int]) -> shardc.Plan:
        """Every axis of ``mesh`` on some dim, or on none, of each parameter and input; drawn by the case's name.

        A shifted call is one of rows, under FSDP.
        """
        if isinstance(self.model, Shifted):
            return shardc.fsdp("dp", level=3)
        draw = random.Random(f"{self.name} {self.at} {mesh}")
        params = {
            f"weights.{i}": drawn_spec(draw, p.shape, mesh, divides=False) for i, p in enumerate(self.model.weights)
        }
        inputs = [drawn_spec(draw, x.shape, mesh, divides=False) for x in self.model.examples]
        return shardc.Plan(
            params={name: spec for name, spec in params.items() if any(spec)},
            inputs={f"tensors.{i}": spec for i, spec in enumerate(inputs) if any(spec)},
        )


def drawn_spec(
    draw: random.Random, shape: Sequence[int], mesh: dict[str, int], divides: bool
) -> tuple[str | None, ...]:
    spec: list[str | None] = [None] * len(shape)
    for axis, size in mesh.items():
        places = [d for d, n in enumerate(shape) if spec[d] is None and n > 1 and (n % size == 0 or not divides)]
        if places and draw.random() < 0.85:
            spec[draw.choice(places)] = axis
    return tuple(spec)


def cases(at: int, count: int, form: type[Called] = Called) -> Iterator[Case]:
    """``count`` usable samples of entry ``at`` of the database, spread over those that have something to split."""
    info = op_db[at]
    dtype = next((d for d in DTYPES if d in info.supported_dtypes("cpu")), None)
    if dtype is None:
        return
    differentiable = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    torch.manual_seed(0)
    usable = []
    for number, sample in enumerate(islice(info.sample_inputs("cpu", dtype, requires_grad=differentiable), 200)):
        tree = ((sample.input, *sample.args), dict(sample.kwargs))
        tensors = [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]
        if all(x.layout == torch.strided and x.numel() <= LARGEST for x in tensors):
            usable.append((not any(n > 1 for x in tensors for n in x.shape), number, tree))
    splits = [one for one in usable if not one[0]] or usable
    order = splits[:: max(len(splits) // count, 1)] if count < len(splits) else usable
    found = 0
    for _, number, tree in order:
        if found < count and (case := _case(at, number, tree, form)) is not None:
            found += 1
            yield case


def _case(at: int, number: int, tree: Any, form: type[Called]) -> Case | None:
    info, name = op_db[at], NAMES[at]
    draw = random.Random(f"{name} {number}")
    floats = [i for i, x in enumerate(pytree.tree_leaves(tree)) if isinstance(x, Tensor) and x.requires_grad]
    held = frozenset(i for n, i in enumerate(floats) if n == 0 or form is Shifted or draw.random() < 0.6)
    try:
        model = form(info.op, tree, held, any(word in info.name for word in UNDEFINED))
        first, second = alone(model), alone(model)
        same = all(alike(a, b) is None for a, b in zip(first, second, strict=True))
    except (RuntimeError, AssertionError):  # some need what this build or machine lacks, or are examples of errors
        return None
    if sum(x.numel() for x in first if x is not None) > LARGEST:
        return None
    return Case(name, number, model, first, not same)


def alone(model: Called) -> list[Tensor | None]:
    """Outputs and gradients on one device."""
    model.zero_grad()
    total, outputs = model(*[x.clone() for x in model.examples])
    if total.requires_grad:
        total.backward()
    return [*(x.clone() for x in outputs), *(None if p.grad is None else p.grad.clone() for p in model.weights)]


def sharded(case: Case, mesh: dict[str, int]) -> list[Tensor | None]:
    """Outputs and gradients on the simulated ranks of ``mesh``."""
    options = shardc.Options(capture=case.once)
    module = shardc.compile(case.model, shardc.Mesh(mesh), case.plan(mesh), backend="eager", options=options)
    sim = shardc.Simulation(module)
    torch.manual_seed(0)
    total, outputs = sim(*[x.clone() for x in case.model.examples])
    if sim._saved is not None:
        sim.backward()
    names = [f"weights.{i}" for i in range(len(case.model.weights))]
    return [*outputs, *(sim.grad(name) if name in sim.grads else None for name in names)]


def on_ranks(case: Case, mesh: dict[str, int], backend: str) -> list[Tensor | None]:
    """The same on the ranks of this process group; a mesh of one rank is simulated on each."""
    if prod(mesh.values()) == 1:
        return sharded(case, mesh)
    device_mesh = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    plan = case.plan(mesh) | shardc.Plan(outputs="...")
    module = shardc.compile(case.model, device_mesh, plan, backend=backend)
    given = module.shard_inputs(*[x.clone() for x in case.model.examples]) if case.model.examples else ()
    torch.manual_seed(0)
    total, outputs = module(*(given if isinstance(given, tuple) else (given,)))
    if total.requires_grad:
        total.backward()
    grads = [p.grad for p in module.parameters()]
    return [*outputs, *(None if grad is None else grad.full_tensor() for grad in grads)]


def alike(ours: Tensor | None, theirs: Tensor | None, coarse: float = 1e-9) -> str | None:
    """What differs by more than ``coarse`` of the largest element (or what its dtype allows), or None."""
    if ours is None or theirs is None:
        one = ours if theirs is None else theirs
        # No gradient is one of zeros.
        return None if one is None or not one.any() else f"a gradient on one side only: {one.flatten()[:4].tolist()}"
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        return f"{ours.dtype} {list(ours.shape)}, not {theirs.dtype} {list(theirs.shape)}"
    if not theirs.numel():
        return None
    if not (theirs.is_floating_point() or theirs.is_complex()):
        return (
            None if torch.equal(ours, theirs) else f"{ours.flatten()[:6].tolist()}, not {theirs.flatten()[:6].tolist()}"
        )
    wide = torch.complex128 if theirs.is_complex() else torch.float64
    exact = {torch.float64: coarse, torch.complex128: coarse, torch.float32: 1e-5, torch.complex64: 1e-5}
    a, b = ours.resolve_conj().to(wide), theirs.resolve_conj().to(wide)
    scale = max(b.abs().nan_to_num(0, 0, 0).max().item(), 1e-6)
    if torch.allclose(a, b, rtol=0, atol=exact.get(theirs.dtype, 2e-2) * scale, equal_nan=True):
        return None
    return f"{ours.flatten()[:6].tolist()}, not {theirs.flatten()[:6].tolist()}"


def verdict(
    case: Case,
    mesh: dict[str, int],
    run: Callable[..., list[Tensor | None]] = sharded,
    coarse: dict[str, float] = COARSE,
) -> str:
    """``right``, ``whole`` (right, with what was warned of), ``refused`` with a source line, or what is wrong."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            expected = run(case, {"dp": 1}) if case.random else case.expected
            made = run(case, mesh)
        except shardc.ShardcError as error:
            return f"refused: {error.what}" if error.source else f"WRONG: an error without a source line: {error}"
        except Exception as error:
            return f"WRONG: {type(error).__name__}: {error}"
    for place, (ours, theirs) in enumerate(zip(made, expected, strict=True)):
        if (difference := alike(ours, theirs, coarse.get(case.name, 1e-9))) is not None:
            return f"WRONG: result {place} is {difference}"
    texts = [str(w.message) for w in said if issubclass(w.category, shardc.ShardcWarning)]
    return f"whole: {texts[0]}" if texts else "right"
