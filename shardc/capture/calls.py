"""Records the torch functions that a model calls, by a run on fake tensors without tracing."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._mode_utils import no_dispatch

from shardc._compat import is_wrapper
from shardc.capture import experts
from shardc.capture.annotate import PREFIX
from shardc.capture.caches import is_cache
from shardc.capture.dtypes import Dtypes
from shardc.capture.layers import other_layers
from shardc.capture.strides import fake_like
from shardc.capture.trace import Loss, _Root, faked
from shardc.ir.inner import metadata

# Constants that are compared by value; any other object is only like itself.
PLAIN = (
    int, float, complex, str, bytes, type(None), type(...), slice,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip


_LEAF = pytree.tree_structure(0)


@dataclass
class Block:
    """One call of a block: its range of events, its arguments and its results."""

    enter: int
    exit: int
    takes: list[Any]
    gives: list[Any]


@dataclass
class Record:
    """The torch functions that a run of a model called, and the tensors they used.

    Args:
        events: (function, frozen arguments, frozen results) in order.
        producers: the index of the event that first returned each tensor, by its token.
        inputs: the tokens of the inputs.
        names: the names of the parameters and buffers, by token.
        blocks: the calls of each numbered child.
        signatures: modules and tensor metadata of each numbered child; equal for blocks that may repeat, None for a
            child that cannot.
        result: the frozen results of the model.
        changed: the buffers that the model changes.
    """

    events: list[tuple[Any, Any, Any]] = field(default_factory=list)
    producers: dict[int, int] = field(default_factory=dict)
    inputs: list[int] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    blocks: dict[str, list[Block]] = field(default_factory=dict)
    signatures: dict[str, Any] = field(default_factory=dict)
    result: Any = None
    changed: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class Token:
    """A tensor's number, in the order of first appearance."""

    at: int


class Writer(TorchFunctionMode):
    """Records the torch functions that are called.

    Args:
        reuse: whether a second call with arguments of the same metadata skips the function, and returns new fake
            tensors with the metadata of the first results. Only for results that share no memory with arguments.
    """

    def __init__(self, record: Record, reuse: bool) -> None:
        super().__init__()
        self.record = record
        self._results: dict[Any, Any] | None = {} if reuse else None
        self._tokens: dict[int, Token] = {}
        self._tensors: list[Any] = []  # so that no address is used again

    def token(self, x: Any) -> Token:
        if id(x) not in self._tokens:
            self._tokens[id(x)] = Token(len(self._tensors))
            self._tensors.append(x)
            self.record.producers[self._tokens[id(x)].at] = len(self.record.events)
        return self._tokens[id(x)]

    def freeze(self, tree: Any) -> tuple[list[Any], Any]:
        leaves, spec = pytree.tree_flatten(tree)
        return self._frozen(leaves), spec

    def freeze_arguments(self, tree: Any) -> list[Any]:
        """Return the frozen arguments of a block; a cache is one leaf, so that its fill level does not matter."""
        return self._frozen(pytree.tree_flatten(tree, is_leaf=is_cache)[0])

    def _frozen(self, leaves: list[Any]) -> list[Any]:
        return [self.token(x) if isinstance(x, Tensor) else x if isinstance(x, PLAIN) else id(x) for x in leaves]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs or {}))
        frozen_args = self._frozen(leaves), spec
        out = self._call(func, args, kwargs or {}, leaves, spec)
        frozen_results = ([self.token(out)], _LEAF) if isinstance(out, Tensor) else self.freeze(out)
        self.record.events.append((func, frozen_args, frozen_results))
        return out

    def _call(self, func: Any, args: Any, kwargs: Any, leaves: list[Any], spec: Any) -> Any:
        name = getattr(func, "__name__", "_")
        if self._results is None or name.endswith("_") or not all(isinstance(x, (Tensor, *PLAIN)) for x in leaves):
            return func(*args, **kwargs)
        try:
            key = (func, spec, tuple(_described(x) for x in leaves))
            result = self._results.get(key)
        except TypeError:  # something has no hash
            return func(*args, **kwargs)
        if isinstance(result, _Example):
            return _copy_of(result)
        if result is not None:
            return pytree.tree_map(_copy_of, result, is_leaf=lambda x: isinstance(x, _Example))
        out = func(*args, **kwargs)
        results = pytree.tree_leaves(out)
        if results and all(type(x) is FakeTensor and not any(x is y for y in leaves) for x in results):
            self._results[key] = pytree.tree_map(_example, out)
        return out


