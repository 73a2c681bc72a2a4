"""`run_step`: a compiled forward and backward as one autograd node, with autograd's checks for in-place changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, Protocol, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.autograd.graph import Node
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardc._compat import PyTree
from shardc.errors import BackwardError
from shardc.ir.deferred import Deferred
from shardc.ir.executable import BACKWARD, FORWARD, INFERENCE, Executable, Half
from shardc.ir.graph import Role, Value
from shardc.ir.layout import Layout
from shardc.runtime.border import Changes, Listened, read_only
from shardc.runtime.events import Event
from shardc.runtime.gathered import gather
from shardc.runtime.inputs import local_part
from shardc.runtime.loops import Argument, Loops, Microstep, Results
from shardc.runtime.memory_ranges import MemoryRanges
from shardc.runtime.read_only import ReadOnly, version_of
from shardc.runtime.routing import Loads
from shardc.runtime.stage_link import StageLink
from shardc.runtime.stage_loops import StageLoops
from shardc.runtime.step import Runner
from shardc.runtime.storage import grad_from_padded

Feed = Sequence[Any]  # inputs of the forward graph: DTensors for parameters, and constants where a call passes them
GradKey = tuple[str, str]  # ("grad", name of a parameter or input)
_PLURAL = {"param": "parameter"}


def run_step(runner: Runner, inputs: list[Tensor]) -> PyTree:
    """Runs the program's forward on local inputs and returns its outputs; in grad mode they have an autograd node."""
    watch_optimizers()
    program = runner.program
    if program.microbatches > 1:
        return _run_microbatches(runner, inputs)
    train = torch.is_grad_enabled() and program.trains
    half = runner.half(FORWARD if train else INFERENCE)
    feed = runner.feed(half.takes, inputs)
    border = runner.border  # between the graph's tensors and the user's: aliasing, versions, hooks
    node: Node | None = None
    if train:
        results = list(Step.apply(runner, *feed))
        # The node keeps the gradient hooks of outputs, which the backward checks.
        node = next((x.grad_fn for x in results if isinstance(x, Tensor) and x.grad_fn is not None), None)
    else:
        with torch.no_grad():
            results = border.without_views(half, runner.run(half, runner.local(half.takes, feed)), feed)
        # Without a backward the check is due here: a layer of experts may have had more rows than room.
        runner.check_loads(runner.routing.take_unchecked())
        if torch.is_grad_enabled():  # in grad mode, torch refuses in-place changes of a view that no_grad made
            results = [x.detach() if isinstance(x, Tensor) and x._is_view() else x for x in results]
    _update_buffers(runner, results)
    border.hand_out(half, results, feed, node)
    return _tree(program, results)


def _update_buffers(runner: Runner, results: Sequence[Any]) -> None:
    """Writes the new values of buffers, which are among ``results`` of a forward graph, to the module's buffers, in
    place.
    """
    roles = zip(runner.program.outputs, results, strict=False)
    new_values = [(runner.params.snapshot.buffers[role.name], x) for role, x in roles if role.kind == "buffer"]
    with torch.no_grad():
        # A graph may return one buffer's old value as another one's new value: it is copied before it is overwritten.
        memory = MemoryRanges(buffer for buffer, _ in new_values)
        for buffer, x in [(buffer, memory.unaliased(x)) for buffer, x in new_values]:
            buffer.copy_(x)


def _tree(program: Executable, results: Sequence[object]) -> PyTree:
    """Returns the outputs of a call in the structure that the model returns, from ``results`` of its forward graph."""
    out: list[object] = []
    for role, constant, result in zip(program.outputs, program.output_values, results, strict=True):
        if role.kind == "output":  # else the new value of a buffer
            out.append(result if isinstance(result, Tensor) else constant)
    for at, aliasing in enumerate(program.returned):
        if aliasing.same is not None:  # the same tensor object as an earlier output
            out[at] = out[aliasing.same]
    return pytree.tree_unflatten(out, program.output_spec)


