"""`ProgramCache`: the programs of a module, by call signature and guards, and the calls whose programs are known."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import nn

from shardc._compat import PyTree
from shardc.errors import InputError, ShardcWarning
from shardc.ir.deferred import NOTHING, Deferred
from shardc.ir.executable import Executable
from shardc.ir.guards import Guards, Lookup, Values, parse, tracing
from shardc.ir.layout import Layout
from shardc.logs import CACHE, timed
from shardc.runtime.events import Event
from shardc.runtime.gloo.buffers import Buffers
from shardc.runtime.host import cheap_garbage_collection
from shardc.runtime.identity_guards import IdentityGuards, ModuleSnapshot
from shardc.runtime.inputs import CacheKey, Example, Signature, TorchGlobalState, no_targets, takes_loss
from shardc.runtime.parameter_checks import ParamStore
from shardc.runtime.routing import Routing
from shardc.runtime.sharding_spec import ShardingSpec
from shardc.runtime.step import Runner

_SHOWN = 3  # differences in a message
_MANY_SIZES = 4  # programs of calls that differ in sizes of tensors
_MANY = 8  # programs of one call that differ in what was read; as Dynamo's limit


@dataclass
class CallCacheEntry:
    """What is cached for calls of one signature: their event, the axes of uneven rows, and their program.

    Args:
        event: event by which ranks compare such a call.
        row_axes: per tensor, the axes over which ranks may pass different numbers of rows; empty if none do.
        program: program of such calls; None before the first one runs.
    """

    event: Event
    row_axes: tuple[tuple[str, ...], ...]
    program: Executable | None = None


class Build(Protocol):
    """Function that compiles a program for example inputs at global shapes, with the settings that all programs of a
    module share.

    Attributes:
        dynamic: the dynamic sizes (`shardc.dynamic`).
        families: the programs of dynamic sizes.
        loss: loss function that programs include.
    """

    dynamic: Any
    families: Any
    loss: Callable[..., object] | None

    def __call__(self, template: nn.Module, example: Example, deferred: Deferred = NOTHING) -> Executable: ...

    def stored(self, template: nn.Module, example: Example, evaluates: bool) -> Executable:
        """Returns a program from the store of compiled programs on disk, if an earlier run or another rank has put it
        there. Compiles it otherwise.
        """

    def sized(
        self,
        template: Callable[[], nn.Module],
        example: Example,
        call: Signature,
        deferred: Deferred,
        holds: Callable[[Guards], bool],
    ) -> Executable | None:
        """Returns the program for a call whose inputs have dynamic sizes. Returns None if none of their sizes is
        dynamic.
        """

    @property
    def has_own_inputs(self) -> bool:
        """Whether the plan has per-rank inputs (`shardc.per_rank`)."""

    def numbered(self, names: Sequence[str]) -> dict[int, int]:
        """For inputs that number rows of each rank's shard of another input: maps the position of the numbering input
        to the position of the input with those rows.
        """

    def input_layouts(self, shapes: Sequence[tuple[str, tuple[int, ...]]]) -> list[Layout]:
        """Returns the layouts of inputs, given as (name, global shape)."""

    def for_copy(self) -> Build:
        """Returns a builder for a copy of the module."""


class ProgramCache:
    """The compiled programs of one module, and facts about recent kinds of calls (`CallCacheEntry`). The facts are
    dropped as soon as a guard may fail.

    Args:
        spec: mesh and layouts of the module.
        params: its parameters.
        build: builder of the programs.

    Attributes:
        programs: programs of fixed sizes; those of dynamic sizes are in ``build.families``.
        calls: facts about calls by `Arguments.key`.
        explicit: whether `Namespace.lower` was called. A call that was not lowered then raises instead of compiling.
        shapes: (name, local shape) of an input -> its global shape. A local shape alone does not say whether a dim is
            split or, since the axes do not divide it, replicated.
        buffers: memory for the results of collectives, shared by all programs: it grows to the largest one's needs.
        routing: records of the layers of experts in the last forward; each runner replaces them.
        runners: id of a program that has run -> its runner.
    """

    def __init__(self, spec: ShardingSpec, params: ParamStore, build: Build) -> None:
        self.spec, self.params, self.build = spec, params, build
        self.programs: dict[CacheKey, Executable] = {}
        self.calls: dict[Hashable, CallCacheEntry] = {}  # facts about recent calls
        # `explicit`: whether the user has called `lower`, so that calls of other shapes raise.
        self.explicit, self.buffers = False, Buffers()
        self.shapes: dict[tuple[str, tuple[int, ...]], tuple[int, ...]] = {}  # (input, local shape) -> global shape
        self.routing = Routing()  # counts of tokens and loads of the layers of experts
        self.runners: dict[int, Runner] = {}
        # Called with an evicted program of dynamic sizes: its runner would keep it alive.
        self.build.families.forget = lambda program: self.runners.pop(id(program), None)
        self._snapshot: ModuleSnapshot | None = None  # of the module at the last call
        # id of a program from the store -> that program, which keeps the id taken, and the same with its stages.
        self._shown: dict[int, tuple[Executable, Executable]] = {}
        self._unused: list[CacheKey] = []  # of programs of precompiled=, until one fits a call
        self._holding: set[tuple[Guards, bool]] = set()  # guards that hold, and whether gradients are recorded
        self._identities: IdentityGuards | None = None  # quick checks of the objects that captures have read

    def current_snapshot(self) -> ModuleSnapshot:
        """Returns the current `ModuleSnapshot` of the module. If it is a new one, or if the quick checks of the objects
        that captures have read (`IdentityGuards`) fail, ``calls``, the cached facts about calls, is emptied first.
        """
        snapshot = self.params.current_snapshot()
        if snapshot is not self._snapshot or self._identities is None or not self._identities.holds():
            # Cached calls skip the comparison of guards, and need it now.
            self.calls.clear()
            self._holding.clear()
            self._snapshot = snapshot
            self._watch()  # makes new `_identities`, with the values of now
        return snapshot

    def _watch(self) -> None:
        """Rebuilds the `IdentityGuards`, the quick checks by identity of all objects that captures of this cache's
        programs have read.
        """
        guards = chain((key.guards for key in self.programs), self.build.families.guards())
        self._identities = IdentityGuards((x.reads for x in guards), self.params.view, self.build.loss)

    def holds(self, guards: Guards) -> bool:
        """Whether ``guards`` hold: the attributes and globals that a capture read still have equal values. A result
        True is cached.
        """
        key = guards, torch.is_grad_enabled()  # the grad mode is among what guards compare
        if key not in self._holding and guards.hold(self.params.view, self.build.loss):
            self._holding.add(key)
        return key in self._holding

    def find(self, call: Signature, deferred: Deferred) -> Executable | None:
        """Returns the program for a call of the model in its present state; None if there is none."""
        for key, program in self.programs.items():
            if key.deferred == deferred and key.call == call and self.holds(key.guards):
                return program
        return None

    def add(self, program: Executable, guards: Guards | None = None) -> None:
        """Adds a compiled program to the cache, for its call while ``guards`` hold. It replaces a program with equal
        guards.

        Warns if there are many programs of one call.

        Args:
            guards: by default those of the program.
        """
        key = CacheKey(program.key.call, guards or program.guards, program.deferred)
        # For the warning: values that captures of this call have read -> key of the program for them.
        variants = {other.guards.values: other for other in self.programs if other.call == key.call}
        same_call = [other for other in self.programs if (other.call, other.deferred) == (key.call, key.deferred)]
        equal = [other for other in same_call if other.guards.equals(key.guards)]
        self.programs[equal[0] if equal else key] = program
        self._watch()
        count = len(variants) + 1
        if key.guards.values not in variants and count >= _MANY and count & (count - 1) == 0:  # a power of 2
            warnings.warn(ShardcWarning(_changing([*variants, key.guards.values])), stacklevel=2)
        if not equal:
            self._warn_of_calls(key.call)

    def _warn_of_calls(self, call: Signature) -> None:
        """Warns if many programs were compiled for calls that differ from ``call`` in sizes only, or in constants only.

        It does at each power of two, from four programs on for sizes, and from eight on for constants.
        """
        # (test whether two calls are alike, number of alike calls that warns, text of the warning).
        sizes = Signature.is_but_for_sizes, _MANY_SIZES, _of_sizes
        constants = Signature.is_but_for_constants, _MANY, _of_constants
        for is_alike, many, text in (sizes, constants):
            calls = [other for other in dict.fromkeys(key.call for key in self.programs) if is_alike(other, call)]
            count = len(calls)
            # `count & (count - 1)` is 0 for powers of 2. The last of the calls is the new one, else it was counted.
            if count >= many and count & (count - 1) == 0 and calls[-1] == call:
                warnings.warn(ShardcWarning(text(calls)), stacklevel=3)

    def with_loss(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> bool:
        """Whether a call passes the arguments of the loss too, after those of the model. It does if ``forward`` takes
        the call without them.

        Raises:
            InputError: ``forward`` takes the call neither with nor without the loss's arguments.
        """
        return takes_loss(self.params.view, args, kwargs, None if self.spec.targets is None else len(self.spec.targets))

    def program_for(self, args: Sequence[PyTree], kwargs: dict[str, PyTree], needs_dumps: bool = False) -> Executable:
        """Returns the program for example inputs at global shapes, in the model's current mode. If the cache has none,
        it is loaded from the store on disk or compiled.

        It has a backward, except under no_grad if the model reads the grad mode.

        Args:
            needs_dumps: whether the graphs after each pass are needed, which a program from the store does not have.
        """
        call = self.signature(args, kwargs)
        self.mark(call.names, args, kwargs)  # dims that `torch._dynamo.mark_dynamic` marks
        evaluates = not torch.is_grad_enabled()
        # In training, a module with a loss must get the loss's arguments: without them there is nothing to train.
        if (
            self.spec.targets
            and self.params.view.training
            and not (needs_dumps or evaluates or self.with_loss(args, kwargs))
        ):
            raise no_targets(self.params.view, self.spec.targets)
        deferred = NOTHING if evaluates else self.params.sync.deferred()
        # Only a trace tells whether the model reads the grad mode; if so, a call without gradients has its own program:
        # it is traced in grad mode first, and then once more without.
        for grad in True, False:
            with tracing(grad):
                example = Example(args, kwargs, self.with_loss(args, kwargs))
                program = self._find_or_compile(call, example, deferred, needs_dumps, evaluates)
            # One program, with a backward, serves both modes, unless what the model computes depends on the mode.
            if not (evaluates and program.guards.reads.grad_mode):
                break
        return program

    def _find_or_compile(
        self, call: Signature, example: Example, deferred: Deferred, needs_dumps: bool, evaluates: bool
    ) -> Executable:
        """Returns the program for a call of the model in its present state, from the cache or the store, or compiled.

        Args:
            deferred: the gradients that the call leaves unreduced.
            needs_dumps: as in `program_for`.
            evaluates: whether it is a call without gradients.
        """
        sized = self._sized(call, example, deferred)  # None without dynamic sizes
        program = in_cache = self.find(call, deferred) if sized is None else sized
        if needs_dumps and in_cache is not None and in_cache.from_store:
            # It lacks the graphs after each pass: `_shown` has one compiled with these, if they were asked for before.
            program = self._shown.get(id(in_cache), (in_cache, None))[1]
        if program is not None:
            self._unused = []  # the warning is about the first call only
            CACHE.info("hit: %s", ", ".join(call.names))
            return program
        self._warn_of_unused(call, deferred)
        if CACHE.isEnabledFor(logging.INFO):
            CACHE.info("miss: %s", self._miss_reason(list(self.programs), call, deferred))
        with cheap_garbage_collection(), timed("program"):
            model = self.params.present()
            # The store has neither the graphs after each pass nor programs of `no_sync`.
            if needs_dumps or deferred:
                program = self.build(model, example, deferred)
            else:
                program = self.build.stored(model, example, evaluates)
        if in_cache is None:
            self.add(program)
        else:  # calls go on with the one that ranks have compared
            self._shown[id(in_cache)] = in_cache, program
        CACHE.info("new program: %s", program.stored)
        return program

    def add_saved(self, programs: Iterable[Executable]) -> None:
        """Adds programs that the user loaded and passed to `shardc.compile`. A warning follows if the first call can
        use none of them.
        """
        for program in programs:
            self.add(program)
        self._unused = list(self.programs)

    def _warn_of_unused(self, call: Signature, deferred: Deferred) -> None:
        """Warns, once, that none of the programs that the user loaded fits a call, so that one is compiled."""
        if self._unused:
            reason = self._miss_reason(self._unused, call, deferred)
            self._unused = []
            text = f"no program of precompiled= fits this call, which compiles one: {reason}"
            warnings.warn(ShardcWarning(text), stacklevel=5)

    def _miss_reason(self, programs: Sequence[CacheKey], call: Signature, deferred: Deferred) -> str:
        """Returns, as text, why none of ``programs`` fits a call: how the nearest call that has a program differs, or
        which value that a capture read has changed.

        Args:
            programs: their keys, the latest last.
            call, deferred: the call, and the gradients that it leaves unreduced.
        """
        if not programs:
            return "the first call"
        latest_first = programs[::-1]
        for key in latest_first:
            if key.call == call and key.deferred == deferred:
                # The call is the same, so guards failed: what was read has another value.
                values, was = key.guards.reads.values(self.params.view, self.build.loss), dict(key.guards.values)
                changed = [f"{name} is {x} and was {was.get(name)}" for name, x in values if was.get(name) != x]
                return _listed(changed or ["the graphs of each pass are needed, which a stored program lacks"])
        for key in latest_first:
            if key.call == call:  # then the deferred gradients differ
                return f"{len(deferred.names)} gradients stay unreduced and {len(key.deferred.names)} did (no_sync)"
        # The nearest call is the one with the fewest differences.
        return _listed(min((call.differences(key.call) for key in latest_first), key=len))

    def _sized(self, call: Signature, example: Example, deferred: Deferred) -> Executable | None:
        """Returns the program for a call whose inputs have dynamic sizes, compiled if there is none yet. Returns None
        if no size is dynamic.
        """
        program = self.build.sized(self.params.present, example, call, deferred, self.holds)
        # The guards of a new program are not known to hold: the quick identity checks must cover what it has read, too.
        if program is not None and (program.guards, torch.is_grad_enabled()) not in self._holding:
            self._watch()
        return program

    def mark(self, names: Sequence[str], args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> None:
        """Records as dynamic those dims of the call's tensors that the user marked with
        ``torch._dynamo.mark_dynamic``.
        """
        self.build.dynamic.mark(list(zip(names, pytree.tree_leaves((tuple(args), kwargs)), strict=True)))

    def lowered_but_for_sizes(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> bool:
        """Whether there is a program for these arguments if their dynamic sizes and train or eval mode are ignored."""
        call = self.signature(args, kwargs)
        inputs = list(zip(call.names, pytree.tree_leaves((tuple(args), kwargs)), strict=True))
        dims, _ = self.build.dynamic.of(inputs)  # the dims with dynamic sizes
        return any(key.call.without(dims).leaves == call.without(dims).leaves for key in self.programs)

    def lowered(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> bool:
        """Whether there is a program for these arguments, given at global shapes."""
        with torch.enable_grad():
            return self.find(self.signature(args, kwargs), NOTHING) is not None

    def whole_shapes(self, local: Sequence[tuple[str, tuple[int, ...]]]) -> list[tuple[int, ...]]:
        """Returns the global shapes of inputs given as (name, local shape). A shape recorded by `note_cut` goes
        before the one that the plan implies.
        """
        by_plan = self.spec.global_shapes(local)
        # `setdefault`: returns the shape that is recorded, and records that of the plan otherwise.
        return [self.shapes.setdefault(named, shape) for named, shape in zip(local, by_plan, strict=True)]

    def note_cut(self, name: str, local: tuple[int, ...], whole: tuple[int, ...]) -> None:
        """Records the global shape ``whole`` of input ``name`` for the shards of shape ``local`` that were cut from
        it.

        Raises:
            InputError: an input of another global shape has shards of the same shape, as it does not divide and is
                replicated.
        """
        previous = self.shapes.setdefault((name, local), whole)
        if previous != whole:
            small, large = sorted((list(whole), list(previous)))
            raise InputError(
                f"input {name!r}: global inputs of {small} and of {large} both give each rank {list(local)}; "
                f"{small} does not divide and is passed whole",
                fix=f"drop or pad the batch of {small}, or compile another module for it",
            )

    def signature(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> Signature:
        """Returns the signature of a call in the current train or eval mode."""
        mode = self.current_snapshot().mode()
        return Signature.of(mode, TorchGlobalState.now(self.spec.device), self.input_names(args, kwargs), args, kwargs)

    def input_names(self, args: Sequence[PyTree], kwargs: dict[str, PyTree]) -> list[str]:
        """Returns a name for each tensor or other leaf in the arguments of a call, which may end with the loss's."""
        loss_args = len(self.spec.targets or ()) if self.with_loss(args, kwargs) else 0
        model = self.params.view
        return self.spec.input_names(model, args, kwargs, loss_args)

    def apply_assignments(self, program: Executable) -> None:
        """Sets attributes of the model to the values that its forward assigned during capture. On one device the
        first call would set them.

        The guards are taken again with these values, so that ``program`` serves later calls too.
        """
        reads = program.guards.reads
        if reads.sets:
            lookup = Lookup(self.params.view, self.build.loss, reads.scopes)
            for expression, value in reads.sets:
                _, owner, name = parse(expression)  # ("attribute", path of its object, its name)
                setattr(lookup(owner), name, value)
            self.add(program, Guards.of(reads, self.params.view, self.build.loss))

    def runner(self, program: Executable) -> Runner:
        """Returns the `Runner`, which runs the graphs of ``program`` on this rank; made at the first call."""
        if id(program) not in self.runners:
            self.runners[id(program)] = Runner(program, self.spec, self.params, self.buffers, self.routing)
        return self.runners[id(program)]


