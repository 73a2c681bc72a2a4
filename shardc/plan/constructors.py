"""Plan constructors: the functions with which users write plans, one for each kind of entry."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import torch

from shardc._compat import OpOverload, OpOverloadPacket
from shardc.errors import PlanError
from shardc.plan.entries import ChunkedLoss, Cp, Ddp, Ep, Fsdp, Microbatches, Offload, Pp, Precision, Save, Tp
from shardc.plan.entries.data_parallel import axis_names, by_glob, gathered_in, regathered
from shardc.plan.layout_spec import quote
from shardc.plan.value import CONSTRUCTORS, Plan
from shardc.validate import checked, renamed


def ddp(axis: str | Sequence[str] | None = None) -> Plan:
    """Data parallel, as DDP: parameters are replicated and gradients are reduced once.

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
    gather: str | None = None,
) -> Plan:
    """Fully sharded data parallel: the batch, and the parameters in storage, are split over ``axis``.

    Args:
        axis: a mesh axis, or several, the first is major. None: the mesh's only axis.
        level: parameters and optimizer state are split between steps at every level.
            1 (ZeRO-1): parameters stay unsharded from forward to backward; gradients can be accumulated unsharded.
            2 (ZeRO-2, ``reshard_after_forward=False``): as 1, but every backward reduces gradients.
            3 (ZeRO-3, ``reshard_after_forward=True``): as 2, and parameters are gathered again in backward.
        threshold: parameters with fewer bytes (unsharded) are replicated; text such as ``"1 MiB"`` is accepted.
        shard_size: number of ranks that a parameter is split over; -1 for all. They are neighbours along ``axis`` (the
            minor ranks of several axes). Over the others it is replicated, and gradients are reduced a second time.
        overrides: parameter glob -> shard size, regardless of the threshold; 1 replicates. The last match wins.
        levels: parameter glob -> level, in place of ``level``. The last match wins.
        thresholds: parameter glob -> threshold, in place of ``threshold``. The last match wins.
        reshard_after_forward: as in FSDP2: True is level 3, False level 2. A number of ranks: level 3, but from forward
            to backward parameters stay split over that many neighbouring ranks only, which backward gathers them over;
            -1: all ranks that store them. Or parameter glob -> one of these; the last match wins.
        gather: with `microbatches`: "step" is level 2, which gathers once for all of them, "microbatch" is level 3.

    Raises:
        PlanError: a shard size is neither positive nor -1. When the plan is used: a shard size (or number of ranks to
            stay split over) does not divide the ranks of ``axis``, neither of two sizes divides the other, or a glob
            matches no parameter.
    """
    entry = "fsdp(...)" if axis is None else f"fsdp({axis!r}, ...)"
    level, tables = regathered(reshard_after_forward, gathered_in(gather, level, entry), levels, entry)
    by_parameter = {"overrides": overrides, "thresholds": thresholds} | tables
    axes = () if axis is None else axis_names(axis, f"fsdp({axis!r})")
    if not axes and axis is not None:
        raise PlanError("fsdp needs an axis to split parameters over", fix='write fsdp("dp")')
    return Plan.of([Fsdp(axes, (), level, cast(int, threshold), shard_size, **by_glob(by_parameter, entry))])


def hsdp(
    shard: str | Sequence[str] = "dp",
    replicate: str | Sequence[str] = "rep",
    level: int = 3,
    threshold: int | str = 0,
    levels: Mapping[str, int] | None = None,
    thresholds: Mapping[str, int | str] | None = None,
    reshard_after_forward: bool | int | Mapping[str, bool | int] | None = None,
    gather: str | None = None,
) -> Plan:
    """Hybrid sharded data parallel: storage split over ``shard``, replicated over ``replicate``; batch over both.

    The other arguments are those of `fsdp`.
    """
    entry = f"hsdp(shard={shard!r}, replicate={replicate!r})"
    level, tables = regathered(reshard_after_forward, gathered_in(gather, level, entry), levels, entry)
    by_parameter = {"thresholds": thresholds} | tables
    axes = axis_names(shard, entry), axis_names(replicate, entry)
    return Plan.of([Fsdp(*axes, level, cast(int, threshold), **by_glob(by_parameter, entry))])


