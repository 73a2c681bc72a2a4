"""The plan: a frozen, composable value that says where things lie, and never what is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from tabulate import tabulate
from torch import nn
from torch.distributed.tensor.parallel import ParallelStyle

from shardc.errors import PlanError
from shardc.plan.calls import Call, call_text, runs, to_call
from shardc.plan.entries import Ddp, Entry, Fsdp, Offload, Param, Precision, Setting, Tp, distinct
from shardc.plan.entries.raw import activation_entries, port_entries
from shardc.plan.forms import freeze, quote
from shardc.plan.from_hf import hf_entries
from shardc.plan.from_sharding_plan import sharding_plan_entries
from shardc.plan.from_styles import style_entries
from shardc.plan.json import decode, encode
from shardc.validate import checked


@dataclass(frozen=True, init=False, repr=False)
class Plan:
    """Where parameters, inputs, outputs and activations lie on the mesh; `a | b` composes, ``b`` winning.

    Two plans speak of the same thing where they name the same data-parallel axes, the same glob (and TP axis), the
    same input, output or activation, or the same setting. Where several globs match one parameter or one module, the
    last one said wins; TP over different axes adds up.

    Args:
        params: parameter glob -> spec of its storage (see `shardc.plan.forms`). ``*`` matches dots too.
        inputs: a spec for all inputs, a list by position, a dict by name, or a pytree of these; None says nothing.
        outputs: the same for outputs.
        activations: module glob, or glob with ``.input`` or ``.output`` -> a spec, a list for several tensors, or a
            dict by keyword.
        reduce: "mean" (the default) or "sum": without a loss in the graph, the gradient is that of the mean or of
            the sum of the ranks' losses over the axes that split the batch.
        grad_scale: a factor on every parameter's gradient, 1.0 if not given.
        dtensor_outputs: return outputs as DTensors rather than as local shards. A loss computed of them is the global
            one, of which there is no mean over ranks to take: ``reduce`` then has no say.
        accumulate: the module starts as after ``set_requires_grad_sync(False)``.
        overlap: False waits for every collective where it starts.
        bucket_size: as that of `shardc.Options`, which wins.

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
    ) -> None:
        for what, given in (("params", params), ("activations", activations)):
            fix = f'write {what}={{"layers.*": ("dp", None)}}'
            checked(given, Mapping[str, Any] | None, what, PlanError, fix=fix)
        entries: list[Entry] = []
        entries += [
            Param(glob, freeze(spec, f"params[{quote(glob)}] = {spec!r}")) for glob, spec in (params or {}).items()
        ]
        entries += port_entries("inputs", inputs) + port_entries("outputs", outputs)
        for target, value in (activations or {}).items():
            entries += activation_entries(target, value)
        settings = {
            "reduce": reduce, "grad_scale": grad_scale, "dtensor_outputs": dtensor_outputs, "accumulate": accumulate,
            "overlap": overlap, "bucket_size": bucket_size,
        }  # fmt: skip
        entries += [Setting(name, value) for name, value in settings.items() if value is not None]
        object.__setattr__(self, "entries", distinct(entries))

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Plan:
        """The plan that says ``entries``, of which later ones win over earlier ones of the same thing.

        Raises:
            PlanError: two data-parallel entries that share some of their axes, but not all.
        """
        said = distinct(entries)
        data = [e for e in said if e.batch]
        for at, entry in enumerate(data):
            for earlier in data[:at]:
                if shared := set(entry.axes) & set(earlier.axes):
                    raise PlanError(
                        f"axis {sorted(shared)[0]!r} is given to two data-parallel entries: {earlier} and {entry}",
                        plan_entry=str(entry),
                        fix="give each axis to one entry",
                    )
        plan = cls.__new__(cls)
        object.__setattr__(plan, "entries", said)
        return plan

    @classmethod
    def from_hf(cls, model: nn.Module, axis: str = "tp") -> Plan:
        """The tensor-parallel plan that a Hugging Face model carries (``_tp_plan``, ``base_model_tp_plan``).

        Raises:
            PlanError: the model carries none, or a style that is not known.
        """
        return cls.of(hf_entries(model, axis))

    @classmethod
    def from_styles(
        cls, styles: Mapping[str, ParallelStyle] | ParallelStyle, axis: str = "tp", model: nn.Module | None = None
    ) -> Plan:
        """What ``parallelize_module`` takes: path -> style of ``torch.distributed.tensor.parallel``.

        Args:
            model: tells linear modules from embeddings; without it a row-wise module whose input is replicated is
                taken for an embedding.

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
        """What hyper-parallel's ``ShardingPlan`` takes, with its meanings.

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
        return said.get(name, DEFAULTS[name])

    @property
    def precision(self) -> Precision:
        """The dtypes that the plan says; all None where it says none."""
        return cast(Precision, self.setting("precision"))

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
    def from_json(cls, text: str, path: str = "the text", namespace: Constructors | None = None) -> Plan:
        """The plan that `to_json` wrote; ``path`` is for messages, otherwise as `load`."""
        plan, constructors = cls(), {**CONSTRUCTORS, **(namespace or {})}
        for name, arguments in decode(text, path, constructors):
            try:
                plan |= constructors[name](**arguments)
            except TypeError as error:
                raise PlanError(f"{path}: {error}") from None
        return plan


def ddp(axis: str) -> Plan:
    """Data parallel: the batch is split over ``axis``, parameters are whole, gradients are reduced once."""
    (name,) = axis_names([axis], f"ddp({axis!r})")
    return Plan.of([Ddp(name)])