class CallContext(Protocol):
    """Type of autograd's context (``ctx``) of a call, with the values that its forward keeps for its backward.

    Attributes:
        runner: runs the program.
        takes, feed: roles and values of the arguments of forward; in ``feed``, None where no backward needs the value.
        versions: version counters at the forward of the tensors that the backward reads.
        unreduced: the gradients that the backward leaves unreduced.
        call: event of the module call.
        freed: whether the backward has run, without ``retain_graph``.
    """

    runner: Runner
    takes: list[Role]
    feed: Feed
    versions: list[int]
    unreduced: Deferred
    call: Event | None
    freed: bool

    def set_materialize_grads(self, value: bool) -> None: ...

    def mark_non_differentiable(self, *outputs: Tensor) -> None: ...


class StepContext(CallContext, Protocol):
    """Type of autograd's context (``ctx``) of `Step`.

    Attributes:
        others: saved values that are no tensors, by position; None for tensors.
        strides: strides of each saved tensor; None unless saved-tensor hooks may change them.
        changes, listened: results of `Border.watch` and of hooks on outputs, for `Border.check`.
        loads: rows in the fullest block of each layer of experts with a capacity, to check that they have room.
    """

    others: list[object]
    strides: list[tuple[int, ...]] | None
    changes: Changes
    listened: list[Listened]
    loads: Loads
    _raw_saved_tensors: Sequence[Any]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...

    def maybe_clear_saved_tensors(self) -> None: ...


def _keep_for_backward(ctx: CallContext, runner: Runner, takes: list[Role], feed: Feed, versions: list[int]) -> None:
    """Sets the attributes of `CallContext` in ``ctx``, at the end of a forward."""
    ctx.runner, ctx.takes, ctx.feed, ctx.versions = runner, takes, feed, versions
    ctx.unreduced, ctx.call, ctx.freed = runner.sync.unreduced(), runner.groups.consistency.call, False
    ctx.set_materialize_grads(False)


C = TypeVar("C", bound=CallContext)
Grads = dict[GradKey, Tensor | None]


def _backward(
    ctx: C,
    tangents: Sequence[Tensor | None],
    run: Callable[[C, dict[int, Tensor]], tuple[Sequence[Role], Grads]],
) -> list[Tensor | None]:
    """Runs the backward of a call and returns the gradients of ``ctx.feed``. An error is raised on all ranks.

    Args:
        tangents: gradients of what forward returned, by position.
        run: computes the gradients, from those of the outputs that have one. Returns (roles of what the backward graph
            returns, gradients by `GradKey`).
    """
    runner = ctx.runner
    with runner.groups.consistency.shares_errors():
        if torch.is_grad_enabled():
            raise BackwardError(
                "create_graph=True: the gradients of a compiled module cannot be differentiated again",
                fix="leave create_graph out; where the model needs a gradient of a gradient, take the first one inside "
                "of it, by torch.autograd.grad in forward",
            )
        if ctx.freed:
            raise BackwardError(
                "backward was already run for this step, and what it needs was freed",
                fix="run the forward again, or pass retain_graph=True to all backwards of one forward but the last",
            )
        # Where a loss combines an output with parameters, the output's gradient is a DTensor.
        tangents = [gather(x) if isinstance(x, DTensor) else x for x in tangents]
        gradients = {index: x for index, x in runner.border.gradients(tangents).items() if x is not None}
        if not gradients:
            return [None] * len(ctx.feed)
        gives, grads = run(ctx, gradients)
        # Users change each gradient in place, and no other tensor may change with it: neither one that they hold, nor
        # another gradient or a local sum.
        memory = MemoryRanges(local_part(x) for x in (*tangents, *ctx.feed) if isinstance(x, Tensor))
        # Also reduces what earlier backwards left unreduced (`no_sync`).
        late = runner.reduce_deferred(gives, grads, ctx.unreduced, memory)
        return list(_argument_grads(runner, ctx.takes, ctx.feed, grads, late, memory))