def tp(axis: str, colwise: Sequence[str] = (), rowwise: Sequence[str] = (), vocab: Sequence[str] = ()) -> Plan:
    """Tensor parallel over ``axis``, by globs of module names (``*`` matches dots, too).

    Args:
        colwise: split ``weight`` on dim 0 (output features), and ``bias``.
        rowwise: split ``weight`` on dim 1 (input features); ``bias`` is replicated.
        vocab: split ``weight`` on dim 0 (the vocabulary of an embedding).
    """
    (name,) = axis_names([axis], f"tp({axis!r})")
    globs = {"colwise": colwise, "rowwise": rowwise, "vocab": vocab}
    styles: dict[str, str] = {}
    for style, names in globs.items():
        fix = f"write {style}=[{quote(names)}]" if isinstance(names, str) else f'write {style}=["layers.*.up"]'
        for glob in checked(names, tuple[str, ...], style, PlanError, plan_entry=f"tp({axis!r})", fix=fix):
            if styles.setdefault(glob, style) != style:
                raise PlanError(
                    f"{glob!r} is both {styles[glob]} and {style}", plan_entry=f"tp({axis!r})", fix="give it one style"
                )
    return Plan.of(Tp(name, style, glob) for style, names in globs.items() for glob in names)


def cp(axis: str, method: str = "auto", modules: str = "*", order: str = "auto", dim: int = 1) -> Plan:
    """Context parallel: the sequence of inputs, activations and attention is split over ``axis``.

    Parameters are replicated over it, unless another entry splits their storage, such as ``fsdp(("dp", "cp"))``.

    Args:
        axis: a mesh axis.
        method: how attention, whose queries are split, gets the keys of the other ranks:
            "gather": keys and values are gathered.
            "ring": keys and values are passed from rank to rank, and partial results are combined (ring attention).
            No rank ever stores all of them.
            "ulysses": an all-to-all splits heads instead of the sequence, and another one restores it (Ulysses).
            "auto": the cheapest of these by the cost model, for each attention.
        modules: a glob of the modules whose attention the entry applies to; of several entries the last match wins.
        order: "striped": rank r has elements r, r + n, r + 2n, ... of the sequence, which balances the work under a
            causal mask. "contiguous": it has one chunk. "auto": contiguous for "ulysses", else striped.
        dim: the sequence dim of the inputs; inputs without this dim, or with one element there, are replicated.

    Raises:
        PlanError: the method or order is unknown, or ``dim`` is below 1. When the plan is used: no input has the dim,
            the axis does not divide the heads, or an attention cannot be split this way.

    >>> print(ddp("dp") | cp("cp", method="ring"))
    ddp("dp") | cp("cp", method="ring")
    """
    (name,) = axis_names([axis], f"cp({axis!r})")
    return Plan.of([Cp(name, method, modules, order, dim)])


@renamed(way="dispatch", bound="capacity")
def ep(axis: str, experts: str | Sequence[str], dispatch: str = "auto", capacity: float = 0.0, chunks: int = 1) -> Plan:
    """Expert parallel: each rank along ``axis`` stores some of the experts, and rows are exchanged.

    The batch is split over ``axis``, too. The experts' weights are never gathered over it.

    Args:
        axis: a mesh axis. `fsdp` may split the other parameters over it as well.
        experts: globs of the modules with the weights of all experts, in tensors whose first dim is the experts.
        dispatch: how rows reach their experts:
            "gather": every rank gathers all tokens of the axis; the results are reduce-scattered.
            "send": each row is sent to its expert's rank and back, by all-to-alls with exact sizes.
            "bounded": each rank sends each other one a block of rows, of a size that does not depend on the routing, so
            that the host waits for no counts. If a block has too little room, the results are NaN, and all ranks raise
            the same `InputError` before any gradient is there.
            "auto": the cheaper of the first two by the cost model, for each layer.
        capacity: for "bounded", the rows of a block, as a multiple of those of an even load; at least 1.0.
        chunks: for "send" and "bounded", the number of chunks of a rank's tokens. The rows of one chunk travel while
            those of another are computed.

    Raises:
        PlanError: the dispatch is unknown, the capacity is below 1.0, or rows in chunks are not sent; when the plan is
            used, a glob matches no module.

    >>> print(ep("ep", "*.experts", dispatch="bounded", capacity=1.5))
    ep("ep", experts="*.experts", dispatch="bounded", capacity=1.5)
    """
    (name,) = axis_names([axis], f"ep({axis!r})")
    globs = (experts,) if isinstance(experts, str) else checked(experts, tuple[str, ...], "experts", PlanError)
    return Plan.of(Ep(name, glob, dispatch, float(capacity), chunks) for glob in globs)


