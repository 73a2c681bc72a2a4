"""Finds repeated blocks of a model: successive children of a container that do the same computation at the same shapes.

Runs the model on fake tensors, without tracing it, and records every torch function that it calls. Two blocks are
equal if they have equal tensor metadata, call the same functions on corresponding tensors, and get their arguments in
the same way from the block before. Names of classes and models play no part.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple
from unittest.mock import patch

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch
from torch.utils.hooks import RemovableHandle

from shardc._compat import PyTree, is_wrapper
from shardc.capture import markers
from shardc.capture.annotate import model_name
from shardc.capture.decompositions import fake_like
from shardc.capture.dtypes import Dtypes
from shardc.capture.replacements import is_cache, traceable_layers
from shardc.capture.trace import Loss, _Root, faked
from shardc.ir.code import constant_key
from shardc.ir.inner import metadata
from shardc.ir.module_paths import is_in, name_in
from shardc.ir.repeat import Repeat, Repeats

# Constants that are compared by value; other objects are compared by identity.
PLAIN = (
    int, float, complex, str, bytes, type(None), type(...), slice,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip

# Functions that draw; dropouts do where one of their arguments, ``training``, is true.
_DRAW = {
    "rand", "randn", "randint", "randperm", "rand_like", "randn_like", "randint_like", "bernoulli", "multinomial",
    "normal", "uniform", "exponential", "rrelu", "gumbel_softmax",
}  # fmt: skip

_LEAF = pytree.tree_structure(0)
Frozen = list[object]  # leaves of arguments or results, tensors as their `Token`


class Token(int):
    """The number of a tensor in recorded calls, in the order of first appearance. It stands for the tensor there."""


class Event(NamedTuple):
    """A recorded call of a torch function: its arguments and results, with their pytree specs."""

    function: Callable[..., object]
    args: Frozen
    args_spec: pytree.TreeSpec
    results: Frozen
    results_spec: pytree.TreeSpec


@dataclass
class Block:
    """One recorded call of a block (a numbered child of a container): what it took and gave, and the torch functions
    called inside.

    Args:
        enter, exit: range of the recorded torch function calls that are inside of the block's.
        takes, gives: its arguments and its results.
    """

    enter: int
    exit: int
    takes: Frozen
    gives: Frozen


class Recorder(TorchFunctionMode):
    """Records the torch functions that a run of a model calls, and the tensors they use.

    Args:
        reuse: whether a second call with arguments of the same metadata skips the function, and returns new fake
            tensors with the metadata of the first results. Only for results that share no memory with arguments.

    Attributes:
        events: the calls, in order.
        producers: the index of the event that first returned each tensor.
        inputs: the tokens of the inputs.
        names: the names of the parameters and buffers, by token.
        blocks: the calls of each numbered child.
        signatures: modules and tensor metadata of each numbered child; equal for blocks that may repeat, None for a
            child that cannot.
        result: the frozen results of the model.
        changed: the buffers that the model changes.
    """

    def __init__(self, reuse: bool) -> None:
        super().__init__()
        self.events: list[Event] = []
        self.producers: dict[Token, int] = {}
        self.inputs: list[Token] = []
        self.names: dict[Token, str] = {}
        self.blocks: dict[str, list[Block]] = {}
        self.signatures: dict[str, object] = {}
        self.result: Frozen = []
        self.changed: set[str] = set()
        # (function, metadata of its arguments) -> makers of fake tensors like its results.
        self._results: dict[Hashable, PyTree] | None = {} if reuse else None
        self._tokens: dict[int, Token] = {}  # by the tensor's id
        self._tensors: list[Tensor] = []  # all that have tokens, kept so that no id is used again

    def token(self, x: Tensor) -> Token:
        """Return the `Token` of the tensor ``x``. A tensor that was not seen before gets the next number."""
        if id(x) not in self._tokens:
            self._tokens[id(x)] = Token(len(self._tensors))
            self._tensors.append(x)
            self.producers[self._tokens[id(x)]] = len(self.events)
        return self._tokens[id(x)]

    def freeze(self, leaves: Sequence[object]) -> Frozen:
        """Return ``leaves`` in comparable form: a `Token` for each tensor, plain constants as they are, and the ``id``
        of any other object.
        """
        return [self.token(x) if isinstance(x, Tensor) else x if isinstance(x, PLAIN) else id(x) for x in leaves]

    def __torch_function__(
        self, func: Callable[..., PyTree], types: object, args: PyTree = (), kwargs: dict[str, PyTree] | None = None
    ) -> PyTree:
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        frozen = self.freeze(leaves)
        out = self._call(func, args, kwargs or {}, leaves, spec)
        results, results_spec = ([out], _LEAF) if isinstance(out, Tensor) else pytree.tree_flatten(out)
        self.events.append(Event(func, frozen, spec, self.freeze(results), results_spec))
        return out

    def _call(
        self,
        func: Callable[..., PyTree],
        args: PyTree,
        kwargs: dict[str, PyTree],
        leaves: list[object],
        spec: pytree.TreeSpec,
    ) -> PyTree:
        """Return the result of ``func(*args, **kwargs)``. With ``reuse``, a call like an earlier one (with equal
        metadata of arguments) is not made: return new fake tensors like the earlier results.
        """
        name = getattr(func, "__name__", "_")
        # Functions in place, and those of arguments that are not compared by value, are always called.
        if self._results is None or name.endswith("_") or not all(isinstance(x, (Tensor, *PLAIN)) for x in leaves):
            return func(*args, **kwargs)
        try:
            key = (func, spec, tuple(_metadata(x) for x in leaves))
            makers = self._results.get(key)
        except TypeError:  # something has no hash
            return func(*args, **kwargs)
        if makers is not None:
            return makers() if isinstance(makers, partial) else pytree.tree_map(lambda make: make(), makers)
        out = func(*args, **kwargs)
        results = pytree.tree_leaves(out)
        if results and all(type(x) is FakeTensor and not any(x is y for y in leaves) for x in results):
            self._results[key] = pytree.tree_map(_maker, out)
        return out


def _metadata(x: object) -> tuple[object, ...]:
    """Return a comparable tuple: class, shape, strides, dtype, device and ``requires_grad`` of a tensor, or type and
    value of a constant.
    """
    if isinstance(x, Tensor):
        return type(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad
    return constant_key(x)


def _maker(x: FakeTensor) -> Callable[[], FakeTensor]:
    """Return a function that makes new fake tensors with the metadata of ``x``."""
    with no_dispatch():
        meta = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")
    return partial(FakeTensor, x.fake_mode, meta, x.device)


def record_calls(
    model: nn.Module,
    args: Sequence[PyTree],
    kwargs: dict[str, PyTree],
    device: torch.device,
    loss: Loss | None,
    dtypes: Dtypes,
    reuse: bool,
) -> Recorder:
    """Runs ``model`` and its loss on fake tensors; returns a `Recorder` with the torch functions that they called.
    Arguments are those of `capture`.

    Args:
        reuse: as for `Recorder`. A buffer changed through a view counts as changed in the first of equal calls only.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    flat, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))  # as for a trace, which runs the same root module
    model = faked(model, mode, device, dtypes)
    root = _Root(model, flat, spec, loss)
    record = Recorder(reuse)
    with contextlib.ExitStack() as stack:
        stack.enter_context(markers.patched(markers.expert_patches()))
        stack.enter_context(dtypes.cast(model))
        stack.enter_context(traceable_layers(root))
        stack.enter_context(mode)
        stack.enter_context(torch.no_grad())
        fakes = [fake_like(x, device) for x in flat if isinstance(x, Tensor)]
        record.inputs = [record.token(x) for x in fakes]
        both = (root.named_parameters(remove_duplicate=False), root.named_buffers(remove_duplicate=False))
        # By id of a tensor: blocks that share tensors with other modules are told by them.
        all_names: dict[int, list[str]] = {}
        for name, x in (item for named in both for item in named):
            all_names.setdefault(id(x), []).append(model_name(name))
            record.names[record.token(x)] = model_name(name)
        for path, size in numbered_containers(model):
            container, names = model.get_submodule(path), Repeat(path, 0, size).names()
            for name, block in zip(names, container._modules.values(), strict=True):
                record.signatures[name] = _signature(block, name, all_names)
                for handle in _add_hooks(block, record.blocks.setdefault(name, []), record):
                    stack.enter_context(handle)
            # Blocks with wrapper tensors are repeats only if all blocks of the container are.
            if any(map(is_wrapper, (*container.parameters(), *container.buffers()))):
                if any(record.signatures[name] != record.signatures[names[0]] for name in names):
                    record.signatures.update(dict.fromkeys(names))
        # A change in place raises torch's version counter of the tensor.
        buffers = [(name, x, x._version) for name, x in root.named_buffers()]
        with record:
            record.result = record.freeze(pytree.tree_leaves(root(*fakes)))
        record.changed = {model_name(name) for name, x, version in buffers if x._version != version}
    # A block that changes its buffers cannot stand for others.
    for name in record.signatures:
        if any(is_in(buffer, name) for buffer in record.changed):
            record.signatures[name] = None
    return record


