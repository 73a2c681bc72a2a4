"""The plan: a frozen, composable value that says where things lie, and never what is computed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from tabulate import tabulate

from shardc.errors import PlanError
from shardc.plan.entries import (
    REDUCTIONS,
    STYLES,
    Activation,
    Data,
    Ddp,
    Entry,
    Fsdp,
    Param,
    Port,
    Setting,
    Tp,
    activations,
    axis_names,
    ports,
    quote,
    show_axes,
)
from shardc.plan.spec import freeze, show


@dataclass(frozen=True, init=False, repr=False)
class Plan:
    """Where parameters, inputs, outputs and activations lie on the mesh; `a | b` composes, ``b`` winning.

    Two plans speak of the same thing where they name the same data-parallel axes, the same glob (and TP axis), the
    same input, output or activation, or the same setting. Where several globs match one parameter or one module, the
    last one said wins; TP over different axes adds up.

    Args:
        params: parameter glob -> spec of its storage (see `shardc.plan.spec`). ``*`` matches dots too.
        inputs: a spec for all inputs, a list by position, a dict by name, or a pytree of these; None says nothing.
        outputs: the same for outputs.
        activations: module glob, or glob with ``.input`` or ``.output`` -> a spec, a list for several tensors, or a
            dict by keyword.
        reduce: "mean" (the default) or "sum": without a loss in the graph, the gradient is that of the mean or of
            the sum of the ranks' losses over the axes that split the batch.
        grad_scale: a factor on every gradient, 1.0 if not given.
        dtensor_outputs: return outputs as DTensors rather than as local shards.

    Raises:
        PlanError: a value that is not a spec, an axis used twice in one spec, an unknown reduction.
    """

    entries: tuple[Entry, ...]

    def __init__(
        self,
        params: Mapping[str, Any] | None = None,
        inputs: Any = None,
        outputs: Any = None,
        activations: Mapping[str, Any] | None = None,
        reduce: str | None = None,
        grad_scale: float | None = None,
        dtensor_outputs: bool | None = None,
    ) -> None:
        entries: list[Entry] = []
        entries += [Param(glob, freeze(spec, f"params[{quote(glob)}] = {spec!r}")) for glob, spec in (params or {}).items()]
        entries += ports("inputs", inputs) + ports("outputs", outputs)
        entries += _activations(activations or {})
        if reduce is not None and reduce not in REDUCTIONS:
            raise PlanError(f"unknown reduction {reduce!r}", plan_entry=f"reduce={reduce!r}", fix=f"use one of {REDUCTIONS}")
        settings = {"reduce": reduce, "grad_scale": grad_scale, "dtensor_outputs": dtensor_outputs}
        entries += [Setting(name, value) for name, value in settings.items() if value is not None]
        object.__setattr__(self, "entries", tuple(entries))

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Plan:
        """The plan that says ``entries``, of which later ones win over earlier ones of the same thing.

        Raises:
            PlanError: two data-parallel entries that share some of their axes, but not all.
        """
        said: dict[Any, Entry] = {}
        for entry in entries:
            said.pop(entry.key, None)
            said[entry.key] = entry
        data = [e for e in said.values() if isinstance(e, Data)]
        for at, entry in enumerate(data):
            for earlier in data[:at]:
                if shared := set(entry.axes) & set(earlier.axes):
                    raise PlanError(
                        f"axis {sorted(shared)[0]!r} is given to two data-parallel entries: {earlier} and {entry}",
                        plan_entry=str(entry),
                        fix="give each axis to one entry",
                    )
        plan = cls()
        object.__setattr__(plan, "entries", tuple(said.values()))
        return plan

    def __or__(self, other: Plan) -> Plan:
        return Plan.of(self.entries + other.entries) if isinstance(other, Plan) else NotImplemented

    def __bool__(self) -> bool:
        return bool(self.entries)

    def setting(self, name: str) -> Any:
        """The value of a setting, or its default."""
        said = {e.name: e.value for e in self.entries if isinstance(e, Setting)}
        return said.get(name, Setting.DEFAULTS[name])

    # --- text

    def __str__(self) -> str:
        return repr(self)

    def __repr__(self) -> str:
        return " | ".join(_call_text(name, arguments) for name, arguments in self.calls()) or "Plan()"

    def calls(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The plan as calls of constructors, in order: (name, arguments that are not defaults)."""
        for run in _runs(self.entries):
            first = run[0]
            if isinstance(first, Ddp):
                yield "ddp", {"axis": first.axis}
            elif isinstance(first, Fsdp):
                options = {"level": first.level} | ({"threshold": first.threshold} if first.threshold else {})
                yield (
                    ("hsdp", {"shard": first.shard, "replicate": first.replicate, **options})
                    if first.replicate
                    else ("fsdp", {"axis": first.shard, **options})
                )
            elif isinstance(first, Tp):
                styles = {s: [e.glob for e in run if isinstance(e, Tp) and e.style == s] for s in STYLES}
                yield "tp", {"axis": first.axis} | {style: globs for style, globs in styles.items() if globs}
            else:
                yield "Plan", _plan_arguments(run)

    def describe(self) -> str:
        """A table of the entries for people."""
        rows = [_row(entry) for entry in self.entries]
        return tabulate(rows, headers=("says", "of", "where"), tablefmt="plain")

    # --- files

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        from shardc.plan.json import dumps

        Path(path).write_text(dumps(self), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """The plan that `save` wrote.

        Raises:
            PlanError: the file is not a plan, or has a key that no plan has.
        """
        from shardc.plan.json import loads

        return loads(Path(path).read_text(encoding="utf-8"), str(path))
