"""Profiles by torch's profiler: `Ranges` names the parts of a step in any profile, and `profile_step` profiles one step
on this rank: collectives, bytes sent and memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from math import prod
from os.path import commonprefix
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile, record_function

from shardc.ir import graph as ir
from shardc.ir.comm_volume import collective_kind, group_of, kind_named
from shardc.ir.executable import Half
from shardc.ir.op_traits import NAMESPACE, OWN_NAMESPACE
from shardc.ir.repeat import Segment
from shardc.runtime.groups import results_of

_SIZES = {
    "double": 8, "long int": 8, "float": 4, "int": 4, "c10::BFloat16": 2, "c10::Half": 2, "short": 2,
    "bool": 1, "unsigned char": 1, "signed char": 1,
}  # fmt: skip


class Ranges:
    """Marks runs of one graph in torch's profiler as nested ranges: "shardc forward", in it each segment, in that
    each collective.

    Without a profiler there are none. Under ``torch.autograd.profiler.emit_nvtx()`` they are NVTX ranges.
    """

    def __init__(self, half: Half) -> None:
        self.half = half
        self._names: dict[tuple[str, ...], str] = {}  # results of a segment -> the name of its range
        self._segment_range: ExitStack | None = None  # range of the segment that runs; None without a profiler

    @contextmanager
    def run(self) -> Iterator[None]:
        """Context manager around a run of the graph: opens its range, if a profiler runs."""
        if not torch.autograd._profiler_enabled():
            yield
            return
        try:
            buckets = _Buckets(self._bucket_names)
            with record_function(f"shardc {self.half.name}"), ExitStack() as self._segment_range, buckets:
                yield
        finally:
            self._segment_range = None

    def enter(self, segment: Segment) -> None:
        """Ends the range of the segment that ran before, and opens a range for ``segment``."""
        if self._segment_range is not None:
            if segment.gives not in self._names:
                self._names[segment.gives] = f"shardc {self.half.name}, {self._module(segment)}"
            self._segment_range.close()
            self._segment_range.enter_context(record_function(self._names[segment.gives]))

    @cached_property
    def _bucket_names(self) -> list[str]:
        """The name of the range of each collective, in the order in which the graph starts them."""
        calls = [(node, kind) for node in self.half.graph.nodes if (kind := collective_kind(node)) is not None]
        over = [",".join(group_of(node, self.half.mesh)[0]) for node, _ in calls]
        return [
            f"shardc {self.half.name}, {kind}({axes}) of {results_of(node)}"
            for (node, kind), axes in zip(calls, over, strict=True)
        ]

    def _module(self, segment: Segment) -> str:
        """Returns a name for a segment: the common prefix of the names of the modules that computed its results, or
        else "first to last" with the first and the last of them; "inputs" without modules.
        """
        # `gives`: names of the nodes that are results of the segment.
        results = [node for node in self.half.graph.nodes if node.name in {*segment.gives}]
        modules = [module.split(".") for node in results if (module := ir.info(node).origin.module)]
        shared = commonprefix(modules)
        return ".".join(shared) or " to ".join(".".join(module) for module in (modules[:1] + modules[-1:])) or "inputs"


class _Buckets(TorchFunctionMode):
    """Torch function mode that marks each started collective in the profile, as a range with the next of ``names``."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self._names = iter(names)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # An op is written "namespace.name.overload", an event of the profiler "namespace::name".
        starts = _kind(str(func).replace(".", "::", 1).partition(".")[0])
        name = next(self._names, None) if starts else None  # collectives start in the graph's order, as the names are
        with nullcontext() if name is None else record_function(name):
            return func(*args, **kwargs or {})


_Event = Any  # an event of torch's profiler


@dataclass(frozen=True)
class Ran:
    """A collective in the profile of a step: its kind, bytes and times.

    Args:
        kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast" or "permute_ranks".
        sent: bytes of its direct messages; None if the backend (NCCL, gloo) carries it out.
        payload: (elements, bytes per element) passed to the backend in that case; None if the profile has no sizes.
        start, end: seconds from the start of the step to the call, and to the end of its last message.
        called: seconds of the call itself.
    """

    kind: str
    sent: int | None
    payload: tuple[int, int] | None
    start: float
    end: float
    called: float


@dataclass(frozen=True)
class Profiled:
    """Profile of one step on this rank: its collectives, waits, ranges and peak memory; times are seconds since its
    start.

    Args:
        collectives: in the order of their start.
        waits: (start, end) of each wait for a result.
        ranges: (name, start, end) of each graph that ran, as `Ranges` names it.
        allocated: peak bytes allocated since the start, without the arenas of collectives.
        seconds: duration of the step.
        begin: its start in nanoseconds, by the clock of the machine.
    """

    collectives: tuple[Ran, ...]
    waits: tuple[tuple[float, float], ...]
    ranges: tuple[tuple[str, float, float], ...]
    allocated: int
    seconds: float
    begin: int


