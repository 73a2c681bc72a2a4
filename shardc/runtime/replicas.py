"""Compares values that must be equal on several ranks: parameters before their first use, and inputs at some calls."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from shardc.ir.layout import Layout
from shardc.runtime.events import SAME, Event
from shardc.runtime.groups import Groups
from shardc.runtime.owned import OwnedLayout
from shardc.runtime.shards import fingerprint, flat_index

Sources = dict[str, tuple[int, int]]  # parameter -> fingerprints of the unsharded tensor and of the shard

_APART = 32  # kinds of calls with a count of their own
_EVERY = 1024  # calls between two comparisons, in the long run


class Turns:
    """Counts a module's calls, to choose those at which ranks compare inputs; all ranks choose the same.

    Attributes:
        paused: whether calls are neither counted nor chosen.
    """

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self.paused = False

    def due(self, kind: str) -> bool:
        """Counts a call of a ``kind``, and returns whether ranks compare its inputs: at calls 1 to 3, powers of 2,
        and every 1024th.

        Args:
            kind: `Event.key` of the call; kinds after the first 32 share a count.
        """
        if self.paused:
            return False
        counts = self._counts
        if kind not in counts and len(counts) >= _APART:
            kind = ""  # the count that further kinds share, so that memory is bounded
        count = counts[kind] = counts.get(kind, 0) + 1
        return count & (count - 1) == 0 or count == 3 or count % _EVERY == 0  # the first: powers of 2


def compare_values(
    name: str,
    tensors: Mapping[str, Tensor],
    storages: Mapping[str, Layout],
    sources: Sources,
    groups: Groups,
) -> None:
    """Compares fingerprints of parameters and buffers between ranks, through the store.

    Args:
        name: name of the module.
        tensors: parameters and buffers by name; buffers are replicated.
        storages: storage layout of each parameter, as this rank has it.
        sources: of each parameter that was cut from an unsharded tensor, the fingerprints of that tensor, which must
            be equal on all ranks unless the shard has changed since, and of the shard as it was cut.

    Raises:
        MeshError: on every rank, if replicas differ; names the tensor and the ranks.
    """
    consistency, groups = groups.consistency, groups.whole  # the ranks of all stages
    if consistency.alone:
        return
    fingerprints: dict[str, tuple[int, int | None]] = {}  # fingerprints of the shard, and of what it was cut from
    for key, x in tensors.items():
        of_shard = _fingerprint(x)
        # If the shard has changed since it was cut, the unsharded tensor says nothing about it.
        of_source, of_shard_as_cut = sources.get(key, (None, None))
        fingerprints[key] = of_shard, of_source if of_shard_as_cut == of_shard else None
    # Names, shapes and layouts are compared as an event, at which ranks exchange their fingerprints.
    stored = {key: f", stored as {storage}" for key, storage in storages.items()}
    listed = "\n".join(f"{key} of shape {list(x.shape)}, {x.dtype}{stored.get(key, '')}" for key, x in tensors.items())
    event = Event((("event", f"first use of the values of {name}"), ("parameters and buffers", listed)))
    compared_with = {key: _first_replica(_sharding_axes(storages.get(key)), groups) for key in tensors}
    answers = consistency.exchange(event, json.dumps(fingerprints), {0, *compared_with.values()})
    theirs = {rank: json.loads(text) for rank, text in answers.items()}
    wrong: dict[str, int] = {}  # tensor -> mesh rank that has other values of it
    for key, (of_shard, of_source) in fingerprints.items():
        # A shard must equal that of the first replica; whole tensors that were sharded, those of the first rank.
        replica, first_source = compared_with[key], theirs[0][key][1]
        if theirs[replica][key][0] != of_shard:
            wrong[key] = replica
        elif None not in (of_source, first_source) and of_source != first_source:
            wrong[key] = 0
    # The text of an error, or that nothing differs.
    outcome = _differing_values(wrong, storages, groups) if wrong else SAME
    # Not `SAME` on one rank makes the events differ, so that all ranks raise its text.
    consistency.enter(Event((("event", f"comparison of the values of {name}"), ("values", outcome))), ask=True)


def _differing_values(wrong: Mapping[str, int], storages: Mapping[str, Layout], groups: Groups) -> str:
    """Returns the error text for parameters and buffers whose values differ from those on another mesh rank.

    Args:
        wrong: their names -> that rank.
        storages: as in `compare_values`.
    """
    (key, rank), more = next(iter(wrong.items())), len(wrong) - 1
    kind = "parameter" if key in storages else "buffer"
    others = f", and so {'has 1 more tensor' if more == 1 else f'have {more} more tensors'}" if more else ""
    this_rank, other_rank = groups.consistency.rank, groups.everyone()[rank]
    return f"{kind} {key!r} has other values on rank {this_rank} than on rank {other_rank}{others}"


class Passed(NamedTuple):
    """An input as this rank passes it to a call, with the axes over which ranks pass different shards of it.

    Args:
        value: a tensor or DTensor.
        split: axes over which ranks pass different shards; along other axes they pass the same values.
        rows: the axes of these that split rows (dim 0).
    """

    value: Tensor
    split: tuple[str, ...]
    rows: tuple[str, ...]

    @classmethod
    def of(cls, x: Tensor, layout: Layout, rows: tuple[str, ...] = ()) -> Passed:
        """Describes the input ``x``, which has ``layout``: along which axes ranks pass different shards. ``rows`` are
        axes along which they may pass different numbers of rows.
        """
        if isinstance(x, DTensor):  # its placements say how it is split
            placed = zip(layout.mesh.axes, x.placements, strict=True)
            return cls(x, tuple(axis for axis, placement in placed if not placement.is_replicate()), ())
        row_axes = (rows or layout.dim_axes(0)) if layout.ndim else ()
        return cls(x, tuple(dict.fromkeys((*rows, *layout.axes))), row_axes)


def compare_inputs(
    name: str,
    inputs: Sequence[tuple[str, Layout]],
    tensors: Sequence[Tensor],
    rows: Sequence[tuple[str, ...]],
    groups: Groups,
    fix: str | None = None,
) -> None:
    """Compares fingerprints of a call's inputs between ranks that must pass the same values, through the store.

    Args:
        name: name of the module.
        inputs: (name, layout) of each input of the program.
        tensors: the inputs as this rank passes them.
        rows: per input, the axes over which numbers of rows differ; empty if none do.
        fix: what to do if values differ; by default advice on the sampler and the plan.

    Raises:
        MeshError: on every rank, if values differ; names the input, the axes and the ranks.
    """
    passed = {
        key: Passed.of(x, layout, over)
        for (key, layout), x, over in zip(inputs, tensors, rows or [()] * len(tensors), strict=True)
    }
    groups = groups.whole  # all stages take the same inputs
    consistency, mesh = groups.consistency, groups.mesh
    # Inputs of which some ranks pass the same shard: fewer shards than ranks.
    shared = {key: x for key, x in passed.items() if prod(map(mesh.size, x.split)) < mesh.ranks}
    if consistency.alone or not shared:
        return
    # Input -> the rank with whose values this rank compares its own.
    first = {key: _first_replica(x.split, groups) for key, x in shared.items()}
    fingerprints = {key: _fingerprint(x.value) for key, x in shared.items()}
    event = Event((("event", f"comparison of inputs of {name}"), ("inputs", ", ".join(fingerprints))))
    texts = consistency.exchange(event, json.dumps(fingerprints), set(first.values()))
    theirs = {rank: json.loads(text) for rank, text in texts.items()}
    wrong = [key for key, value in fingerprints.items() if theirs[first[key]][key] != value]
    lines = [("values of inputs", SAME)]
    if wrong:
        lines = _differing_inputs(wrong, shared[wrong[0]], first[wrong[0]], groups)
        lines = lines if fix is None else [lines[0], ("fix", fix)]
    # Not `SAME` on one rank makes the events differ, so that all ranks raise its text.
    consistency.enter(Event((("event", f"comparison of the values of inputs of {name}"), *lines)), ask=True)


def _differing_inputs(names: list[str], passed: Passed, first: int, groups: Groups) -> list[tuple[str, str]]:
    """Returns the error for inputs that differ between this rank and mesh rank ``first`` and should be equal, as two
    lines (topic, text): what differs, and the fix.

    Args:
        names: names of the inputs that differ.
        passed: the first of these inputs.
    """
    mesh, key = groups.mesh, names[0]
    along = ", ".join(axis for axis in mesh.axes if mesh.index(axis, first) != mesh.index(axis, groups.rank))
    lies = f"split over {', '.join(passed.split)}" if passed.split else "whole on every rank"
    more = f"; other inputs that differ: {', '.join(names[1:])}" if names[1:] else ""
    text = (
        f"input {key!r} has other values on rank {groups.consistency.rank} than on rank {groups.everyone()[first]}; "
        f"these differ along {along}, and it is {lies}{more}"
    )
    sampler = ""  # advice for a data loader, if rows of the input are split
    if passed.rows:
        index = (
            f'mesh.get_local_rank("{passed.rows[0]}")' if len(passed.rows) == 1 else f"the index along {passed.rows}"
        )
        sampler = f" (a sampler with num_replicas={prod(map(mesh.size, passed.rows))}, rank={index})"
    fix = (
        f"pass the same data on ranks that differ along {along}{sampler}, and draw what is random from the same seed; "
        f"or split it over {along} too: shardc.Plan(inputs={{{key!r}: ...}})"
    )
    return [("values of inputs", text), ("fix", fix)]


def note_source(sources: Sources, name: str, storage: Layout, whole: Tensor, param: Tensor) -> None:
    """Records fingerprints of the unsharded tensor ``whole`` and of its shard ``param``, for a comparison between
    ranks. Does nothing if ``storage`` does not shard the parameter.
    """
    if _sharding_axes(storage):
        assert isinstance(param, DTensor)
        sources[name] = fingerprint(whole), fingerprint(param._local_tensor)


def _sharding_axes(storage: Layout | None) -> tuple[str, ...]:
    """Returns the mesh axes along which ranks store different shards of a tensor. It is () for ``storage`` None, as
    buffers have.
    """
    if storage is None:
        return ()
    # Stages store different parameters; one without dims is on all stages.
    return (storage.stages, *storage.bound) if isinstance(storage, OwnedLayout) and storage.ndim else storage.bound


def _first_replica(split: tuple[str, ...], groups: Groups) -> int:
    """Returns the lowest mesh rank that has the same shard as this rank, for a tensor split over the axes ``split``."""
    index = flat_index(groups.mesh, split, groups.rank)
    return next(rank for rank in range(groups.mesh.ranks) if flat_index(groups.mesh, split, rank) == index)


def _fingerprint(x: Tensor) -> int:
    """Returns the fingerprint of a local tensor; 0 on ``meta``."""
    x = x._local_tensor if isinstance(x, DTensor) else x
    return 0 if x.is_meta else fingerprint(x)