def _signature(block: nn.Module | None, name: str, all_names: Mapping[int, Sequence[str]]) -> object:
    """Return what two blocks must have in common to be repeats: classes of modules and metadata of tensors, by relative
    name. None if the block called ``name`` cannot repeat.

    It cannot if a module outside shares its tensors.

    Args:
        all_names: id of each tensor -> its names in the model.
    """
    if block is None:
        return None
    # Paths within the block: they must be equal, not the blocks' own.
    modules = [(path, type(module), module.training) for path, module in block.named_modules()]
    tensors = []
    for path, x in (*block.named_parameters(remove_duplicate=False), *block.named_buffers(remove_duplicate=False)):
        if not all(is_in(place, name) for place in all_names[id(x)]):
            return None
        tensors.append((path, metadata(x)))
    return modules, tensors


def _add_hooks(block: nn.Module | None, calls: list[Block], record: Recorder) -> list[RemovableHandle]:
    """Installs hooks on ``block`` that append a `Block` to ``calls`` whenever the block is called. ``record`` gives the
    tokens of its tensors; returns the hooks' handles.
    """
    if block is None:
        return []

    def enter(_module: nn.Module, args: PyTree, kwargs: PyTree) -> None:
        leaves = pytree.tree_leaves((args, kwargs), is_leaf=is_cache)  # how full a cache is does not matter
        # `leave` sets the end and the results.
        calls.append(Block(len(record.events), -1, record.freeze(leaves), []))

    def leave(_module: nn.Module, _args: PyTree, _kwargs: PyTree, output: PyTree) -> None:
        calls[-1].exit, calls[-1].gives = len(record.events), record.freeze(pytree.tree_leaves(output))

    return [
        block.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
        block.register_forward_hook(leave, with_kwargs=True),
    ]