def _listed(texts: list[str]) -> str:
    """Joins the first few of ``texts`` to one text. It ends with the number of texts that are left out."""
    more = f", and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return "; ".join(texts[:_SHOWN]) + more


def _changing(variants: list[Values]) -> str:
    """Returns the text of a warning: one call was compiled several times because values that its code reads changed.
    ``variants`` has the values (guards) of each program.
    """
    values_by_name = [dict(values) for values in variants]
    differ = [name for name in values_by_name[-1] if len({values.get(name) for values in values_by_name}) > 1]
    shown = [
        f"{_shown(name)} is {values_by_name[-1][name]} and was {values_by_name[-2].get(name, 'not read')}"
        for name in differ[:3]
    ]
    return (
        f"the module was compiled {len(variants)} times for calls that differ only in what its code reads, last "
        f"because {' and '.join(shown)}; make a value that changes from step to step an input or a buffer (a "
        "tensor), or do not read it in forward"
    )


def _of_sizes(calls: Sequence[Signature]) -> str:
    """Returns the text of a warning: the module was compiled for each of ``calls``, which differ in sizes only. The
    text proposes ``dynamic`` sizes.
    """
    sizes = {  # (input, dim) -> its size in each call
        (name, dim): tuple(dict(call.tensors)[name].shape[dim] for call in calls)
        for name, like in calls[0].tensors
        for dim in range(len(like.shape))
    }
    differ = {at: in_calls for at, in_calls in sizes.items() if len(set(in_calls)) > 1}
    # Dims that always have the same size share a name.
    names = {in_calls: f"n{number}" for number, in_calls in enumerate(dict.fromkeys(differ.values()))}
    dynamic: dict[str, dict[int, str]] = {}
    for (name, dim), in_calls in differ.items():
        dynamic.setdefault(name, {})[dim] = names[in_calls]
    (name, dim), in_calls = next(iter(differ.items()))
    return (
        f"the module was compiled {len(calls)} times for calls that differ only in sizes (dim {dim} of {name!r} was "
        f"{', '.join(map(str, in_calls[-4:]))}); for one program of all sizes write shardc.compile(..., "
        f"dynamic={dynamic}), or pad the inputs to a few sizes"
    )


def _of_constants(calls: Sequence[Signature]) -> str:
    """Returns the text of a warning: the module was compiled for each of ``calls``, which differ only in arguments
    that are not tensors. The text has advice.
    """
    # Constant argument -> its value in each call.
    values = {name: [repr(dict(call.constants)[name]) for call in calls] for name, _ in calls[0].constants}
    name, row = next((name, row) for name, row in values.items() if len(set(row)) > 1)
    return (
        f"the module was compiled {len(calls)} times for calls that differ only in arguments that are no tensors "
        f"({name!r} was {', '.join(row[-4:])}); pass a number that changes from step to step as a tensor, and leave "
        "out what forward does not need"
    )


def _shown(name: str) -> str:
    """Returns the expression ``name`` with ``.x`` in place of each ``._modules['x']``."""
    return re.sub(r"\._modules\['([^']+)'\]", r".\1", name)