def fsdp(
    axis: str | Sequence[str],
    level: int = 3,
    threshold: int | str = 0,
    shard_size: int = -1,
    overrides: Mapping[str, int] | None = None,
) -> Plan:
    """Fully sharded data parallel: the batch and the parameters' storage are split over ``axis``.

    Args:
        axis: a mesh axis, or several, bound in order.
        level: 1: parameters and optimizer state split, gradients accumulated whole; 2: gradients reduced every
            micro-batch, parameters kept whole from forward to backward; 3: gathered again in backward.
        threshold: parameters of fewer bytes (all of the parameter, not a shard; ``"1 MiB"`` too) stay whole.
        shard_size: ranks that a parameter is split over, neighbours along ``axis`` (the minor ones of several axes);
            it is whole over the rest, over which gradients are reduced a second time. -1 for all.
        overrides: parameter glob -> shard size of these, whatever the threshold; 1 keeps them whole. The last that
            matches holds.

    Raises:
        PlanError: a shard size that is not one. When it is used, one that does not divide the ranks of ``axis``, two
            neither of which divides the other, or a glob that matches no parameter.
    """
    entry = f"fsdp({axis!r}, ...)"
    pairs = tuple(checked(overrides or {}, Mapping[str, Any], "overrides", PlanError, plan_entry=entry).items())
    return Plan.of([Fsdp(axis_names(axis, f"fsdp({axis!r})"), (), level, cast(int, threshold), shard_size, pairs)])


def hsdp(
    shard: str | Sequence[str] = "dp", replicate: str | Sequence[str] = "rep", level: int = 3, threshold: int | str = 0
) -> Plan:
    """Hybrid sharded data parallel: storage split over ``shard`` and whole over ``replicate``, the batch over both.

    ``level`` and ``threshold`` are those of `fsdp`.
    """
    entry = f"hsdp(shard={shard!r}, replicate={replicate!r})"
    return Plan.of([Fsdp(axis_names(shard, entry), axis_names(replicate, entry), level, cast(int, threshold))])


def tp(axis: str, colwise: Sequence[str] = (), rowwise: Sequence[str] = (), vocab: Sequence[str] = ()) -> Plan:
    """Tensor parallel over ``axis``, by globs over module names.

    Args:
        colwise: ``weight`` split on dim 0 (the output features), and ``bias`` too.
        rowwise: ``weight`` split on dim 1 (the input features), ``bias`` whole.
        vocab: ``weight`` split on dim 0 (the vocabulary of an embedding).
    """
    (name,) = axis_names([axis], f"tp({axis!r})")
    globs = {"colwise": colwise, "rowwise": rowwise, "vocab": vocab}
    styles: dict[str, str] = {}
    for style, given in globs.items():
        fix = f"write {style}=[{quote(given)}]" if isinstance(given, str) else f'write {style}=["layers.*.up"]'
        for glob in checked(given, tuple[str, ...], style, PlanError, plan_entry=f"tp({axis!r})", fix=fix):
            if styles.setdefault(glob, style) != style:
                raise PlanError(
                    f"{glob!r} is both {styles[glob]} and {style}", plan_entry=f"tp({axis!r})", fix="say one of them"
                )
    return Plan.of(Tp(name, style, glob) for style, given in globs.items() for glob in given)


def precision(
    param: torch.dtype | None = None,
    reduce: torch.dtype | None = None,
    output: torch.dtype | None = None,
    buffers: torch.dtype | None = None,
    keep_low_precision_grads: bool = False,
    full_precision_eval: bool = False,
) -> Plan:
    """Mixed precision; the arguments are those of `shardc.plan.entries.Precision`.

    The order is fixed: gradients are cast to ``reduce``, reduced over the shard axes, then over the replicate axes,
    cast back to the parameter's dtype, and scaled.
    """
    return Plan.of([Precision(param, reduce, output, buffers, keep_low_precision_grads, full_precision_eval)])


def offload(names: str | Sequence[str] = "*", to: str = "host", pin_memory: bool = True) -> Plan:
    """Keeps parameters, with their gradients and optimizer state, in the host's memory.

    A step moves each rank's shard to its device in front of its gather (or first use), and the reduced gradient back;
    the optimizer's update then runs on the host. Parameters that ``fsdp`` gathers again in backward, or never, are
    moved again in backward; those of levels 1 and 2 are kept from forward to backward.

    Args:
        names: a parameter glob, or several; of entries that match one parameter, the last holds.
        to: "host", or "device" for what an earlier entry should not have matched.
        pin_memory: the host memory is pinned where the device is an accelerator, so that copies run beside compute;
            it is memory that the system cannot swap out.

    Raises:
        PlanError: a place that is not one; when it is used, a glob that matches no parameter.
    """
    said = checked(names, str | tuple[str, ...], "names", PlanError, plan_entry="offload(...)")
    globs = [said] if isinstance(said, str) else said
    return Plan.of(Offload(glob, to, pin_memory) for glob in globs)


def axis_names(axis: Any, entry: str) -> tuple[str, ...]:
    """``axis``, a name or a sequence of them, as a tuple."""
    names = (axis,) if isinstance(axis, str) else tuple(axis) if isinstance(axis, list | tuple) else (axis,)
    for name in names:
        if not isinstance(name, str) or not name:
            raise PlanError(f"{name!r} is not the name of a mesh axis", plan_entry=entry, fix='name axes like "dp"')
    return names


DEFAULTS: dict[str, Any] = Setting.DEFAULTS | {"precision": Precision()}
Constructors = Mapping[str, Callable[..., Plan]]


CONSTRUCTORS: dict[str, Callable[..., Plan]] = {
    "ddp": ddp,
    "fsdp": fsdp,
    "hsdp": hsdp,
    "tp": tp,
    "precision": precision,
    "offload": offload,
    "Plan": Plan,
}
