"""Random uses of outputs: what a net returns and what a caller does with it, drawn from a seed.

Each rank gets the same rows, so that what it returns, and the mean of the ranks' losses, is that of one device.
"""

from __future__ import annotations

import copy
import random
import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

import shardc
from shardc.errors import ShardcError

ROWS, SIZE, WIDTH, OUT = 4, 6, 8, 4

TENSORS = (
    "y", "y", "h", "y.tanh()", "y.relu()", "y * 2", "h.sin()", "y.softmax(-1)", "y[..., :2]", "y[..., 1:]", "y.t()",
    "y.unsqueeze(1)", "y.view(-1)", "y.flatten()", "h.view(-1, 2, 4)", "y[0]", "y[:, 0]", "y.detach()",
    "y.detach()[..., :2]", "y[..., :2].detach()", "h.chunk(2, -1)[0]", "h.chunk(2, -1)", "y.unbind(-1)",
    "h.split(3, -1)", "y.mean()", "y.mean(0)", "y.mean(-1, keepdim=True).expand(-1, 3)", "y.argmax(-1)", "y > 0",
    "y[:, :0]", "y.contiguous()", "y.clone()", "y.float()", "y.to(torch.float64)", "(y * 1.5)[..., :2]",
    "(y * 1.5)[..., 2:]", "z[..., :3]", "z[..., 1:]", "z.t()", "z.unbind(-1)", "z.chunk(2, -1)",
    "y.squeeze()", "y.reshape(-1, 2)", "y.mT", "y.movedim(0, 1)", "x", "x", "x[..., :2]", "x.detach()", "x.view(-1)",
    "x.t()", "x.unbind(-1)", "i", "i[:2]", "i.view(-1)", "i + 1", "self.scale", "self.scale * 2", "self.scale[:2]",
    "self.first.weight", "self.first.weight.t()", "self.offset", "self.offset[1:]", "self.offset + y", "self.frozen",
    "self.frozen[:2]", "torch.ones(3, dtype=torch.float64)", "torch.view_as_real(torch.complex(y, y))",
    "y.masked_fill(y > 0, 1.0)", "y.exp().detach()", "None", "3", "'name'",
)  # fmt: skip

CONSTANTS = ("None", "3", "'name'")
LINES = (
    "o[{i}].mul_(0.5)", "o[{i}].mul_(0.5)", "o[{i}].add_(1)", "o[{i}][..., 0] = -2", "o[{i}].zero_()",
    "o[{i}].div_(0.7)", "o[{i}].masked_fill_(o[{i}] > 0, 1)", "o[{i}].clamp_(-1, 1)", "o[{i}] += o[{j}]",
    "o[{i}].copy_(o[{j}])", "o[{i}].detach_()", "o[{i}].requires_grad_()", "o[{i}].requires_grad_(False)",
    "o[{i}].retain_grad()", "o[{i}].register_hook(lambda g: g * 2)",
    "o[{i}].register_hook(lambda g: seen.append(g.clone()))", "with torch.no_grad(): o[{i}].mul_(0.5)",
    "with torch.no_grad(): o[{i}].copy_(o[{i}] * 3)", "with torch.no_grad(): o[{i}][0] = 1", "o[{i}].data.mul_(2)",
    "o[{i}].data = o[{i}].data * 2", "o[{i}].resize_(2)", "o[{i}].set_(torch.ones(3, dtype=o[{i}].dtype))",
    "o[{i}].t_()", "o[{i}].unsqueeze_(0)", "o[{i}].squeeze_()", "o[{i}].transpose_(0, -1)",
    "torch.add(o[{i}], 1, out=o[{i}])", "torch.mul(o[{j}], 2, out=o[{i}])", "k.append(o[{i}].exp())",
    "k.append(o[{i}] * o[{i}])", "k.append(o[{i}] * o[{j}])", "k.append(o[{i}][..., 0])", "k.append(o[{i}].view(-1))",
    "k.append(o[{i}].detach())", "k[-1].mul_(2)", "k[-1].add_(1)",
    "seen.append(torch.autograd.grad(total(o[{i}]), [o[{i}]], retain_graph=True)[0])",
    "seen.append(torch.autograd.grad(total(o[{i}] * 2), [o[{j}]], retain_graph=True, allow_unused=True)[0])",
    "total(o[{i}]).backward(retain_graph=True)", "total(*o).backward(retain_graph=True)", "total(o[{i}]).backward()",
    "total(o[{i}], o[{j}]).backward(retain_graph=True)", "total(*k).backward(retain_graph=True)", "del o[{i}]",
    "o[{i}] = o[{i}] * 2", "o.append(o[{i}])", "o[{i}].share_memory_()", "o += leaves(net(x * 2, i))",
    "net.offset.add_(1)", "x.mul_(2)", "x.mul_(2)", "i.add_(1)",
    "o[{i}].backward(torch.ones_like(o[{i}]) / o[{i}].numel(), retain_graph=True)",
    "seen.append(torch.tensor([o[{i}] is o[{j}], o[{i}] is x, o[{i}] is net.offset]))",
    "seen.append(torch.tensor([o[{i}].requires_grad, o[{i}].is_leaf, o[{i}]._is_view()]))",
    "torch.autograd.backward([total(o[{i}]), total(o[{j}])], retain_graph=True)", "x.grad = None",
    "total(x).backward(retain_graph=True)", "o[{i}].index_fill_(0, torch.tensor([0]), 1)", "o[{i}].fill_diagonal_(0)",
    "o[{i}].view(-1).mul_(2)", "o[{i}].register_post_accumulate_grad_hook(print)",
    "torch._foreach_mul_([o[{i}], o[{j}]], 2)", "nn.functional.relu_(o[{i}])",
    "nn.functional.dropout(o[{i}], 0.0, inplace=True)",
)  # fmt: skip

