"""`Runner`: runs the graphs of a compiled program on this rank.

Under ``torch.autograd.detect_anomaly``, the error for NaN in a backward names the op that first gave it, by module and
source line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx

from shardc import _compat
from shardc.custom_ops.expert_ops import noting
from shardc.custom_ops.random import draw_key
from shardc.errors import BackwardError
from shardc.ir import graph as ir
from shardc.ir.certificate import Certificate
from shardc.ir.comm import group_name
from shardc.ir.comm_volume import collective_kind, group_axes
from shardc.ir.deferred import Deferred
from shardc.ir.executable import BACKWARD, FORWARD, REDUCTION, Compiled, Executable, Half, Port, certificate_of
from shardc.ir.graph import Role
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh
from shardc.ir.repeat import Segment
from shardc.runtime.border import Border
from shardc.runtime.events import Event, program_event
from shardc.runtime.gloo.buffers import Buffers
from shardc.runtime.gloo.direct import prepare
from shardc.runtime.gradients import Key
from shardc.runtime.groups import Groups, as_collective_error
from shardc.runtime.host import cheap_garbage_collection, keep_heap, settle
from shardc.runtime.inputs import in_order
from shardc.runtime.loops import Argument
from shardc.runtime.memory_ranges import MemoryRanges
from shardc.runtime.parameter_checks import ParamStore
from shardc.runtime.profile import Ranges
from shardc.runtime.routing import Loads, Routing, check_loads, is_limited
from shardc.runtime.sharding_spec import ShardingSpec
from shardc.runtime.shards import flat_index
from shardc.runtime.storage import cut, padded_local

_NOWHERE = 1 << 30
# What torch's ops, and code of Inductor, raise on a CPU for an index that is out of range.
_OUT_OF_RANGE = re.compile(
    r"(?P<index>index -?\d+) is out of bounds for dimension \d+ with size (?P<size>\d+)"
    r"|index out of bounds: [^\n]* < (?P<bound>\d+)?|index out of range in self"
)


def out_of_range(text: str) -> IndexError | None:
    """Converts the message ``text`` of an error of torch to an IndexError, which the caller raises. Returns None if
    the message is about something else.
    """
    error = _OUT_OF_RANGE.search(text)
    if error is None:
        return None
    size = error["size"] or error["bound"]
    return IndexError(f"{error['index'] or 'an index'} is out of range" + f" for a dim of {size} elements" * bool(size))


def run_finding_nan(half: Half, inputs: list[object]) -> tuple[Sequence[Any], int]:
    """Interprets a graph op by op; returns (its results, index of the first node whose result has NaN, else 2**30)."""
    watch = _Watch(half.gm)
    with torch.no_grad():
        return watch.boxed_run(inputs), watch.first


class _Watch(fx.Interpreter):
    """Interpreter of a graph that notes the index of the first node whose result has NaN."""

    first = _NOWHERE

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm)
        self._places = {node: at for at, node in enumerate(gm.graph.nodes)}

    def run_node(self, n: fx.Node) -> object:
        """Runs a node of the graph, and notes it if its result is the first with NaN. A collective's result is looked
        at when it is waited for: before, it may have no values yet.
        """
        result = super().run_node(n)
        looks = n.op == "call_function" and self.first == _NOWHERE and collective_kind(n) is None
        if looks and any(map(has_nan, _compat.pytree.tree_leaves(result))):
            self.first = self._places[n]
        return result


def has_nan(x: object) -> bool:
    """Whether ``x`` is a tensor with a NaN."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex()) and bool(x.isnan().any())


