"""Events of a rank (module calls, backwards, compilations) as text that ranks compare, and errors for differences."""

from __future__ import annotations

import hashlib
import json
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import groupby, zip_longest
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.distributed.tensor import DTensor

from shardc.errors import CollectiveError, MeshError, ShardcError
from shardc.ir.code import is_versioned
from shardc.ir.deferred import Deferred
from shardc.ir.mesh import Mesh
from shardc.ir.text import dump
from shardc.runtime.inputs import Constant, Like, Signature
from shardc.runtime.shards import fingerprint

SAME = "the same"
_LONGEST = 4000  # characters of another rank's error
Lines = Sequence[Sequence[str]]
Place = Callable[[int], str]  # returns a global rank as text

# Prefix of a topic -> the fix if ranks differ in it.
_FIXES = {
    "event": "call the same modules, methods and backward equally often and in the same order on every rank; what "
    "forward reads (attributes, globals) has to be the same on every rank",
    "input": "pass the same arguments on every rank, and equally many rows (drop_last=True, or a sampler that pads); "
    "with shardc.Options(uneven=True) ranks may pass different numbers of rows, and shardc.batches(loader, module, "
    "pad=...) pads other dims to the longest of the ranks",
    "gradients": "enter the same of torch.no_grad() and torch.inference_mode() on every rank",
    "left unreduced": "enter no_sync(), and call set_requires_grad_sync, on every rank or on none",
    "grads": "freeze the same parameters on every rank",
    "outputs": "compute the loss from the same outputs on every rank",
    "training": "call train() and eval() on the same modules on every rank",
    "new values": "load_state_dict, init_weights and summon_full_params are for all ranks, at the same time",
    "values": "start from the same values on every rank: torch.manual_seed before the model is made, init_weights() or "
    "load_state_dict() on every rank; shardc.compile(..., init_sync=True) takes those of the mesh's first rank",
    **dict.fromkeys(
        ("autocast", "default dtype", "deterministic", "matmul precision", "attention", "default device"),
        "enter the same autocast and use the same settings of torch on every rank",
    ),
    "": "compile the same model, plan, mesh and options on every rank",
}


@dataclass(frozen=True)
class Event:
    """A call in which all ranks must take part in the same order. Described by (topic, text) lines, the first of
    topic "event".
    """

    lines: tuple[tuple[str, str], ...]

    @cached_property
    def key(self) -> str:
        """Hash of the event, by which ranks compare it."""
        return hashlib.sha256(json.dumps(self.lines).encode()).hexdigest()[:32]

    def backward(self, used: frozenset[int]) -> Event:
        """Returns the event for a backward of the module call that this event describes. ``used`` has the indices of
        the outputs that have gradients.
        """
        if used not in self._backwards:
            (_, does), *rest = self.lines
            outputs = ("outputs that gradients come from", ", ".join(map(str, sorted(used))))
            self._backwards[used] = Event((("event", f"backward of {does}"), outputs, *rest))
        return self._backwards[used]

    @cached_property
    def fresh(self) -> Event:
        """Returns the event of a call for which parameter values were replaced since the call before. All ranks must
        have replaced theirs.
        """
        return Event((*self.lines, ("new values", "some since the last call")))

    @cached_property
    def _backwards(self) -> dict[frozenset[int], Event]:
        """Cache of the events of this call's backwards: set of indices of the outputs that have gradients -> event."""
        return {}


def call_event(
    name: str,
    call: Signature,
    leaves: Sequence[object],
    deferred: Deferred,
    row_axes: Sequence[tuple[str, ...]] = (),
) -> Event:
    """Returns the event by which ranks check that they call the same module with arguments of the same types and
    shapes.

    Args:
        name: name of the module.
        call: signature of the local inputs.
        leaves: pytree leaves of the arguments.
        deferred: the gradients that are left unreduced.
        row_axes: per tensor, the mesh axes over which ranks may pass different numbers of rows; none by default.
    """
    uneven = iter(row_axes)  # axes of each tensor in turn; other leaves have none
    inputs = [
        (f"input {name!r}", _argument_text(x, leaf, isinstance(x, Tensor) and bool(next(uneven, ()))))
        for name, x, leaf in zip(call.names, leaves, call.leaves, strict=True)
    ]
    # Settings of torch at the call, such as autocast; then train mode, `requires_grad` and dtypes of the module.
    around = [(name.replace("_", " "), _setting_text(value)) for name, value in call.surroundings._asdict().items()]
    modes = [(field.name, _run_lengths(getattr(call.mode, field.name))) for field in fields(call.mode)]
    gradients = "recorded" if torch.is_grad_enabled() else "not recorded"
    unreduced = ", ".join(sorted(deferred.whole)) or "nothing"
    unreduced += "".join(f", {name} over replicas" for name in sorted(deferred.scattered))
    return Event(
        (
            ("event", f"call of {name}"),
            *inputs,
            ("input structure", " ".join(str(call.spec).split())),
            ("gradients", gradients + ", in inference_mode" * torch.is_inference_mode_enabled()),
            ("left unreduced", unreduced),
            *modes,
            *around,
        )
    )


