"""`flex_attention` in Dynamo's graph, as the op of `shardc.custom_ops.flex_ops` where its functions are pointwise.

Score and mask functions are graphs of numbers. As graphs of tensors that broadcast, they compute a block of scores with
the same ops, if each of these is pointwise or looks a number up in a captured tensor. Other calls are written out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch._higher_order_ops.flex_attention import math_attention
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import _disable_current_modes

from shardc.capture.functions import graph_of_function
from shardc.custom_ops.flex_ops import FLEX, FLEX_GRADIENT, KIND
from shardc.custom_ops.function_ops import Function, register
from shardc.errors import CaptureError

aten = torch.ops.aten
_LIKE = (
    aten.full_like.default, aten.zeros_like.default, aten.ones_like.default, aten._to_copy.default, aten.clone.default,
    aten.alias.default, aten.detach.default, aten.lift_fresh_copy.default,
)  # fmt: skip
_RESULTS = {"OUTPUT_LOGSUMEXP": True, "OUTPUT_MAX": False}  # options that say which results the kernel writes
_NEW = (aten.new_full.default, aten.new_zeros.default, aten.new_ones.default)


class _Flex(torch.autograd.Function):
    """Autograd function that calls the op of `flex_attention` in forward, and the op of its gradient in backward."""

    @staticmethod
    def forward(ctx: Any, body: str, scale: float, *operands: Tensor) -> tuple[Tensor, Tensor]:
        query, key, value, *captured = operands
        # sums: log-sum-exp of each query's scores; the last argument is the number of keys without padding.
        out, sums = FLEX(query, key, value, captured, body, scale, key.shape[2])
        ctx.save_for_backward(*operands, out, sums)
        ctx.body, ctx.scale = body, scale
        ctx.set_materialize_grads(False)  # the gradient of a result that is not used is None
        return out, sums

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_sums: Tensor | None) -> Any:
        query, key, value, *captured, out, sums = ctx.saved_tensors
        grad = torch.zeros_like(out) if grad is None else grad
        needed = ctx.needs_input_grad[5:]  # of the captured tensors, behind body, scale, query, key and value
        needed_positions = [at for at, needs in enumerate(needed) if needs]
        gradients = FLEX_GRADIENT(
            grad, query, key, value, out, sums, grad_sums, needed_positions, captured, ctx.body, ctx.scale, key.shape[2]
        )
        captured_gradients = iter(gradients[3:])
        of_captured = (next(captured_gradients) if needs else None for needs in needed)
        return (None, None, *gradients[:3], *of_captured)


def attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Callable[..., Tensor], block_mask: tuple[Any, ...],
    scale: float, kernel_options: dict[str, Any],
    score_mod_other_buffers: tuple[Any, ...] = (), mask_mod_other_buffers: tuple[Any, ...] = (),
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """Compute torch's ``flex_attention``: by the op of shardc if its functions are pointwise, else as torch's reference
    does. Return (output, log-sum-exp in base 2, largest scores or, from the op, None). Arguments and shapes are
    torch's.
    """
    functions_name, mask_mod = None, block_mask[-1]  # the name under which both functions are registered
    captured = (*score_mod_other_buffers, *mask_mod_other_buffers)
    if _are_plain((query, key, value, *captured)):
        # The functions are traced by themselves, outside of the trace that calls this.
        with _disable_current_modes():
            functions_name = functions_of(
                query, score_mod, score_mod_other_buffers, mask_mod, mask_mod_other_buffers, kernel_options
            )
    if functions_name is None:
        return math_attention(
            query, key, value, score_mod, block_mask, scale, kernel_options, score_mod_other_buffers,
            mask_mod_other_buffers,
        )  # fmt: skip
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    # Torch broadcasts a batch of one; the op does not.
    key, value = (x.expand(query.shape[0], *x.shape[1:]) for x in (key, value))
    apply: Any = _Flex.apply
    out, log_sums = apply(functions_name, scale, query, key, value, *captured)
    return out, log_sums / math.log(2), None


def _are_plain(operands: Sequence[Any]) -> bool:
    """Return whether all operands are tensors of static sizes, on one device."""
    tensors = [x for x in operands if isinstance(x, Tensor) and all(type(size) is int for size in x.shape)]
    return len(tensors) == len(operands) and len({x.device for x in tensors}) == 1


def functions_of(
    query: Tensor, score_mod: Callable[..., Tensor], of_score: Sequence[Tensor], mask_mod: Callable[..., Tensor],
    of_mask: Sequence[Tensor], kernel_options: Mapping[str, Any] | None = None,
) -> str | None:  # fmt: skip
    """Register a score and a mask function as graphs of tensors that broadcast. Return the name of both together; None
    if one of them has no such graph.

    Args:
        query: a tensor with the batch, heads, dtype and device of the call.
        score_mod, mask_mod: functions of numbers, and of the captured tensors ``of_score`` and ``of_mask``.
        kernel_options: torch's options for its kernel, which its op takes.
    """
    score_dtype = torch.promote_types(query.dtype, torch.float32)
    dtypes = [torch.int64] * 4  # batch, head, row, column
    graphs = (
        _traced(score_mod, query, [score_dtype, *dtypes], of_score), _traced(mask_mod, query, dtypes, of_mask),
    )  # fmt: skip
    if graphs[0] is None or graphs[1] is None:
        return None
    options = dict(kernel_options or {}) | _RESULTS
    captured_counts = len(of_score), len(of_mask)
    return register(
        Function(KIND, (graphs[0], graphs[1]), captured_counts, options=tuple(sorted(options.items())))
    ).name


def _traced(
    function: Callable[..., Tensor], query: Tensor, dtypes: Sequence[torch.dtype], captured: Sequence[Tensor]
) -> fx.Graph | None:
    """Return a score or mask function as a graph of tensors that broadcast. None if it has an op that is neither
    pointwise nor a lookup.

    Args:
        function: function of numbers of the ``dtypes``, and of the tensors ``captured``.
        query: a tensor with the batch, heads and device of the call.
    """
    # The last context traces ``table[i]``, with a tensor of one number as ``i``, as a lookup, not as a read of ``i``.
    with FakeTensorMode(), torch.no_grad(), TransformGetItemToIndex():
        numbers = [torch.empty((), dtype=dtype, device=query.device) for dtype in dtypes]
        tensors = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in captured]
        traced = make_fx(lambda *operands: (function(*operands),))(*numbers, *tensors)
        try:
            graph = graph_of_function(traced, None, KIND)
        except CaptureError:
            return None
        return _Broadcast(graph, len(dtypes), query.shape[:2]).graph


class _Broadcast:
    """Rewrites the graph of a function of scalars as a graph of tensors that broadcast over the scores.

    Attributes:
        graph: the result; None if an op is neither pointwise nor a lookup.
    """

    def __init__(self, graph: fx.Graph, numbers: int, sizes: Sequence[int]) -> None:
        # The first ``numbers`` inputs are scalars: [score,] batch, head, row, column. The others are captured tensors.
        # ``sizes`` are those of batch and heads.
        self.old, self.new = graph, fx.Graph()
        self.inputs = list(graph.find_nodes(op="placeholder"))
        self.places = self.inputs[numbers - 4 : numbers]  # batch, head, row, column
        self.captured = self.inputs[numbers:]
        self.varies = set(self.inputs[:numbers])  # nodes whose value differs between scores
        self.env: dict[fx.Node, fx.Node] = {}  # old node -> new node
        for node in self.inputs[:numbers]:
            self.env[node] = self.new.placeholder(node.name)
        self.here = [self.new.placeholder(name) for name in ("batch_here", "head_here")]  # within the rank's shard
        for node in self.captured:
            self.env[node] = self.new.placeholder(node.name)
        self.sizes = sizes
        # Node -> (table, indices); ``t[i][j]`` is a lookup by [i, j].
        self.lookups = {node: lookup for node in graph.nodes if (lookup := _lookup(node)) is not None}
        # Lookups that take a part of a table, from which the next lookup takes a number.
        self.partial = {
            node for node in self.lookups
            if node.meta["val"].ndim and any(x in self.varies for x in self.lookups[node][1])
        }  # fmt: skip
        self.graph = self._run()

    def _run(self) -> fx.Graph | None:
        """Build the graph and return it; None if an op is neither pointwise nor a complete lookup (an index for each
        dim).
        """
        for node in self.old.nodes:
            if node.op == "output":
                result = node.args[0][0]
                if result in self.partial:
                    return None
                self.new.output((self._number(result),))
            elif node.op == "call_function":
                # What is the same for all scores is copied as it is, whatever op it is.
                if any(x in self.varies for x in node.all_input_nodes):
                    self.varies.add(node)
                    if not self._emit(node):
                        return None
                else:
                    self.env[node] = self.new.node_copy(node, self.env.__getitem__)
        self.new.eliminate_dead_code()
        # By position, so that equal functions have equal texts.
        for at, node in enumerate(self.new.nodes):
            if node.op != "output":
                node._rename(f"v{at}")
        return self.new

    def _emit(self, node: fx.Node) -> bool:
        """Copy ``node``, an op whose value differs between scores, into the new graph. Return whether that is possible:
        the op is pointwise, a lookup by numbers, or makes a new tensor.
        """
        if node in self.partial:
            # Not copied: the next lookup takes all indices at once.
            return all(user.target is aten.index.Tensor and user.args[0] is node for user in node.users)
        operands = node.all_input_nodes
        if node in self.lookups:
            table, indices = self.lookups[node]
            # A table must be the same for all scores, and each of its dims be indexed.
            if table in self.varies or len(indices) != table.meta["val"].ndim:
                return False
            arguments = [self._index(table, dim, x) for dim, x in enumerate(indices)]
            self.env[node] = self.new.call_function(node.target, (self.env[table], arguments))
        elif any(x in self.partial for x in operands) or node.meta["val"].ndim:
            return False  # an operand or the result is no number
        elif node.target in _NEW:
            self.env[node] = self.new.node_copy(node, self.env.__getitem__)
            # It takes dtype and device of its operand only, and is the same for all scores.
            self.varies.discard(node)
        elif node.target in _LIKE or torch.Tag.pointwise in getattr(node.target, "tags", ()):
            if any(x.meta["val"].ndim for x in operands):
                return False
            self.env[node] = self.new.node_copy(node, self._number)
        else:
            return False
        return True

    def _number(self, node: fx.Node) -> fx.Node:
        """Return the node in the new graph of ``node``, a number of the traced function. A number that is the same for
        all scores gets the dims of the scores, so that dtypes promote as among numbers.
        """
        if node in self.varies:
            return self.env[node]
        return self.new.call_function(aten.view.default, (self.env[node], [1, 1, 1, 1]))

    def _index(self, table: fx.Node, dim: int, index: fx.Node) -> fx.Node:
        """Return the node in the new graph for ``index``, which indexes ``dim`` in a lookup in ``table``. If ``index``
        is the batch or head, this may be its number within this rank's part.

        The number within the part is used if all lookups in a captured table index ``dim`` by the batch (or head):
        ranks may then split ``dim``.
        """
        # Batch and head only: `here` and `sizes` have two items, `places` four.
        for place, local_place, size in zip(self.places, self.here, self.sizes, strict=False):
            by_place = index is place and table in self.captured and table.meta["val"].shape[dim] == size
            if by_place and all(_looks_up(user, table, dim, place, self) for user in table.users):
                return local_place
        return self._number(index)


def _lookup(node: fx.Node) -> tuple[fx.Node, list[fx.Node]] | None:
    """Return (table, indices) of a lookup by numbers, such as ``table[i, j]`` or ``table[i][j]``, both with the indices
    [i, j]; None for other nodes.
    """
    if node.target is not aten.index.Tensor:
        return None
    table: Any = node.args[0]
    indices: Any = list(node.args[1])
    if not all(
        isinstance(x, fx.Node) and x.meta["val"].ndim == 0 and x.meta["val"].dtype != torch.bool for x in indices
    ):
        return None
    table_lookup = _lookup(table)  # for ``t[i][j]``, that of ``t[i]``
    return (table, indices) if table_lookup is None else (table_lookup[0], [*table_lookup[1], *indices])


def _looks_up(user: fx.Node, table: fx.Node, dim: int, place: fx.Node, graph: _Broadcast) -> bool:
    """Return whether ``user`` is a lookup in ``table`` that indexes ``dim`` by ``place``, the batch or the head."""
    lookup = graph.lookups.get(user)
    return lookup is not None and lookup[0] is table and len(lookup[1]) > dim and lookup[1][dim] is place