def precision(
    param: torch.dtype | None = None,
    reduce: torch.dtype | None = None,
    output: torch.dtype | None = None,
    buffers: torch.dtype | None = None,
    keep_low_precision_grads: bool = False,
    full_precision_eval: bool = False,
    cast_forward_inputs: bool | str = True,
    modules: str | Sequence[str] = (),
    matmul: str | None = None,
    scaling: str | None = None,
) -> Plan:
    """Return the plan for mixed precision. The arguments are described at `shardc.plan.entries.Precision`.

    The order is fixed: the gradient of the output is scaled (``Plan(reduce=..., grad_scale=...)``); parameters'
    gradients are cast to ``reduce``, reduced over the shard axes, then over the replicate axes, and cast back.

    Raises:
        PlanError: a dtype is not floating-point. When the plan is used: a glob matches no module with parameters.

    >>> import torch
    >>> precision(param=torch.bfloat16) | precision(param=torch.float32, modules="head")
    precision(param=torch.bfloat16) | precision(param=torch.float32, modules="head")
    """
    globs = (modules,) if isinstance(modules, str) else modules
    fields = (param, reduce, output, buffers, keep_low_precision_grads, full_precision_eval, cast_forward_inputs)
    return Plan.of([Precision(*fields, globs, matmul, scaling)])  # type: ignore[arg-type]


def offload(names: str | Sequence[str] = "*", to: str = "host", pin_memory: bool = True) -> Plan:
    """Keep parameters, with their gradients and optimizer state, in host memory.

    A step copies each rank's shard to its device before its gather (or first use), and the reduced gradient back. The
    optimizer then updates on the host. Parameters of level 3, and replicated ones, are copied again in backward; those
    of levels 1 and 2 stay on the device from forward to backward.

    Args:
        names: a parameter glob, or several. If several entries match a parameter, the last one wins.
        to: "host", or "device" for parameters that an earlier entry matched too.
        pin_memory: pin the host memory if the device is an accelerator, so that copies overlap with compute. The
            system cannot swap pinned memory out.

    Raises:
        PlanError: ``to`` is neither "host" nor "device". When the plan is used: a glob matches no parameter.
    """
    return Plan.of(Offload(glob, to, pin_memory) for glob in _globs(names, "offload(...)"))


def recompute(names: str | Sequence[str]) -> Plan:
    """Recompute the activations of modules in backward instead of saving them (``torch.utils.checkpoint``).

    Only the inputs of such a module are saved. `shardc.Options` decides which of its collectives are repeated.

    Args:
        names: a module glob, or several. A matching module inside another one belongs to the outer one.

    Raises:
        PlanError: when the plan is used, a glob matches no module.
    """
    return save(names, on="recompute")


def save(names: str | Sequence[str], on: str, ops: Sequence[object] | str | None = None) -> Plan:
    """Choose where activations of modules are kept until backward reads them: on the host, on the device, or nowhere
    (they are recomputed).

    If several entries name an activation, the last one is used.

    Args:
        names: a module glob, or several.
        on: "host": in host memory. The schedule moves each value there while forward goes on, and back ahead of its
            use, within ``Options(max_in_flight=...)`` each way. "device": where it was computed, as without an entry.
            "recompute": nowhere, since backward computes it again (`shardc.recompute`). Results that other modules use
            are saved then, on the host if an earlier entry says so.
        ops: the entry is about results of these ops only: ops of torch, or their names in `Program.text`, such as
            ``"aten.mm.default"`` or ``"aten.mm"``. They are saved as such, also inside of modules that are recomputed;
            without ``ops``, backward may compute cheap ones again from others. None: all ops of the modules.

    Raises:
        PlanError: ``on`` is none of the three, or ``ops`` has something else than ops. When the plan is used: a glob
            matches no module, or none of the ops is in those modules.

    >>> print(fsdp("dp") | save("layers.*", on="host"))
    fsdp("dp", level=3) | save("layers.*", on="host")
    >>> save("*", on="recompute") | save("*", on="device", ops=[torch.ops.aten.mm.default])
    recompute("*") | save("*", on="device", ops=["aten.mm.default"])
    """
    is_op = isinstance(ops, OpOverload | OpOverloadPacket | str)
    globs, listed = _globs(names, "save(...)"), [ops] if is_op else list(ops or ())
    if ops is not None and not listed:
        raise PlanError("ops= is empty", plan_entry="save(...)", fix="leave it out, for all ops of the modules")
    return Plan.of(Save(glob, on, tuple(map(_op_name, listed))) for glob in globs)


def _op_name(op: object) -> str:
    """Return the name of the op ``op`` as in graphs, such as ``aten.mm.default``. For an op given without overload it
    is ``aten.mm``, which means all overloads.
    """
    if isinstance(op, OpOverload | OpOverloadPacket | str):
        return str(op).removeprefix("torch.ops.")
    raise PlanError(
        f"ops= has {op!r}, which is no op",
        plan_entry="save(...)",
        fix='write ops of torch, such as torch.ops.aten.mm.default, or their names: "aten.mm"',
    )