def check(
    half: Half, results: Sequence[object], first: int, groups: Groups, unpadded: Callable[[str, Tensor], Tensor]
) -> None:
    """Raises BackwardError if a gradient of a backward is NaN on any rank. The error names the first op whose result
    has NaN. All ranks call it.

    Args:
        half: the backward graph.
        results: its results.
        first: node index from `run_finding_nan`.
        unpadded: (name, gradient) -> the gradient without padding.

    Raises:
        BackwardError: the same on all ranks.
    """
    # Padding may be NaN, and is in no gradient that the user gets.
    bad = [
        role.name
        for role, x in zip(half.gives, results, strict=True)
        if isinstance(x, Tensor) and has_nan(unpadded(role.name, x) if role.kind == "grad" else x)
    ]
    if not groups.any(bool(bad)):
        return
    place = -groups.most(-first)  # the least of all ranks, whose graphs have the same nodes
    nodes = list(half.gm.graph.nodes)
    if place == _NOWHERE:  # no op of any rank has the first NaN
        raise BackwardError("a gradient that came into the backward of a compiled module is NaN")
    info = ir.info(nodes[place])
    where = f"module {info.origin.module!r}" if info.origin.module else "the model's own forward"
    raise BackwardError(
        f"%{info.name} is the first result with NaN in a backward, of {where}; gradients are NaN behind it",
        source=info.origin.source or None,
        fix="look at what this line takes: a division by zero, the root or the logarithm of 0, inf - inf; nothing was "
        "added to any .grad",
    )


# First graph of a program -> names of graphs -> the event by which ranks compare these. Behind an error a program gets
# a new `Runner`, and graphs then have the names of this process's groups.
_COMPARED: WeakKeyDictionary[fx.GraphModule, dict[tuple[str, ...], Event]] = WeakKeyDictionary()


