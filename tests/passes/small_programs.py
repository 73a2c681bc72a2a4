"""Random programs of a few ops, as text, with a mesh, layouts of their inputs and costs. All follow from a seed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from math import prod

from torch import fx

from shardc.cost.model import CostModel
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.parse import parse
from shardc.passes.layout.propagate import Problem

Shape = tuple[int, ...]
MESHES = (Mesh(a=2), Mesh(a=3), Mesh(a=4), Mesh(a=2, b=2), Mesh(a=2, b=3), Mesh(a=4, b=2), Mesh(a=2, b=4))
SIZES = (2, 3, 4, 4, 6, 8, 8, 12)
LARGEST = 600  # elements of a value


@dataclass
class Draft:
    """A program that grows by a line at a time."""

    draw: random.Random
    mesh: Mesh
    inputs: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    shapes: dict[str, Shape] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)

    def input(self, shape: Shape, kind: str = "input") -> str:
        name = f"x{len(self.inputs)}"
        layout = Layout.whole(self.mesh, shape)
        for axis in self.mesh.axes:
            fitting = [split for dim in range(len(shape)) if (split := _split(layout, dim, axis)) is not None]
            if fitting and self.draw.random() < 0.5:
                layout = self.draw.choice(fitting)
        number = f" #{len(self.inputs)}" if kind == "input" and self.inputs else ""
        self.inputs.append(f"  {kind}{number} %{name}: f32{layout}")
        self.shapes[name] = shape
        return name

    def pick(self, ndim: int | None = None) -> str:
        """A value, more often one that nothing reads yet."""
        names = [n for n, s in self.shapes.items() if s and ndim in (None, len(s))]
        fresh = [n for n in names if n not in self.read]
        if not names:
            return self.input(self.shape(ndim or 2))
        return self.draw.choice(fresh if fresh and self.draw.random() < 0.7 else names)

    def shape(self, ndim: int) -> Shape:
        return tuple(self.draw.choice(SIZES) for _ in range(ndim))

    def write(self, op: str, names: list[str], shape: Shape, rest: str = "") -> None:
        name = f"v{len(self.lines)}"
        self.read.update(names)
        self.shapes[name] = shape
        text = f"[{','.join(map(str, shape))}]"
        self.lines.append(f"  %{name}: f32{text}? = {op}({', '.join(f'%{n}' for n in names)}{rest})")

    # --- lines

    def mm(self) -> None:
        left = self.pick(2)
        rows, inner = self.shapes[left]
        fitting = [n for n, s in self.shapes.items() if len(s) == 2 and s[0] == inner]
        right = self.draw.choice(fitting) if fitting and self.draw.random() < 0.5 else ""
        right = right or self.input((inner, self.draw.choice(SIZES)))
        self.write("mm", [left, right], (rows, self.shapes[right][1]))

    def add(self) -> None:
        left = self.pick()
        alike = [n for n, s in self.shapes.items() if s == self.shapes[left]]
        right = self.draw.choice(alike) if self.draw.random() < 0.7 else self.input(self.shapes[left][-1:])
        self.write("add.Tensor", [left, right], self.shapes[left])

    def view(self) -> None:
        name = self.pick()
        left, shape = prod(self.shapes[name]), []
        for _ in range(self.draw.randint(0, 2)):
            shape.append(self.draw.choice([n for n in range(1, left + 1) if left % n == 0 and n <= 12]))
            left //= shape[-1]
        shape.append(left)
        self.write("view", [name], tuple(shape), f", {shape}")

    def transpose(self) -> None:
        name = self.pick()
        order = list(range(len(self.shapes[name])))
        self.draw.shuffle(order)
        self.write("permute", [name], tuple(self.shapes[name][at] for at in order), f", {order}")

    def sum(self) -> None:
        name = self.pick()
        shape, dim = self.shapes[name], self.draw.randrange(len(self.shapes[name]))
        self.write("sum.dim_IntList", [name], shape[:dim] + shape[dim + 1 :], f", [{dim}]")

    def relu(self) -> None:
        name = self.pick()
        self.write("relu", [name], self.shapes[name])


def _split(layout: Layout, dim: int, axis: str) -> Layout | None:
    made = layout.split(dim, axis) if layout.shape[dim] % layout.mesh.size(axis) == 0 else None
    return made if made is None or made.shape == layout.shape else None


@dataclass(frozen=True)
class Small:
    """A program in front of the choice of layouts; `text` shows it."""

    text: str
    problem: Problem

    def graph(self) -> fx.Graph:
        return parse(self.text).graph


def small(seed: int) -> Small:
    """The program of ``seed``: 3 to 6 ops."""
    draw = random.Random(seed)
    d = Draft(draw, draw.choice(MESHES))
    d.input(d.shape(2))
    for _ in range(draw.randint(3, 6)):
        draw.choice((d.mm, d.mm, d.add, d.add, d.view, d.transpose, d.sum, d.relu))()
    results = [n for n in d.shapes if n not in d.read and n[0] == "v"]
    outputs, grads = [], {}
    for at, name in enumerate(results):
        if d.shapes[name] and draw.random() < 0.4:  # the gradient of a parameter that nothing else reads
            param = d.input(d.shapes[name], "param")
            outputs.append(f"  grad {param} = %{name}")
            grads[param] = Layout.parse(d.inputs[-1].rpartition("f32")[2], d.mesh)
        else:
            outputs.append(f"  output{f' #{at}' if at else ''} = %{name}")
    text = "\n".join([f"mesh {d.mesh}", "inputs:", *d.inputs, "forward:", *d.lines, "outputs:", *outputs])
    link = 10 ** draw.uniform(6, 10)  # slower than memory
    cost = CostModel(
        latency=10 ** draw.uniform(-7, -4), hop=0.0, bandwidth=link, flops=10 ** draw.uniform(7, 12),
        memory_bandwidth=link * 10 ** draw.uniform(1, 2), kinds=(),
    )  # fmt: skip
    problem = Problem(
        d.mesh, cost, tuple(a for a in d.mesh.axes if draw.random() < 0.5),
        output_layout=lambda index, name, natural: (natural, ""), pin_layout=lambda name, found: (found, ""),
        grad_layouts=grads, compute_layouts=grads,
    )  # fmt: skip
    return Small(text, problem)
