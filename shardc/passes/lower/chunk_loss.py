"""ChunkLoss: computes logits and their loss for one chunk of rows after another."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from math import ceil, gcd, prod

import torch
from torch import fx

from shardc.custom_ops.flops import is_dense
from shardc.custom_ops.order import AFTER
from shardc.errors import PlanError, ShardcWarning
from shardc.ir import graph as ir
from shardc.ir.chunking import PRODUCTS, ChunkRewriter, ChunkSpec, Operands, operands, through, total_operands
from shardc.ir.comm import WAIT
from shardc.ir.comm_volume import collective_kind
from shardc.ir.op_traits import CAST
from shardc.passes.lower.microbatch import needs_tangent

aten = torch.ops.aten
_OUTPUT = "is an output"


@dataclass(frozen=True)
class ChunkLoss:
    """Computes logits and loss in chunks of rows: cuts the last matrix product before the loss, and the ops that read
    its result, into chunks.

        %y = mm(%x, %w)                     %y0 = mm(%x0, %w);  %l0 = loss of %y0
        %l = loss of %y                 ->  %y1 = mm(%x1, %w);  %l1 = loss of %y1
        %gw = mm(%gy.t, %x)                 %gw0 = mm(%gy0.t, %x0);  %gw1 = addmm(%gw0, %gy1.t, %x1)
        %gx = mm(%gy, %w)                   %gx = cat(mm(%gy0, %w), mm(%gy1, %w))

    Forward computes chunk after chunk. So does backward, which computes each chunk's logits again. The rows of a chunk
    are taken by ``shardc_order::after``, when the chunk before is done. Each chunk has its own collectives (the maximum
    and the sum of a row whose vocabulary is split), which backward does not repeat. What does not depend on rows (the
    gathered weight) is shared by all chunks.

    *Requires:* a local joint graph. *Ensures:* values are the same, up to the order of sums over rows.

    Args:
        chunks: number of chunks, or up to four times as many, if these divide the rows; 1 leaves the graph as it is.
        cause: the plan entry; "" if there is none: then the chunks are those of the model's ``linear_cross_entropy``.

    Warns:
        ShardcWarning: logits stay whole, since no such number divides the rows, or something needs all of them (they
            are an output).
    """

    chunks: int = 1
    cause: str = ""
    name = "chunk_loss"
    requires = ("localize",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        heads = _last_products(gm.graph)
        # Without a plan entry, the model's own calls of ``linear_cross_entropy`` decide.
        chunks = self.chunks if self.cause else max(map(_chunks_in_model, heads), default=1)
        if chunks == 1 or not heads:
            return gm
        region = _region(gm.graph, heads, chunks)
        if isinstance(region, _Region):
            _Loops(gm.graph, region).run()
            gm.graph.lint()
            gm.recompile()
        elif ir.placeholders(gm.graph, "tangent"):  # in training: an inference may well return logits
            warnings.warn(ShardcWarning(str(self._error(heads[0], region))), stacklevel=2)
        return gm

    def _error(self, head: fx.Node, reason: str) -> PlanError:
        """Returns an error (shown as a warning) which says that the logits ``head`` are computed as a whole, and the
        ``reason``.
        """
        record = ir.info(head)
        return PlanError(
            f"the logits %{record.name} are computed as a whole: {reason}",
            plan_entry=self.cause or None,
            source=record.origin.source or None,
            fix="return the loss only, and shift the targets instead of the logits; or ask for no chunks",
        )


def _chunks_in_model(head: fx.Node) -> int:
    """Returns in how many chunks the model's own code (``linear_cross_entropy``) would compute the logits ``head`` on
    one rank's rows; 1 if it does not.
    """
    rows = ir.info(head).origin.chunk_rows
    return ceil(ir.value(head).shape[0] / rows) if rows else 1


def _region(graph: fx.Graph, heads: list[fx.Node], chunks: int) -> _Region | str:
    """Returns the region of nodes to compute in chunks, from the logits ``heads`` on, with the least possible number of
    chunks (at least ``chunks``). If it cannot be cut, returns the reason as text.
    """
    other = next((head.target for head in heads if head.target not in (aten.mm.default, aten.addmm.default)), None)
    if other is not None:
        return f"{other} computes them, which has no chunks"
    rows = gcd(*(ir.value(head).shape[0] for head in heads))
    # Chunks of all rows (1). Or, where a user of the logits views rows as [sequences, length, ...], chunks of each
    # sequence (as many as there are sequences).
    views = (ir.value(user).shape for head in heads for user in head.users if ir.is_tensor(user))
    outers = dict.fromkeys((1, *(shape[0] for shape in views if len(shape) > 2)))
    reasons = []
    for count in range(chunks, 4 * chunks + 1):
        for outer in (n for n in outers if rows % (n * count) == 0):
            region = _Region(graph, heads, count, outer)
            if (reason := region.obstacle()) is None:
                return region
            reasons.append(reason)
    # The reason that logits are an output goes first: it is true of any chunks. Others may be true of some only, such
    # as of chunks that do not fit a view.
    reasons.sort(key=lambda reason: not reason.endswith(_OUTPUT))
    return next(iter(reasons), f"{rows} rows of each rank have no divisor from {chunks} to {4 * chunks}")


def _last_products(graph: fx.Graph) -> list[fx.Node]:
    """Returns the matrix products of forward whose results no further product uses, such as the one that computes
    logits. Much smaller ones are left out.
    """
    products = [node for node in graph.nodes if is_dense(node.target) and ir.info(node).origin.phase == "forward"]
    before_products = ir.ancestors(x for product in products for x in product.all_input_nodes)
    last = [product for product in products if product not in before_products]
    largest = max(map(_numel, last), default=0)
    return [node for node in last if _numel(node) and 2 * _numel(node) >= largest]


def _numel(node: fx.Node) -> int:
    """Returns the number of elements of a node's result."""
    return prod(ir.value(node).shape) if ir.is_tensor(node) else 0