class Step(torch.autograd.Function):
    """Autograd function that runs a program's forward and backward graphs. Torch checks that saved tensors are not
    changed in place.
    """

    @staticmethod
    def forward(ctx: StepContext, runner: Runner, *feed: Any) -> tuple[object, ...]:
        """Runs the forward graph on ``feed``, its arguments, and keeps in ``ctx`` what the backward reads and checks.
        Returns outputs and base tensors of views (`Border.split_results`).
        """
        half = runner.half(FORWARD)
        results = runner.run(half, runner.local(half.takes, feed))
        border = runner.border
        outputs, saved = border.split_results(results, feed)
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in saved))
        ctx.others = [None if isinstance(x, Tensor) else x for x in saved]
        # Hooks on saved tensors, which may keep values without their strides.
        hooked = torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
        ctx.strides = [x.stride() if isinstance(x, Tensor) else () for x in saved] if hooked else None
        # For checks in the backward: in-place changes, hooks (added by `Border.hand_out`), rows beyond the capacity.
        ctx.changes, ctx.listened, ctx.loads = border.watch(outputs), [], runner.routing.take_unchecked()
        needed_feed = [x if needed else None for x, needed in zip(feed, border.needed, strict=True)]
        _keep_for_backward(ctx, runner, [port.role for port in half.takes], needed_feed, list(_versions(runner, feed)))
        ctx.mark_non_differentiable(*border.without_gradients(outputs))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: StepContext, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, *_backward(ctx, tangents, _run_backward)


def _run_backward(ctx: StepContext, gradients: dict[int, Tensor]) -> tuple[Sequence[Role], Grads]:
    """Runs the backward graph for outputs with ``gradients``, after a check for in-place changes. Returns the roles of
    its results, and the results.
    """
    runner, used = ctx.runner, frozenset(gradients)
    half = runner.backward_of(used)
    _check_versions(runner, half, ctx.feed, ctx.versions)
    runner.border.check(half, used, ctx.changes, ctx.listened)
    local = _backward_inputs(ctx, half, gradients)
    # Ranks must agree on these outputs: for other ones the backward has other collectives.
    if ctx.call is not None:
        runner.groups.consistency.enter(ctx.call.backward(used))
    if not torch._C._autograd._get_current_graph_task_keep_graph():  # without `retain_graph`
        ctx.freed, ctx.others = True, []
        ctx.maybe_clear_saved_tensors()  # or they would live until the backward ends
    if torch.is_anomaly_enabled():
        runner.check_loads(ctx.loads)  # before the NaN of rows without room are looked for
    results = runner.run(half, local)
    runner.check_loads(ctx.loads)
    return half.gives, {(role.kind, role.name): grad for role, grad in zip(half.gives, results, strict=True)}


def _backward_inputs(ctx: StepContext, half: Half, gradients: Mapping[int, Any]) -> list[object]:
    """Returns the arguments of the backward graph ``half`` in order: values that forward saved, and ``gradients``
    (output index -> gradient).

    Raises:
        RuntimeError: torch's own, if a saved tensor was changed in place.
    """
    # `places`: name of a saved value -> position. `_raw_saved_tensors` is read once: each access rebuilds the list.
    inputs, places, saved = list[object](), ctx.runner.border.places, ctx._raw_saved_tensors
    for port in half.takes:
        if port.role.kind == "tangent":
            inputs.append(gradients[port.role.index].contiguous())
            continue
        at = places[port.name]
        x: Any = ctx.others[at]
        if x is None:  # a tensor
            x = saved[at].unpack()
            if ctx.strides is not None and x.stride() != ctx.strides[at]:  # a saved-tensor hook kept the values only
                x = torch.empty_strided(x.shape, ctx.strides[at], dtype=x.dtype, device=x.device).copy_(x)
        inputs.append(x)
    return inputs


