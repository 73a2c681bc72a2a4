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
from shardc.plan.entries import (
    Ddp,
    Entry,
    Fsdp,
    Offload,
    Param,
    Policies,
    Precision,
    Prefetch,
    Recompute,
    Setting,
    Tp,
    distinct,
)
from shardc.plan.entries.data_parallel import axis_names, by_glob, check_apart, of_all
from shardc.plan.entries.raw import activation_entries, port_entries
from shardc.plan.forms import freeze, quote
from shardc.plan.from_hf import hf_entries
from shardc.plan.from_sharding_plan import sharding_plan_entries
from shardc.plan.from_styles import style_entries
from shardc.plan.json import decode, encode
from shardc.validate import checked, typed


@dataclass(frozen=True, init=False, repr=False)
class Plan:
    """Where parameters, inputs, outputs and activations lie on the mesh; `a | b` composes, ``b`` winning.

    Entries of two plans are about the same thing if they name the same data-parallel axes, the same glob (and TP axis),
    the same input, output or activation, or the same setting. If several globs match one parameter or one module, the
    last one wins. TP over different axes adds up.

    Args:
        params: parameter glob -> spec of its storage (see `shardc.plan.forms`). ``*`` matches dots too.
        inputs: a spec for all inputs, a list by position, a dict by name, or a pytree of these; None says nothing.
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

    @classmethod
    @typed(PlanError)
    def from_hf(cls, model: nn.Module, axis: str = "tp") -> Plan:
        """The tensor-parallel plan that a Hugging Face model carries (``_tp_plan``, ``base_model_tp_plan``).

        Raises:
            PlanError: the model carries no plan, or one with an unknown style.
        """
        return cls.of(hf_entries(model, axis))

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


def ddp(axis: str) -> Plan:
    """Data parallel, as DDP: the batch is split over ``axis``, parameters are whole, gradients are reduced once."""
    (name,) = axis_names([axis], f"ddp({axis!r})")
    return Plan.of([Ddp(name)])


def fsdp(
    axis: str | Sequence[str],
    level: int = 3,
    threshold: int | str = 0,
    shard_size: int = -1,
    overrides: Mapping[str, int] | None = None,
    levels: Mapping[str, int] | None = None,
    thresholds: Mapping[str, int | str] | None = None,
    reshard_after_forward: int | Mapping[str, int] | None = None,
) -> Plan:
    """Fully sharded data parallel: the batch and the parameters' storage are split over ``axis``.

    Args:
        axis: a mesh axis, or several, bound in order.
        level: parameters and optimizer state are split between steps at every level.
            1 (ZeRO-1): parameters stay whole from forward to backward; gradients can be accumulated whole.
            2 (ZeRO-2, ``reshard_after_forward=False``): the same, but every backward reduces gradients.
            3 (ZeRO-3, ``reshard_after_forward=True``): as 2, and parameters are gathered again in backward.
        threshold: parameters of fewer bytes stay whole (bytes of the whole parameter; ``"1 MiB"`` too).
        shard_size: how many ranks a parameter is split over; -1 for all. They are neighbours along ``axis`` (the minor
            ranks of several axes). Over the rest it is replicated, and gradients are reduced a second time.
        overrides: parameter glob -> shard size, whatever the threshold; 1 keeps them whole. The last match wins.
        levels: parameter glob -> level, where it is not ``level``. The last match wins.
        thresholds: parameter glob -> threshold, where it is not ``threshold``. The last match wins.
        reshard_after_forward: of parameters of level 3, over how many neighbouring ranks they stay split from forward
            to backward, which then gathers them over these ranks only; -1 for all that store them. A number, or
            parameter glob -> number, of which the last match wins.

    Raises:
        PlanError: a shard size that is neither positive nor -1. When the plan is used: a shard size, or a number of
            ranks to stay split over, that does not divide the ranks of ``axis``, two of which neither divides the
            other, or a glob that matches no parameter.
    """
    entry = f"fsdp({axis!r}, ...)"
    said = {"overrides": overrides, "levels": levels, "thresholds": thresholds}
    said |= {"reshard_after_forward": of_all(reshard_after_forward)}
    axes = axis_names(axis, f"fsdp({axis!r})")
    return Plan.of([Fsdp(axes, (), level, cast(int, threshold), shard_size, **by_glob(said, entry))])


def hsdp(
    shard: str | Sequence[str] = "dp",
    replicate: str | Sequence[str] = "rep",
    level: int = 3,
    threshold: int | str = 0,
    levels: Mapping[str, int] | None = None,
    thresholds: Mapping[str, int | str] | None = None,
    reshard_after_forward: int | Mapping[str, int] | None = None,
) -> Plan:
    """Hybrid sharded data parallel: storage split over ``shard`` and whole over ``replicate``, the batch over both.

    ``level``, ``threshold``, ``levels``, ``thresholds`` and ``reshard_after_forward`` are those of `fsdp`.
    """
    entry = f"hsdp(shard={shard!r}, replicate={replicate!r})"
    said = {"levels": levels, "thresholds": thresholds, "reshard_after_forward": of_all(reshard_after_forward)}
    axes = axis_names(shard, entry), axis_names(replicate, entry)
    return Plan.of([Fsdp(*axes, level, cast(int, threshold), **by_glob(said, entry))])


def tp(axis: str, colwise: Sequence[str] = (), rowwise: Sequence[str] = (), vocab: Sequence[str] = ()) -> Plan:
    """Tensor parallel over ``axis``, by globs over module names (``*`` matches dots too).

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
                    f"{glob!r} is both {styles[glob]} and {style}", plan_entry=f"tp({axis!r})", fix="give it one style"
                )
    return Plan.of(Tp(name, style, glob) for style, given in globs.items() for glob in given)


