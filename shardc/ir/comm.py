"""Communication of local graphs: process groups by name, shardc's collectives and host copies, their provenance.

A group is named after the axes that its ranks differ along, so one graph serves every rank: the runtime maps the name
to this rank's group. Ops of ``torch.ops.shardc``:

    permute_ranks                      sends shards to other ranks; implemented in `shardc.runtime.gloo.direct`
    send_rows_coalesced                all-to-all of rows sorted by destination rank: ``sends`` and ``receives`` count
                                       the rows per rank; results have room for ``rows``
    all_gather_into_tensor_coalesced,
    reduce_scatter_tensor_coalesced,
    all_reduce_coalesced               as in `_c10d_functional`, by direct messages between ranks without buffers;
                                       implemented in `shardc.runtime.gloo.direct`. ``slots`` are the numbers of the
                                       arena slots of the results (pass `PlanMemory`); none: own memory
    to_device(x, device), to_host(x)   copies between host and device memory, waited for as collectives are; implemented
                                       in `shardc.runtime.host`. If the device is a CPU, they are real copies, too.
                                       ``to_host(x, False)``: the host does not read the result, only ``to_device`` does

The provenance of a collective is the plan entry and the line of the user's code that it comes from. Here it is found in
one graph; `shardc.cost.causes` searches all ops of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import getitem

import torch
from torch import fx

from shardc.ir import ops
from shardc.ir.comm_volume import GROUP_PREFIX, arguments_of, collective_kind, named_axes
from shardc.ir.graph import Origin, info, placeholders
from shardc.ir.op_traits import WAIT as WAIT

_library = torch.library.Library("shardc", "DEF")
_library.define("permute_ranks(Tensor x, int[] destinations, str group_name) -> Tensor")
_library.define(
    "all_gather_into_tensor_coalesced(Tensor[] inputs, int group_size, str group_name, int[] slots=[]) -> Tensor[]"
)
_library.define(
    "reduce_scatter_tensor_coalesced(Tensor[] inputs, str reduce_op, int group_size, str group_name, int[] slots=[])"
    " -> Tensor[]"
)
_library.define(
    "send_rows_coalesced(Tensor[] inputs, Tensor sends, Tensor receives, int rows, str group_name) -> Tensor[]"
)
_library.define("all_reduce_coalesced(Tensor[] inputs, str reduce_op, str group_name, int[] slots=[]) -> Tensor[]")
_library.define("to_device(Tensor x, str device) -> Tensor")
_library.define("to_host(Tensor x, bool read=True) -> Tensor")


GATHER = torch.ops.shardc.all_gather_into_tensor_coalesced.default
REDUCE_SCATTER = torch.ops.shardc.reduce_scatter_tensor_coalesced.default
ALL_REDUCE = torch.ops.shardc.all_reduce_coalesced.default
SEND_ROWS = torch.ops.shardc.send_rows_coalesced.default
IN_MESSAGES = (GATHER, REDUCE_SCATTER, ALL_REDUCE)
HOST = torch.device("cpu")
MOVES = {torch.ops.shardc.to_device.default: "to_device", torch.ops.shardc.to_host.default: "to_host"}


def is_ring(kind: str, ranks: int) -> bool:
    """Return whether CPU ranks run a collective of ``kind`` by gloo's ring instead of direct messages. True for
    all-reduces over any number of ranks but two.

    As direct messages, an all-reduce sends everything to every rank. Only between two ranks that is as little as in a
    ring.
    """
    return kind == "all_reduce" and ranks != 2


def waits_of(node: fx.Node) -> list[fx.Node]:
    """Return the wait nodes of ``node``, which starts a collective or a host copy, or selects one result of it."""
    out = []
    for user in node.users:
        out += [user] if user.target is WAIT else waits_of(user) if user.target is getitem else []
    return out


def _permute_ranks_fake(x: torch.Tensor, destinations: list[int], group_name: str) -> torch.Tensor:
    return x.new_empty(x.shape)


def _all_gather_fake(
    inputs: list[torch.Tensor], group_size: int, group_name: str, slots: Sequence[int] = ()
) -> list[torch.Tensor]:
    return [x.new_empty((group_size * (x.shape[0] if x.dim() else 1), *x.shape[1:])) for x in inputs]


def _reduce_scatter_fake(
    inputs: list[torch.Tensor], reduce_op: str, group_size: int, group_name: str, slots: Sequence[int] = ()
) -> list[torch.Tensor]:
    return [x.new_empty((x.shape[0] // group_size, *x.shape[1:])) for x in inputs]


def _all_reduce_fake(
    inputs: list[torch.Tensor], reduce_op: str, group_name: str, slots: Sequence[int] = ()
) -> list[torch.Tensor]:
    return [x.new_empty(x.shape) for x in inputs]


def _send_rows_fake(
    inputs: list[torch.Tensor], sends: torch.Tensor, receives: torch.Tensor, rows: int, group_name: str
) -> list[torch.Tensor]:
    return [x.new_empty((rows, *x.shape[1:])) for x in inputs]


def _to_device_fake(x: torch.Tensor, device: str) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=device)


def _to_host_fake(x: torch.Tensor, read: bool = True) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=HOST)


torch.library.register_fake("shardc::to_device", _to_device_fake)
torch.library.register_fake("shardc::to_host", _to_host_fake)
torch.library.register_fake("shardc::send_rows_coalesced", _send_rows_fake)
torch.library.register_fake("shardc::permute_ranks", _permute_ranks_fake)
torch.library.register_fake("shardc::all_gather_into_tensor_coalesced", _all_gather_fake)
torch.library.register_fake("shardc::reduce_scatter_tensor_coalesced", _reduce_scatter_fake)
torch.library.register_fake("shardc::all_reduce_coalesced", _all_reduce_fake)


def move_kind(node: fx.Node) -> str | None:
    """Return ``to_device`` or ``to_host`` if ``node`` starts a copy between host and device, else None."""
    return MOVES.get(node.target) if node.op == "call_function" else None


def is_stored(node: fx.Node) -> bool:
    """Return whether ``node`` copies a value to host memory for a later graph only: nothing on the host reads the
    copy.
    """
    return move_kind(node) == "to_host" and not arguments_of(node).get("read", True)


def is_loaded(node: fx.Node) -> bool:
    """Return whether ``node`` copies a value that an earlier graph stored in host memory back to the device."""
    if move_kind(node) != "to_device" or (role := info(node.all_input_nodes[0]).role) is None:
        return False
    return role.kind == "saved"


def group_name(axes: Iterable[str]) -> str:
    """Return the name of the groups whose ranks differ along ``axes``, which are in mesh order.

    >>> group_name(["dp", "tp"])
    'shardc:dp,tp'
    """
    return GROUP_PREFIX + ",".join(axes)


_FAR = 64  # most ops after a collective that are searched for a source line


def collective_of(node: fx.Node) -> fx.Node | None:
    """Return the collective that ``node`` starts, waits for or is a result of, or None."""
    while node.target is WAIT or node.target is getitem:
        node = node.all_input_nodes[0]
    return node if collective_kind(node) is not None else None


def entry_of(node: fx.Node, causes: Mapping[str, str]) -> str | None:
    """Return the plan entry, as text, that caused the collective ``node``; None if none did. ``causes`` maps a
    parameter to its plan entries as text.
    """
    origin: Origin = info(node).origin
    if not origin.consumer:
        return origin.cause or None
    stored = (info(x).origin.cause for x in placeholders(node.graph) if info(x).name == origin.consumer)
    beside = (entry for param, entry in causes.items() if param.rpartition(".")[0] == origin.module)
    return next(about(axes_of(node), (*stored, *beside)), None)


def axes_of(node: fx.Node) -> set[str]:
    """Return the names of the mesh axes that a collective runs over; a part such as ``tp:1x2`` counts as its axis."""
    group = node.kwargs.get("axis", "") if node.target in ops.COLLECTIVES else arguments_of(node)["group_name"]
    return {axis.partition(":")[0] for axis in named_axes(str(group)) or str(group).split(",")}


def about(axes: Iterable[str], entries: Iterable[str]) -> Iterator[str]:
    """Yield the plan entries (as text) that mention a mesh axis in ``axes``."""
    return (entry for entry in entries if any(f'"{axis}"' in entry or f"@{axis}" in entry for axis in axes))


def source_of(node: fx.Node) -> str | None:
    """Return ``file:line`` of the user's code that caused the collective ``node``.

    It is the node's own source line, or that of the nearest op that uses its result; None if neither has one.
    """
    seen = [node]
    for user_node in seen:
        if user_node.op != "output" and (source := info(user_node).origin.source):
            return source
        seen += [user for user in user_node.users if user not in seen][: _FAR - len(seen)]
    return None