def program_event(certificate: str, graphs: Mapping[str, fx.GraphModule], mesh: Mesh) -> Event:
    """Returns the event by which ranks check that they have compiled the same program: the text of its graphs and
    collectives.

    Args:
        certificate: text that lists the collectives of the graphs in order.
        graphs: local graphs by name.
        mesh: mesh of the graphs.
    """
    # A saved value is named after its node, and a stored graph does not keep node names.
    texts = {name: re.sub(r"(?m)^(  saved(?: #\d+)?) \S+ =", r"\1 =", dump(gm, mesh)) for name, gm in graphs.items()}
    code = [(f"the {name} graph", texts[name] + "\n".join(_constant_lines(gm))) for name, gm in graphs.items()]
    return Event((("event", "compiled program"), ("collectives", certificate), *code))


def _constant_lines(gm: fx.GraphModule) -> list[str]:
    """Returns one line for each constant tensor of a graph: its name and fingerprint."""
    targets = {str(node.target) for node in gm.graph.nodes if node.op == "get_attr"}
    constants = [(name, attrgetter(name)(gm)) for name in sorted(targets)]
    return [f"{name} = {fingerprint(x):x}" for name, x in constants if isinstance(x, Tensor)]


def _argument_text(x: object, described: Like | Constant, any_rows: bool) -> str:
    """Returns argument ``x`` of a call as text: a tensor's shape (with "any" rows if ``any_rows``) and dtype, or a
    value. ``constant`` is its description in the call's signature.
    """
    if isinstance(x, Tensor):
        kind = "DTensor of " if isinstance(x, DTensor) else ""
        shape = ", ".join(["any", *map(str, x.shape[1:])] if any_rows else map(str, x.shape))
        return f"{kind}shape [{shape}], {x.dtype}" + (", requires_grad" if x.requires_grad else "")
    assert isinstance(described, Constant)
    value = sorted(map(repr, x)) if isinstance(x, set | frozenset) else x
    return re.sub(" at 0x[0-9a-f]+", "", repr(value))  # addresses differ between processes


def _run_lengths(values: object) -> str:
    """Returns a value as text; a tuple is run-length encoded: ``True x 3, False``."""
    if not isinstance(values, tuple):
        return repr(values)
    runs = [(value, len(list(run))) for value, run in groupby(values)]
    return ", ".join(f"{value} x {count}" if count > 1 else f"{value}" for value, count in runs)


def difference(rank: int, rank_lines: Lines, other_rank: int, other_lines: Lines) -> MeshError:
    """Returns the error for two ranks that are at different events under the same event number. The events are given
    as (topic, text) lines.
    """
    texts, other_texts = {line[0]: line[1] for line in rank_lines}, {line[0]: line[1] for line in other_lines}
    topics = [topic for topic in {**texts, **other_texts} if texts.get(topic) != other_texts.get(topic)]
    if not topics:
        both = f"both are at a {texts['event']}, one of them earlier"
        return MeshError(
            f"ranks {rank} and {other_rank} are not at the same call: {both}",
            fix=_FIXES["event"],
        )
    # The error names one topic: what the ranks do, else an input, else the first.
    topic = min(topics, key=lambda topic: (topic != "event", not topic.startswith("input '")))
    value, other_value = texts.get(topic), other_texts.get(topic)  # None if only the other rank has the topic
    if topic.startswith("values"):
        # A text other than `SAME` is a whole error, of a rank that has found its values to differ.
        failed = next(lines for lines in (texts, other_texts) if lines.get(topic) != SAME)
        return MeshError(failed[topic], fix=failed.get("fix", _FIXES["values"]))
    # Of long texts, such as graphs, the first line that differs.
    if value is not None and other_value is not None and "\n" in value + other_value:
        pairs = zip_longest(value.split("\n"), other_value.split("\n"), fillvalue="nothing more")
        value, other_value = next(pair for pair in pairs if pair[0] != pair[1])
    what = f"in {topic}" if topic != "event" else "in what they do"
    return MeshError(
        f"ranks differ at a {texts['event']}, {what}: rank {rank} has {value or 'none'}, "
        f"rank {other_rank} has {other_value or 'none'}",
        fix=next(fix for start, fix in _FIXES.items() if topic.startswith(start)),  # the last, "", fits any topic
    )


def raised(rank: str, error: BaseException) -> tuple[str, str | None, str]:
    """Returns (text, source line, advice) of the error that other ranks raise because ``rank`` has raised ``error``."""
    shardc_error = error if isinstance(error, ShardcError) else None  # these have parts; of others, all is in `str`
    text = (shardc_error.what if shardc_error else str(error))[:_LONGEST]
    fix = f"mend it on rank {rank}" + (
        f": {shardc_error.fix}" if shardc_error and shardc_error.fix else ", whose traceback says where"
    )
    return (
        f"rank {rank} raised {type(error).__name__}" + (f": {text}" if text else ""),
        shardc_error.source if shardc_error else next(reversed([*_lines_of_user(error)]), None),
        fix,
    )


