"""Write: a choice of layouts as a plan of ordinary entries, by glob where alike blocks agree."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

from torch import nn

from shardc.ir.layout import Layout, SubDim
from shardc.ir.mesh import Mesh
from shardc.ir.repeat import Repeat
from shardc.plan.constructors import ddp, fsdp, hsdp, tp
from shardc.plan.value import Plan

Stored = tuple[Layout, Layout]
T = TypeVar("T")


@dataclass(frozen=True)
class Writer:
    """Writes plans for a model on a mesh.

    Args:
        repeats, keep: the runs of alike blocks of the whole model, and how many of each stand for all.
        names: of all parameters and modules of the whole model.
    """

    model: nn.Module
    mesh: Mesh
    repeats: Sequence[Repeat]
    keep: int

    def plan(
        self,
        stored: Mapping[str, Stored],
        over: tuple[str, ...],
        batch: tuple[str, ...],
        level: int,
        inputs: Sequence[tuple[str, tuple[int, ...]]],
    ) -> Plan:
        """The plan that stores parameters as ``stored`` says and splits the batch over ``batch``.

        Args:
            stored: by name in the captured model, for compute and between steps.
            over: the axes over which storage alone is split.
            level: of the ``fsdp`` entry, where there is one.
            inputs: name and shape of each.
        """
        plan = Plan()
        whole = {name: 1 for name, (c, s) in stored.items() if c == s and over and s.numel > 1}
        rest = tuple(axis for axis in batch if axis not in over)
        if over and any(c != s for c, s in stored.values()):
            small, threshold = self._threshold(whole, [name for name, (c, s) in stored.items() if c != s])
            overrides = {} if small else dict(self.by_glob(whole))
            if rest:
                plan |= hsdp(over, rest, level=level, threshold=threshold) if not overrides else self._ddp(rest)
            if not rest or overrides:
                plan |= fsdp(over, level=level, threshold=threshold, overrides=overrides or None)
        else:
            plan |= self._ddp(batch)
        has = [axis for entry in plan.entries for axis in entry.batch]
        if set(has) != set(batch):
            plan |= Plan(inputs={name: rows(shape, batch, self.mesh) for name, shape in inputs if shape})
        return plan | self._computes({name: c for name, (c, _) in stored.items() if c.axes}, batch)

    def _threshold(self, whole: Iterable[str], split: Iterable[str]) -> tuple[bool, int]:
        """Whether the parameters that stay whole are those below a size, and that size in bytes."""
        nbytes = {name: p.numel() * p.element_size() for name, p in self.model.named_parameters()}
        least = min((nbytes[self._long(name)] for name in split), default=0)
        largest = max((nbytes[self._long(name)] for name in whole), default=-1)
        return (True, least if largest >= 0 else 0) if largest < least else (False, 0)

    @staticmethod
    def _ddp(axes: Iterable[str]) -> Plan:
        plan = Plan()
        for axis in axes:
            plan |= ddp(axis)
        return plan

    def _computes(self, computes: Mapping[str, Layout], batch: Sequence[str]) -> Plan:
        """How parameters are split for compute: as tensor parallel styles where these say it, else as they lie.

        The styles are not for axes that split the batch too.
        """
        styles: dict[tuple[str, str], list[str]] = {}
        raw: dict[str, str] = {}
        for glob, layout in self.by_glob(computes):
            found = self._style(glob, layout, computes)
            if found is not None and found[1] not in batch:
                styles.setdefault(found, []).append(glob.rpartition(".")[0])
            else:
                raw[glob] = spec(layout)
        plan = Plan()
        for axis in self.mesh.axes:
            said = {style: globs for (style, over), globs in styles.items() if over == axis and style != "bias"}
            if said:
                plan |= tp(axis, **said)
        return plan | Plan(params=raw) if raw else plan

    def _style(self, glob: str, layout: Layout, computes: Mapping[str, Layout]) -> tuple[str, str] | None:
        """(style, axis) that splits a parameter so, "bias" where that of its weight does; None if none does."""
        module_glob, _, kind = glob.rpartition(".")
        if len(layout.bound) != 1 or layout.bound[0] not in self.mesh.axes:
            return None
        axis, dim = layout.bound[0], layout.dim_of(layout.bound[0])
        assert dim is not None
        first = layout.dims[dim][0].axis == axis
        module = self._module(module_glob)
        if not first or not isinstance(module, nn.Linear | nn.Embedding):
            return None
        bias = next((x for g, x in self.by_glob(computes) if g == f"{module_glob}.bias"), None)
        bias_split = bias is not None and bias.bound == (axis,)
        has_bias = getattr(module, "bias", None) is not None
        if kind == "bias":
            weight = next((x for g, x in self.by_glob(computes) if g == f"{module_glob}.weight"), None)
            return (
                ("bias", axis)
                if weight is not None and self._style(f"{module_glob}.weight", weight, computes)
                else None
            )
        if isinstance(module, nn.Embedding):
            return ("vocab", axis) if dim == 0 else None
        if dim == 0 and bias_split == has_bias:
            return "colwise", axis
        return ("rowwise", axis) if dim == 1 and bias is None else None

    def _module(self, glob: str) -> nn.Module:
        """A module that ``glob`` matches."""
        for each in self.repeats:
            if glob.startswith(f"{each.prefix}*"):
                glob = f"{each.prefix}{each.first}{glob.removeprefix(f'{each.prefix}*')}"
        return self.model.get_submodule(glob)

    # --- globs

    def by_glob(self, found: Mapping[str, T]) -> list[tuple[str, T]]:
        """What is said by name in the captured model, by globs of the whole model; alike blocks under one."""
        groups: dict[str, dict[int, T]] = {}
        out: list[tuple[str, T]] = []
        for name, said in found.items():
            where = self._block(name)
            if where is None:
                out.append((self._long(name), said))
            else:
                groups.setdefault(where[0], {})[where[1]] = said
        for glob, each in groups.items():
            if len(each) == self.keep and len({str(x) for x in each.values()}) == 1:
                out.append((glob, each[0]))
                continue
            inner = each.get(1)
            if inner is not None:
                out.append((glob, inner))
            for at in (0, self.keep - 1):
                if at in each and str(each[at]) != str(inner):
                    out.append((self._at(glob, at), each[at]))
        return out

    def alike(self, name: str) -> list[str]:
        """``name`` of the captured model in each of the alike blocks; itself if it is in none."""
        found = self._block(name)
        if found is None:
            return [name]
        each = next(each for each in self.repeats if found[0].startswith(f"{each.prefix}*"))
        rest = found[0].removeprefix(f"{each.prefix}*")
        return [f"{each.prefix}{each.first + at}{rest}" for at in range(self.keep)]

    def _block(self, name: str) -> tuple[str, int] | None:
        """The glob of a name in a block, and the number of the block among those that were captured."""
        for each in self.repeats:
            match = re.fullmatch(rf"{re.escape(each.prefix)}(\d+)(\..*)?", name)
            if match and each.first <= int(match[1]) < each.first + self.keep:
                return f"{each.prefix}*{match[2] or ''}", int(match[1]) - each.first
        return None

    def _at(self, glob: str, block: int) -> str:
        """The name that ``glob`` stands for in the first or in the last block."""
        each = next(each for each in self.repeats if glob.startswith(f"{each.prefix}*"))
        number = each.first + (block if block == 0 else each.count - 1)
        return f"{each.prefix}{number}{glob.removeprefix(f'{each.prefix}*')}"

    def _long(self, name: str) -> str:
        """The name in the whole model of what is in none of the alike blocks."""
        for each in self.repeats:
            match = re.fullmatch(rf"{re.escape(each.prefix)}(\d+)(\..*)?", name)
            if match and int(match[1]) >= each.first + self.keep:
                name = f"{each.prefix}{int(match[1]) + each.count - self.keep}{match[2] or ''}"
        return name


def spec(layout: Layout) -> str:
    """A layout as a spec that does not say how large the whole dims are: ``@dp, (3 _@tp), _``."""
    dims = []
    for dim in range(layout.ndim):
        subs = layout.sub_dims(dim)
        if len(subs) == 1:
            dims.append(_sub(subs[0], open=True))
        else:
            largest = max(subs, key=lambda sub: sub.size)  # whose size is left open: it may be padded
            dims.append(f"({' '.join(_sub(sub, open=sub is largest) for sub in subs)})")
    return ", ".join(dims) + layout.partial_text()


def _sub(sub: SubDim, *, open: bool) -> str:
    size, axes = "_" if open else sub.size, sub.axes
    return f"{size}" if not axes else f"{size}@{axes[0]}" if len(axes) == 1 else f"{size}@({','.join(axes)})"


def rows(shape: Sequence[int], batch: Sequence[str], mesh: Mesh) -> tuple[object, ...]:
    """The spec of an input of which ``batch`` splits dim 0."""
    first = tuple(batch) if shape[0] % prod(mesh.size(a) for a in batch) == 0 else ()
    return (first[0] if len(first) == 1 else first or None, *[None] * (len(shape) - 1))