def _described(x: Any) -> Any:
    if isinstance(x, Tensor):
        return type(x), x.shape, x.stride(), x.dtype, x.device, x.requires_grad
    return type(x), x


class _Example(NamedTuple):
    """A fake tensor and its meta tensor, from which `_copy_of` makes new fake tensors."""

    like: FakeTensor
    meta: Tensor


def _copy_of(example: _Example) -> FakeTensor:
    return FakeTensor(example.like.fake_mode, example.meta, example.like.device)


def _example(x: FakeTensor) -> _Example:
    with no_dispatch():
        return _Example(x, torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta"))


def record_calls(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    device: torch.device,
    loss: Loss | None,
    dtypes: Dtypes,
    reuse: bool,
) -> Record:
    """Runs ``model`` and its loss on fake tensors and returns the calls; ``reuse`` is that of `Writer`.

    With ``reuse``, a buffer that is changed through a view is seen to change in the first of several equal calls only.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    flat, spec = pytree.tree_flatten((tuple(args), dict(kwargs)))
    model = faked(model, mode, device, dtypes)
    root = _Root(model, flat, spec, loss)
    record = Record()
    writer = Writer(record, reuse)
    handles: list[Any] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(experts.patched(experts.other_forms()))
        stack.callback(lambda: [handle.remove() for handle in handles])
        stack.enter_context(dtypes.cast(model))
        stack.enter_context(other_layers(root))
        stack.enter_context(mode)
        stack.enter_context(torch.no_grad())
        fakes = [fake_like(x, device) for x in flat if isinstance(x, Tensor)]
        record.inputs = [writer.token(x).at for x in fakes]
        both = (root.named_parameters(remove_duplicate=False), root.named_buffers(remove_duplicate=False))
        places: dict[int, list[str]] = {}
        for name, x in (item for named in both for item in named):
            places.setdefault(id(x), []).append(name.removeprefix(PREFIX))
            record.names[writer.token(x).at] = name.removeprefix(PREFIX)
        for path, size in numbered_containers(model):
            container = model.get_submodule(path)
            for at in range(size):
                name = f"{path}.{at}" if path else str(at)
                record.signatures[name] = _signature(container._modules[str(at)], name, places)
                handles += _add_hooks(container._modules[str(at)], record.blocks.setdefault(name, []), writer)
            if any(map(is_wrapper, (*container.parameters(), *container.buffers()))):  # all are folded, or none
                names = [f"{path}.{at}" if path else str(at) for at in range(size)]
                if any(record.signatures[name] != record.signatures[names[0]] for name in names):
                    record.signatures.update(dict.fromkeys(names))
        buffers = [(name, x, x._version) for name, x in root.named_buffers()]
        with writer:
            record.result = writer.freeze(root(*fakes))
        record.changed = {name.removeprefix(PREFIX) for name, x, version in buffers if x._version != version}
    for name in record.signatures:
        if any(buffer.startswith(f"{name}.") for buffer in record.changed):
            record.signatures[name] = None
    return record


def _signature(block: nn.Module | None, name: str, places: dict[int, list[str]]) -> Any:
    """Return the signature of a block: modules and tensor metadata; None if a module outside shares its tensors."""
    if block is None:
        return None
    modules = [(path, type(module), module.training) for path, module in block.named_modules()]
    tensors = []
    for path, x in (*block.named_parameters(remove_duplicate=False), *block.named_buffers(remove_duplicate=False)):
        if any(not place.startswith(f"{name}.") for place in places[id(x)]):
            return None
        tensors.append((path, metadata(x)))
    return modules, tensors


def _add_hooks(block: nn.Module | None, calls: list[Block], writer: Writer) -> list[Any]:
    """Installs hooks that record the calls of ``block``; returns their handles."""
    if block is None:
        return []

    def enter(_module: Any, args: Any, kwargs: Any) -> None:
        calls.append(Block(len(writer.record.events), -1, writer.freeze_arguments((args, kwargs)), []))

    def leave(_module: Any, _args: Any, _kwargs: Any, output: Any) -> None:
        calls[-1].exit, calls[-1].gives = len(writer.record.events), writer.freeze(output)[0]

    return [
        block.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
        block.register_forward_hook(leave, with_kwargs=True),
    ]


def numbered_containers(model: nn.Module) -> list[tuple[str, int]]:
    """Return (path, number of children) of the modules with children "0", "1", ..., outermost first."""
    containers = []
    for path, module in model.named_modules():
        children = list(module._modules)
        if children and children == [str(at) for at in range(len(children))]:
            containers.append((path, len(children)))
    return sorted(containers, key=lambda item: item[0].count("."))
