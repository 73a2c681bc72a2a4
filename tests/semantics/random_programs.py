"""Random programs: modules of a few lines, with a plan and a mesh, as source text that a seed gives again."""

from __future__ import annotations

import copy
import linecache
import random
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc
from tests.semantics.random_lines import LINES, SIZES, Draft, Unfit

MESHES: tuple[dict[str, int], ...] = ({"dp": 2}, {"dp": 3}, {"dp": 2, "tp": 2}, {"dp": 3, "tp": 2}, {"dp": 4})
LARGEST = 1200  # elements of a value

# --- programs


@dataclass(frozen=True)
class Program:
    """A program with its plan, mesh and inputs; ``source`` is the text of its module."""

    seed: int
    source: str
    model: nn.Module
    inputs: tuple[Tensor, ...]
    mesh: dict[str, int]
    plan: shardc.Plan
    drawn: bool

    def __str__(self) -> str:
        shapes = ", ".join(f"{x.dtype} {list(x.shape)}" for x in self.inputs)
        return f"seed {self.seed} on {self.mesh} with {self.plan} of {shapes}\n{self.source}"


def program(seed: int, ranks: int | None = None) -> Program:
    """The program of ``seed``, on a mesh of ``ranks`` ranks if that is given."""
    attempt = 0
    while (made := _program(seed, attempt, ranks)) is None:
        attempt += 1
    return made


def drafted(draw: random.Random) -> tuple[Draft, list[str]]:
    """The lines of a random program, and the names of its results, of which there may be none."""
    d = Draft(draw)
    for at in range(draw.randint(1, 3)):
        shape = [draw.choice(SIZES) for _ in range(draw.choice((1, 2, 2, 3, 3, 4)))]
        if at and draw.random() < 0.5:
            shape = list(d.values["x0"].shape)
        d.inputs[f"x{at}"] = d.values[f"x{at}"] = d.normal(*shape)
    wanted = draw.randint(3, 12)
    for _ in range(8 * wanted):
        if len(d.lines) < wanted:
            _write(d)
    unused = [
        n
        for n in d.values
        if n[0] == "v" and not any(re.search(rf"\b{n}\b", line) for line in d.lines[int(n[1:]) + 1 :])
    ]
    return d, unused[-4:]


def _program(seed: int, attempt: int, ranks: int | None) -> Program | None:
    draw = random.Random(f"{seed} {attempt}")
    d, results = drafted(draw)
    if not results:
        return None
    source = _text(d, results)
    model = module_of(f"<random program {seed}>", source, d)
    inputs = tuple(x for _, x in d.inputs.items())
    try:
        total = model(*[x.clone() for x in inputs])[0]
        if total.requires_grad:
            total.backward()
    except RuntimeError:  # what a gradient needs was changed in place
        return None
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    if not all(x.isfinite().all() for x in grads) or total.abs() > 1e4:
        return None
    fresh = module_of(f"<random program {seed}>", source, d)
    meshes = [m for m in MESHES if ranks is None or prod(m.values()) == ranks]
    mesh = draw.choice(meshes)
    return Program(seed, source, fresh, inputs, mesh, plan_of(d, mesh), d.rough)


def _write(d: Draft) -> None:
    """One more line, if the one that is drawn fits."""
    kinds, weights = zip(*LINES, strict=True)
    before = dict(d.values), dict(d.inputs), dict(d.params), dict(d.buffers), d.rough
    kind = d.draw.choices(kinds, weights)[0]
    name = f"v{len(d.lines)}"
    held = nn.Module()
    copies: dict[str, Tensor] = {}
    try:
        line = kind(d)
        used = [n for n in (*d.params, *d.buffers) if f"self.{n}" in line]
        for n in used:
            setattr(held, n, (d.params | d.buffers)[n].clone())
        copies = _copied(d.values)
        scope = {"torch": torch, "F": F, "self": held, **copies}
        statement = line[1:] if line[0] == "!" else f"{name} = {line}"
        exec(statement, scope)
    except (Unfit, RuntimeError, IndexError, ValueError, TypeError):
        d.values, d.inputs, d.params, d.buffers, d.rough = before
        return
    result = scope.get(name)
    changed = [copies[n] for n in d.values]
    if isinstance(result, Tensor):
        changed.append(result)
    if any(not 1 <= x.numel() <= LARGEST or not x.isfinite().all() or x.abs().max() > 1e3 for x in changed):
        d.values, d.inputs, d.params, d.buffers, d.rough = before
        return
    d.params = {n: p for n, p in d.params.items() if n in before[2] or f"self.{n}" in line}
    d.buffers = {n: p for n, p in d.buffers.items() if n in before[3] or f"self.{n}" in line}
    d.inputs = {n: p for n, p in d.inputs.items() if n in before[1] or n in line}
    d.values = {n: copies[n] for n in d.values if n in before[0] or n in line}
    if isinstance(result, Tensor):
        d.values[name] = result
        owners = [n for n in d.values if n != name and result._base is not None and _base(d.values[n]) is _base(result)]
        # What shares memory with an input, a parameter or a buffer must not be changed.
        if all(n in d.changeable for n in owners) and (result._base is None or owners):
            d.changeable.add(name)
    d.lines.append(statement)


def _base(x: Tensor) -> Tensor:
    return x if x._base is None else x._base


def _copied(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of ``values`` that share memory as they do."""
    bases: dict[int, Tensor] = {}
    out = {}
    for name, x in values.items():
        base = _base(x)
        if id(base) not in bases:
            bases[id(base)] = base.clone()
        fresh = bases[id(base)]
        out[name] = fresh if x is base else fresh.as_strided(x.shape, x.stride(), x.storage_offset())
    return out


def _text(d: Draft, results: list[str]) -> str:
    names = ", ".join(d.inputs)
    body = "\n".join(f"        {line}" for line in d.lines)
    return f"""class Program(nn.Module):
    def forward(self, {names}):
{body}
        return objective([{", ".join(results)}]), {", ".join(f"{n}.detach()" for n in results)}
"""


def objective(outputs: list[Tensor]) -> Tensor:
    """A sum in which every element has a weight of its own."""
    total = torch.zeros((), dtype=torch.float64)
    for x in outputs:
        weights = torch.arange(1, x.numel() + 1, dtype=torch.float64) / x.numel()
        total = total + (x * weights.view(x.shape)).sum()
    return total


def module_of(name: str, source: str, d: Draft) -> nn.Module:
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    scope: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "objective": objective, "__name__": __name__}
    exec(compile(source, name, "exec"), scope)
    model: nn.Module = scope["Program"]()
    for param, x in d.params.items():
        setattr(model, param, nn.Parameter(x.clone()))
    for buffer, x in d.buffers.items():
        model.register_buffer(buffer, x.clone())
    return model


def plan_of(d: Draft, mesh: dict[str, int]) -> shardc.Plan:
    draw = d.draw
    params = {name: spec(draw, x, mesh) for name, x in d.params.items() if draw.random() < 0.6}
    inputs = {name: spec(draw, x, mesh) for name, x in d.inputs.items()}
    plan = shardc.Plan(
        params={name: one for name, one in params.items() if any(one)},
        inputs={name: one for name, one in inputs.items() if any(one)},
        outputs=draw.choice((None, "...")),
    )
    if draw.random() < 0.5:
        plan = shardc.fsdp("dp", level=draw.choice((1, 2, 3)), threshold=0) | plan
    return plan


def spec(draw: random.Random, x: Tensor, mesh: dict[str, int]) -> tuple[str | None, ...]:
    """Each axis of ``mesh`` on one of the dims of ``x``, or on none."""
    out: list[str | None] = [None] * x.ndim
    for axis in mesh:
        places = [i for i, n in enumerate(x.shape) if n > 1 and out[i] is None]
        if places and draw.random() < 0.7:
            out[draw.choice(places)] = axis
    return tuple(out)


# --- results


Results = dict[str, Tensor | None]


def alone(p: Program) -> Results:
    """Outputs, gradients and buffers of one device."""
    model = copy.deepcopy(p.model)
    total, *outputs = model(*[x.clone() for x in p.inputs])
    if total.requires_grad:
        total.backward()
    return {
        **{f"output {at}": x.detach() for at, x in enumerate([total, *outputs])},
        **{f"gradient of {n}": x.grad for n, x in model.named_parameters()},
        **{f"buffer {n}": x for n, x in model.named_buffers()},
    }


def simulated(p: Program, mesh: dict[str, int] | None = None, options: shardc.Options | None = None) -> Results:
    module = shardc.compile(p.model, shardc.Mesh(mesh or p.mesh), p.plan, backend="eager", options=options)
    sim = shardc.Simulation(module)
    torch.manual_seed(0)
    outputs = sim(*p.inputs)
    if sim._saved is not None:
        sim.backward()
    return {
        **{f"output {at}": x for at, x in enumerate(outputs)},
        **{f"gradient of {n}": sim.grad(n) if n in sim.grads else None for n, _ in p.model.named_parameters()},
        **{f"buffer {n}": sim.buffer(n) for n, _ in p.model.named_buffers()},
    }


def on_ranks(backend: str, p: Program) -> Results:
    """The same on the ranks of this process group."""
    mesh = init_device_mesh("cpu", tuple(p.mesh.values()), mesh_dim_names=tuple(p.mesh))
    module = shardc.compile(p.model, mesh, p.plan | shardc.Plan(outputs="..."), backend=backend)
    given = module.shard_inputs(*[x.clone() for x in p.inputs])
    torch.manual_seed(0)
    outputs = module(*(given if isinstance(given, tuple) else (given,)))
    if outputs[0].requires_grad:
        outputs[0].backward()
    return {
        **{f"output {at}": x.detach() for at, x in enumerate(outputs)},
        **{f"gradient of {n}": None if x.grad is None else x.grad.full_tensor() for n, x in module.named_parameters()},
        **{f"buffer {n}": x for n, x in module.named_buffers()},
    }


def one_rank(p: Program) -> Results:
    """What one device draws, too: the same program on a mesh of one rank."""
    return simulated(p, dict.fromkeys(p.mesh, 1))


def verdict(p: Program, run: Callable[[Program], Results] = simulated) -> str | None:
    """None where the program is right, or refused with the line or plan entry that is the cause; else what is wrong."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            expected = one_rank(p) if p.drawn else alone(p)
            made = run(p)
        except shardc.ShardcError as error:
            return None if error.source or error.plan_entry else f"an error without a source line: {error}"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    largest = max((x.abs().max().item() for x in expected.values() if x is not None), default=0.0)
    for name, theirs in expected.items():
        ours = made[name]
        if ours is None or theirs is None:
            one = ours if theirs is None else theirs
            if one is not None and one.abs().max() > 1e-12:
                return f"{name} is on one side only"
            continue
        scale = max(theirs.abs().max().item(), 1e-3 * largest, 1e-9)
        if ours.shape != theirs.shape or not (ours - theirs).abs().max() <= 1e-9 * scale:
            return f"{name} is {ours.flatten()[:6].tolist()}, not {theirs.flatten()[:6].tolist()}"
    return None
