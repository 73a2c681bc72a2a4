"""Rules for `flex_attention` as an op (`shardc.custom_ops.flex_ops`), whose functions know global positions.

Queries and keys are split as those of attention of a split sequence (`shardc.rules.attention_rules`). What functions
read by position is whole there; what they read by batch or head lies with these.
"""

from __future__ import annotations

from operator import getitem

import torch

from shardc.custom_ops.flex_ops import FLEX, FLEX_GRADIENT, FLEX_TABLES, mask_op, score_functions
from shardc.rules.attention_rules import Attended, SequenceHeads, routed
from shardc.rules.key_blocks import KeyBlock, KeyBlocks
from shardc.rules.notation import FREE, WHOLE, Loops
from shardc.rules.positions import positions
from shardc.rules.rule import CONTIGUOUS, Call, Emitted, Local, Rule, table
from shardc.rules.spec import Dims, Spec

aten = torch.ops.aten


class _Heads(SequenceHeads):
    """Factors of the op of `flex_attention` or of its gradient: those of attention whose sequence may be split, and
    those of the tensors that the functions passed to it capture.
    """

    def __init__(self, loops: Loops, *, backward: bool) -> None:
        # Gradients of captured tensors are sums over batch and heads too.
        super().__init__(loops, backward=backward, batch="sum" if backward else FREE)
        self.by_name["grad_logsumexp"] = self.row
        b, h, *_ = self.query
        captured = [shape for name, shape in zip(loops.names, loops.shapes, strict=True) if name == "captured"]
        # Of each captured tensor, the dims that the functions index by this rank's batch or head: these are split with
        # the batch or the heads. All others are whole, since the functions may read any element.
        by_place = score_functions(loops.call["body"]).places
        self.captured = [
            tuple(
                {"batch": b, "head": h}[places[dim]] if dim in places else loops.dim(f"captured{at}.{dim}", n, WHOLE)
                for dim, n in enumerate(shape)
            )
            for at, (shape, places) in enumerate(zip(captured, by_place, strict=True))
        ]

    def operands(self) -> list[Dims]:
        """Return the factors of the dims of each operand of the call, captured tensors included."""
        captured = iter(self.captured)  # a list in the schema, and so operands of the same name
        return [next(captured) if name == "captured" else self.by_name[name] for name in self.loops.names]


def _flex(call: Call) -> Spec:
    """Return the spec of flex_attention. If keys are split, the output is a partial sum."""
    loops = Loops(call)
    heads = _Heads(loops, backward=False)
    key, value = 1, 2  # positions of the operands; linear in the values
    log_sum_exp = 1  # position of the result
    # With keys split the output is a partial sum, already weighted by each rank's share; the log-sum-exp is complete.
    spec = loops.spec(heads.operands(), [heads.out, heads.row], linear=[{value}], replicated=[log_sum_exp])
    return routed(call, spec, moving=(key, value), trips=1)


def _gradient(call: Call) -> Spec:
    """Return the spec of the backward of flex_attention: gradients of query, key, value and of the captured tensors
    whose positions are in ``wanted``.
    """
    loops = Loops(call)
    heads = _Heads(loops, backward=True)
    results = [heads.query, heads.key, heads.value, *(heads.captured[at] for at in call["wanted"])]
    # Linear in the gradients of both results together; that of the log-sum-exp may be None.
    grads = {loops.names.index(name) for name in ("grad", "grad_logsumexp") if name in loops.names}
    spec = loops.spec(heads.operands(), results, linear=[grads])
    key, value = 2, 3  # positions of the operands
    # Each block of keys and values is sent, and their gradients back.
    return routed(call, spec, moving=(key, value), trips=2)


# --- on one rank