ENTERS = ("torch.enable_grad()",) * 6 + ("torch.no_grad()", "torch.inference_mode()")


@dataclass(frozen=True)
class Use:
    """What is returned, as an expression, and what is done with it, as lines.

    Args:
        enters: the mode of the call.
        needs: whether the input has a gradient.
    """

    seed: int
    returns: str
    enters: str
    needs: bool
    lines: tuple[str, ...]

    def __str__(self) -> str:
        grad = ".requires_grad_()" if self.needs else ""
        return f"seed {self.seed}: x{grad}; with {self.enters}: return {self.returns}\n    " + "\n    ".join(self.lines)


def use(seed: int) -> Use:
    """The use of ``seed``."""
    draw = random.Random(seed)
    parts = [draw.choice(TENSORS) for _ in range(draw.choice((1, 1, 2, 2, 3)))]
    if len(parts) > 1 and draw.random() < 0.5:  # what shares memory
        parts[1:] = [draw.choice([t for t in TENSORS if t[0] == parts[0][0]]) for _ in parts[1:]]
    forms = ("({},)", "[{}]", "({}, None)", "{{'a': [{}], 'n': 3}}", "(({}, 'name'), y)")
    if set(parts) <= set(CONSTANTS):
        parts.append("y")
    if len(parts) == 1:
        forms = ("{}", "{}", "({},)")
    returns = draw.choice(forms).format(", ".join(parts))
    lines = [draw.choice(LINES) for _ in range(draw.randint(1, 5))]
    filled = tuple(line.format(i=draw.randrange(4), j=draw.randrange(4)) for line in lines)
    # A parameter that is returned is a plain tensor, with a gradient where that is recorded.
    enters = ENTERS[0] if takes_parameter(returns) else draw.choice(ENTERS)
    # The gradient of a rank's own rows is that of a mean over all rows, which are twice as many.
    needs = draw.random() < 0.3 and "mean(" not in returns
    return Use(seed, returns, enters, needs, (*filled, "total(*o).backward()"))


class Net(nn.Module):
    """Two layers that return what a use says."""

    def __init__(self, returns: str) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(SIZE, WIDTH), nn.Linear(WIDTH, OUT)
        self.scale = nn.Parameter(torch.full((OUT,), 1.5))
        self.frozen = nn.Parameter(torch.full((OUT,), 0.5), requires_grad=False)
        self.register_buffer("offset", torch.arange(float(OUT)))
        scope: dict[str, Any] = {"torch": torch}
        self.code = f"def returns(self, x, i, h, y, z): return {returns}"
        exec(self.code, scope)
        self.returns = scope["returns"]

    def forward(self, x: Tensor, i: Tensor) -> Any:
        h = self.first(x).tanh()
        y = self.second(h) * self.scale
        return self.returns(self, x, i, h, y, y.sin() + 1)


