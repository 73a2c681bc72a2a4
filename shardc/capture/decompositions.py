"""Decompositions under which a model is traced, chosen so that sharding rules are exact.

- Norms, softmaxes and losses become sums, maxima and pointwise ops, whose rules are exact over any sharded dim.
  Contractions, attention, embeddings, convolutions and pooling stay one op.
- nn.LSTM, nn.GRU and nn.RNN become matmuls and one op for all steps (`recurrent_ops`).
- ``as_strided`` reads a storage by the strides that a tensor had in the trace; a shard has other strides. It becomes a
  selection of elements of the tensor that owns the storage: a permutation if it reads each element once, else an index.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import prod
from operator import getitem
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._decomp import decompositions
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from shardc.capture.capture_errors import line_of
from shardc.custom_ops.recurrent_ops import STEPS
from shardc.errors import CaptureError
from shardc.ir.comm_volume import arguments_of
from shardc.ir.op_traits import CAST, aliases

aten = torch.ops.aten

_READS = (aten.as_strided.default, aten.as_strided_copy.default)
_WRITES = (aten.as_strided_scatter.default,)


def fake_like(x: Tensor, device: torch.device, dtype: torch.dtype | None = None) -> Tensor:
    """Return a tensor like ``x`` in the active fake mode, with its strides and storage offset, on ``device``.

    If ``x`` is floating-point and ``dtype`` is given, the result has this dtype.
    """
    dtype = dtype if dtype is not None and x.is_floating_point() else x.dtype
    fake = torch.empty_strided(x.shape, x.stride(), dtype=dtype, device=device)
    if x.storage_offset():  # kept, as the offsets of `as_strided` count from the begin of the storage
        size = x.storage_offset() + fake.untyped_storage().nbytes() // dtype.itemsize
        memory = torch.empty(size, dtype=dtype, device=device).untyped_storage()
        fake.set_(memory, x.storage_offset(), x.shape, x.stride())
    return fake.requires_grad_(x.requires_grad)


def without_strides(graph: fx.Graph, mode: FakeTensorMode) -> None:
    """Replaces the ``as_strided`` ops of a traced graph by permutations and indices. CaptureError if one reads memory
    in which the tensor that owns the storage has no element.
    """
    nodes = [node for node in graph.nodes if node.op == "call_function" and node.target in (*_READS, *_WRITES)]
    if not nodes:
        return
    with mode, torch.no_grad():
        # (owner of the storage, offset in it) of each, as traced: before replacements change the strides.
        memories = [_memory(node.args[0]) for node in nodes]
        # By replaced op, which may own the storage of a later one.
        replacements: dict[fx.Node, fx.Node] = {}
        for node, (base, offset) in zip(nodes, memories, strict=True):
            with graph.inserting_before(node):
                elements = _Elements(graph, node, base, replacements.get(base, base), offset)
                replacement = replacements[node] = (
                    elements.insert_read() if node.target in _READS else elements.insert_write()
                )
            node.replace_all_uses_with(replacement)
    graph.eliminate_dead_code()


def numbers_as_tensors(graph: fx.Graph) -> None:
    """Replaces dtype casts of plain numbers in a traced graph by ops that make a tensor. Such casts come from ``vmap``
    of code like ``x / 2``.
    """
    for node in graph.find_nodes(op="call_function", target=CAST):
        if not isinstance(node.args[0], fx.Node):
            val = node.meta["val"]
            node.target, node.kwargs = aten.scalar_tensor.default, {"dtype": val.dtype, "device": val.device}


def insert_call(
    graph: fx.Graph, like: fx.Node, target: Callable[..., object], *args: fx.node.Argument, **kwargs: fx.node.Argument
) -> Any:
    """Insert a call of ``target`` in the active fake mode; return its node. It has the meta of the node ``like``, but
    its own fake value.
    """
    node = graph.call_function(target, args, kwargs)
    args, kwargs = fx.map_arg((args, kwargs), lambda x: x.meta["val"])
    node.meta = {**like.meta, "val": target(*args, **kwargs)}
    return node


class _Elements:
    """The elements that one ``as_strided`` op reads or writes.

    Args:
        node: the op.
        traced_base, base: the owner of the storage that it reads, as traced and after earlier writes.
        offset: storage offset of the op's tensor, relative to the owner's first element.
    """

    def __init__(self, graph: fx.Graph, node: fx.Node, traced_base: fx.Node, base: fx.Node, offset: int) -> None:
        self.node, self.base, self._call = node, base, partial(insert_call, graph, node)
        arguments = arguments_of(node)
        self.tensor, self.source = arguments["self"], arguments.get("src")
        self.size: list[int] = [int(n) for n in arguments["size"]]
        self.stride: list[int] = [int(n) for n in arguments["stride"]]
        val, storage_offset = traced_base.meta["val"], arguments.get("storage_offset")
        self.offset = offset if storage_offset is None else int(storage_offset) - val.storage_offset()
        # The base's dims by stride, the largest first.
        self.order = sorted(range(val.ndim), key=lambda dim: (-val.stride(dim), dim))
        last = self.offset + sum((n - 1) * step for n, step in zip(self.size, self.stride, strict=True))
        # Each place that is read must be an element of the base, at a position that its strides tell.
        dense = val.permute(self.order).is_contiguous()
        if prod(self.size) and not (dense and 0 <= self.offset and last < val.numel()):
            name, at = node.target.overloadpacket.__name__, self.offset if storage_offset is None else storage_offset
            raise CaptureError(
                f"{name} of sizes {self.size} and strides {self.stride} at {at} reads memory in which the tensor of "
                f"shape {list(val.shape)} has no element of its own",
                source=line_of(node) or None,
                fix="make the tensor contiguous before, or choose its elements by slices, unfold or an index",
            )

    def insert_read(self) -> fx.Node:
        """Inserts ops that read the elements. Returns the node of the result, which has the shape of the op's
        result.
        """
        if not prod(self.size):
            return self._call(aten.new_empty.default, self.base, self.size)
        order = self._through_all()
        if order is None:  # elements are left out or read twice
            return self._call(aten.index.Tensor, self._flat(self.base), [self._positions()])
        flat = self._call(aten.view.default, self._flat(self.base), [self.size[dim] for dim in order])
        return self._permuted(flat, inverse(order))

    def insert_write(self) -> fx.Node:
        """Inserts ops that write the op's ``src`` to the elements. Returns the node of the base after the write."""
        assert self.source is not None
        if not prod(self.size):
            return self.tensor
        order, base = self._through_all(), self.base.meta["val"]
        if order is not None:  # all elements are replaced: the base's old values play no part
            flat = self._call(aten.reshape.default, self._permuted(self.source, order), [-1])
        else:
            flat = self._call(aten.index_put.default, self._flat(self.base), [self._positions()], self.source)
        whole = self._call(aten.view.default, flat, [base.shape[dim] for dim in self.order])
        result = self._permuted(whole, inverse(self.order))
        assert result.meta["val"].shape == self.tensor.meta["val"].shape, "a view of what is written to"
        return result

    def _through_all(self) -> list[int] | None:
        """Return the dims of the ``as_strided`` op in order of stride, the largest first, if the op reads each element
        of the base exactly once. Else return None.
        """
        # The strides of dims of size 1 play no role: they come last.
        order = sorted(range(len(self.size)), key=lambda dim: (self.size[dim] == 1, -self.stride[dim], dim))
        steps = [(self.size[dim], self.stride[dim]) for dim in order if self.size[dim] != 1]
        dense_strides = [prod(n for n, _ in steps[at + 1 :]) for at in range(len(steps))]
        whole = not self.offset and prod(self.size) == self.base.meta["val"].numel()
        return order if whole and [step for _, step in steps] == dense_strides else None

    def _positions(self) -> fx.Node:
        """Insert ops that compute, for each element that the op reads or writes, its index in the base's storage
        (int64). Return the last node.
        """
        device, positions = self.base.meta["val"].device, None
        for dim, (n, step) in enumerate(zip(self.size, self.stride, strict=True)):
            if n == 1:
                continue
            # Index in the storage: offset + sum over dims of (position in the dim * its stride).
            along = self._call(aten.arange.default, n, dtype=torch.int64, device=device)
            along = self._call(aten.mul.Tensor, along, step)
            along = self._call(aten.view.default, along, [n if at == dim else 1 for at in range(len(self.size))])
            positions = along if positions is None else self._call(aten.add.Tensor, positions, along)
        if positions is None:
            return self._call(aten.full.default, self.size, self.offset, dtype=torch.int64, device=device)
        return positions if not self.offset else self._call(aten.add.Tensor, positions, self.offset)

    def _flat(self, x: fx.Node) -> fx.Node:
        """Insert ops that flatten ``x``, a tensor of the base's shape, in the order of the storage. Return the last
        node.
        """
        return self._call(aten.reshape.default, self._permuted(x, self.order), [-1])

    def _permuted(self, x: fx.Node, order: Sequence[int]) -> fx.Node:
        """Insert a permutation of the dims of ``x`` to ``order``, unless they are in that order already; return the
        result's node.
        """
        return x if list(order) == sorted(order) else self._call(aten.permute.default, x, list(order))


def _memory(node: fx.Node) -> tuple[fx.Node, int]:
    """Return (the node that owns the storage of ``node``, the offset of ``node`` from the owner's first element)."""
    chain = [node]
    while _is_view(chain[-1]):
        chain.append(chain[-1].args[0])
    base = chain.pop()
    val = base.meta["val"]
    # The same views of a new tensor, which starts at offset 0; the owner may start elsewhere in its storage.
    replayed: Any = torch.empty_strided(val.shape, val.stride(), dtype=val.dtype, device=val.device)
    for view in reversed(chain):
        replayed = view.target(replayed, *view.args[1:], **view.kwargs)
    return base, replayed.storage_offset()


def _is_view(node: fx.Node) -> bool:
    """Return whether ``node`` may share memory with its first argument, as a view or as an item of several views."""
    if node.op != "call_function" or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    return _is_view(node.args[0]) if node.target is getitem else aliases(node.target)


def inverse(order: Sequence[int]) -> list[int]:
    """Return the inverse of a permutation."""
    return [list(order).index(dim) for dim in range(len(order))]


Hidden: TypeAlias = "Tensor | tuple[Tensor, Tensor]"  # for an LSTM (hidden, cell)


def _layer(
    input: Tensor, hidden: Hidden, params: Sequence[Tensor], has_biases: bool, hidden_fn: str, reverse: bool = False
) -> tuple[Tensor, Hidden]:
    """Computes one direction of one layer of an RNN, GRU or LSTM on ``input`` [time, batch, in]. Returns (outputs
    [time, batch, out], last state). The input's products are one matmul for all times; the op STEPS does the rest.

    Args:
        params: weights [gates, in] and [gates, out], then both biases if ``has_biases``, then the projection of an LSTM
            if it has one. ``gates`` is the sizes of all gates together.
    """
    h, c = hidden if isinstance(hidden, tuple) else (hidden, None)
    w_input, w_state, *rest = params
    gates = F.linear(input, w_input, rest[0] if has_biases else None)
    state_bias: Tensor | None = rest[1] if has_biases else None
    size = w_state.shape[0] // (4 if c is not None else 3 if hidden_fn == "gru" else 1)
    # The new gate of a GRU is tanh(input's part + reset gate * state's part): STEPS takes the two separately, and the
    # state's bias goes with the second.
    if hidden_fn == "gru":
        gates = F.pad(gates, (0, size))
        if state_bias is not None:
            state_bias = torch.cat(
                [state_bias[: 2 * size], torch.zeros_like(state_bias[:size]), state_bias[2 * size :]]
            )
    gates = gates.flip(0) if reverse else gates
    gates = gates if state_bias is None else gates + state_bias
    projection = rest[-1] if len(rest) in (1, 3) else None
    # The state h is projection @ (state in STEPS), so the projection goes into the state's weight. The first h is
    # projected already: its product is added to step 0, which then starts at zeros.
    if projection is not None and c is not None:
        gates = torch.cat([gates[:1] + F.linear(h, w_state), gates[1:]])
        h, w_state = torch.zeros_like(c), w_state @ projection
    state = h if c is None else torch.cat([h, c], -1)
    states, _ = STEPS(gates, state.to(gates.dtype), w_state.to(gates.dtype), hidden_fn)
    out = states[..., :size]
    out = out if projection is None else F.linear(out, projection)
    last = out[-1] if c is None else (out[-1], states[-1, :, size:])
    return out.flip(0) if reverse else out, last