def profile_step(step: Callable[[], object]) -> Profiled:
    """Runs ``step`` under torch's CPU profiler. Returns the collectives that it ran, with times and bytes, and the
    peak memory.
    """
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True) as seen:
        step()
    results: Any = seen.profiler.kineto_results
    events: list[_Event] = sorted(results.events(), key=lambda event: (event.start_ns(), -event.duration_ns()))
    first = events[0].start_ns()

    def named(name: str) -> list[_Event]:
        """Returns the events of this name, in order of time."""
        return [event for event in events if event.name() == name]

    def span(event: _Event) -> tuple[float, float]:
        """Returns start and end in seconds since the start of the step."""
        return (event.start_ns() - first) / 1e9, (_end(event) - first) / 1e9

    calls = [(event, kind) for event in events if (kind := _kind(event.name())) is not None]
    # Calls of c10d and the messages of gloo that they start are in the same order.
    sends, sent_messages = named("c10d::send"), named("gloo:send")
    receives, received_messages = named("c10d::recv_"), named("gloo:recv")
    # All-reduces without messages of their own are carried out by the backend: its events have their ends and sizes.
    by_backend = [event for event, kind in calls if kind == "all_reduce" and not any(_inside(s, event) for s in sends)]
    in_backend = named("gloo:all_reduce")
    # Gloo labels other collectives all_reduce too. If there are more of them than calls, they cannot be matched.
    matches = len(by_backend) == len(in_backend)
    backend_event_of = dict(zip(map(id, by_backend), in_backend, strict=True)) if matches else {}
    ran = []
    for event, kind in calls:
        # Its messages: those that c10d calls within the collective's call have started.
        outgoing = [x for call, x in zip(sends, sent_messages, strict=True) if _inside(call, event)]
        incoming = [x for call, x in zip(receives, received_messages, strict=True) if _inside(call, event)]
        native = backend_event_of.get(id(event), event)  # the call itself if no event of the backend matches
        start, _ = span(event)
        end = max(span(x)[1] for x in (event, native, *outgoing, *incoming))
        sent_bytes = sum(count * size for count, size in map(_payload, outgoing)) if outgoing else None
        payload = None if outgoing else _payload(native)
        called = event.duration_ns() / 1e9
        ran.append(Ran(kind, sent=sent_bytes, payload=payload, start=start, end=end, called=called))
    waits = tuple(map(span, named(f"{NAMESPACE}::wait_tensor")))
    # Those of whole graphs: names of ranges inside of them have a comma.
    ranges = tuple(
        (name, *span(event)) for event in events if (name := event.name()).startswith("shardc ") and "," not in name
    )
    seconds = (max(map(_end, events)) - first) / 1e9
    return Profiled(tuple(ran), waits, ranges, allocated=_peak(events), seconds=seconds, begin=first)


def peak_of(step: Callable[[], object]) -> int:
    """Runs ``step`` under torch's CPU profiler; returns the peak of bytes allocated since the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        step()
    results: Any = seen.profiler.kineto_results
    return _peak(sorted(results.events(), key=lambda event: event.start_ns()))


def alive(tensors: Iterable[Tensor]) -> int:
    """Returns the bytes that ``tensors`` occupy on this rank; storage that several share counts once."""
    local = [x.to_local() if isinstance(x, DTensor) else x for x in tensors]
    return sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in local}.values())


def _kind(name: str) -> str | None:
    """Returns the kind of collective ("all_gather", ...) that an event of this name starts; None if it starts none."""
    space, _, op = name.partition("::")
    if space not in (NAMESPACE, OWN_NAMESPACE):
        return None
    return kind_named(op)


def _inside(event: _Event, outer: _Event) -> bool:
    """Whether ``event`` lies within event ``outer``, on the same thread."""
    same = event.start_thread_id() == outer.start_thread_id()
    return bool(same and outer.start_ns() <= event.start_ns() and _end(event) <= _end(outer))


def _end(event: _Event) -> int:
    """Returns the time at which ``event`` ends, in nanoseconds."""
    return event.start_ns() + event.duration_ns()


def _payload(event: _Event) -> Any:
    """Returns (elements, bytes per element) of an event's first argument; None if that is a list of tensors."""
    shape, dtype = event.shapes()[0], event.dtypes()[0]
    return (prod(shape), _SIZES[dtype]) if dtype in _SIZES else None


def _peak(events: Sequence[_Event]) -> int:
    """Returns the highest number of bytes in use at one time, counted from the allocations and frees in ``events``."""
    live = peak = 0
    for event in events:
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak
