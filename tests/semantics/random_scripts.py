"""Random training scripts: what a user's code does around a random program.

A script prepares the model, compiles it, calls it, changes and reads outputs, parameters and gradients, and steps. Each
line runs on one device while the script is drafted, so that a line that one device refuses is known to be refused.
"""

from __future__ import annotations

import copy
import os
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import shardc
from tests.semantics.random_lines import Draft, Unfit
from tests.semantics.random_programs import MESHES, drafted, module_of, objective, plan_of

SETUP = 0.5  # the share of scripts that prepare the model before it is compiled


class Plain(torch.Tensor):
    """A subclass that overrides nothing."""


class Doubled(torch.Tensor):
    """A subclass whose products are twice those of a plain tensor."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            return out * 2 if func in (F.linear, torch.matmul, Tensor.matmul, Tensor.mul) else out


# Other strides, the same values.
ODD: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "cut": lambda x: torch.cat([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]],
    "offset": lambda x: torch.cat([x[:1], x])[1:],
}


@dataclass(frozen=True)
class Script:
    """A training script.

    Args:
        source: the text of the module's class; ``other`` is another forward of it, which a second start binds.
        setup: lines that run before the model is compiled.
        lines: lines that run on the compiled module.
        refused: whether one device refuses the last line.
    """

    seed: int
    source: str
    model: nn.Module
    inputs: tuple[Tensor, ...]
    mesh: dict[str, int]
    plan: shardc.Plan
    setup: tuple[str, ...]
    lines: tuple[str, ...]
    refused: bool

    def __str__(self) -> str:
        shapes = ", ".join(f"{x.dtype} {list(x.shape)}" for x in self.inputs)
        body = "\n".join(["# setup", *self.setup, "# compiled here", *self.lines])
        return f"seed {self.seed} on {self.mesh} with {self.plan} of {shapes}\n{self.source}\n{body}"

    def prepared(self, other: bool = False) -> nn.Module:
        """The model behind its setup, with its ``other`` forward bound if asked for."""
        model = copy.deepcopy(self.model)
        if other:
            type(model).forward = type(model).other  # type: ignore[method-assign]
        for line in self.setup:
            exec(line, scope_of(model, []))
        return model


def scope_of(model: nn.Module, inputs: list[Tensor]) -> dict[str, Any]:
    """The names that lines of a script may use."""
    return {
        "torch": torch, "nn": nn, "F": F, "model": model, "inputs": inputs, "seen": [], "objective": objective,
        "ODD": ODD, "Plain": Plain, "Doubled": Doubled,
    }  # fmt: skip


# --- lines


def _param(draw: random.Random, scope: dict[str, Any]) -> str:
    names = [name for name, _ in scope["model"].named_parameters()]
    if not names:
        raise Unfit
    return draw.choice(names)


def _out(draw: random.Random, scope: dict[str, Any], grads: bool = False) -> str:
    numbers = [i for i, x in enumerate(scope["outs"]) if x.requires_grad or not grads]
    if not numbers:
        raise Unfit
    return f"outs[{draw.choice(numbers)}]"


def setup_line(draw: random.Random, scope: dict[str, Any]) -> str:
    p = _param(draw, scope)
    return draw.choice(
        (f"model.{p} = nn.Parameter(model.{p}.detach().as_subclass(Plain))",
         f"model.{p} = nn.Parameter(model.{p}.detach().as_subclass(Doubled))",
         f"model.{p}.register_hook(lambda grad: grad * 1.5)", f"model.{p}.requires_grad_(False)",
         "model.register_forward_hook(lambda module, args, out: tuple(x * 0.5 for x in out))",
         "model.register_forward_pre_hook(lambda module, args: tuple(x * 2 if x.dtype.is_floating_point else x"
         " for x in args))",
         f"model.{p}.data.mul_(1.1)", f"model.{p}.data = ODD['strided'](model.{p}.data)")
    )  # fmt: skip


def before_line(draw: random.Random, scope: dict[str, Any]) -> str:
    i = draw.randrange(len(scope["inputs"]))
    forms = [f"inputs[{i}] = ODD['{draw.choice(sorted(ODD))}'](inputs[{i}])"]
    if draw.random() < 0.5:
        forms = [written(draw, scope), f"model.{_param(draw, scope)}.register_hook(lambda grad: grad * 1.5)"]
    return draw.choice(forms)


def written(draw: random.Random, scope: dict[str, Any]) -> str:
    """A write to a parameter, or to a part of it."""
    p = _param(draw, scope)
    shape = scope["model"].get_parameter(p).shape
    at = draw.randrange(shape[-1])
    write = draw.choice(
        (f"model.{p}.mul_(0.5)", f"model.{p}.add_(0.1)", f"model.{p}[0] = 0.3", f"model.{p}[..., {at}] *= 2",
         f"model.{p}.data.add_(0.1)", f"model.{p}.view(-1)[{at}:].mul_(0.5)", f"model.{p}.clamp_(-0.5, 0.5)",
         f"model.{p}[0].zero_()", f"nn.init.constant_(model.{p}, 0.3)", f"model.{p}.T.mul_(0.9)",
         f"model.{p}.copy_(torch.full({list(shape)}, 0.2, dtype=torch.float64))",
         f"model.{p}.masked_fill_(model.{p} > 0.5, 0.5)")
    )  # fmt: skip
    return f"with torch.no_grad(): {write}"


def after_line(draw: random.Random, scope: dict[str, Any]) -> str:
    if draw.random() < 0.3:
        # torch crashes where the hook is the first to ask for the gradient function of a view that was changed.
        out = _out(draw, scope, True)
        return draw.choice((f"{out}.grad_fn; {out}.register_hook(lambda grad: grad * 3)", f"{out}.retain_grad()"))
    out = _out(draw, scope)
    return draw.choice(
        (f"{out}.mul_(0.7)", f"{out}.tanh_()", f"{out}[..., 0] = 0.3", f"{out}.detach_()", f"{out}.add_({out}.cos())",
         f"with torch.no_grad(): {out}.add_(0.5)", f"{out}.view(-1)[0] = 0.1", f"{out}.unsqueeze(0).mul_(2)",
         f"{out} = {out} * 2", f"{out}.masked_fill_({out} > 0.5, 0.1)", f"seen.append(float({out}.detach().sum()))",
         f"{out}.data.mul_(2)", "model.eval(); model.train()")
    )  # fmt: skip


def read_line(draw: random.Random, scope: dict[str, Any]) -> str:
    p = f"model.{_param(draw, scope)}"
    if draw.random() < 0.7:
        p += ".grad"
    return draw.choice(
        (f"seen.append({p}.norm().item())", f"seen.append(float({p}.abs().max()))", f"seen.append({p}.mean().item())",
         f"seen.append(({p} ** 2).sum().item() ** 0.5)", f"seen.append(bool({p}.isnan().any()))",
         f"seen.append({p}.detach().sum().tolist())", f"with torch.no_grad(): {p}.mul_(0.5)",
         f"with torch.no_grad(): {p}[0] = 0.0", f"with torch.no_grad(): {p}.clamp_(-0.1, 0.1)",
         "seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))",
         "seen.append(float(sum(p.grad.pow(2).sum() for p in model.parameters() if p.grad is not None)))",
         f"seen.append(f'{{{p}.std().item():.6f}}')", f"seen.append(int(({p} > 0).sum()))")
    )  # fmt: skip


STEP = "torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9).step(); model.zero_grad()"


class Drafting:
    """A script while its lines are drafted, each of which runs on one device."""

    def __init__(self, draw: random.Random, model: nn.Module, inputs: list[Tensor]) -> None:
        self.draw, self.scope, self.lines, self.refused = draw, scope_of(model, inputs), [], False

    def add(self, line: str) -> None:
        if self.refused or not self._fits(line):
            return
        try:
            exec(line, self.scope)
        except RuntimeError:
            self.refused = True
        except (Unfit, TypeError, ValueError, IndexError, AttributeError):
            return
        self.lines.append(line)

    def _fits(self, line: str) -> bool:
        """Whether torch does not go backward through values that ``.data`` changed."""
        outs = self.scope.get("outs", [])
        at = int(line[5]) if line.startswith("outs[") else None
        if at is not None and ".data.mul_" in line:
            before = self._gradients(outs)
            outs[at].data.mul_(2)
            after = self._gradients(outs)
            outs[at].data.div_(2)
            return all(a is b or torch.equal(a, b) for a, b in zip(before, after, strict=True))
        return True

    def _gradients(self, outs: list[Tensor]) -> tuple[Any, ...]:
        outs = [x for x in outs if x.requires_grad]
        params = [p for p in self.scope["model"].parameters() if p.requires_grad]
        ones = [torch.ones_like(x) for x in outs]
        try:
            return torch.autograd.grad(outs, params, ones, retain_graph=True, allow_unused=True) if outs else ()
        except RuntimeError:  # of what was changed before
            return ()

    def some(self, kind: Callable[[random.Random, dict[str, Any]], str], most: int) -> None:
        for _ in range(self.draw.randint(0, most)):
            try:
                self.add(kind(self.draw, self.scope))
            except Unfit:
                pass

    def step(self) -> None:
        """Calls the model and goes backward from some of the outputs."""
        self.some(before_line, 2)
        self.add("outs = list(model(*inputs))")
        if self.refused:
            return
        self.some(after_line, 2)
        used = [i for i, x in enumerate(self.scope["outs"]) if x.requires_grad and self.draw.random() < 0.7]
        if used:
            self.add(f"objective([{', '.join(f'outs[{i}]' for i in used)}]).backward()")
        self.some(read_line, 3)


def script(seed: int, ranks: int, folder: Path) -> Script:
    """The script of ``seed``, on a mesh of ``ranks`` ranks; the code of its module is a file in ``folder``."""
    attempt = 0
    while (drafted_script := _script(seed, attempt, ranks, folder / f"script{seed}.py")) is None:
        attempt += 1
    return drafted_script


def _script(seed: int, attempt: int, ranks: int, path: Path) -> Script | None:
    draw = random.Random(f"script {seed} {attempt}")
    d, results = drafted(draw)
    if not results or d.rough or not d.params:
        return None
    source = _text(d, results, draw)
    model = module_of(str(path), source, d)
    inputs = list(d.inputs.values())
    setup = Drafting(draw, copy.deepcopy(model), [])
    if draw.random() < SETUP:
        setup.some(setup_line, 2)
    run = Drafting(draw, setup.scope["model"], [x.clone() for x in inputs])
    run.step()
    if draw.random() < 0.5:
        run.add(STEP)
        run.step()
    final = state_of(run.scope)
    if setup.refused or not all(x.isfinite().all() and x.abs().max() < 1e4 for x in final.values() if x.numel()):
        return None
    with NamedTemporaryFile("w", dir=path.parent, delete=False) as file:  # of several ranks, which write the same
        file.write(source)
    os.replace(file.name, path)
    mesh = {"dp": 1} if ranks == 1 else draw.choice([m for m in MESHES if _size(m) == ranks])
    plan = plan_of(d, mesh) | shardc.Plan(outputs="...")
    return Script(
        seed, source, model, tuple(inputs), mesh, plan, tuple(setup.lines), tuple(run.lines), run.refused
    )  # fmt: skip


def _size(mesh: dict[str, int]) -> int:
    size = 1
    for axis in mesh.values():
        size *= axis
    return size


def _text(d: Draft, results: list[str], draw: random.Random) -> str:
    """The class, with another forward in which one line has another value."""
    names, returned = ", ".join(d.inputs), ", ".join(results)
    body = [f"        {line}" for line in d.lines]
    assigned = [at for at, line in enumerate(d.lines) if line.split(" = ")[0] in d.values]
    at = draw.choice(assigned)
    name, expression = d.lines[at].split(" = ", 1)
    changed = [*body]
    changed[at] = f"        {name} = ({expression}) * 0.5" if d.values[name].is_floating_point() else body[at]
    head = f"self, {names}"
    return "\n".join(
        ["class Program(nn.Module):", f"    def forward({head}):", *body, f"        return {returned},", "",
         f"    def other({head}):", *changed, f"        return {returned},", ""]
    )  # fmt: skip


# --- results


def state_of(scope: dict[str, Any]) -> dict[str, Tensor]:
    """Outputs, parameters, gradients and buffers as plain tensors of global shape, and what was read on the way."""
    model = scope["model"]
    out = {f"output {at}": _plain(x) for at, x in enumerate(scope.get("outs", ()))}
    for name, param in model.named_parameters():
        out[f"parameter {name}"] = _plain(param)
        if param.grad is not None:
            out[f"gradient of {name}"] = _plain(param.grad)
    out |= {f"buffer {name}": _plain(x) for name, x in model.named_buffers()}
    out |= {f"read {at}": torch.tensor(float(x), dtype=torch.float64) for at, x in enumerate(scope["seen"])}
    return out


def _plain(x: Tensor) -> Tensor:
    x = x.detach()
    return (x.full_tensor() if isinstance(x, DTensor) else x).as_subclass(Tensor).clone()


def on_one_device(s: Script, other: bool = False) -> tuple[dict[str, Tensor], int]:
    """The state after the lines that one device takes, and how many these are; with ``other``, it may refuse others."""
    scope = scope_of(s.prepared(other), [x.clone() for x in s.inputs])
    state = state_of(scope)
    for at, line in enumerate(s.lines):
        try:
            exec(line, scope)
        except Exception:
            return state, at
        state = state_of(scope)
    return state, len(s.lines)


def verdict(s: Script, backend: str = "eager", other: bool = False) -> str | None:
    """None where the compiled script does as one device, "refused" where shardc refuses a line; else what is wrong.

    A refusal names a fix or a source line. A line that one device refuses has to be refused.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, taken = on_one_device(s, other)
        line = "shardc.compile"
        try:
            mesh = init_device_mesh("cpu", tuple(s.mesh.values()), mesh_dim_names=tuple(s.mesh))
            options = shardc.Options(program_cache=True)
            module = shardc.compile(s.prepared(other), mesh, s.plan, backend=backend, options=options)
            cut = module.shard_inputs(*[x.clone() for x in s.inputs])
            scope = scope_of(module, list(cut) if isinstance(cut, tuple) else [cut])
            for line in s.lines[:taken]:
                exec(line, scope)
            ours = state_of(scope)
        except shardc.ShardcError as error:
            clear = error.fix or error.source or error.plan_entry
            return "refused" if clear else f"{line}: an error without line or fix: {error}"
        except Exception as error:
            # Torch's own, of retain_grad() and then a change in place, of any function of several outputs.
            own = "INTERNAL ASSERT" in str(error) and "variable.cpp" in str(error)
            # What an op makes with an in-place view (quantile), or a subclass, is a view on one side only.
            own |= "Can't detach views" in str(error)
            return "refused" if own else f"{line}: {type(error).__name__}: {error}"
        largest = max((x.abs().max().item() for x in expected.values() if x.numel()), default=0.0)
        for name in dict.fromkeys((*expected, *ours)):
            a, b = ours.get(name), expected.get(name)
            if a is None or b is None:
                return f"{name} is on one side only"
            scale = max(b.abs().max().item(), 1e-3 * largest, 1e-9) if b.numel() else 1.0
            if a.shape != b.shape or a.numel() and not (a - b).abs().max() <= 1e-9 * scale:
                return f"{name} is {a.flatten()[:6].tolist()}, not {b.flatten()[:6].tolist()}"
        for line in s.lines[taken : taken + 1]:
            try:
                exec(line, scope)
            except Exception:
                return None
            if line.endswith(".detach_()") or ".view(-1)" in line:  # a part of a rank has strides of its own
                return None
            if ".backward()" in line and "prod(" in s.source:  # its traced formula does not read its result
                return None
            return f"{line}: one device refuses it, the compiled module runs it"
    return None