def numbered_containers(model: nn.Module) -> list[tuple[str, int]]:
    """Return (path, number of children) of each module whose children are named "0", "1", ...; outermost modules come
    first.
    """
    containers = []
    for path, module in model.named_modules():
        children = list(module._modules)
        if children and children == [str(at) for at in range(len(children))]:
            containers.append((path, len(children)))
    return sorted(containers, key=lambda item: item[0].count("."))


@contextlib.contextmanager
def shortened(model: nn.Module, repeats: Repeats) -> Iterator[None]:
    """Context manager in which ``model`` has only the first ``repeats.keep`` blocks of each run. Children that come
    after a run get lower numbers.
    """
    containers = [(model.get_submodule(run.path), run) for run in repeats]
    with contextlib.ExitStack() as stack:
        # Last runs first, so that earlier runs keep the numbers of their children.
        for container, run in reversed(containers):
            children = list(container._modules.values())
            remaining = children[: run.first + repeats.keep] + children[run.first + run.count :]
            numbered = {str(at): child for at, child in enumerate(remaining)}
            stack.enter_context(patch.dict(container._modules, numbered, clear=True))
        yield


def find_repeats(
    model: nn.Module,
    args: Sequence[PyTree],
    kwargs: dict[str, PyTree],
    *,
    device: torch.device,
    keep: int,
    loss: Loss | None = None,
    dtypes: Dtypes,
) -> Repeats:
    """Return the runs of equal blocks in ``model``, at most one run per container, each longer than ``keep``. If each
    run is shortened to ``keep`` blocks, the rest of the model makes the same calls.

    Args:
        model, args, kwargs, device, loss, dtypes: as for `capture`.
        keep: the number of blocks that represent a run.
    """

    def record(dtypes: Dtypes) -> Recorder:
        # Where results are reused, a call does not show all buffers that it changes.
        calls = record_calls(model, args, kwargs, device, loss, dtypes, reuse=True)
        return record_calls(model, args, kwargs, device, loss, dtypes, reuse=False) if calls.changed else calls

    containers = [(path, size) for path, size in numbered_containers(model) if size > keep]
    if not containers:
        return Repeats()
    whole = record(dtypes)
    runs: list[Repeat] = []
    for path, size in containers:
        if not any(is_in(path, block) for run in runs for block in run.names()):
            run = _longest_run(whole, path, size)
            if run is not None and run.count > keep:
                runs.append(run)
    settled = False
    while runs:
        repeats = Repeats(tuple(runs), keep)
        with shortened(model, repeats):
            short = record(dtypes.shortened(repeats))
        if _calls_outside(whole, repeats, repeats.short) == _calls_outside(short, repeats.shortened):
            return repeats
        if not settled:  # a first call may leave state behind that later calls read
            whole, settled = record(dtypes), True
            continue
        runs.pop()  # fewer blocks change the rest of the model: give up the last run
    return Repeats()


