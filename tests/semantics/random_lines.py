"""Random lines: what a random program may do next, chosen by the values that it has."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

SIZES = (2, 3, 4, 4, 5, 6, 6, 8)
GAP = 1e-6  # how far apart values must be for their order not to hang on rounding


class Unfit(Exception):
    """A line that this program cannot have here."""


@dataclass
class Draft:
    """A program while it is written: its lines, and the values that they give on one device.

    Args:
        draw: where its choices come from.
        values: of each name in ``forward``, by which later lines are chosen.
        held: of each parameter, and of each buffer.
        rough: what the program draws or rounds makes no order of values safe from here on.
    """

    draw: random.Random
    lines: list[str] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)
    params: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    changeable: set[str] = field(default_factory=set)
    rough: bool = False
    made: int = 0  # names, those that no line uses too

    def floats(self, ndim: int = 0) -> list[str]:
        return [n for n, x in self.values.items() if x.is_floating_point() and x.ndim >= ndim]

    def pick(self, ndim: int = 1, exactly: bool = False) -> str:
        """A float of at least ``ndim`` dims, later ones more often."""
        names = [n for n in self.floats(ndim) if not exactly or self.values[n].ndim == ndim]
        if not names:
            raise Unfit
        return self.draw.choice(names[-4:] if self.draw.random() < 0.7 else names)

    def dim(self, name: str) -> int:
        ndim = self.values[name].ndim
        return self.draw.randrange(ndim) - self.draw.choice((0, ndim))

    def like(self, name: str) -> str:
        """Another value that broadcasts with ``name`` to its shape, or its sine."""
        shape = self.values[name].shape
        fits = [n for n in self.floats(1) if n != name and broadcasts(self.values[n].shape, shape)]
        return self.draw.choice(fits) if fits and self.draw.random() < 0.8 else f"{name}.sin()"

    def _fresh(self, kind: str) -> str:
        self.made += 1
        return f"{kind}{self.made}"

    def param(self, *shape: int) -> str:
        """A parameter of this shape: one that is there, or a new one."""
        alike = [n for n, p in self.params.items() if tuple(p.shape) == shape]
        if alike and self.draw.random() < 0.3:
            return f"self.{self.draw.choice(alike)}"
        name = self._fresh("p")
        self.params[name] = self.normal(*shape)
        return f"self.{name}"

    def buffer(self, *shape: int) -> str:
        name = self._fresh("b")
        self.buffers[name] = self.normal(*shape)
        return f"self.{name}"

    def normal(self, *shape: int) -> Tensor:
        seed = self.draw.randrange(2**31)
        return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 0.7

    def size(self) -> int:
        return self.draw.choice(SIZES)

    def ids(self, below: int, *shape: int) -> str:
        """Integers below ``below``: an input of the program."""
        name = self._fresh("i")
        generator = torch.Generator().manual_seed(self.draw.randrange(2**31))
        self.inputs[name] = self.values[name] = torch.randint(below, shape, generator=generator)
        return name

    def apart(self, expression: str) -> str:
        """``expression``, if no two of its values are so close that rounding could order them otherwise."""
        x = self.value(expression).detach().flatten().sort().values
        if self.rough or (x.numel() > 1 and (x[1:] - x[:-1]).min() < GAP):
            raise Unfit
        return expression

    def off_zero(self, expression: str) -> str:
        if self.rough or self.value(expression).abs().min() < GAP:
            raise Unfit
        return expression

    def value(self, expression: str) -> Tensor:
        return eval(expression, {"torch": torch, "F": F, **self.values})


def broadcasts(shape: torch.Size, to: torch.Size) -> bool:
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(to), strict=False))


# --- lines: each gives an expression, or a statement that changes something


def smooth(d: Draft) -> str:
    x = d.pick(0)
    return d.draw.choice(
        (f"torch.tanh({x})", f"torch.sin({x} * 1.3)", f"F.gelu({x})", f"F.silu({x})", f"torch.exp(-{x} * {x})",
         f"torch.sigmoid({x})", f"F.softplus({x})", f"torch.log1p({x}.square())", f"{x} * 0.5 - 0.25",
         f"torch.atan({x})")
    )  # fmt: skip


def kinked(d: Draft) -> str:
    x = d.off_zero(d.pick(0))
    form = ("F.relu({x})", "{x}.abs()", "F.leaky_relu({x}, 0.1)", "F.elu({x})", "{x}.masked_fill({x} > 0, 0.3)",
            "torch.where({x} > 0, {x} * 2, {x}.cos())", "{x}.clamp(min=0.0)",
            "({x} > 0).to({x}.dtype) * {x}")  # fmt: skip
    return d.draw.choice(form).format(x=x)


def pair(d: Draft) -> str:
    x = d.pick()
    y = d.like(x)
    form = ("{x} + {y}", "{x} * {y}", "{x} - 0.5 * {y}", "{x} / ({y}.square() + 1)", "torch.lerp({x}, {y}, 0.3)",
            "torch.hypot({x} + 3, {y})", "torch.addcmul({x}, {x}, {y}, value=0.5)",
            "torch.atan2({x}, {y}.square() + 1)",
            "torch.logaddexp({x}, {y})")  # fmt: skip
    return d.draw.choice(form).format(x=x, y=y)


def reduced(d: Draft) -> str:
    x, keep = d.pick(), d.draw.random() < 0.5
    i = d.dim(x)
    if d.values[x].shape[i] < 2:
        raise Unfit
    form = ("{x}.mean({i}, keepdim={k})", "{x}.sum({i}, keepdim={k}) * 0.3", "{x}.logsumexp({i}, keepdim={k})",
            "({x} + 2).norm(dim={i}, keepdim={k})", "{x}.var({i}, keepdim={k})",
            "({x} * 0.3 + 1).prod({i}, keepdim={k})",
            "torch.stack(torch.var_mean({x}, {i}, keepdim={k}))",
            "torch.linalg.vector_norm({x} + 1, 3, {i}, keepdim={k})",
            "{x}.mean()", "{x}.std()", "{x}.sum(tuple(range({x}.ndim)), keepdim=True) * 0.1")  # fmt: skip
    return d.draw.choice(form).format(x=x, i=i, k=keep)


def ordered(d: Draft) -> str:
    x = d.apart(d.pick())
    i = d.dim(x)
    n = d.values[x].shape[i]
    form = (f"{x}.sort({i}).values", f"{x}.topk({d.draw.randint(1, n)}, {i}).values", f"{x}.amax({i})",
            f"{x}.amin({i}, keepdim=True)", f"{x}.max({i}).values", f"{x}.cummax({i}).values",
            f"{x}.median({i}).values",
            f"{x}.gather({i}, {x}.argsort({i}, descending=True))", f"{x}.kthvalue({d.draw.randint(1, n)}, {i}).values",
            f"F.one_hot({x}.argmax({i}), {n}).to({x}.dtype)", f"torch.maximum({x}, {x}.flip({i}) * 0.99 + 0.001)",
            f"{x}.quantile(0.4, {i})")  # fmt: skip
    return d.draw.choice(form)


def along(d: Draft) -> str:
    x = d.pick()
    i = d.dim(x)
    n = d.values[x].shape[i]
    form = ("{x}.softmax({i})", "F.log_softmax({x}, {i})", "{x}.cumsum({i}) * 0.5", "{x}.flip({i})",
            "{x}.roll({s}, {i})",
            "F.normalize({x} + 1.5, dim={i})", "{x}.logcumsumexp({i})", "{x}.diff(dim={i})",
            "{x}.narrow({i}, {s}, {m})",
            "{x}.index_select({i}, torch.tensor({ids}))", "{x}.select({i}, {s})", "{x}.repeat_interleave(2, {i})",
            "{x}.unfold({i}, {m}, 1)", "{x}.cumprod({i})", "torch.cat([{x}, {x}.cos()], {i})",
            "torch.stack([{x}, {x} * 2], {i})", "torch.cat({x}.split({m}, {i})[::-1], {i})",
            "sum({x}.unbind({i})) * 0.5", "{x}.chunk(2, {i})[-1]", "{x}.tensor_split(2, {i})[0] + 1",
            "{x}.unsqueeze({i}).expand(*[-1] * ({x}.ndim + 1)) * 1.1")  # fmt: skip
    start = d.draw.randrange(n)
    ids = [d.draw.randrange(n) for _ in range(d.draw.randint(1, 4))]
    return d.draw.choice(form).format(x=x, i=i, s=start, m=d.draw.randint(1, n - start), ids=ids)


def viewed(d: Draft) -> str:
    x = d.pick()
    shape = list(d.values[x].shape)
    order = list(range(len(shape)))
    d.draw.shuffle(order)
    last = shape[-1]
    part = d.draw.choice([n for n in range(1, last + 1) if last % n == 0])
    merged = d.draw.randrange(len(shape))
    joined = [*shape[:merged], -1, *shape[merged + 2 :]]
    return d.draw.choice(
        (f"{x}.permute({order})", f"{x}.reshape({[*shape[:-1], part, last // part]})", f"{x}.reshape({joined})",
         f"{x}.flatten()", f"{x}.unsqueeze({d.draw.randint(0, len(shape))})",
         f"{x}.mT" if len(shape) > 1 else f"{x}[::2]",
         f"{x}.unflatten(-1, ({part}, -1)).transpose(0, -1)", f"{x}[..., ::2]", f"{x}[1:]", f"{x}[:, None] * 1",
         f"{x}.contiguous().view({[*shape[:-1], last // part, part]})", f"F.pad({x}, (1, 2), value=0.1)",
         f"{x}.repeat({[d.draw.choice((1, 1, 2)) for _ in shape]})", f"{x}.movedim(0, -1)",
         f"{x}[torch.arange({shape[0]}) % 2]",
         f"{x}.tril()" if len(shape) > 1 else f"{x}.diag_embed()", f"{x}.squeeze()", f"{x}[-1]")
    )  # fmt: skip


def product(d: Draft) -> str:
    x = d.pick()
    shape, m = d.values[x].shape, d.size()
    n = shape[-1]
    form = [f"F.linear({x}, {d.param(m, n)}, {d.param(m)})", f"{x} @ {d.param(n, m)}",
            f"torch.einsum('...n,mn->...m', {x}, {d.param(m, n)})", f"{x} * {d.param(n)}"]  # fmt: skip
    if len(shape) == 2:
        form += [f"{x} @ {x}.mT * 0.3", f"torch.addmm({d.param(m)}, {x}, {d.param(n, m)})",
                 f"torch.cdist({x}, {d.param(m, n)})",
                 f"F.bilinear({x}, {x}.cos(), {d.param(m, n, n)}) * 0.2"]  # fmt: skip
    if len(shape) == 1:
        form += [f"torch.outer({x}, {d.param(m)})", f"{d.param(m, n)} @ {x}"]
    if len(shape) == 3:
        form += [f"torch.bmm({x}, {x}.mT) * 0.3", f"torch.einsum('abc,acd->bd', {x}, {x}.mT) * 0.2"]
    return d.draw.choice(form)


def layer(d: Draft) -> str:
    x = d.pick(2)
    shape = list(d.values[x].shape)
    n, c = shape[-1], shape[1]
    form = [f"F.layer_norm({x}, ({n},), {d.param(n)}, {d.param(n)})", f"F.rms_norm({x}, ({n},), {d.param(n)})"]
    if shape[0] * n > 2:
        form += [f"F.batch_norm({x}, {d.buffer(c)}, {d.buffer(c)}.abs_(), {d.param(c)}, {d.param(c)}, training=True)",
                 f"F.group_norm({x}, {c if len(shape) > 2 else 1}, {d.param(c)})"]  # fmt: skip
    if len(shape) == 3:
        form += [f"F.conv1d({x}, {d.param(d.size(), c, min(3, n))}, {d.draw.choice(('None', 'None'))}, padding=1)",
                 f"F.scaled_dot_product_attention({x}, {x}.cos(), {x}.sin())", f"F.avg_pool1d({x}, 2, 1)",
                 f"F.max_pool1d({d.apart(x)}, 2)", f"F.interpolate({x}, scale_factor=2, mode='linear')"]  # fmt: skip
    if len(shape) == 4:
        kernel = min(2, n, shape[2])
        form += [f"F.conv2d({x}, {d.param(d.size(), c, kernel, kernel)})", f"F.avg_pool2d({x}, {kernel})",
                 f"F.conv_transpose2d({x}, {d.param(c, 3, 2, 2)}, stride=2)"]  # fmt: skip
    return d.draw.choice(form)


def looked_up(d: Draft) -> str:
    x = d.pick()
    shape = list(d.values[x].shape)
    i, n, k = d.dim(x), d.values[x].shape[0], d.draw.randint(1, 5)
    along = shape[i]
    spread = shape[:]
    spread[i] = k
    form = [f"F.embedding({d.ids(n, k, 2)}, {x})" if len(shape) == 2 else f"{x}[{d.ids(n, k)}]",
            f"{x}.gather({i}, {d.ids(along, *spread)})", f"{x}.index_add({i}, {d.ids(along, along)}, {x}.cos())",
            f"{x}.scatter_add({i}, {d.ids(along, *shape)}, {x}.sin())", f"{x}.take({d.ids(d.values[x].numel(), k)})",
            f"torch.zeros_like({x}).index_put(({d.ids(n, n)},), {x}, accumulate=True)"]  # fmt: skip
    if len(shape) == 2:
        form += [f"F.cross_entropy({x}, {d.ids(shape[1], n)}, reduction='{d.draw.choice(('mean', 'none'))}')",
                 f"F.embedding_bag({d.ids(n, 6)}, {x}, torch.tensor([0, 2, 2]), mode='sum')",
                 f"{x}[{d.ids(n, k)}, {d.ids(shape[1], k)}]"]  # fmt: skip
    return d.draw.choice(form)


def joined(d: Draft) -> str:
    x, y = d.pick(), d.pick()
    if d.values[x].shape[1:] != d.values[y].shape[1:]:
        raise Unfit
    return f"torch.cat([{x}, {y} * 0.7])"


def drawn(d: Draft) -> str:
    d.rough = True
    return f"F.dropout({d.pick()}, 0.3)"


def in_place(d: Draft) -> str:
    names = [n for n in d.changeable if d.values[n].ndim]
    if not names:
        raise Unfit
    x = d.draw.choice(sorted(names))
    n = d.values[x].shape[0]
    form = ("{x}.add_({y} * 0.5)", "{x}.mul_(0.7)", "{x}[0] = 0.4", "{x}[{s}:].add_(0.2)", "{x}.tanh_()",
            "{x}[..., -1] *= 2",
            "{x}[torch.tensor([0, {s}])] += 0.5", "{x}.copy_({y})", "{x}.select(0, {s}).zero_()",
            "{x}.transpose(0, -1).sin_()",
            "{x}.view(-1)[::2].mul_(0.9)", "{x}.clamp_(max=2.5)", "{x}.unsqueeze(0)[:, {s}] = 0.1")  # fmt: skip
    return "!" + d.draw.choice(form).format(x=x, y=d.like(x), s=d.draw.randrange(n))


def buffered(d: Draft) -> str:
    x = d.pick()
    buffer = d.buffer(*d.values[x].shape[1:])
    form = ("{b}.add_({x}.detach().mean(0))", "{b}.copy_({x}.detach()[0])", "{b}.lerp_({x}.detach().sum(0), 0.1)",
            "{b}.mul_(0.5)")  # fmt: skip
    return "!" + d.draw.choice(form).format(b=buffer, x=x)


LINES: tuple[tuple[Callable[[Draft], str], int], ...] = (
    (smooth, 3), (kinked, 2), (pair, 4), (reduced, 3), (ordered, 2), (along, 5), (viewed, 5), (product, 4), (layer, 3),
    (looked_up, 3), (joined, 2), (drawn, 1), (in_place, 3), (buffered, 1),
)  # fmt: skip