class _Positions:
    """Arguments by which the op computes one rank's scores: the global positions of its rows, batches and heads (left
    out where they are 0, 1, 2, ...), and which blocks of scores are visible, computed once for all calls with the same
    mask.

    Attributes:
        functions: the score and mask functions, and what they read.
        same: the keyword arguments that are the same for all blocks of keys.
    """

    def __init__(self, local: Local) -> None:
        self.local, self.functions = local, score_functions(local.call["body"])
        reads = dict(zip(("batches", "heads"), self.functions.reads, strict=True))
        # Of the query's dims [b, h, q, e]; batch and head only if a function reads them.
        self.same = {name: self._of(dim) for name, dim in (("batches", 0), ("heads", 1)) if reads[name]}
        self.same |= {"rows": self._of(2)}
        self.same = {name: x for name, x in self.same.items() if x is not None}

    def _of(self, dim: int) -> Emitted | None:
        """Emit and return the global positions of this rank's elements along ``dim`` of the query; None if they are 0,
        1, 2, ..., as the op assumes without an argument.
        """
        layout = self.local.operand_layout("query")
        at = self.local.call.position("query") or 0  # 0 in forward, 1 in the gradient
        # True sizes (without padding) are listed by dims of all operands; those before the query have four dims each.
        size = self.local.true_size(4 * at + dim, layout.shape[dim])
        if not layout.dim_axes(dim) and size == layout.shape[dim]:
            return None
        builder = self.local.builder

        def emit() -> Emitted:
            places = positions(self.local, layout, dim, None)
            # Padding takes the position of the last element, at which the captured tensors have one.
            return places if size == layout.shape[dim] else builder.call(aten.clamp.default, places, 0, size - 1)

        # Calls whose queries are split in the same way share the tensor.
        return builder.once(("positions", layout.shape[dim], layout.dims[dim], size), emit)

    def at(self, block: KeyBlock, key: Emitted) -> dict[str, Emitted]:
        """Return keyword arguments of the op for ``block``, whose keys are ``key`` [b, g, k, e]: positions, and the
        blocks of scores that the mask leaves visible.
        """
        local, builder = self.local, self.local.builder
        where = self.same | ({} if block.columns is None else {"columns": block.columns})
        # The op that evaluates the mask ahead of the kernel: FLEX_TABLES gives what torch's CUDA kernel takes.
        op = mask_op(builder.device)
        # The kernel of such a device evaluates the mask at each call.
        if op is None:
            return where
        *batch_heads_rows, _ = builder.shape(local.operand("query"))
        read_by_mask = list(local.operand("captured"))[self.functions.counts[0] :]  # behind those of the score function
        size = [*batch_heads_rows, builder.shape(key)[2]]
        arguments = read_by_mask, local.call["body"], size, local.call["keys"]
        device = [builder.device] if op is FLEX_TABLES else []
        # All that the result depends on, hashable: calls that agree on it share the result.
        mask_key = (op, *(tuple(x) if isinstance(x, list) else x for x in arguments), *where.items())

        def emit() -> list[Emitted]:
            results = builder.call(op, *arguments, *device, **where)
            count = 8 if op is FLEX_TABLES else 1  # the tables of torch's `BlockMask`, or one tensor
            return [builder.call(getitem, results, at) for at in range(count)]

        return where | {"visible": builder.once(mask_key, emit)}


def _flex_local(local: Local) -> Emitted:
    """Emit flex_attention of this rank's queries to all keys, block by block; return [output, log-sum-exp]."""
    run, sequence, call, attended = local.builder.call, KeyBlocks(local), local.call, Attended(local)
    places = _Positions(local)
    how = list(local.operand("captured")), call["body"], call["scale"], call["keys"]
    for block, k, v in sequence.with_keys(sequence.by_position()):
        results = run(FLEX, local.operand("query"), k, v, *how, **places.at(block, k))
        out, log_sum_exp = run(getitem, results, 0), run(getitem, results, 1)
        attended.add(out, log_sum_exp, blind=True)  # any mask may hide all keys of a block from a query
    return list(attended.over(sequence.pending))


def _gradient_local(local: Local) -> Emitted:
    """Emit the gradients of query, key, value and of the captured tensors that ``wanted`` lists on this rank, block by
    block; return them.
    """
    run, sequence, places = local.builder.call, KeyBlocks(local), _Positions(local)
    # The same for all blocks, in the order of the schema; output and log-sum-exp are those over all keys.
    names = ("out", "logsumexp", "grad_logsumexp", "wanted", "captured", "body", "scale", "keys")
    how = [list(local.operand(name)) if name in ("wanted", "captured") else local.operand(name) for name in names]
    grad, query = local.operand("grad"), local.operand("query")
    count = 3 + len(local.call["wanted"])  # gradients of query, key and value, then of captured tensors

    def of_block(block: KeyBlock, k: Emitted, v: Emitted) -> list[Emitted]:
        """Emit and return the gradients for one block, with the keys ``k`` and the values ``v``."""
        results = run(FLEX_GRADIENT, grad, query, k, v, *how, **places.at(block, k))
        return [run(getitem, results, at) for at in range(count)]

    # It sends the gradients of keys and values to the rank that has these, and adds the others over the blocks.
    return sequence.gradients(sequence.by_position(), of_block)


TABLE = table(
    Rule(
        "shardc_attention.flex",
        _flex,
        "b (g r) q e, b g k e, b g k f, ... -> b (g r) q f, b (g r) q    k: sum; or q and k on one axis",
        _flex_local,
    ),
    Rule(
        "shardc_attention.flex_gradient",
        _gradient,
        "b (g r) q f, b (g r) q e, b g k e, b g k f, ... -> b (g r) q e, b g k e, b g k f, ...    all: sum; or as "
        "forward",
        _gradient_local,
    ),
    opaque=True,
    strides=CONTIGUOUS,
)