def takes_parameter(returns: str) -> bool:
    return "weight" in returns or "self.scale" in returns


def total(*parts: Any) -> Tensor:
    """A loss of those of ``parts`` that have gradients."""
    return sum((x.double().sin().mean() for x in parts if isinstance(x, Tensor) and x.requires_grad), torch.zeros(()))


def leaves(out: Any) -> list[Any]:
    return [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]


def run(made: Use, net: Any) -> tuple[list[str], list[Any], dict[str, Any]]:
    """What each line does ("" or why it raises, which ends it), what there is then, and parameters' gradients."""
    torch.manual_seed(1)
    x = torch.randn(ROWS, SIZE, dtype=torch.float64)
    if made.needs:
        x.requires_grad_()
    scope: dict[str, Any] = {
        "torch": torch, "nn": nn, "net": net, "x": x, "i": torch.arange(ROWS), "k": [], "seen": [], "total": total,
        "leaves": leaves, "o": [],
    }  # fmt: skip
    said: list[str] = []
    for line in (f"with {made.enters}: o = leaves(net(x, i))", *made.lines):
        try:
            exec(line, scope)
        except IndexError:
            said.append("")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
            break
        else:
            said.append("")
    values = [*scope["o"], *scope["k"], x, x.grad, scope["i"], *(o.grad for o in scope["o"] if o.retains_grad)]
    values += scope["seen"] + [net.offset, *net.parameters()]
    return said, values, {name: p.grad for name, p in net.named_parameters()}


def verdict(made: Use, plan: shardc.Plan, backend: str, ranks: int) -> str:
    """How the compiled module differs from one device; "" where it does not."""
    torch.manual_seed(0)
    net = Net(made.returns).double()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    module = shardc.compile(copy.deepcopy(net), mesh, plan, backend=backend)
    said, values, grads = run(made, net)
    ours, ours_values, ours_grads = run(made, module)
    lines = ("the call", *made.lines)
    if len(said) != len(ours) or bool(said[-1]) != bool(ours[-1]):
        if takes_parameter(made.returns) and "created inside a custom Function" in ours[-1]:
            return ""  # where it was changed in place, a parameter that is returned has no gradient any more
        if (
            re.search("weight|self.scale|self.frozen", made.returns)
            and "cannot be changed in place: on one" in ours[-1]
        ):
            return ""  # a parameter is split, or has no memory that can be replaced
        theirs, mine = (f"{lines[len(x) - 1]!r}: {x[-1][:300] or 'runs'}" for x in (said, ours))
        return f"one device at {theirs}\n  compiled at {mine}"
    if said[-1]:  # what a backward did before it was refused is of no matter
        return ""
    for at, (a, b) in enumerate(zip(values, ours_values, strict=True)):
        if not _equal(a, b):
            return f"value {at}: {a} and {b}"
    for name, a in grads.items():
        if not _equal(a, ours_grads[name]):
            return f"gradient of {name}: {a} and {ours_grads[name]}"
    return ""


def _equal(a: Any, b: Any) -> bool:
    if a is None or b is None:
        return a is b
    b = b.full_tensor() if isinstance(b, DTensor) else b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.allclose(
        a.double(), b.double(), rtol=1e-9 if a.dtype == torch.float64 else 1e-5, atol=1e-12, equal_nan=True
    )


def check(seeds: range, backend: str, ranks: int, plan: shardc.Plan) -> None:
    """Runs the uses of ``seeds`` on this process's rank."""
    found = []
    for made in map(use, seeds):
        torch._dynamo.reset()
        try:
            differs = verdict(made, plan, backend, ranks)
        except ShardcError as error:
            differs = f"refused: {error}"
        if differs:
            found.append(f"{made}\n  {differs}")
    assert not found, f"{len(found)} of {len(seeds)}\n" + "\n\n".join(found)