def _longest_run(record: Recorder, path: str, size: int) -> Repeat | None:
    """Return the longest run of equal blocks among the ``size`` children of the container ``path``; of several, the
    first.

    None if there is none.
    """
    names = Repeat(path, 0, size).names()
    if any(len(record.blocks[name]) != 1 for name in names):
        return None
    calls = [record.blocks[name][0] for name in names]
    # Equal blocks with draws differ: each draw has a random sequence of its own.
    if any(_draws(func, args) for call in calls for func, args, *_ in record.events[call.enter : call.exit]):
        return None
    pairs = list(zip(calls, calls[1:], strict=False))
    if any(before.exit > after.enter for before, after in pairs):  # a block calls the next one
        return None
    bodies = [_calls_inside(record, call, name) for call, name in zip(calls, names, strict=True)]
    # Before block `at` come the calls `links[at]`, which are alike within a run.
    links = [None, *(_calls_between(record, before, after) for before, after in pairs)]
    runs, first = [], 0
    for at in range(1, size + 1):
        first_signature, signature = (record.signatures[names[i]] for i in (first, at)) if at < size else (None, None)
        # A run ends at its first block that differs, or that gets its arguments in another way than the second did.
        matches = first_signature is not None and first_signature == signature and bodies[first] == bodies[at]
        if not matches or (at > first + 1 and links[at] != links[first + 1]):
            runs.append(Repeat(path, first, at - first))
            first = at
    runs = [run for run in runs if run.count > 1 and not _escapes(record, calls, run)]
    return max(runs, key=lambda run: (run.count, -run.first), default=None)


def _draws(func: Callable[..., object], args: Frozen) -> bool:
    """Return whether a call of ``func`` draws random numbers, which differ from block to block."""
    name = getattr(func, "__name__", "").strip("_")
    share = any(isinstance(x, float) and x > 0 for x in args)  # ``p`` of a dropout; ``training`` is a True
    return name in _DRAW or ("dropout" in name and share and any(x is True for x in args))


def _tokens(leaves: Sequence[object]) -> dict[Token, int]:
    """Return `Token` -> its (last) index in ``leaves``, for each tensor in these leaves of recorded arguments or
    results. (A token stands for a tensor there.)
    """
    return {x: at for at, x in enumerate(leaves) if isinstance(x, Token)}