class _Region:
    """The nodes that are computed chunk by chunk: from the product that computes logits, through the loss, to the
    backward products that give gradients.

    Args:
        heads: the products that compute logits.
        count: number of chunks.
        outer: 1 for chunks of all rows; the number of sequences for chunks of each sequence (`ChunkSpec.outer`).

    Attributes:
        cuts: node -> its chunks, in the graph's order.
        totals: node that is a sum over rows, so over the chunks -> the chunks of its operands.
        ends: the products that compute the gradient of the rows ``x``.
        copied: nodes in ``cuts`` that do not depend on logits. Nodes outside of the region read them uncut.
        rows: number of rows of the logits.
        least: number of elements of the smallest logits.
    """

    def __init__(self, graph: fx.Graph, heads: list[fx.Node], count: int, outer: int) -> None:
        self.rows = max(ir.value(head).shape[0] for head in heads)
        self.least = min(map(_numel, heads))
        self.graph, self.heads = graph, heads
        self.cuts: dict[fx.Node, ChunkSpec] = {}
        self.totals: dict[fx.Node, Operands] = {}
        self.ends: set[fx.Node] = set()
        self.copied: set[fx.Node] = set()
        # From the logits on, in the graph's order: what can be computed in chunks follows from its operands.
        for node in graph.nodes:
            if node in heads:
                size = ir.value(node).shape[0]
                self.cuts[node] = ChunkSpec(0, outer, count, size // (outer * count))
            else:
                self._add_if_chunked(node)
        self._prune()
        self._add_operands()
        # In the graph's order, in which loops are written; operands were added in reverse.
        self.cuts = {node: self.cuts[node] for node in graph.nodes if node in self.cuts}

    def obstacle(self) -> str | None:
        """Returns why the region cannot be computed chunk by chunk, so that logits stay whole; None if it can.

        A node in the region must not need results of all chunks of its phase (forward or backward), which exist only
        when the phase's loop has ended. A node outside must not read values as wide as logits: they would be joined.
        """
        late: set[fx.Node] = set()  # nodes outside the region that need results of all chunks of their phase
        for node in self.graph.nodes:
            chunked = [x for x in node.all_input_nodes if self.has(x) and x not in self.copied]  # these exist in chunks
            wide = next((x for x in chunked if x in self.cuts and self.is_wide(x)), None)
            if node.op == "output":
                if wide is not None:
                    return f"%{ir.info(wide).name} {_OUTPUT}"
                continue
            phase = ir.info(node).origin.phase
            # Backward may read all of what forward computed: its loop is another one.
            same_phase = [x for x in node.all_input_nodes if ir.info(x).origin.phase == phase]
            if self.has(node):
                need = self.totals.get(node) or operands(node, self.cuts[node])
                assert need is not None
                # A chunk of ``node`` would read all of an operand, or other chunks than the operand has.
                whole = [x for x in same_phase if x in late or x in self.totals]
                if whole or any(x in chunked and self.cuts.get(x) != need[x] for x in same_phase):
                    return f"%{ir.info(node).name} needs a value of all rows"
                continue
            if any(x in late or x in chunked for x in same_phase):
                late.add(node)
            if wide is not None:
                return f"%{ir.info(node).name} ({node.target}) reads all rows at once"
        return None

    def has(self, node: fx.Node) -> bool:
        """Returns whether ``node`` is computed chunk by chunk, as chunks or as a sum over them."""
        return node in self.cuts or node in self.totals

    def is_wide(self, node: fx.Node) -> bool:
        """Returns whether ``node`` has more than one element per row, as logits have, and is not a result of the
        region (a gradient of the rows ``x``, in ``ends``).
        """
        return _numel(node) > self.rows and node not in self.ends

    def _add_if_chunked(self, node: fx.Node) -> None:
        """Adds ``node`` to the region if it reads chunked values and can be computed chunk by chunk, or as a sum over
        chunks.
        """
        # What reads nothing but results of the region (``ends``) is outside of it.
        read = {x: self.cuts[x] for x in node.all_input_nodes if x in self.cuts and x not in self.ends}
        if not read:
            return
        if (cut := through(node, read)) is not None:
            self.cuts[node] = cut
            # A product ends the region: its result (the gradient of rows) is no longer as wide as logits.
            if node.target in PRODUCTS:
                self.ends.add(node)
        # A sum of one element per row (the rows' losses) stays outside: it reads the joined chunks, at little cost.
        elif any(map(self.is_wide, read)) and (need := total_operands(node, read)) is not None:
            self.totals[node] = need

    def _prune(self) -> None:
        """Removes values of one element per row from ``cuts``, if they neither read values as wide as logits nor lead
        to any. There is nothing to gain from cutting these into chunks.
        """
        useful: set[fx.Node] = set(self.totals)
        for node in reversed(self.cuts):  # users before operands
            phase = ir.info(node).origin.phase
            # Within a phase: what backward reads of forward it may read as a whole.
            leads_to_useful = any(user in useful and ir.info(user).origin.phase == phase for user in node.users)
            read = [x for x in node.all_input_nodes if x in self.cuts]
            if leads_to_useful or any(map(self.is_wide, [node, *read])):
                useful.add(node)
        self.cuts = {node: cut for node, cut in self.cuts.items() if node in useful}

    def _add_operands(self) -> None:
        """Adds operands of the region's nodes to it, such as masks and one-hot targets, if they are as large as logits
        or computed from values as large. They would otherwise be in memory as a whole.
        """
        for node in reversed(self.graph.nodes):  # so that operands of added operands are added, too
            if (
                node.op != "call_function"
                or self.has(node)
                or not any(map(self._is_large, [node, *node.all_input_nodes]))
            ):
                continue
            if node.target in PRODUCTS or node.target is WAIT or collective_kind(node) is not None:
                continue
            readers = [user for user in node.users if user in self.cuts and user.target not in PRODUCTS]
            # Readers outside of the region need it whole anyway.
            if not self._is_large(node) and len(readers) < len(node.users):
                continue
            # The chunks that its readers want: it has to be cut in one way for all of them.
            wanted = {need[node] for user in readers if (need := operands(user, self.cuts[user])) is not None}
            cut = wanted.pop() if len(wanted) == 1 else None
            if cut is not None and operands(node, cut) is not None:
                self.cuts[node] = cut
                self.copied.add(node)

    def _is_large(self, node: fx.Node) -> bool:
        """Returns whether ``node`` has at least as many elements as the smallest logits."""
        return _numel(node) >= self.least


class _Loops(ChunkRewriter):
    """Rewrites a region as two loops over the chunks, written out: one in forward, one in backward."""

    def __init__(self, graph: fx.Graph, region: _Region) -> None:
        super().__init__(graph, region.cuts)
        self.region = region
        # total -> the cast to a wider dtype that alone reads it, in which it is added up
        self.casts = {total: cast for total in region.totals if (cast := _widening(total)) is not None}
        self.sums: dict[fx.Node, fx.Node] = {}  # total, or its cast -> the sum so far
        self.recomputed: dict[fx.Node, fx.Node] = {}  # node of forward -> its piece of this chunk, computed by backward
        self.done: list[fx.Node] = []  # results of the chunk before
        self.tangents = needs_tangent(graph)

    def run(self) -> None:
        """Replaces the region's nodes by loops over chunks: in forward and in backward, one loop stands where the last
        of its nodes stood. Other nodes read the joined chunks, and stand behind the loop if they read any.
        """
        replaced = [node for node in self.graph.nodes if self.region.has(node) or node in self.casts.values()]
        last_of_phase = {ir.info(node).origin.phase: node for node in replaced}
        loop: dict[fx.Node, None] = {}  # nodes of the phase so far; dicts keep the graph's order
        late: dict[fx.Node, None] = {}  # nodes outside the region that depend on these
        for node in list(self.graph.nodes):
            if node in replaced:
                loop[node] = None
                if node in last_of_phase.values():
                    end = node.next
                    self._write(list(loop), end)
                    for reader in late:
                        self._take_joined(reader, end)
                        end.prepend(reader)  # moves it behind the loop
                    loop, late = {}, {}
            elif any((x in loop and x not in self.region.copied) or x in late for x in node.all_input_nodes):
                late[node] = None  # it stands between nodes of the loop, and waits for its end
            else:
                self._take_joined(node, node)
        for node in reversed(replaced):
            # A copied node that others read stays beside its chunks.
            if node not in self.region.copied or not node.users:
                self.graph.erase_node(node)

    def _write(self, loop: list[fx.Node], before: fx.Node) -> None:
        """Writes one loop before the node ``before``: all of the nodes ``loop`` for the first chunk, then all for the
        next chunk, and so on.
        """
        region, backward = self.region, ir.info(loop[0]).origin.phase == "backward"
        read = {x: None for node in loop for x in node.all_input_nodes}  # a set in order
        # What logits of the next chunk wait for (see `_piece`). The first ones of backward wait for a value that
        # depends on a tangent, so that they are not computed in forward.
        self.done = [x for x in read if x in self.tangents and not region.has(x)][:1] if backward else []
        # What a chunk leaves behind: a chunk is done when this is computed.
        results = [x for x in loop if x in self.cuts and (x in region.ends or not region.is_wide(x))]
        results = [x for x in results if any(user not in loop for user in x.users)]
        for number in range(self.count):
            self.recomputed = {}  # pieces of the chunk before are read no more
            for x in read if backward else ():
                if self._is_recomputed(x):
                    self._recomputed_piece(x, number, before)
            for node in loop:
                if node in region.totals:
                    self._add(node, number, before)
                elif node in self.cuts:
                    self.pieces.setdefault(node, []).append(self._piece(node, number, before))
            self.done = [*(self.pieces[x][number] for x in results), *(self.sums[x] for x in loop if x in self.sums)]
        for node in loop:
            if node in self.sums:
                node.replace_all_uses_with(ir.update(self.sums[node], name=ir.info(node).name))

    def _add(self, node: fx.Node, number: int, before: fx.Node) -> None:
        """Inserts the contribution of chunk ``number`` to ``node``, which is a sum over all chunks, and adds it to the
        sum over the earlier chunks.
        """
        cast, need = self.casts.get(node), self.region.totals[node]
        result = node if cast is None else cast  # terms are cast, then added, so that the sum has the wider dtype
        total, self.phase = self.sums.get(result), ir.info(node).origin.phase
        args = fx.map_arg(node.args, lambda x: self._operand(x, need[x], number, before))
        # A product adds to the sum by itself (addmm).
        if total is not None and cast is None and node.target is aten.mm.default:
            self.sums[node] = self._emit(before, node, aten.addmm.default, total, *args)
            return
        term = self._emit(before, node, node.target, *args, **node.kwargs)
        if cast is not None:
            term = self._emit(before, cast, cast.target, term, **cast.kwargs)
        self.sums[result] = term if total is None else self._emit(before, result, aten.add.Tensor, total, term)

    def _is_recomputed(self, x: fx.Node) -> bool:
        """Returns whether backward recomputes ``x``: a value of forward as wide as logits, which is not saved. Of other
        values it reads forward's result.
        """
        return x in self.cuts and ir.info(x).origin.phase == "forward" and self.region.is_wide(x)

    def _recomputed_piece(self, x: fx.Node, number: int, before: fx.Node) -> fx.Node:
        """Returns chunk ``number`` of ``x``, recomputed in backward before the node ``before``."""
        if x not in self.recomputed:
            self.recomputed[x] = self._piece(x, number, before, "backward")
        return self.recomputed[x]

    def _piece(self, node: fx.Node, number: int, before: fx.Node, phase: str = "") -> fx.Node:
        """Inserts chunk ``number`` of ``node`` before the node ``before``; returns it. ``phase``: the phase of the
        chunk, by default that of ``node``. A chunk of logits waits until the previous chunk is done, which limits
        memory.
        """
        piece = super()._piece(node, number, before, phase)
        if node in self.region.heads and self.done:
            rows = piece.args[-2]  # of (rows, weight), or (bias, rows, weight)
            piece.replace_input_with(rows, self._emit(piece, node.args[-2], AFTER, rows, list(self.done)))
        return piece

    def _join(self, x: fx.Node, before: fx.Node) -> fx.Node:
        """Returns ``x`` as a whole: the original node if it was kept beside its chunks, else a concatenation of the
        chunks.
        """
        return x if x in self.region.copied else super()._join(x, before)

    def _operand(self, x: fx.Node, cut: ChunkSpec | None, number: int, before: fx.Node) -> fx.Node:
        """Returns chunk ``number`` of the operand ``x``, divided as in ``cut``; all of ``x`` if that is None. In
        backward, values as wide as logits are recomputed for the chunk.
        """
        if self.phase == "backward" and self._is_recomputed(x) and self.cuts[x] == cut:
            return self._recomputed_piece(x, number, before)
        return super()._operand(x, cut, number, before)


def _widening(node: fx.Node) -> fx.Node | None:
    """Returns the only user of ``node`` if it is a cast to a wider dtype; else None."""
    user = next(iter(node.users)) if len(node.users) == 1 else None
    wider = user is not None and user.target is CAST and ir.value(user).itemsize > ir.value(node).itemsize
    return user if wider else None