def _layers(
    input: Tensor, hidden: Sequence[Hidden], params: Sequence[Sequence[Tensor]], has_biases: bool, num_layers: int,
    dropout: float, train: bool, bidirectional: bool, batch_first: bool, layer_fn: Callable[..., tuple[Tensor, Hidden]],
) -> tuple[Tensor, list[Hidden]]:  # fmt: skip
    """Computes all layers of an RNN, GRU or LSTM; returns (outputs, last states). Dropout is applied between layers,
    which torch's decomposition does not do.
    """
    input, directions_per_layer, last = input.transpose(0, 1) if batch_first else input, 1 + bidirectional, []
    # ``hidden`` and ``params`` list the directions of each layer, one layer after the other.
    for at in range(0, num_layers * directions_per_layer, directions_per_layer):
        directions = [
            layer_fn(input, hidden[at + n], params[at + n], has_biases, reverse=bool(n))
            for n in range(directions_per_layer)
        ]
        last += [state for _, state in directions]
        input = torch.cat([out for out, _ in directions], -1) if bidirectional else directions[0][0]
        if dropout and train and at + directions_per_layer < num_layers * directions_per_layer:
            input = F.dropout(input, dropout)
    return input.transpose(0, 1) if batch_first else input, last


# (owner, attribute name, replacement) in torch's decompositions; a cell function becomes its name.
OTHER_FORMS: tuple[tuple[object, str, object], ...] = (
    (decompositions, "select_one_layer_lstm_function", lambda *_: partial(_layer, hidden_fn="lstm")),
    (decompositions, "one_layer_rnn", _layer),
    (decompositions, "gru_cell", "gru"),
    (decompositions, "rnn_cell", lambda function: function.__name__),
    (decompositions, "_rnn_helper", _layers),
)