def precision(
    param: torch.dtype | None = None,
    reduce: torch.dtype | None = None,
    output: torch.dtype | None = None,
    buffers: torch.dtype | None = None,
    keep_low_precision_grads: bool = False,
    full_precision_eval: bool = False,
    cast_forward_inputs: bool | str = True,
    modules: str | Sequence[str] = (),
) -> Plan:
    """Mixed precision; `shardc.plan.entries.Precision` describes the arguments.

    The order is fixed. The gradient of the output is scaled (``Plan(reduce=..., grad_scale=...)``). Parameters'
    gradients are cast to ``reduce``, reduced over the shard axes, then over the replicate axes, and cast back.

    Raises:
        PlanError: a dtype that is not floating-point; when the plan is used, a glob that matches no module that holds
            parameters.

    >>> import torch
    >>> precision(param=torch.bfloat16) | precision(param=torch.float32, modules="head")
    precision(param=torch.bfloat16) | precision(param=torch.float32, modules="head")
    """
    globs = (modules,) if isinstance(modules, str) else modules
    given = (param, reduce, output, buffers, keep_low_precision_grads, full_precision_eval, cast_forward_inputs)
    return Plan.of([Precision(*given, globs)])  # type: ignore[arg-type]


def offload(names: str | Sequence[str] = "*", to: str = "host", pin_memory: bool = True) -> Plan:
    """Keeps parameters, with their gradients and optimizer state, in the host's memory.

    A step moves each rank's shard to its device before its gather (or first use), and the reduced gradient back. The
    optimizer's update then runs on the host. Parameters of level 3, and whole ones, are moved again in backward. Those
    of levels 1 and 2 are kept from forward to backward.

    Args:
        names: a parameter glob, or several. If several entries match one parameter, the last wins.
        to: "host", or "device" for parameters that an earlier entry matched too.
        pin_memory: pin the host memory if the device is an accelerator, so that copies overlap with compute. The
            system cannot swap pinned memory out.

    Raises:
        PlanError: ``to`` is neither "host" nor "device"; when the plan is used, a glob that matches no parameter.
    """
    return Plan.of(Offload(glob, to, pin_memory) for glob in _globs(names, "offload(...)"))


def recompute(names: str | Sequence[str]) -> Plan:
    """Keeps nothing that these modules compute for backward, which computes it again, as ``torch.utils.checkpoint``.

    What is kept of such a module is what it takes. `shardc.Options` says which of its collectives run again.

    Args:
        names: a module glob, or several. A module inside another that is named belongs to that one.

    Raises:
        PlanError: when the plan is used, a glob that matches no module.
    """
    return Plan.of(Recompute(glob) for glob in _globs(names, "recompute(...)"))


def _globs(names: Any, entry: str) -> Iterable[str]:
    said = checked(names, str | tuple[str, ...], "names", PlanError, plan_entry=entry)
    return [said] if isinstance(said, str) else tuple(said)


Constructors = Mapping[str, Callable[..., Plan]]


CONSTRUCTORS: dict[str, Callable[..., Plan]] = {
    made.__name__: made for made in (ddp, fsdp, hsdp, tp, precision, offload, recompute, Plan)
}