class Runner:
    """Runs the forward and backward graphs of a compiled program on this rank; lowers them at first use.

    Args:
        program: the compiled program.
        spec: settings of the module, which is on a device mesh.
        params: parameters of the module, and local sums of the gradients that the program leaves unreduced.
        buffers: memory for the results of collectives.
        routing: filled by each run of a forward.

    Attributes:
        splits_outputs: whether gradients of outputs are of this rank's own loss, and are scaled.
        units_checked: whether `shardc.runtime.autograd.check_units` has checked the inputs.
        keys: keys of the random numbers of the next run; if there are none, they are drawn.
    """

    units_checked = False

    def __init__(
        self,
        program: Executable,
        spec: ShardingSpec,
        params: ParamStore,
        buffers: Buffers,
        routing: Routing,
    ) -> None:
        assert spec.groups is not None
        self.program, self.spec, self.params, self.groups = program, spec, params, spec.groups
        self.sync, self.buffers = params.sync, buffers  # sums of unreduced gradients; memory of collectives
        # `half` returns a graph by its phase; the border converts between the user's tensors and those of graphs.
        self.half, self.border = program.half, Border(program)
        self.border.dtensors = spec.dtensor_outputs
        layouts = [role.layout for role in program.outputs if role.layout is not None]
        self.splits_outputs = any(spec.unit(program.outputs, layout) != 1 for layout in layouts)
        self.routing = routing
        self.keys: list[Tensor] = []
        self._compiled: dict[Half, Compiled] = {}  # the lowered graphs
        self._ranges: dict[Half, Ranges] = {}  # names of a graph's parts in profiles
        self._others: dict[int, Runner] = {}  # id of a variant of the program (`using`) -> its runner
        self._timed = self.groups.mesh.timed(program.microbatches)  # with the axis of microbatches
        self._coordinates: dict[tuple[tuple[str, ...], int], Tensor] = {}  # (axes, microbatch) -> index along them
        # (parameter, layout, dtype) of each local sum -> graph that reduces these sums.
        self._reductions: dict[tuple[tuple[str, Layout, torch.dtype], ...], Half] = {}
        self._prepared: set[bool] = set()  # of stages: whether training and inference steps are lowered
        self._step_event = Event((("event", "run of the stages"),))

    def using(self, program: Executable) -> Runner:
        """Returns a runner of ``program``, a variant of this runner's program for backwards in which other outputs have
        gradients. Runners of variants are cached.
        """
        if program is self.program:
            return self
        if id(program) not in self._others:
            self._others[id(program)] = Runner(program, self.spec, self.params, self.buffers, self.routing)
        return self._others[id(program)]

    def backward_of(self, used: frozenset[int]) -> Half:
        """Returns the graph of a backward in which only the outputs with indices ``used`` have gradients."""
        whole = self.half(BACKWARD)
        every = {port.role.index for port in whole.takes if port.role.kind == "tangent"}
        if used >= every:
            return whole
        with self.groups.consistency.compiles():  # the first request compiles the variant
            return self.half(used)

    def run(self, half: Half, inputs: list[object], adds_tokens: bool = False) -> Sequence[Any]:
        """Runs ``half``, a forward or backward graph, on ``inputs``, and returns its results. The list ``inputs`` is
        emptied, so that memory can be freed early; a failed collective raises CollectiveError.

        Args:
            adds_tokens: whether a forward adds to the counts of tokens, in place of those of an earlier forward.
        """
        compiled, consistency = self.compiled(half), self.groups.consistency
        ranges = self._ranges[half] = self._ranges.get(half) or Ranges(half)
        running: Segment | None = None

        def enter(segment: Segment) -> None:
            """Called before each segment of the graph: errors name it, and its collectives use its planned memory."""
            nonlocal running
            # Equal segments share code, which numbers memory slots from the segment's first.
            running, window.first = segment, segment.slot  # `window`: the plan's memory for this run
            ranges.enter(segment)

        try:
            # In a pipeline ranks run different graphs, which cannot be compared: "" registers no event.
            compared_as = "" if self.program.stage_ranks else f"run of the {half.kind}"
            seeks_nan = half.kind == "backward" and torch.is_anomaly_enabled()
            # The search interprets the graph as it was before lowering, and so by the plan of that.
            plan = half.plan if seeks_nan else compiled.plan
            with (
                consistency.runs(compared_as),
                self.buffers.planned(plan) as window,
                _compat.no_autocast(),
                noting() as noted,
                ranges.run(),
            ):
                results, first_nan_index = run_finding_nan(half, inputs) if seeks_nan else (compiled(inputs, enter), 0)
            settle()
            if seeks_nan:
                check(half, results, first_nan_index, self.groups, self._without_pad)
            if half.is_forward:
                self.routing.note(half.graph, noted, adds_tokens)
            return results
        except Exception as error:
            failed = as_collective_error(error, half.gm, half.kind, self.groups, self.program.cause, running)
            failure = failed or out_of_range(str(error))
            if failure is None:
                raise
            raise failure from error

    def _without_pad(self, name: str, grad: Tensor) -> Tensor:
        """Returns the gradient ``grad`` of parameter ``name`` without the padding of its storage; unchanged if ``name``
        is no parameter.
        """
        param: Any = self.params.snapshot.parameters.get(name)
        return grad if param is None or grad.dim() != param.dim() else cut(grad, param._local_tensor.shape)

    def check_loads(self, loads: Loads) -> None:
        """Raises InputError on all ranks if a layer of experts had more rows than its capacity has room for.

        Args:
            loads: those of a call, from ``routing``.
        """
        if loads or self._limits_stages:
            check_loads(loads, self.groups.any if self._limits_stages else None)

    @cached_property
    def _limits_stages(self) -> bool:
        """Whether a layer of experts in some pipeline stage has a capacity. Stages must then tell each other if it
        was exceeded, since each knows its own loads only.
        """
        halves = self.program.step(self.program.trains) if self.program.stage_ranks else ()
        return any(is_limited(half.graph) for half in halves)

    def planned(self) -> dict[str, int]:
        """Maps each lowered graph ("forward", "backward", "inference") to the planned peak in bytes of its collective
        results.
        """
        # A variant of the backward has a set of outputs as its phase, and is left out.
        plans = {half.phase: compiled.plan for half, compiled in self._compiled.items() if isinstance(half.phase, str)}
        peaks = {str(phase): plan.peak for phase, plan in plans.items() if phase != REDUCTION}
        if BACKWARD in peaks:  # with the results that forward leaves in memory for it
            peaks[BACKWARD] = plans[BACKWARD].peak_after(plans[FORWARD])
        return peaks

    def compiled(self, half: Half) -> Compiled:
        """Returns ``half`` lowered. At first use, ranks compare the graphs of a step, and lower them together."""
        if half not in self._compiled:
            together = self.program.step() if half in self.program.step() else (half,)
            self._compile(together, partial(certificate_of, together))
        return self._compiled[half]

    def prepare(self, training: bool) -> None:
        """Lowers the graphs of a step that this rank of a pipeline runs. First, all ranks check that they have equal
        graphs for all stages.

        Raises:
            BackwardError: ``torch.autograd.detect_anomaly`` is on.
        """
        if torch.is_anomaly_enabled():
            raise BackwardError(
                "torch.autograd.detect_anomaly does not look into the stages of a pipeline",
                plan_entry=str(self.program.key.plan.setting("pp")),
                fix="leave pp out of the plan to find the op",
            )
        trains = training and self.program.trains
        if trains not in self._prepared:  # alike on all ranks, whichever graphs they run
            self._compile(self.program.step(training), partial(self.program.certificate, training))
            self._prepared.add(trains)
        # One event for the step: stages run different graphs, which cannot be compared one by one.
        self.groups.consistency.enter(self._step_event)

    def _runs_here(self, half: Half) -> bool:
        """Returns whether this rank runs ``half``."""
        return half.stage is None or self.program.order(True).rank_of[half.stage] == self.groups.stage

    def _compile(self, halves: Sequence[Half], certificate: Callable[[], Certificate]) -> None:
        """Checks that all ranks have the same graphs (``halves``) and the same list of collectives
        (``certificate``). Then lowers those graphs that this rank runs.
        """
        # Once per process, before the first step.
        keep_heap()
        # Autocast is off: the captured graphs contain its casts already.
        with self.groups.consistency.compiles(), cheap_garbage_collection(), _compat.no_autocast():
            graphs = {half.name: half.gm for half in halves}
            events, names = _COMPARED.setdefault(halves[0].gm, {}), tuple(graphs)
            # Only at the first time: `use_groups` below writes names into the graphs that other ranks may not have.
            if names not in events:
                events[names] = program_event(certificate().text(), graphs, halves[0].mesh)
            self.groups.consistency.enter(events[names])
            # Of a pipeline's graphs, a rank lowers those of its stages only.
            to_lower = [half for half in halves if self._runs_here(half) and half not in self._compiled]
            for half in to_lower:
                use_groups(half.gm, self.groups)
                prepare(half.graph)
            self._compiled.update(zip(to_lower, self.spec.lower_half(*to_lower), strict=True))

    def reduce(self, sums: dict[Key, Tensor]) -> dict[str, Tensor]:
        """Reduces local sums of gradients over ranks. Takes (parameter name, layout) -> sum; returns padded local
        gradients by parameter name.
        """
        key = tuple((name, layout, x.dtype) for (name, layout), x in sums.items())
        if key not in self._reductions:  # a graph is compiled for each set of sums
            with self.groups.consistency.compiles():
                self._reductions[key] = self.program.reduction(key)
        # The graph takes the sums in the order of `key`, and coordinates among them.
        half, summands = self._reductions[key], iter(list(sums.values()))
        feed: list[object] = [
            self._coordinate(port) if port.role.kind == "coordinate" else next(summands) for port in half.takes
        ]
        return {role.name: x for role, x in zip(half.gives, self.run(half, feed), strict=True)}

    def reduce_deferred(
        self,
        roles: Sequence[Role],
        grads: dict[tuple[str, str], Tensor | None],
        deferred: Deferred,
        memory: MemoryRanges,
    ) -> dict[str, Tensor]:
        """Handles gradients that backward leaves unreduced (`no_sync`): adds them to local sums. Then reduces the
        sums of parameters that are not in ``deferred``.

        Args:
            roles: roles of the results of the backward graph.
            grads: the results by ("grad", parameter name); the unreduced ones are removed.
            deferred: the parameters whose sums stay unreduced.
            memory: memory that no sum may share.

        Returns:
            The reduced sums: padded local gradients by parameter name.
        """
        if not self.program.deferred:
            return {}
        for role in roles:
            grad = grads.pop(("grad", role.name), None) if role.name in self.program.deferred.names else None
            if grad is not None:
                assert role.layout is not None
                self.sync.add(role.name, role.layout, memory.unaliased(grad))
        due = self.sync.take(self.program.deferred.names - deferred.names)
        return self.reduce(due) if due else {}

    def feed(self, takes: Iterable[Port], inputs: list[Tensor]) -> list[Any]:
        """Returns the values for ``takes``, the arguments of a step's graphs: parameters (as DTensors), buffers,
        inputs, coordinates and random keys.

        Args:
            inputs: the local inputs, in the program's order.
        """
        inputs_by_name = dict(zip((name for name, _ in self.program.inputs), inputs, strict=True))
        snapshot = self.params.snapshot
        feed: list[Any] = []
        for port in takes:
            if port.role.kind == "param":
                feed.append(snapshot.parameters[port.role.name])
            elif port.role.kind == "buffer":
                feed.append(snapshot.buffers[port.role.name])
            elif port.role.kind == "coordinate":
                feed.append(self._coordinate(port))
            elif port.role.kind == "key":
                # `keys` are set when a run is repeated, with the random numbers of before.
                feed.append(self.keys.pop(0) if self.keys else self.draw(port.example.device))
            else:
                # An input that is a number is none of the tensors: it is a constant, and the example has its value.
                feed.append(inputs_by_name.get(port.role.name, port.example))
        return feed

    def draw(self, device: torch.device) -> Tensor:
        """Returns a key for the random numbers of a step, the same on all ranks."""
        return self.groups.of_first(draw_key(device=device))

    def _coordinate(self, port: Port, microbatch: int = 0) -> Tensor:
        """Returns this rank's index along the mesh axes that ``port`` (an input of a graph) names. One of these may
        be the axis of microbatches, along which ``microbatch`` is the index.
        """
        axes, time = tuple(port.role.name.split(",")), self._timed.time
        if not time or not any(self._timed.overlap(axis, time) for axis in axes):
            return self.groups.coordinate(axes)
        key = axes, microbatch
        if key not in self._coordinates:
            # The axis of microbatches is the last of the mesh `_timed`, so it varies fastest.
            index = flat_index(self._timed, axes, self.groups.rank * self._timed.microbatches + microbatch)
            self._coordinates[key] = torch.tensor([index], device=port.example.device)
        return self._coordinates[key]

    def arguments(self, inputs: list[Tensor]) -> Argument:
        """Returns a function (port, microbatch) -> argument of the graphs, for one call in microbatches. It also
        serves a repeated run of that call.

        Buffers that the call changes are copied, since a later run reads their values of now.
        """
        changed = [role.name for role in self.program.outputs if role.kind == "buffer"]
        # (kind, name) of an argument -> its value, for all microbatches.
        values: dict[tuple[str, str], Any] = {
            ("buffer", name): in_order(self.params.snapshot.buffers[name]).clone() for name in changed
        }

        def argument(port: Port, microbatch: int) -> Any:
            role = port.role
            if role.kind == "coordinate":
                return self._coordinate(port, microbatch)
            key = role.kind, role.name
            # Cached: all microbatches, and a repeated run, take the same values, random keys among them.
            if key not in values:
                values[key] = self.local([port], self.feed([port], inputs))[0]
            return values[key]

        return argument

    def local(self, takes: Iterable[Port], feed: Sequence[Any]) -> list[object]:
        """Converts values that the method `feed` has returned to the arguments that graphs take: padded local tensors
        of parameters, contiguous buffers.
        """
        return [
            padded_local(x, self.spec.storages[port.role.name])
            if port.role.kind == "param"
            else in_order(x)
            if port.role.kind == "buffer"
            else x
            for port, x in zip(takes, feed, strict=True)
        ]


def use_groups(graph: fx.GraphModule, groups: Groups) -> None:
    """Creates the process groups that ``graph`` names, unless they exist. Replaces their names in its nodes, in place,
    by those under which torch has registered the groups; registered names stay.
    """
    named = named_groups(graph, groups.mesh)
    registered = groups.add(named.values())
    rename = {x: registered[group_name(axes)] for x, axes in named.items()}
    for node in graph.graph.nodes:  # a group is an argument of a collective, by its name
        if any(isinstance(x, str) and x in named for x in (*node.args, *node.kwargs.values())):
            node.args = tuple(rename.get(x, x) if isinstance(x, str) else x for x in node.args)
            node.kwargs = {k: rename.get(x, x) if isinstance(x, str) else x for k, x in node.kwargs.items()}
    graph.recompile()


def named_groups(graph: fx.GraphModule, mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """Maps the group names in ``graph`` to their mesh axes."""
    return {
        x: axes
        for node in graph.graph.nodes
        if node.op == "call_function"
        for x in (*node.args, *node.kwargs.values())
        if isinstance(x, str) and (axes := group_axes(x, mesh)) is not None
    }
