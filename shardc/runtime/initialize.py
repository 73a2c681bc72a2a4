"""Initialisation shard by shard: a model's code runs on parameters of global shape that no rank holds in full.

Meanwhile each parameter and buffer is a `Virtual`, a CPU tensor of global shape with memory for this rank's shard.
In-place fills, elementwise ops and views act on the shard; random fills draw the whole stream in chunks
(`shardc.runtime.sharded_init`). The result is bit for bit that of one CPU device with the same generator state.

On a compiled module, the model's own initialisation methods run this way too (`initializers`).
"""

from __future__ import annotations

import functools
import inspect
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from shardc import _compat
from shardc._compat import PyTree
from shardc.errors import InitError, MeshError
from shardc.ir.layout import Layout
from shardc.runtime.sharded_init import Fill, InitShard, Piece, Virtual, drawn, piece_of, place, scatter, unsupported
from shardc.runtime.storage import cut, refill, shard_tensor

if TYPE_CHECKING:
    from shardc.runtime.state import State


CHUNK_BYTES = 1 << 20
T = TypeVar("T")


def reset_parameters(module: nn.Module) -> None:
    """Calls ``module.reset_parameters()`` if it exists; the default of `Namespace.init_weights`."""
    reset = getattr(module, "reset_parameters", None)
    if callable(reset):
        reset()


@dataclass(eq=False)
class Slot:
    """An entry of a module's parameters or buffers during initialisation: its tensor before and after, and the
    `Virtual` in between.

    Args:
        name: qualified name; tied entries share a tensor.
        module, kind, key: the entry ``getattr(module, kind)[key]``; ``kind`` is ``_parameters`` or ``_buffers``.
        before: tensor before the initialisation.
        shard: this rank's values of it.
        stand_in: `Virtual` that replaces it meanwhile.
        now: tensor after the initialisation, noted by `check_slots`.
    """

    name: str
    module: nn.Module
    kind: str
    key: str
    before: torch.Tensor
    shard: InitShard
    stand_in: torch.Tensor
    now: torch.Tensor | None = None

    def value(self) -> torch.Tensor:
        """Returns the initialised shard, padded; the full tensor if it has no layout. Raises InitError if it was not
        filled completely.
        """
        shard, current = self.shard, self.now
        if current is self.stand_in:
            shard.check_written()
            return shard.padded
        # The initialisation assigned a plain tensor of global shape.
        assert current is not None
        return current.detach() if shard.storage is None else shard_tensor(current, shard.storage, shard.rank)


