"""The plan: a frozen, composable value that gives layouts, and never changes what is computed."""

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
from shardc.plan.entries import Entry, Param, Policies, Precision, Prefetch, Setting, distinct
from shardc.plan.entries.data_parallel import check_apart
from shardc.plan.entries.entry import Call, call_text, runs, to_call
from shardc.plan.entries.raw import activation_entries, port_entries
from shardc.plan.from_dtensor import style_entries
from shardc.plan.from_hf import ep_entries, hf_entries
from shardc.plan.from_sharding_plan import sharding_plan_entries
from shardc.plan.layout_spec import freeze, quote
from shardc.plan.plan_file import decode, encode
from shardc.validate import checked, typed

Constructors = Mapping[str, Callable[..., "Plan"]]
# Constructors of plans by name: the functions of `shardc.plan.constructors`, and the class `Plan`.
CONSTRUCTORS: dict[str, Callable[..., Plan]] = {}


@dataclass(frozen=True, init=False, repr=False)
class Plan:
    """The layouts of a model's tensors on a mesh; ``a | b`` composes two plans, entries of ``b`` take precedence.

    An entry replaces an earlier one about the same data-parallel axes, the same glob (and TP axis), the same input,
    output or activation, or the same setting. If several globs match a parameter or module, the last one wins. TP over
    different axes adds up.

    Args:
        params: parameter glob -> spec of its storage (see `shardc.plan.layout_spec`). ``*`` matches dots, too.
        inputs: a spec for all inputs, a list by position, a dict by name, or a pytree of these; None is skipped.
            `shardc.per_rank` is a spec for edge lists, offsets and other inputs with each rank's own rows.
        outputs: the same for outputs.
        activations: module glob, or glob with ``.input`` or ``.output`` -> a spec, a list for several tensors, or a
            dict by keyword.
        reduce: "mean" (the default) or "sum". Without a loss in the graph, gradients are those of the mean (or sum) of
            the losses of the ranks that split the batch. With a loss in the graph, it has no effect.
        grad_scale: a factor on every parameter's gradient, by default 1.0. Gradients of inputs are not scaled.
        dtensor_outputs: return outputs as DTensors instead of local shards. A loss computed from them is the global
            loss, so ``reduce`` has no effect then.
        accumulate: the module starts in the state after ``set_requires_grad_sync(False)``.
        overlap: False waits for every collective where it starts.
        bucket_size: as in `shardc.Options`, which takes precedence.
        prefetch: module -> modules whose parameters' gathers start before it computes, in forward and in backward. The
            compiler schedules all other gathers.

    Raises:
        PlanError: a value is not a spec, a spec uses an axis twice, or the reduction is unknown.
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
        for what, table in (("params", params), ("activations", activations), ("prefetch", prefetch)):
            fix = f'write {what}={{"layers.*": ("dp", None)}}'
            checked(table, Mapping[str, Any] | None, what, PlanError, fix=fix)
        entries: list[Entry] = []
        entries += [
            Param(glob, freeze(spec, f"params[{quote(glob)}] = {spec!r}")) for glob, spec in (params or {}).items()
        ]
        entries += port_entries("inputs", inputs) + port_entries("outputs", outputs)
        for target, value in (activations or {}).items():
            entries += activation_entries(target, value)
        for module, names in (prefetch or {}).items():
            what = f"prefetch[{quote(module)}]"
            modules = checked(names, tuple[str, ...], what, PlanError, fix='write ["layers.1"]')
            entries.append(Prefetch(module, modules))
        settings = {
            "reduce": reduce, "grad_scale": grad_scale, "dtensor_outputs": dtensor_outputs, "accumulate": accumulate,
            "overlap": overlap, "bucket_size": bucket_size,
        }  # fmt: skip
        entries += [Setting(name, value) for name, value in settings.items() if value is not None]
        object.__setattr__(self, "entries", distinct(entries))

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Plan:
        """Return the plan with ``entries``; a later entry replaces an earlier one about the same thing.

        Raises:
            PlanError: two data-parallel entries share some of their axes, but not all.
        """
        last_entries = distinct(entries)
        check_apart(last_entries)
        plan = cls.__new__(cls)
        object.__setattr__(plan, "entries", last_entries)
        return plan

    def on(self, mesh: Mesh) -> Plan:
        """Return the plan with axes filled in: entries written without axes, such as ``fsdp()``, get the mesh's only
        axis.

        Raises:
            PlanError: there is such an entry, and the mesh has several axes.
        """
        entries = tuple(entry.on(mesh) for entry in self.entries)
        return self if entries == self.entries else Plan.of(entries)

    @classmethod
    @typed(PlanError)
    def from_hf(cls, model: nn.Module, axis: str | None = "tp", ep: str | None = None) -> Plan:
        """Return the plan that a Hugging Face model defines: in ``_tp_plan`` and ``_ep_plan``, of the model and of its
        config.

        Args:
            axis: the mesh axis of tensor parallelism, or None.
            ep: the mesh axis that experts are split over, or None.

        Raises:
            PlanError: the model has no such plan, or one with an unknown style.
        """
        tensor = [] if axis is None else hf_entries(model, axis)
        return cls.of([*tensor, *([] if ep is None else ep_entries(model, ep))])

    @classmethod
    @typed(PlanError)
    def from_styles(
        cls, styles: Mapping[str, ParallelStyle] | ParallelStyle, axis: str = "tp", model: nn.Module | None = None
    ) -> Plan:
        """Return the plan for the styles that ``parallelize_module`` takes (``torch.distributed.tensor.parallel``).

        Args:
            styles: path -> style, or one style for the root module.
            axis: the mesh axis of tensor parallelism.
            model: distinguishes linear modules and embeddings. Without it, a row-wise module with a replicated input
                counts as an embedding.

        Raises:
            PlanError: a style is of a class that is not torch's own.
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
        """Return the plan for the arguments of hyper-parallel's ``ShardingPlan``, with the same meanings.

        Raises:
            PlanError: a key of ``input_plan`` or ``output_plan`` ends in neither ``input`` nor ``output``.
        """
        return cls.of(sharding_plan_entries(plan, input_plan, output_plan, return_local_tensor))

    def __or__(self, other: Plan) -> Plan:
        return Plan.of(self.entries + other.entries) if isinstance(other, Plan) else NotImplemented

    def __bool__(self) -> bool:
        return bool(self.entries)

    def setting(self, name: str) -> Any:
        """Return the value of the setting ``name``, or its default."""
        settings = {key: value for entry in self.entries for key, value in entry.settings.items()}
        return settings.get(name, Setting.DEFAULTS[name])

    def entry_of(self, name: str) -> Entry | None:
        """Return the entry that gives the setting ``name`` its value; None if it has its default."""
        return next((entry for entry in reversed(self.entries) if name in entry.settings), None)

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the mesh axes that the plan mentions, in order."""
        return tuple(dict.fromkeys(axis for entry in self.entries for axis in entry.axes))

    @property
    def precision(self) -> Policies:
        """Return the mixed precision that the plan's entries ask for, as `Policies` (dtypes by module)."""
        return Policies(tuple(entry for entry in self.entries if isinstance(entry, Precision)))

    # --- text

    def __str__(self) -> str:
        return repr(self)

    def __repr__(self) -> str:
        return " | ".join(call_text(name, arguments) for name, arguments in self.calls()) or "Plan()"

    def calls(self) -> Iterator[Call]:
        """Yield the constructor calls that create the plan, in order: (name, arguments that are not defaults)."""
        for run in runs(self.entries):
            yield to_call(run)

    def describe(self) -> str:
        """Return the entries of the plan as a text table for people to read."""
        rows = [entry.row for entry in self.entries]
        return str(tabulate(rows, ("what", "of", "where"), "plain", disable_numparse=True))

    # --- files

    def save(self, path: str | Path) -> None:
        """Write the plan to ``path``, as JSON."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    def to_json(self) -> str:
        """Return the plan as JSON text."""
        return encode(self.calls())

    @classmethod
    @typed(PlanError)
    def load(cls, path: str | Path, namespace: Constructors | None = None) -> Plan:
        """Read and return a plan that `save` wrote.

        Args:
            path: the file.
            namespace: constructors of your own entries, by name.

        Raises:
            PlanError: the file is not a plan, or has an unknown key.
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
        """Return the plan in the JSON ``text`` that `to_json` wrote. ``path`` names the text in errors; ``namespace``
        is as for `load`.
        """
        plan, constructors = cls(), {**CONSTRUCTORS, **(namespace or {})}
        for name, arguments in decode(text, path, constructors):
            try:
                plan |= constructors[name](**arguments)
            except TypeError as error:
                raise PlanError(f"{path}: {error}") from None
        return plan
