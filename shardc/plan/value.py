"""The plan: a frozen, composable value that says where things lie, and never what is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from shardc.errors import PlanError
from shardc.ir.mesh import Mesh
from shardc.plan.calls import Call, call_text, runs, to_call
from shardc.plan.entries import (
    Entry,
    Param,
    Policies,
    Precision,
    Prefetch,
    Setting,
    distinct,
)
from shardc.plan.entries.data_parallel import check_apart
from shardc.plan.entries.raw import activation_entries, port_entries
from shardc.plan.forms import freeze, quote
from shardc.plan.from_hf import ep_entries, hf_entries
from shardc.plan.from_sharding_plan import sharding_plan_entries
from shardc.plan.from_styles import style_entries
from shardc.plan.json import decode, encode
from shardc.validate import checked, typed

Constructors = Mapping[str, Callable[..., "Plan"]]
# By name, what makes plans: the functions of `shardc.plan.constructors`, and the class.
CONSTRUCTORS: dict[str, Callable[..., Plan]] = {}


@dataclass(frozen=True, init=False, repr=False)
class Plan:
    """Where parameters, inputs, outputs and activations lie on the mesh; `a | b` composes, ``b`` winning.

    Entries of two plans are about the same thing if they name the same data-parallel axes, the same glob (and TP axis),
    the same input, output or activation, or the same setting. If several globs match one parameter or one module, the
    last one wins. TP over different axes adds up.

    Args:
        params: parameter glob -> spec of its storage (see `shardc.plan.forms`). ``*`` matches dots too.
        inputs: a spec for all inputs, a list by position, a dict by name, or a pytree of these; None says nothing.
            `shardc.per_rank` is a spec for edge lists, offsets and other inputs of each rank's own rows.
        outputs: the same for outputs.
        activations: module glob, or glob with ``.input`` or ``.output`` -> a spec, a list for several tensors, or a
            dict by keyword.
        reduce: "mean" (the default) or "sum". Without a loss in the graph, gradients are those of the mean, or of the
            sum, of the losses of the ranks that split the batch. With one, it has no effect.
        grad_scale: a factor on every parameter's gradient, 1.0 if not given. Gradients of inputs are not scaled.
        dtensor_outputs: return outputs as DTensors rather than as local shards. A loss computed from them is already
            the global loss, so ``reduce`` has no effect then.
        accumulate: the module starts as after ``set_requires_grad_sync(False)``.
        overlap: False waits for every collective where it starts.
        bucket_size: as in `shardc.Options`, which wins if it gives one.
        prefetch: module -> modules whose parameters' gathers start before it computes, in forward and in backward. The
            other gathers start as the compiler finds best.

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
        accumulate: bool | None = None,
        overlap: bool | None = None,
        bucket_size: int | str | None = None,
        prefetch: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        for what, given in (("params", params), ("activations", activations), ("prefetch", prefetch)):
            fix = f'write {what}={{"layers.*": ("dp", None)}}'
            checked(given, Mapping[str, Any] | None, what, PlanError, fix=fix)
        entries: list[Entry] = []
        entries += [
            Param(glob, freeze(spec, f"params[{quote(glob)}] = {spec!r}")) for glob, spec in (params or {}).items()
        ]
        entries += port_entries("inputs", inputs) + port_entries("outputs", outputs)
        for target, value in (activations or {}).items():
            entries += activation_entries(target, value)
        for module, names in (prefetch or {}).items():
            said = checked(names, tuple[str, ...], f"prefetch[{quote(module)}]", PlanError, fix='write ["layers.1"]')
            entries.append(Prefetch(module, said))
        settings = {
            "reduce": reduce, "grad_scale": grad_scale, "dtensor_outputs": dtensor_outputs, "accumulate": accumulate,
            "overlap": overlap, "bucket_size": bucket_size,
        }  # fmt: skip
        entries += [Setting(name, value) for name, value in settings.items() if value is not None]
        object.__setattr__(self, "entries", distinct(entries))

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Plan:
        """The plan with ``entries``; a later entry replaces an earlier one about the same thing.

        Raises:
            PlanError: two data-parallel entries that share some of their axes, but not all.
        """
        said = distinct(entries)
        check_apart(said)
        plan = cls.__new__(cls)
        object.__setattr__(plan, "entries", said)
        return plan

    def on(self, mesh: Mesh) -> Plan:
        """The plan with the axes filled in that ``fsdp()`` and ``ddp()`` leave open.

        Raises:
            PlanError: such an entry, on a mesh of several axes.
        """
        entries = tuple(entry.on(mesh) for entry in self.entries)
        return self if entries == self.entries else Plan.of(entries)

    @classmethod
    @typed(PlanError)
    def from_hf(cls, model: nn.Module, axis: str | None = "tp", ep: str | None = None) -> Plan:
        """The plans that a Hugging Face model carries: ``_tp_plan`` and ``_ep_plan``, and those of its config.

        Args:
            axis: the mesh axis of tensor parallelism; None for none.
            ep: the mesh axis that experts are split over; None for none.

        Raises:
            PlanError: the model carries no such plan, or one with an unknown style.
        """
        tensor = [] if axis is None else hf_entries(model, axis)
        return cls.of([*tensor, *([] if ep is None else ep_entries(model, ep))])

    @classmethod
    @typed(PlanError)
    def from_styles(
        cls, styles: Mapping[str, ParallelStyle] | ParallelStyle, axis: str = "tp", model: nn.Module | None = None
    ) -> Plan:
        """The plan for what ``parallelize_module`` takes: path -> style of ``torch.distributed.tensor.parallel``.

        Args:
            styles: path -> style, or one style for the root module.
            axis: the mesh axis of tensor parallelism.
            model: shows which modules are linear and which are embeddings. Without it, a row-wise module whose input
                is replicated counts as an embedding.

        Raises:
            PlanError: a style of a class that is not one of torch's own.
        """
        return cls.of(style_entries(styles, axis, model))

    @classmethod
    def from_sharding_plan(
        cls,
        plan: Mapping[str, Any] | None = None,
        input_plan: Mapping[str, Any] | None = None,
        output_plan: Mapping[str, Any] | None = None,
        return_local_tensor: Sequence[str] | None = None,
    ) -> Plan:
        """The plan for what hyper-parallel's ``ShardingPlan`` takes, with the same meanings.

        Raises:
            PlanError: a key of ``input_plan`` or ``output_plan`` that ends in neither ``input`` nor ``output``.
        """
        return cls.of(sharding_plan_entries(plan, input_plan, output_plan, return_local_tensor))

    def __or__(self, other: Plan) -> Plan:
        return Plan.of(self.entries + other.entries) if isinstance(other, Plan) else NotImplemented

    def __bool__(self) -> bool:
        return bool(self.entries)

    def setting(self, name: str) -> Any:
        """The value of a setting, or its default."""
        said = {key: value for entry in self.entries for key, value in entry.settings.items()}
        return said.get(name, Setting.DEFAULTS[name])

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that the plan speaks of, in order."""
        return tuple(dict.fromkeys(axis for entry in self.entries for axis in entry.axes))

    @property
    def precision(self) -> Policies:
        """The dtypes that the plan gives modules."""
        return Policies(tuple(entry for entry in self.entries if isinstance(entry, Precision)))

    # --- text

    def __str__(self) -> str:
        return repr(self)

    def __repr__(self) -> str:
        return " | ".join(call_text(name, arguments) for name, arguments in self.calls()) or "Plan()"

    def calls(self) -> Iterator[Call]:
        """The plan as calls of constructors, in order: (name, arguments that are not defaults)."""
        for run in runs(self.entries):
            yield to_call(run)

    def describe(self) -> str:
        """A table of the entries for people."""
        rows = [entry.row for entry in self.entries]
        return str(tabulate(rows, ("what", "of", "where"), "plain", disable_numparse=True))

    # --- files

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    def to_json(self) -> str:
        return encode(self.calls())

    @classmethod
    @typed(PlanError)
    def load(cls, path: str | Path, namespace: Constructors | None = None) -> Plan:
        """The plan that `save` wrote.

        Args:
            namespace: constructors of entries of your own, by name.

        Raises:
            PlanError: the file is not a plan, or has a key that no plan has.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
            raise PlanError(f"the plan {path} cannot be read: {reason}", fix="write it with plan.save(path)") from None
        return cls.from_json(text, str(path), namespace)

    @classmethod
    @typed(PlanError)
    def from_json(cls, text: str, path: str = "the text", namespace: Constructors | None = None) -> Plan:
        """The plan that `to_json` wrote; ``path`` is for messages, otherwise as `load`."""
        plan, constructors = cls(), {**CONSTRUCTORS, **(namespace or {})}
        for name, arguments in decode(text, path, constructors):
            try:
                plan |= constructors[name](**arguments)
            except TypeError as error:
                raise PlanError(f"{path}: {error}") from None
        return plan