def _argument_grads(
    runner: Runner,
    takes: Sequence[Role],
    feed: Feed,
    grads: Mapping[GradKey, Tensor | None],
    late: dict[str, Tensor],
    memory: MemoryRanges,
) -> Iterator[Tensor | None]:
    """Yields, for each of the arguments ``feed`` of forward, its gradient or None. No two gradients share memory.

    Args:
        takes: roles of the arguments.
        grads: results of the backward graph.
        late: gradients by parameter name that replace those in ``grads``, as they include sums of earlier backwards.
            Those of parameters that are not in ``feed`` are added to ``.grad``.
        memory: memory that no gradient may share.
    """
    for role, x in zip(takes, feed, strict=True):
        grad = grads.get(("grad", role.name)) if role.kind in ("param", "input") else None
        if role.kind == "param":
            has_sum = role.name in late
            grad = late.pop(role.name, grad)  # what is left in `late` is of parameters that are not in `feed`
            grad = None if grad is None else grad_from_padded(memory.unaliased(grad), x)
            # Frozen since a backward whose gradient was left unreduced: autograd drops what is yielded for it.
            if has_sum and grad is not None and not x.requires_grad:
                _accumulate(x, grad)
        elif grad is not None:
            grad = memory.unaliased(grad)
        yield grad
    for name, grad in late.items():
        param: Any = runner.params.snapshot.parameters[name]
        _accumulate(param, grad_from_padded(memory.unaliased(grad), param))


class MicrobatchContext(CallContext, Protocol):
    """Type of autograd's context (``ctx``) of `StepInMicrobatches`. Its ``feed`` is the call's parameters, inputs, and
    buffers that it does not change.

    Attributes:
        step: the call; None once its backward has run, without ``retain_graph``.
    """

    step: Microstep | None


class StepInMicrobatches(torch.autograd.Function):
    """Autograd function of a call with microbatches: its forward computes the gradients of the loss, too."""

    @staticmethod
    def forward(
        ctx: MicrobatchContext, runner: Runner, step: Callable[[], Microstep], takes: list[Role], *feed: Any
    ) -> tuple[object, ...]:
        """Runs all microbatches by ``step``, and returns the outputs. ``feed`` are the tensors that the call reads,
        ``takes`` their roles.
        """
        ctx.step, program = step(), runner.program
        with torch._C.DisableTorchFunctionSubclass():
            versions = list(map(version_of, feed))
        _keep_for_backward(ctx, runner, takes, feed, versions)
        outputs = _unaliased_outputs(program, ctx.step, takes, feed)
        with_gradient = {("output", index) for index in program.tangents}
        # New values of buffers too, which are among the outputs.
        without = [
            x for x, role in zip(outputs, program.outputs, strict=True) if (role.kind, role.index) not in with_gradient
        ]
        ctx.mark_non_differentiable(*(x for x in without if isinstance(x, Tensor)))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: MicrobatchContext, *tangents: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, None, *_backward(ctx, tangents, _run_backward_of_microbatches)


def _run_backward_of_microbatches(ctx: MicrobatchContext, gradients: dict[int, Tensor]) -> tuple[Sequence[Role], Grads]:
    """Returns the roles and the gradients of what backward computes. If only the loss has a gradient, they are those
    that forward has computed, times that gradient; otherwise the microbatches run again.
    """
    runner, program, step, used = ctx.runner, ctx.runner.program, ctx.step, frozenset(gradients)
    assert step is not None  # as `ctx` is not freed
    if ctx.call is not None:
        runner.groups.consistency.enter(ctx.call.backward(used))
    if not step.has_gradients(gradients):
        # The microbatches run again, so parameters and inputs must still have the values that forward read.
        for role, x, before in zip(ctx.takes, ctx.feed, ctx.versions, strict=True):
            if (now := version_of(x)) != before:
                raise changed(role, before, now)
        with runner.groups.consistency.compiles():  # a program from the store is captured for it
            program.using(used)
    keeps = torch._C._autograd._get_current_graph_task_keep_graph()  # `retain_graph`: another backward may follow
    grads = step.grads({index: x.contiguous() for index, x in gradients.items()}, keeps)
    if not keeps:
        ctx.step, ctx.freed = None, True
    gives = [role for half in program.step() if half.kind == BACKWARD for role in half.gives]
    return gives, grads


def _without_rows(device: torch.device, value: Value) -> Tensor:
    """Returns the gradient of a parameter that another pipeline stage stores, for this rank: a tensor without rows.
    ``value`` is the type of the gradient on that stage.
    """
    return torch.empty((0, *value.shape[1:]), dtype=value.dtype, device="cpu" if value.host else device)