@contextmanager
def shardwise(
    model: nn.Module, storages: Mapping[str, Layout], rank: int, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[list[Slot]]:
    """Context manager for initialisation without whole tensors. It replaces each parameter and buffer of ``model`` by
    a `Virtual`, which is written shard by shard, and restores the tensors at exit.

    Yields the replaced entries.

    Args:
        model: the model, with tensors of global shape.
        storages: name -> storage layout; a tensor without one is not split.
        rank: this rank, on the mesh.
        chunk_bytes: limit of the memory in which a fill draws values of the whole tensor.
    """
    slots: list[Slot] = []
    # id of a tensor -> (its shard, the stand-in), which tied entries share.
    stand_ins: dict[int, tuple[InitShard, torch.Tensor]] = {}
    for name, module, kind, key in _named_slots(model):
        tensor = getattr(module, kind)[key]
        if id(tensor) not in stand_ins:
            shard = InitShard.of(name, tensor, storages.get(name), rank, limit=chunk_bytes // tensor.itemsize)
            stand_ins[id(tensor)] = shard, _stand_in(tensor, shard)
        slots.append(Slot(name, module, kind, key, tensor, *stand_ins[id(tensor)]))
    # The dicts are restored as a whole, since the initialisation may also add and remove entries.
    tables = [(getattr(module, kind), dict(getattr(module, kind))) for module in model.modules() for kind in _KINDS]
    for slot in slots:
        getattr(slot.module, slot.kind)[slot.key] = slot.stand_in
    stand_in_of = {id(slot.before): slot.stand_in for slot in slots}
    try:
        with torch.no_grad(), shardwise_trunc_normal(), _StandIns(stand_in_of):
            yield slots
    finally:
        for table, before in tables:
            table.clear()
            table.update(before)


def _stand_in(tensor: torch.Tensor, shard: InitShard) -> torch.Tensor:
    """Returns the `Virtual`, a tensor that is written shard by shard, that replaces ``tensor`` during initialisation.
    It is an nn.Parameter if ``tensor`` is.
    """
    whole: torch.Tensor = Virtual.whole(shard)
    if isinstance(tensor, nn.Parameter):
        whole = nn.Parameter(whole, tensor.requires_grad)
    vars(whole).update(attributes(tensor))
    return whole


def attributes(tensor: torch.Tensor) -> dict[str, object]:
    """Returns, by name, the attributes that the user's code has set on the object of a parameter or buffer."""
    return {
        key: x for key, x in vars(tensor).items() if key not in ("meta", "init_shard") and not key.startswith("shardc_")
    }


class _StandIns(TorchFunctionMode):
    """Torch function mode that passes each op the stand-in (a `Virtual`) in place of a model's tensor. So code that
    holds the tensor in a closure writes the stand-in, too.

    Args:
        stand_ins: id of a tensor -> its `Virtual`.
    """

    def __init__(self, stand_ins: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._stand_ins = stand_ins

    def __torch_function__(
        self,
        func: Callable[..., T],
        types: object,
        args: Sequence[PyTree] = (),
        kwargs: Mapping[str, PyTree] | None = None,
    ) -> T:
        """Calls ``func`` with the stand-ins of the model's tensors among its arguments."""
        args, kwargs = pytree.tree_map_only(
            torch.Tensor, lambda x: self._stand_ins.get(id(x), x), (tuple(args), dict(kwargs or {}))
        )
        return func(*args, **kwargs)


_KINDS = ("_parameters", "_buffers")


def _named_slots(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, str]]:
    """Yields (qualified name, module, ``_parameters`` or ``_buffers``, key) of every tensor of the model."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for kind in _KINDS:
            for key, tensor in getattr(module, kind).items():
                if tensor is not None:
                    yield f"{prefix}.{key}" if prefix else key, module, kind, key


def check_slots(model: nn.Module, slots: Sequence[Slot]) -> None:
    """Stores in each slot (entry of a module) the tensor that is there after initialisation. Raises InitError if an
    entry was added or removed, or its tensor does not fit.

    A tensor in place of the stand-in must have its shape and dtype, and be neither on meta nor a DTensor.
    """
    names = {slot.name for slot in slots}
    for name, *_ in _named_slots(model):
        if name not in names:
            raise InitError(f"the initialisation added {name!r}", fix="register it when the model is built")
    for slot in slots:
        now, shard = getattr(slot.module, slot.kind).get(slot.key), slot.shard
        if now is None:
            raise InitError(f"the initialisation removed {slot.name!r}", fix="remove it when the model is built")
        if isinstance(now, Virtual) and now is not slot.stand_in:  # another entry's stand-in: they were tied
            raise InitError(
                f"the initialisation put {now.init_shard.name!r} in the place of {slot.name!r}",
                fix="tie parameters when the model is built, or copy_ the values",
            )
        if now is not slot.stand_in and (
            now.is_meta or tuple(now.shape) != shard.shape or now.dtype != shard.dtype or isinstance(now, DTensor)
        ):
            raise InitError(
                f"the initialisation replaced {slot.name!r}, {list(shard.shape)} {shard.dtype}, by a tensor of shape "
                f"{list(now.shape)}, {now.dtype} on {now.device}",
                fix="give it a real tensor of the same shape and dtype",
            )
        slot.now = now


# --- truncated normal distributions

# With less probability mass than this within the bounds, torch draws from another distribution.
_LEAST_PROBABILITY = 0.3


@contextmanager
def shardwise_trunc_normal() -> Iterator[None]:
    """Context manager in which ``nn.init.trunc_normal_`` can fill a `Virtual` (a tensor that is initialised shard by
    shard). Values are those of one device.

    torch 2.13 draws the whole tensor again until no element is out of bounds, so each rank tracks all elements that
    are. Older versions transform it in place, which `shardc.runtime.sharded_init` handles.
    """
    original = nn.init._no_grad_trunc_normal_
    in_place = not _compat.trunc_normal_rejects()  # in older versions: by uniform values, transformed in place

    def trunc_normal(
        tensor: torch.Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
    ) -> torch.Tensor:
        """Fills ``tensor`` in place with normal values in [a, b], as torch's function does. If it is a `Virtual`, this
        rank's elements get the values that one device draws.
        """
        # torch's function also works on a tensor of which this rank has all elements.
        if not isinstance(tensor, Virtual) or tensor.init_shard.whole or in_place:
            return original(tensor, mean, std, a, b, generator=generator)
        piece = piece_of(nn.init.trunc_normal_, tensor)  # this rank's elements
        if not tensor.meta.is_contiguous():
            raise unsupported(nn.init.trunc_normal_, tensor, "through a view that is not contiguous")
        # Few enough to draw the whole tensor.
        if piece.numel <= tensor.init_shard.limit:
            values = torch.empty(piece.shape, dtype=tensor.dtype)
            place(piece, 0, original(values, mean, std, a, b, generator=generator).flatten())
        elif _probability((a - mean) / std, (b - mean) / std) <= _LEAST_PROBABILITY:
            raise unsupported(nn.init.trunc_normal_, tensor, f"with bounds so far out: ({a}, {b})")
        else:
            # Rounded to the tensor's dtype, in which values are compared with them.
            bounds = [torch.tensor(bound, dtype=tensor.dtype).item() for bound in (a, b)]
            fill = partial(torch.Tensor.normal_, mean=mean, std=std, generator=generator)
            _fill_within(piece, bounds, fill, tensor.dtype, tensor.init_shard.limit)
        tensor.init_shard.mark_filled(tensor)
        return tensor

    nn.init._no_grad_trunc_normal_ = trunc_normal
    try:
        yield
    finally:
        nn.init._no_grad_trunc_normal_ = original


def _probability(low: float, high: float) -> float:
    """Returns the probability mass of the standard normal distribution between ``low`` and ``high``."""
    return (math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2


def _fill_within(piece: Piece, bounds: Sequence[float], fill: Fill, dtype: torch.dtype, limit: int) -> None:
    """Fills ``piece``, this rank's elements of a tensor, with random values in ``bounds`` (low, high). Values of the
    whole tensor are drawn again until no element on any rank is out of bounds, so that all ranks draw equally often.

    Args:
        fill: fills a tensor in place with random values, in bounds or not.
        limit: number of elements that are drawn at once.
    """
    low, high = bounds
    # First flat index of a chunk -> offsets of its elements that are out of bounds.
    outside: dict[int, torch.Tensor] = {}
    for start, values in drawn(piece.numel, fill, dtype, limit):
        place(piece, start, values)
        outside[start] = ((values < low) | (values > high)).nonzero().flatten().int()
    while any(len(offsets) for offsets in outside.values()):
        for start, values in drawn(piece.numel, fill, dtype, limit):
            # Of the new values, only those replace an element whose last value was out of bounds.
            offsets = outside[start]
            redrawn = values[offsets]
            scatter(piece, offsets + start, redrawn)
            outside[start] = offsets[(redrawn < low) | (redrawn > high)]


# Names of initialisation methods in libraries and models.
_INITIALISES = re.compile(
    r"_{0,2}(re)?(init|initiali[sz]e|reset|set_init)(_?(all|model|module))?"
    r"(_?(weights?|params?|parameters?|buffers?|embeddings?|linears?|layers?))?_?"
)


def initializers(cls: type) -> dict[str, Callable[..., PyTree]]:
    """Finds the methods of class ``cls`` that initialise parameters (``init_weights``, ``reset_parameters``). Returns
    wrappers of these by name, which initialise a compiled module shard by shard.

    What they write to parameters and buffers reaches the shards, with the values of one device; attributes that they
    set stay.
    """
    # Static: class and static methods have no model, and are left out below.
    methods = {name: inspect.getattr_static(cls, name, None) for name in dir(cls) if _INITIALISES.fullmatch(name)}
    return {name: _shardwise(method) for name, method in methods.items() if isinstance(method, FunctionType)}


def _shardwise(method: FunctionType) -> Callable[..., PyTree]:
    """Wraps ``method``, which initialises a model, as a method of the compiled module that runs shard by shard."""

    @functools.wraps(method)
    def call(self: nn.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        state: State | None = vars(self).get("shardc")
        if state is None:  # a slice of a container
            return method(self, *args, **kwargs)
        # `method` may raise on one rank only, while others already wait in a collective.
        with state.shares_errors():
            result = initialise(state, lambda model: method(model, *args, **kwargs))
        # The method runs on a view of the module; `return self` returns the module that the user called.
        return self if result is state.params.view else result

    return call


def initialise(state: State, run: Callable[[nn.Module], T], complete: bool = False) -> T:
    """Calls ``run`` on the model, with stand-ins for its parameters and buffers, and copies what it writes to the
    module's shards. Returns the result of ``run``.

    All ranks call it.

    Args:
        complete: whether all tensors on ``meta`` must be filled.

    Raises:
        InitError: an op cannot run shard by shard, or a tensor was filled in part or replaced by one of another kind.
            No parameter or buffer is changed then.
    """
    if state.spec.device_mesh is None:
        raise MeshError(f"the module was compiled for the abstract mesh {state.spec.mesh} and holds no shards")
    state.check()
    with shardwise(state.params.view, state.spec.stored, state.spec.rank) as slots:
        result = run(state.params.view)
        check_slots(state.params.view, slots)
        written = [slot for slot in slots if complete or slot.shard.touched or slot.now is not slot.stand_in]
        # `value` may raise, so all are computed before the first is written.
        values = {id(slot): slot.value() for slot in written}
    new_buffers: dict[int, torch.Tensor] = {}  # id of a buffer without values -> its tensor; tied buffers share it
    with torch.no_grad():
        for slot in written:
            _write(state, slot, values[id(slot)], new_buffers)
        for slot in slots:  # the module keeps the original tensors
            assert slot.now is not None
            slot.before.requires_grad_(slot.now.requires_grad)
            vars(slot.before).update(attributes(slot.now))
    # Ranks compare the new values at the next call.
    state.params.fresh = True
    return result


def _write(state: State, slot: Slot, value: torch.Tensor, new_buffers: dict[int, torch.Tensor]) -> None:
    """Copies ``value``, the initialised local tensor (padded) of a parameter or buffer, to the module.

    Args:
        new_buffers: id of a buffer that is replaced -> the new tensor; shared by tied buffers, and added to here.
    """
    before: Any = slot.before
    if slot.kind == "_buffers":
        # Replaced by the initialisation, or without memory so far: the buffer becomes another tensor.
        if slot.now is not slot.stand_in or before.is_meta:
            slot.module._buffers[slot.key] = new_buffers.setdefault(id(before), value.to(state.spec.device))
        else:
            before.copy_(value)
    elif before.is_meta:
        # A parameter stays the same object, and gets memory on its device or, if it is offloaded, on the host.
        storage = state.spec.stored[slot.shard.name]
        refill(before, state.spec.homes[slot.shard.name].keep(value.to(before.dtype)), storage, state.spec.rank)
    else:
        local = before._local_tensor  # without the padding
        local.copy_(cut(value, local.shape))