def chunked_loss(chunks: int = 8) -> Plan:
    """Compute logits and their loss for one chunk of rows (tokens) after another, in forward and in backward.

    Logits are then never whole in memory. They are the result of the last product before the loss, whatever the loss:
    ``F.cross_entropy(head(x), targets)`` with its options, ``F.linear_cross_entropy``, or a loss of your own that
    treats each row by itself and adds up. The compiled module has to compute the loss, and not return logits. Backward
    computes the logits of a chunk again: one more product with the head's weight in each step. The weight is gathered
    once for all chunks.

    Args:
        chunks: number of chunks, 1 or more; up to four times as many, if ``chunks`` does not divide the rows of a rank.

    Raises:
        PlanError: the number is below 1.

    Warns:
        ShardcWarning: when the plan is used, logits stay whole: they are an output, something needs all rows of them,
            or no such number divides the rows.

    >>> print(fsdp("dp") | chunked_loss(chunks=16))
    fsdp("dp", level=3) | chunked_loss(chunks=16)
    """
    return Plan.of([ChunkedLoss(chunks)])


def microbatches(count: int, reduce: str = "step") -> Plan:
    """Split the batch of each rank into microbatches, which run one after the other.

    A step then needs the memory of one microbatch's activations. Results are those of the whole batch: a mean over
    masked targets is that of all microbatches, not a mean of means. Gradients are added up in the dtype that they are
    reduced in. ``loss.backward()`` hands out gradients that the call has computed.

    Args:
        count: number of microbatches, 1 or more. Dim 0 of the inputs is split over them below the batch axes.
        reduce: "step": whole gradients are added up on each rank, and reduced once. "microbatch": gradients of
            parameters whose storage is split are reduced for each microbatch, and each rank adds up its shards.

    Raises:
        PlanError: the count is below 1. When the plan is used: the mesh has an axis called ``micro``, or the model
            needs values of all microbatches in the middle of a step (batch normalisation).

    >>> print(ddp("dp") | microbatches(8))
    ddp("dp") | microbatches(8)
    """
    return Plan.of([Microbatches(count, reduce)])  # type: ignore[arg-type]


def pp(
    axis: str = "pp",
    schedule: str = "1f1b",
    microbatches: int | None = None,
    cut: str | Sequence[str] = "auto",
    stages_per_rank: int | None = None,
) -> Plan:
    """Pipeline parallel: the model is cut into stages, each on the ranks of one coordinate of ``axis``.

    The model stays as it is: the cut is of its graph. All ranks of a pipeline pass the same inputs. Results are those
    of the whole batch, as with `microbatches`. A parameter lies on the ranks of its stage, split there as other entries
    say; elsewhere its local tensor is empty.

    Args:
        axis: the mesh axis of the stages.
        schedule: the order in which ranks run stages and microbatches: "gpipe" (all forwards, then all backwards),
            "1f1b", "interleaved" (1F1B with several stages a rank), "zb" (that with backwards cut in two, so that
            gradients of parameters fill gaps), "zbv" and "dualpipev" (two stages a rank, in a V).
        microbatches: their number, 2 or more; None: that of a `microbatches` entry.
        cut: globs of the modules that begin the second and later stages, in the order of the model's parameters.
            "auto": between repeated blocks, so that the largest stage has the fewest elements of weights to multiply.
        stages_per_rank: number of stages of each rank; None: 2, for "gpipe" and "1f1b" 1. Only "interleaved" and "zb"
            have others.

    Raises:
        PlanError: there is no such schedule. When the plan is used: there are more stages than blocks, a glob matches
            no module, or the batch is split over ``axis``.

    >>> print(ddp("dp") | pp("pp", microbatches=8))
    ddp("dp") | pp("pp", microbatches=8)
    """
    globs = cut if isinstance(cut, str) else tuple(cut)
    return Plan.of([Pp(axis, schedule, microbatches, globs, stages_per_rank)])


def _globs(names: object, entry: str) -> Iterable[str]:
    """Return a glob or a sequence of globs as a sequence; raise PlanError, which names ``entry``, for another type."""
    globs = checked(names, str | tuple[str, ...], "names", PlanError, plan_entry=entry)
    return [globs] if isinstance(globs, str) else tuple(globs)


_FUNCTIONS = ddp, fsdp, hsdp, tp, cp, ep, chunked_loss, microbatches, pp, precision, offload, recompute, save
CONSTRUCTORS |= {function.__name__: function for function in (*_FUNCTIONS, Plan)}