def _run_microbatches(runner: Runner, inputs: list[Tensor]) -> PyTree:
    """Runs a call with microbatches on local inputs and returns its outputs."""
    program = runner.program
    grad = torch.is_grad_enabled() and program.trains
    argument = runner.arguments(inputs)  # (port, microbatch) -> argument of a graph
    run_step = _microbatch_runner(runner, inputs, argument)

    def step() -> Microstep:
        """Runs all microbatches of the call, and returns outputs and gradients as a `Microstep`. Raises InputError if
        a layer of experts exceeded its capacity.
        """
        computed = Microstep(program, run_step, grad, _on_this_rank)
        runner.check_loads(runner.routing.take_unchecked())
        return computed

    # What the graphs take, by kind and name; several graphs may take the same.
    ports = {(port.role.kind, port.role.name): port for half in program.step(grad) for port in half.takes}
    # Autograd's node takes the tensors that the call reads and does not change: backward may read them again.
    changed_buffers = {("buffer", role.name) for role in program.outputs if role.kind == "buffer"}
    unchanged = [
        port
        for key, port in ports.items()
        if key[0] in ("param", "buffer", "input") and key not in changed_buffers and isinstance(port.example, Tensor)
    ]
    takes, feed = [port.role for port in unchanged], runner.feed(unchanged, inputs)
    for (kind, _), port in ports.items():
        if kind == "key":
            argument(port, 0)  # a collective, which all ranks start here: stages reach their draws at other times
    if grad:
        results = list(StepInMicrobatches.apply(runner, step, takes, *feed))
    else:
        with torch.no_grad():
            results = _unaliased_outputs(program, step(), takes, feed)
    _update_buffers(runner, results)
    # From now on a read-only output raises if the tensor that it is a copy of is changed.
    for x in results:
        if isinstance(x, ReadOnly):
            x.shared.note()
    return _tree(program, results)


def _on_this_rank(function: Callable[..., Any], *values: Any) -> Any:
    """Calls ``function`` for each rank of this process, of which there is one: a value is one tensor. In a simulation,
    for which `Loops` is written too, it is one per rank.
    """
    return function(*values)


def _microbatch_runner(
    runner: Runner, inputs: list[Tensor], argument: Argument
) -> Callable[[Executable, bool, Mapping[int, Any]], Results]:
    """Returns a function that runs forward and backward of each microbatch of a call, for a variant of the runner's
    program: by `Loops`, or by `StageLoops` for this rank's stages of a pipeline.

    Args:
        inputs: local inputs of the call.
        argument: result of `Runner.arguments`.
    """
    by_name = dict(zip((name for name, _ in runner.program.inputs), inputs, strict=True))

    def run_step(program: Executable, training: bool, tangents: Mapping[int, Any]) -> Results:
        """Runs the graphs of all microbatches, as `Loops.run_step`."""
        running, forwards = runner.using(program), 0

        def run(half: Half, feed: list[Any]) -> Sequence[Any]:
            nonlocal forwards
            forwards += half.is_forward
            # The first forward of a call replaces the token counts of the call before; the next ones add to them.
            return running.run(half, feed, adds_tokens=forwards > 1)

        if not program.stage_ranks:
            return Loops(program, run, argument, by_name, _on_this_rank).run_step(training, tangents)
        link = StageLink(runner.groups, program, runner.spec.device)
        loops = StageLoops(
            program, run, argument, by_name, _on_this_rank,
            rank=runner.groups.stage, link=link, prepare=running.prepare,
            absent=partial(_without_rows, runner.spec.device),
        )  # fmt: skip
        return loops.run_step(training, tangents)

    return run_step


def _unaliased_outputs(program: Executable, step: Microstep, takes: Sequence[Role], feed: Feed) -> list[Any]:
    """Returns the outputs of a call with microbatches, each in memory of its own: shared neither with a tensor of
    ``feed`` nor with another output.

    Those that share memory with another tensor on one device raise on writes, which would not reach that tensor here.
    """
    occupied = {local_part(x).untyped_storage().data_ptr() for x in feed}  # addresses of storages
    sources = {role.name: x for role, x in zip(takes, feed, strict=True)}
    outputs: list[Any] = []
    for role in program.outputs:
        x = step.output(role)
        if isinstance(x, Tensor):
            storage = x.untyped_storage().data_ptr()
            x = x.clone() if storage in occupied or x._is_view() else x
            occupied.add(storage)
            # How it aliases on one device; None for the new value of a buffer.
            aliasing = program.returned[role.index] if role.kind == "output" else None
            if aliasing is not None and aliasing.overlaps:
                x = read_only(x, aliasing, role.index, program.returned, sources.get(aliasing.of or ""))
        outputs.append(x)
    return outputs