# Ops that torch itself decomposes to sums, maxima and pointwise ops.
FROM_TORCH = tuple(
    (
        "native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward "
        "_fused_rms_norm _fused_rms_norm_backward _native_batch_norm_legit_functional _native_batch_norm_legit "
        "_native_batch_norm_legit_no_training native_batch_norm native_batch_norm_backward "
        "_batch_norm_with_update_functional batch_norm_backward "
        "_softmax _log_softmax _softmax_backward_data _log_softmax_backward_data _safe_softmax "
        "nll_loss_forward nll_loss2d_forward mse_loss mse_loss_backward "
        "smooth_l1_loss smooth_l1_loss_backward huber_loss huber_loss_backward "
        "binary_cross_entropy binary_cross_entropy_backward binary_cross_entropy_with_logits "
        "gelu gelu_backward silu silu_backward sigmoid_backward tanh_backward threshold threshold_backward "
        "leaky_relu leaky_relu_backward elu elu_backward hardtanh hardtanh_backward hardswish hardswish_backward "
        "hardsigmoid hardsigmoid_backward softplus softplus_backward mish mish_backward logsumexp glu glu_backward "
        "native_dropout_backward logit_backward _unsafe_view addcmul addcdiv lerp "
        "diagonal_backward baddmv addr std std_mean "
        "rsub masked_fill hardshrink softshrink clamp_min clamp_max logaddexp xlogy "
        "upsample_nearest2d pixel_shuffle rot90 trace dot mv vdot linalg_vector_norm norm dist "
        "unfold_backward frac lift_fresh new_full new_ones new_zeros new_empty zeros_like ones_like "
        "empty_like stack fill zeros ones unsafe_split unsafe_split_with_sizes _prelu_kernel _prelu_kernel_backward "
        "log_sigmoid_forward log_sigmoid_backward soft_margin_loss soft_margin_loss_backward channel_shuffle "
        "_weight_norm_interface diag_embed _unsafe_masked_index _unsafe_masked_index_put_accumulate "
        "_euclidean_dist affine_grid_generator"
    ).split()
)