def _lines_of_user(error: BaseException) -> Iterator[str]:
    """Yields ``file:line`` of the frames of user code in the traceback of ``error``, outermost first."""
    frames = traceback.walk_tb(error.__traceback__)
    yield from (f"{x.f_code.co_filename}:{line}" for x, line in frames if not is_versioned(x.f_code))


def late_ranks(store: dist.Store, prefix: str, ranks: Sequence[int], place: Place) -> MeshError | None:
    """Returns an error that names those of ``ranks`` that did not arrive at a comparison in time, or says that the
    store does not answer. Returns None if all have arrived.

    Args:
        prefix: of the store keys under which ranks publish that they have arrived.
        place: returns a rank as text.
    """
    waited = f"{store.timeout.total_seconds():g} seconds"  # type: ignore[attr-defined]
    try:
        late = [rank for rank in ranks if not store.check([f"{prefix}here/{rank}"])]
    except RuntimeError:
        return MeshError(
            "the store in which ranks compare what they run is gone, or does not answer", fix=look_at_store(place(0))
        )
    if not late:
        return None
    which = f"rank {place(late[0])}" if len(late) == 1 else f"ranks {', '.join(map(place, late))}"
    return MeshError(
        f"{which} of {list(ranks)} did not come to compare what they run within {waited}",
        fix=f"look at {which} first: it died, raised, never called the module, or still compiles (then give "
        "init_process_group a longer timeout); all ranks must call it equally often, with inputs of the same shapes",
    )


def ended(rank: str, ranks: Sequence[int]) -> MeshError:
    """Returns the error for a comparison of events between ``ranks`` that one rank does not join, as its program has
    ended. ``rank`` is the text that names that rank.
    """
    return MeshError(
        f"rank {rank} of {list(ranks)} has ended, or left its process group, and does not come to compare what it runs",
        fix=f"look at rank {rank} first: it raised, or took fewer steps (drop_last=True, or a sampler that pads)",
    )


def is_lost(error: RuntimeError) -> bool:
    """Whether ``error``, raised by torch, says that a connection was lost or a wait timed out."""
    text = str(error).partition("\n")[0]
    return not isinstance(error, ShardcError) and bool(re.search(r"gloo|NCCL|[Cc]onnection|[Tt]imed out", text))


def lost(error: RuntimeError, rank: str, ranks: Sequence[int], fix: str) -> CollectiveError:
    """Returns the CollectiveError for ``error``, which torch raised on ``rank`` in a collective with ``ranks`` because
    the connection was lost or the wait timed out.
    """
    text = str(error).partition("\n")[0]
    return CollectiveError(
        f"rank {rank} was in a collective with ranks {list(ranks)}, between two graphs, when it failed: {text}",
        fix=fix,
    )


def look_at(first: Sequence[str]) -> str:
    """Returns the advice (``fix``) for an error about a wait for other ranks: to look at the ranks ``first`` before
    the others.

    Args:
        first: the ranks to look at first, as text.
    """
    which = f"rank {first[0]} first: it" if len(first) == 1 else f"ranks {', '.join(first)} first: one of them"
    return f"look at {which} died, raised or came too late; then restart all ranks from the last checkpoint"


def look_at_store(rank: str) -> str:
    """Returns the advice (``fix``) for an error raised because the store (torch's key-value store) does not answer.

    Args:
        rank: rank 0, which keeps it if no launcher does, as text.
    """
    return (
        f"look first at the process that keeps the store (rank {rank}, or torchrun): it died or was stopped; then "
        "restart all ranks"
    )


def different_waits(rank: int, where: str, other: int, does: Lines) -> MeshError:
    """Returns the error for two ranks that wait for each other in different places: ``rank`` in a torch collective at
    ``where``, ``other`` in an event (a call or step).

    Args:
        rank, where: the rank in the collective, and its name and source line.
        other, does: the rank in the event, and the event's (topic, text) lines.
    """
    return MeshError(
        f"rank {rank} waits in {where}, and rank {other} waits for it at a {does[0][1]}",
        fix="call both on every rank, equally often and in the same order (equally many batches: drop_last=True, or a "
        "sampler that pads); no norm, number or whole tensor of a parameter on one rank only",
    )


def _setting_text(value: object) -> str:
    """Returns a setting of torch, or a tuple of them, as text for an event: "cpu torch.bfloat16", "none"."""
    if isinstance(value, tuple):
        return ", ".join(" ".join(map(str, x)) if isinstance(x, tuple) else str(x) for x in value) or "none"
    return str(value)