def _accumulate(param: Tensor, grad: Tensor) -> None:
    """Adds ``grad`` to ``param.grad``, for a parameter to which autograd itself adds nothing: a frozen one, or one that
    the program does not take.
    """
    param.grad = grad if param.grad is None else param.grad + grad


def _versions(runner: Runner, feed: Feed) -> Iterator[int]:
    """Yields the version counter of each tensor in ``feed``, the arguments of forward, that the
    backward graph reads.
    """
    with torch._C.DisableTorchFunctionSubclass():
        for _, at in runner.border.reads(runner.half(BACKWARD)):
            x = feed[at]
            yield version_of(x)


def _check_versions(runner: Runner, half: Half, feed: Feed, before: Sequence[int]) -> None:
    """Raises BackwardError if a tensor of ``feed`` was changed in place since forward and the graph ``half`` reads
    it. ``before`` has the tensors' version counters at forward.
    """
    now = list(_versions(runner, feed))
    if now == before:
        return
    read = {at for _, at in runner.border.reads(half)}
    for (role, at), old, new in zip(runner.border.reads(runner.half(BACKWARD)), before, now, strict=True):
        if old != new and at in read:
            raise changed(role, old, new)


def changed(role: Role, old: int, new: int) -> BackwardError:
    """Returns the error for a parameter, buffer or input whose version counter changed from ``old`` to ``new`` between
    forward and backward.
    """
    return BackwardError(
        f"{_PLURAL.get(role.kind, role.kind)} {role.name!r} was modified in place between the forward and this "
        f"backward, which needs its values of then: it is at version {new}; expected version {old}",
        fix="run backward before the optimizer's step (or whatever changes it), or run the forward again",
    )


def check_units(runner: Runner, inputs: Sequence[Tensor], layouts: Sequence[Layout]) -> None:
    """Raises BackwardError if the gradients of two compiled modules in sequence do not fit together: the module in
    front averages its gradients as if each rank had its own loss, but all ranks share one loss of this module.

    Args:
        inputs: local inputs of the call.
        layouts: their layouts.
    """
    # `splits_outputs`: each rank has a loss of its own, over which the module's gradients are averaged.
    if runner.splits_outputs or runner.units_checked or not torch.is_grad_enabled():
        return
    # The gradient of a replicated input is the same in both cases.
    work: list[Node | None] = [
        x.grad_fn for x, layout in zip(inputs, layouts, strict=True) if x.grad_fn is not None and layout.bound
    ]
    seen: set[Node] = set()
    while work:  # searches autograd's graph, from the inputs back, for the node of another compiled module
        node = work.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, Step._backward_cls) and node.runner.splits_outputs:  # type: ignore[attr-defined]
            raise BackwardError(
                "an input comes from a compiled module whose gradients are averaged over losses of the ranks' own, and "
                "the loss of this module is one of all ranks",
                fix='give Plan(reduce="sum") to the module in front, or compute the loss outside of this one',
            )
        work += [before for before, _ in node.next_functions]
    # Checked once: the next calls have inputs of the same kind, unless none has had a gradient so far.
    runner.units_checked = bool(seen)


def _count_update(optimizer: Optimizer, *_: object) -> None:
    """Optimizer hook: increments the version counters of updated DTensors, which torch's foreach kernels do not."""
    params = (param for group in optimizer.param_groups for param in group["params"])
    changed = [param for param in params if isinstance(param, DTensor) and param.grad is not None]
    if changed:
        torch.autograd.graph.increment_version(changed)


@cache
def watch_optimizers() -> None:
    """Registers a hook (`_count_update`) after the step of every optimizer of the process, so that in-place changes by
    it are detected. Later calls do nothing.
    """
    register_optimizer_step_post_hook(_count_update)