def _mean(
    x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """Computes ``mean`` as a sum and a quotient."""
    dims = list(range(x.ndim)) if dim is None or dim == [] else [dim] if isinstance(dim, int) else list(dim)
    count = prod(x.shape[d] for d in dims if x.ndim)
    return aten.div.Tensor(aten.sum.dim_IntList(x, dims, keepdim, dtype=dtype), count)


def _var_mean(
    x: Tensor, dim: int | Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """Return (variance, mean) of ``x`` over ``dim``. Both are computed by sums, whose sharding rules are exact."""
    dims = list(range(x.ndim)) if dim is None or dim == [] else [dim] if isinstance(dim, int) else list(dim)
    count = prod(x.shape[d] for d in dims if x.ndim)
    mean = aten.div.Tensor(aten.sum.dim_IntList(x, dims, True), count)
    centered = aten.sub.Tensor(x, mean)
    total = aten.sum.dim_IntList(aten.mul.Tensor(centered, centered), dims, keepdim)
    # By default, with Bessel's correction.
    degrees_of_freedom = max(count - (1.0 if correction is None else float(correction)), 0.0)
    var = aten.div.Tensor(total, degrees_of_freedom)
    return var, mean if keepdim else aten.squeeze.dims(mean, dims)


def _var(
    x: Tensor, dim: int | Sequence[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> Tensor:
    """Return the variance of ``x`` over ``dim``, computed by `_var_mean`."""
    return _var_mean(x, dim, correction=correction, keepdim=keepdim)[0]


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Computes ``addmm`` as a product and pointwise ops."""
    product = aten.mm.default(a, b)
    if alpha != 1:
        product = aten.mul.Tensor(product, alpha)
    if beta == 0:
        return product
    return aten.add.Tensor(product, bias if beta == 1 else aten.mul.Tensor(bias, beta))


def _chunk(x: Tensor, chunks: int, dim: int = 0) -> list[Tensor]:
    """Computes ``chunk`` as a ``split``."""
    size = max(1, -(-x.shape[dim] // chunks))
    return aten.split.Tensor(x, size, dim)


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: object) -> Tensor:
    """Computes a convolution without its bias, then adds the bias. Otherwise each rank with a partial sum would add the
    bias to it. Returns NotImplemented, which keeps the op whole, if there is no bias.
    """
    if bias is None:
        return NotImplemented
    product = aten.convolution.default(x, weight, None, *geometry)
    # The weight is [out, in / groups, *kernel]; the result is [batch, out, *space].
    return aten.add.Tensor(product, aten.view.default(bias, [-1] + [1] * (weight.ndim - 2)))


def _convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Sequence[int] | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
    output_mask: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor]:  # fmt: skip
    """Return the gradients of a convolution's (input, weight, bias). The bias's gradient is computed as a sum, an op
    with a rule of its own. NotImplemented, which keeps the op whole, if no bias gradient is wanted.
    """
    if not output_mask[2]:
        return NotImplemented
    bias = aten.sum.dim_IntList(grad, [dim for dim in range(grad.ndim) if dim != 1])  # all dims but the channels
    if not (output_mask[0] or output_mask[1]):
        return None, None, bias
    geometry = (stride, padding, dilation, transposed, output_padding, groups)
    grads = aten.convolution_backward.default(grad, x, weight, None, *geometry, [output_mask[0], output_mask[1], False])
    return grads[0], grads[1], bias


def _nll_loss_backward(
    grad: Tensor, x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int, total: Tensor
) -> Tensor:
    """Computes the gradient of ``x`` by comparing the targets with all class numbers. Unlike a scatter, that can be
    sharded over classes. ``total`` is the sum of the targets' weights, by which a mean divides.
    """
    class_dim = 0 if x.ndim < 2 else 1  # ``x`` is [classes] or [batch, classes, *space]
    shape = [-1] + [1] * (x.ndim - class_dim - 1)
    classes = aten.view.default(aten.arange.default(x.shape[class_dim], device=x.device, dtype=torch.int64), shape)
    target = aten.unsqueeze.default(target, class_dim)
    if reduction == _MEAN:
        grad = aten.div.Tensor(grad, total)
    # Without a reduction, each row has a gradient of its own.
    if x.ndim > grad.ndim > 0:
        grad = aten.unsqueeze.default(grad, class_dim)
    if weight is not None:
        grad = aten.mul.Tensor(grad, aten.view.default(weight, shape))
    is_target = aten.logical_and.default(aten.eq.Tensor(target, classes), aten.ne.Scalar(target, ignore_index))
    return aten.where.self(
        is_target, aten.neg.default(grad), aten.full.default([], 0, dtype=grad.dtype, device=grad.device)
    )


def _slice_backward(grad: Tensor, sizes: Sequence[int], dim: int, start: int, end: int, step: int) -> Tensor:
    """Returns the gradient of the operand of a slice: ``grad``, with zeros in the places that the slice left out, in
    shape ``sizes``.
    """
    dim %= grad.ndim
    before = min(max(start + sizes[dim] if start < 0 else start, 0), sizes[dim])  # places in front of the slice
    if step != 1:  # put zeros in the places that the step skipped
        # Each element and the zeros around it are one of equal parts of the dim: one padding is enough.
        if before < step and grad.shape[dim] * step == sizes[dim]:
            spread = _pad_dim(aten.unsqueeze.default(grad, dim + 1), dim + 1, before, step - 1 - before)
            return aten.view.default(spread, sizes)
        spread = _pad_dim(aten.unsqueeze.default(grad, dim + 1), dim + 1, 0, step - 1)
        grad = aten.view.default(spread, [*grad.shape[:dim], grad.shape[dim] * step, *grad.shape[dim + 1 :]])
        if (room := sizes[dim] - before) < grad.shape[dim]:  # zeros behind the last element reach beyond the end
            grad = aten.slice.Tensor(grad, dim, 0, room)
    return _pad_dim(grad, dim, before, sizes[dim] - before - grad.shape[dim])


def _select_backward(grad: Tensor, sizes: Sequence[int], dim: int, index: int) -> Tensor:
    """Returns the gradient of the operand of a ``select``: ``grad``, padded with zeros to ``sizes``."""
    dim %= len(sizes)
    index %= sizes[dim]
    return _pad_dim(aten.unsqueeze.default(grad, dim), dim, index, sizes[dim] - index - 1)


def _pad_dim(x: Tensor, dim: int, before: int, after: int) -> Tensor:
    """Return ``x`` with ``before`` and ``after`` zeros at the ends of ``dim``."""
    return aten.constant_pad_nd.default(x, [*[0, 0] * (x.ndim - dim - 1), before, after], 0)


def _constant_pad_nd(x: Tensor, pad: Sequence[int], value: float = 0) -> Tensor:
    """Computes padding with negative widths by slices, because torch's kernel takes symbolic sizes for positive widths
    only. Returns NotImplemented if no width is negative.
    """
    if all(width >= 0 for width in pad):
        return NotImplemented
    for at, (before, after) in enumerate(zip(pad[::2], pad[1::2], strict=True)):  # widths of the last dim come first
        dim = x.ndim - 1 - at
        if before < 0 or after < 0:
            x = aten.slice.Tensor(x, dim, max(-before, 0), x.shape[dim] - max(-after, 0))
    added = [max(width, 0) for width in pad]
    return aten.constant_pad_nd.default(x, added, value) if any(added) else aten.clone.default(x)


def _index_put(x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    """Computes ``x[mask] = number`` by ``where``, whose shapes do not depend on the mask. Returns NotImplemented for
    other writes.
    """
    indexed = [(at, index) for at, index in enumerate(indices) if index is not None]
    if len(indexed) != 1 or indexed[0][1].dtype != torch.bool or values.numel() != 1 or accumulate:
        return NotImplemented
    at, mask = indexed[0]  # the mask covers dims ``at`` to ``at + mask.ndim - 1``
    mask = aten.view.default(mask, [*mask.shape, *[1] * (x.ndim - at - mask.ndim)])
    return aten.where.self(mask, aten.view.default(values, []), x)


def _zeros(
    size: Sequence[int], *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: object
) -> Tensor:
    """Replaces ``_efficientzerotensor`` (autograd's zero gradient without memory) by ``full``, because views of such a
    tensor would have no device.
    """
    return aten.full.default(size, 0, dtype=dtype or torch.get_default_dtype(), device=device or torch.device("cpu"))


def _full_like(
    x: Tensor, value: float, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: object
) -> Tensor:
    """Computes ``full_like`` by ``full``, which does not read ``x``."""
    return aten.full.default(x.shape, value, dtype=dtype or x.dtype, device=device or x.device)


def _weight_norm_backward(grad: Tensor, v: Tensor, g: Tensor, norms: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of (``v``, ``g``) in the weight norm ``v g / norms``. ``norms`` are those of ``v`` over all
    dims except ``dim``.
    """
    over = [d for d in range(v.ndim) if d != dim % v.ndim]
    # The part of the gradient along v is that of ``g``; ``v`` gets the part across, as its length plays no role.
    along = aten.div.Tensor(aten.sum.dim_IntList(aten.mul.Tensor(grad, v), over, True), norms)
    across = aten.sub.Tensor(grad, aten.mul.Tensor(v, aten.div.Tensor(along, norms)))
    return aten.mul.Tensor(across, aten.div.Tensor(g, norms)), along


def _lu(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return (LU, pivots) of ``a``, or of its transpose if ``a`` is real, and row-major in the trace. The formulas of
    the backward expect that; the determinant is the same.
    """
    lu, pivots, _ = aten.linalg_lu_factor_ex.default(a.mT if a.is_contiguous() and not a.is_complex() else a)
    return lu, pivots


def _permutation_sign(pivots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sign of the permutation that ``pivots`` (1-based row swaps) describe."""
    rows = aten.arange.start(1, pivots.shape[-1] + 1, dtype=pivots.dtype, device=pivots.device)
    swaps = aten.sum.dim_IntList(aten.ne.Tensor(rows, pivots), [-1])
    return aten._to_copy.default(aten.sub.Tensor(1, aten.mul.Tensor(aten.remainder.Scalar(swaps, 2), 2)), dtype=dtype)


def _det(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return (determinant, LU, pivots) of ``a``."""
    lu, pivots = _lu(a)
    diagonal = aten.diagonal.default(lu, 0, -2, -1)
    return aten.mul.Tensor(aten.prod.dim_int(diagonal, -1), _permutation_sign(pivots, a.dtype)), lu, pivots


def _slogdet(a: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return (sign of the determinant, logarithm of its absolute value, LU, pivots) of ``a``."""
    lu, pivots = _lu(a)
    diagonal = aten.diagonal.default(lu, 0, -2, -1)
    sign = aten.mul.Tensor(aten.prod.dim_int(aten.sgn.default(diagonal), -1), _permutation_sign(pivots, a.dtype))
    return sign, aten.sum.dim_IntList(aten.log.default(aten.abs.default(diagonal)), [-1]), lu, pivots


_MEAN = 1

OWN: dict[OpOverload, Callable[..., object]] = {
    aten.mean.default: lambda x, *, dtype=None: _mean(x, dtype=dtype),
    aten.mean.dim: _mean,
    aten.var_mean.correction: _var_mean,
    aten.var.correction: _var,
    aten.addmm.default: _addmm,
    aten.chunk.default: _chunk,
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.nll_loss_backward.default: _nll_loss_backward,
    aten.nll_loss2d_backward.default: _nll_loss_backward,
    aten.slice_backward.default: _slice_backward,
    aten._linalg_det.default: _det,
    aten._linalg_slogdet.default: _slogdet,
    aten.select_backward.default: _select_backward,
    aten.full_like.default: _full_like,
    aten.index_put.default: _index_put,
    aten.constant_pad_nd.default: _constant_pad_nd,
    aten._weight_norm_interface_backward.default: _weight_norm_backward,
    aten._efficientzerotensor.default: _zeros,
}


def _dropout(x: Tensor, p: float, train: bool | None) -> Tensor:
    """Computes dropout by ``native_dropout``, but returns ``x`` itself where nothing is dropped."""
    return aten.native_dropout.default(x, p, train)[0] if train and p != 0 else x


@contextmanager
def eager_dropout() -> Iterator[None]:
    """Context manager in which a dropout that drops nothing returns its input, as in eager mode. (torch's traces return
    a copy.)
    """
    op = aten.dropout.default
    kernels = dict.fromkeys((torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd), _dropout)
    try:
        with patch.dict(op.py_kernels, kernels):
            op._dispatch_cache.clear()
            yield
    finally:
        op._dispatch_cache.clear()