def _comparable(
    record: Recorder, start: int, events: Sequence[Event], extra: Sequence[object], name_of: Callable[[Token], object]
) -> tuple[list[Event], Frozen]:
    """Convert recorded ``events`` and the values ``extra`` to a form in which equal calls compare equal. Each tensor is
    replaced by its name (``name_of``), or by its number among the events' results.

    Args:
        start: results of calls recorded before this index keep their own identity.
        extra: more values to convert, after the calls.
        name_of: returns the name of a tensor from outside of the calls, None if it has none.
    """
    local: dict[Token, int] = {}  # tensor that one of these calls returned -> its number among them

    def role(x: Token) -> object:
        if (name := name_of(x)) is not None:
            return name
        # Any other tensor is equal to itself only.
        return ("own", local[x]) if x in local and record.producers[x] >= start else ("other", x)

    def frozen(leaves: Sequence[object]) -> Frozen:
        return [role(x) if isinstance(x, Token) else constant_key(x) for x in leaves]

    out = []
    for func, args, args_spec, results, results_spec in events:
        frozen_args = frozen(args)
        for x in _tokens(results):
            local.setdefault(x, len(local))
        out.append(Event(func, frozen_args, args_spec, frozen(results), results_spec))
    return out, frozen(extra)


def _calls_inside(record: Recorder, call: Block, name: str) -> object:
    """Return the torch function calls recorded in one ``call`` of the block ``name``, in comparable form.

    Tensors are named by the block's arguments, parameters and buffers.
    """
    takes = _tokens(call.takes)

    def name_of(x: Token) -> object:
        if (inner := name_in(record.names.get(x, ""), name)) is not None:
            return "parameter", inner
        return ("argument", takes[x]) if x in takes else None

    return _comparable(record, call.enter, record.events[call.enter : call.exit], call.gives, name_of)


def _calls_between(record: Recorder, before: Block, after: Block) -> object:
    """Return the torch function calls between two successive blocks, in comparable form: they compute the arguments of
    ``after`` from the arguments and results of ``before``.
    """
    gives, takes = _tokens(before.gives), _tokens(before.takes)

    def name_of(x: Token) -> object:
        return ("result", gives[x]) if x in gives else ("argument before", takes[x]) if x in takes else None

    return _comparable(record, before.exit, record.events[before.exit : after.enter], after.takes, name_of)


def _escapes(record: Recorder, calls: Sequence[Block], run: Repeat) -> bool:
    """Return whether something after ``run`` uses a tensor computed inside of it that is no result of its last block.
    ``calls`` has the recorded call of each child of the container.
    """
    start, last = calls[run.first].enter, calls[run.first + run.count - 1]
    tail = [x for _, args, *_ in record.events[last.exit :] for x in args]
    used = _tokens([*tail, *record.result]).keys() - _tokens(last.gives).keys() - record.names.keys()
    return any(start <= record.producers[x] < last.enter for x in used)


def _calls_outside(record: Recorder, repeats: Repeats, renamed: Callable[[str], object] = str) -> object:
    """Return the torch function calls outside of repeated blocks, in comparable form. ``renamed`` converts the names of
    parameters in it.
    """
    spans = []  # (first, end) of the calls in each run
    # A run's result -> (number of the run, index among its results): the same in a model with fewer blocks.
    results_of_runs: dict[Token, tuple[int, int]] = {}
    for number, run in enumerate(repeats):
        calls = [record.blocks[name][0] for name in run.names()]
        spans.append((calls[0].enter, calls[-1].exit))
        results_of_runs.update({x: (number, at) for x, at in _tokens(calls[-1].gives).items()})
    events = [e for at, e in enumerate(record.events) if not any(start <= at < end for start, end in spans)]
    inputs, results = _tokens(record.inputs), {x for *_, results, _ in events for x in _tokens(results)}

    def name_of(x: Token) -> object:
        if x in record.names:
            return "parameter", renamed(record.names[x])
        if x in results_of_runs:
            return "result of a run", results_of_runs[x]
        # A tensor that no call returned, and no input, is a constant: ("input", None).
        return ("input", inputs.get(x)) if x in inputs or x not in results else None

    return _comparable(record, 0, events, record.result, name_of)
