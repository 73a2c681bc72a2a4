"""What plans are written with: a function for each kind of entry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch

from shardc.errors import PlanError
from shardc.plan.entries import Cp, Ddp, Ep, Fsdp, Offload, Precision, Recompute, Tp
from shardc.plan.entries.data_parallel import axis_names, by_glob, regathered
from shardc.plan.forms import quote
from shardc.plan.value import CONSTRUCTORS, Plan
from shardc.validate import checked


def ddp(axis: str | Sequence[str] | None = None) -> Plan:
    """Data parallel, as DDP: parameters are whole, gradients are reduced once.

    Args:
        axis: a mesh axis, or several; the batch is split over them. None: the mesh's only axis.
    """
    if axis is None:
        return Plan.of([Ddp(None)])
    entry = f"ddp({axis!r})"
    names = axis_names(axis, entry)
    if not names or len(set(names)) < len(names):
        raise PlanError("ddp needs axes to split the batch over, each once", plan_entry=entry, fix='write ddp("dp")')
    return Plan.of([Ddp(name) for name in names])


def fsdp(
    axis: str | Sequence[str] | None = None,
    level: int = 3,
    threshold: int | str = 0,
    shard_size: int = -1,
    overrides: Mapping[str, int] | None = None,
    levels: Mapping[str, int] | None = None,
    thresholds: Mapping[str, int | str] | None = None,
    reshard_after_forward: bool | int | Mapping[str, bool | int] | None = None,
) -> Plan:
    """Fully sharded data parallel: the batch and the parameters' storage are split over ``axis``.

    Args:
        axis: a mesh axis, or several, bound in order. None: the mesh's only axis.
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
        reshard_after_forward: as FSDP2 means it. True is level 3, False level 2. A number of ranks: level 3, but from
            forward to backward parameters stay split over that many neighbouring ranks only, and backward gathers them
            over these; -1 for all that store them. Or parameter glob -> one of these, of which the last match wins.

    Raises:
        PlanError: a shard size that is neither positive nor -1. When the plan is used: a shard size, or a number of
            ranks to stay split over, that does not divide the ranks of ``axis``, two of which neither divides the
            other, or a glob that matches no parameter.
    """
    entry = "fsdp(...)" if axis is None else f"fsdp({axis!r}, ...)"
    level, tables = regathered(reshard_after_forward, level, levels, entry)
    said = {"overrides": overrides, "thresholds": thresholds} | tables
    axes = () if axis is None else axis_names(axis, f"fsdp({axis!r})")
    if not axes and axis is not None:
        raise PlanError("fsdp needs an axis to split parameters over", fix='write fsdp("dp")')
    return Plan.of([Fsdp(axes, (), level, cast(int, threshold), shard_size, **by_glob(said, entry))])


def hsdp(
    shard: str | Sequence[str] = "dp",
    replicate: str | Sequence[str] = "rep",
    level: int = 3,
    threshold: int | str = 0,
    levels: Mapping[str, int] | None = None,
    thresholds: Mapping[str, int | str] | None = None,
    reshard_after_forward: bool | int | Mapping[str, bool | int] | None = None,
) -> Plan:
    """Hybrid sharded data parallel: storage split over ``shard`` and whole over ``replicate``, the batch over both.

    ``level``, ``threshold``, ``levels``, ``thresholds`` and ``reshard_after_forward`` are those of `fsdp`.
    """
    entry = f"hsdp(shard={shard!r}, replicate={replicate!r})"
    level, tables = regathered(reshard_after_forward, level, levels, entry)
    said = {"thresholds": thresholds} | tables
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


def cp(axis: str, method: str = "auto", modules: str = "*", order: str = "auto", dim: int = 1) -> Plan:
    """Context parallel: the sequence of inputs, activations and attention is split over ``axis``.

    Parameters are whole over it, unless another entry stores them there; ``fsdp(("dp", "cp"))`` does.

    Args:
        axis: a mesh axis.
        method: how attention, whose queries are split, reaches the keys of the other ranks:
            "gather": keys and values are gathered.
            "ring": each rank's keys and values go to one rank after the other, and what queries see of each is put
            together as they come. No rank ever holds all of them.
            "heads": an all-to-all splits heads in place of the sequence, and another brings it back (Ulysses).
            "auto": the cheapest, by the cost model, for each attention.
        modules: a glob of the modules whose attention this is about; of several entries the last that matches holds.
        order: "striped": rank r holds the elements r, r + n, r + 2n, ... of the sequence. Under a causal mask, ranks
            then compute the same. "contiguous": it holds one piece. "auto": contiguous for "heads", else striped.
        dim: the dim of the inputs that is the sequence; inputs that have no such dim, or one element there, are whole.

    Raises:
        PlanError: an unknown method or order, a dim below 1; when the plan is used, no input with such a dim, heads
            that the axis does not divide, attention that cannot be split so.

    >>> print(ddp("dp") | cp("cp", method="ring"))
    ddp("dp") | cp("cp", method="ring")
    """
    (name,) = axis_names([axis], f"cp({axis!r})")
    return Plan.of([Cp(name, method, modules, order, dim)])


def ep(axis: str, experts: str | Sequence[str], way: str = "auto", bound: float = 0.0) -> Plan:
    """Expert parallel: each rank along ``axis`` holds some of the experts, and rows travel to them.

    The batch is split over ``axis`` too. The experts' weights are never gathered over it.

    Args:
        axis: a mesh axis. `fsdp` may split the other parameters over it as well.
        experts: globs of the modules that hold all experts' weights, in tensors whose first dim is the experts.
        way: how rows reach their experts:
            "gather": every rank gathers all tokens of the axis; their results are reduced and scattered.
            "send": each row goes to its expert's rank and back, by all-to-alls of exactly the rows that there are.
            "bounded": as "send", with room for ``bound`` times the rows of an even load. If more come to some rank, all
            ranks raise the same `InputError` before a row is sent.
            "auto": the cheapest of the first two, by the cost model, for each layer.
        bound: of "bounded": 1.0 is room for an even load alone.

    Raises:
        PlanError: an unknown way, a bound below 1.0; when the plan is used, a glob that matches no module.

    >>> print(ep("ep", "*.experts", way="bounded", bound=1.5))
    ep("ep", experts="*.experts", way="bounded", bound=1.5)
    """
    (name,) = axis_names([axis], f"ep({axis!r})")
    globs = (experts,) if isinstance(experts, str) else checked(experts, tuple[str, ...], "experts", PlanError)
    return Plan.of(Ep(name, glob, way, float(bound)) for glob in globs)


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


CONSTRUCTORS |= {made.__name__: made for made in (ddp, fsdp, hsdp, tp, cp, ep, precision, offload, recompute, Plan)}
