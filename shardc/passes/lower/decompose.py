"""Decompose: splits collectives of activations into chunks of rows, so that one is sent while another is computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from operator import itemgetter

from torch import fx, nn

from shardc.cost.compute import flops_of
from shardc.cost.hardware import Hardware
from shardc.cost.model import Pricing
from shardc.ir import graph as ir
from shardc.ir.chunking import PRODUCTS, ChunkSpec, make_pieces, operands, through
from shardc.ir.comm import WAIT
from shardc.ir.comm_volume import arguments_of, collective_kind, group_of, wire_bytes
from shardc.ir.mesh import Mesh

PIECES = (2, 4, 8)
_PAYS = 0.95  # share of the unsplit time that chunks must stay below: predictions are no more accurate than this
_KINDS = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class Candidate:
    """Into how many chunks `Decompose` splits one collective next to a matrix product, and why; for reports.

    Args:
        name, module, source: the collective's name, module and source line.
        pieces: number of chunks; 1 if it is not split.
        reason: the reason for that number.
    """

    name: str
    module: str
    source: str
    pieces: int
    reason: str


@dataclass(frozen=True)
class Decompose:
    """Splits collectives of activations, and the matrix products beside them, into chunks of rows.

        %y = mm(%x, %w)                     %y0 = mm(%x0, %w);  %a0 = all_reduce(%y0)
        %a = all_reduce(%y)             ->  %y1 = mm(%x1, %w);  %a1 = all_reduce(%y1)
                                            (%a0 is sent while %y1 is computed)

    Rows run along a dim that every rank cuts the same way. A chunk goes from the product that computes it through its
    collective and row-wise ops (views, pointwise ops, norms) to the products that read it, and on to their collective.
    The chunks of one stretch, from collective to collective, are computed one after another. An op that cannot be
    chunked (attention, a weight's gradient) reads the chunks concatenated, and runs while the last ones are sent.

    *Requires:* a local joint graph. *Ensures:* values are the same; collectives of parameters and of their gradients
    stay, since the schedule hides those under other work.

    Args:
        mesh: the mesh.
        cost: cost model of collectives; None if links were neither measured nor described: then nothing is split unless
            ``pieces`` is a number.
        compute: cost model of matrix products.
        pieces: "auto" takes the number of chunks with the least predicted time, if that beats the unsplit one; a number
            splits every collective into that many chunks if its sizes allow.
        report: called with the decision about every candidate.
    """

    mesh: Mesh
    cost: Pricing | None
    compute: Pricing
    pieces: int | str = "auto"
    report: Callable[[Candidate], None] | None = field(default=None, compare=False, repr=False)
    name = "decompose"
    requires = ("localize",)

    def __call__(self, gm: fx.GraphModule) -> fx.GraphModule:
        if self.pieces == 1 or (self.cost is None and self.pieces == "auto"):
            return gm
        before_products = ir.ancestors(filter(flops_of, gm.graph.nodes))
        collectives = [node for node in gm.graph.nodes if node in before_products and _is_activation_collective(node)]
        counts = PIECES if self.pieces == "auto" else (int(self.pieces),)
        plans = (self._plan(gm.graph, collectives, count) for count in counts)
        _seconds_saved, plan, reasons = max(plans, key=itemgetter(0))  # on a tie the fewest chunks
        if self.report is not None:
            for node in collectives:
                record, count = ir.info(node), plan.count if node in plan.cuts else 1
                self.report(Candidate(record.name, record.origin.module, record.origin.source, count, reasons[node]))
        if plan.cuts:
            make_pieces(gm.graph, plan.cuts)
            gm.graph.lint()
            gm.recompile()
        return gm

    def _plan(self, graph: fx.Graph, collectives: list[fx.Node], count: int) -> tuple[float, _Cuts, dict[fx.Node, str]]:
        """Plans the split of ``collectives`` into ``count`` chunks each; the graph is not changed. Returns
        (predicted seconds saved, the nodes to compute in chunks, collective -> reason for its decision).

        With ``pieces`` "auto" those collectives are left out that would take about as long, or longer, in chunks.
        """
        cuts = _Cuts(graph, count, collectives)
        reasons = dict.fromkeys(collectives, "as the option says") | cuts.stopped
        if self.pieces != "auto":  # a fixed number of chunks needs no prediction
            return 0.0, cuts, reasons
        saved, paying = 0.0, []
        for node in collectives:
            if node not in cuts.cuts:  # it cannot be split: `cuts.stopped` has the reason
                continue
            whole_seconds, chunked_seconds = self._seconds(cuts, node)
            reasons[node] = (
                f"{count} pieces take {1e6 * chunked_seconds:,.0f} us, and whole it takes {1e6 * whole_seconds:,.0f} us"
            )
            if chunked_seconds < _PAYS * whole_seconds:
                saved += whole_seconds - chunked_seconds
                paying.append(node)
        # Again, for the paying ones only: ops that are beside none of these stay whole.
        return saved, _Cuts(graph, count, paying), reasons

    def _seconds(self, cuts: _Cuts, node: fx.Node) -> tuple[float, float]:
        """Returns (seconds unsplit, seconds in chunks), both predicted, of the collective ``node`` together with the
        matrix products beside it.

        Args:
            cuts: the nodes that are computed in chunks.
        """
        assert self.cost is not None
        axes, ranks = group_of(node, self.mesh)
        kind = collective_kind(node)
        assert kind is not None
        before, behind = cuts.beside(node)
        beside = cuts.seconds_beside(node, self._product_seconds)
        times = []  # [unsplit, in chunks]
        for n in (1, cuts.count):
            sent = self.cost.collective_seconds(kind, self.mesh, axes, wire_bytes(node, kind, ranks) / n)
            # A product beside several collectives is shared out among them.
            before_seconds, behind_seconds = (
                sum(self._product_seconds(x, n) / cuts.sharers[x] for x in products) for products in (before, behind)
            )
            times.append(self._pipelined_seconds(before_seconds, beside, behind_seconds, sent, ranks, n))
        # An op that is not computed in chunks reads them concatenated: the copy reads and writes each byte.
        for x in before | behind:
            if any(user not in cuts.cuts for user in x.users):
                times[1] += self.compute.copy_seconds(2 * ir.value(x).nbytes) / cuts.sharers[x]
        return times[0], times[1]

    def _pipelined_seconds(
        self, before: float, beside: float, behind: float, sent: float, ranks: int, count: int
    ) -> float:
        """Simulates a pipeline of ``count`` chunks and returns its seconds. All chunks are computed one after another,
        each is sent when it is computed and the link is free, and each is consumed when it has arrived.

        Args:
            before, sent, behind: seconds to compute, send and consume one chunk.
            beside: seconds of compute that is scheduled between the collective and its first use.
            ranks: ranks of the collective's group.
            count: number of chunks.
        """
        start = share = 0.0
        if isinstance(self.cost, Hardware):  # a rank's own core sends: it starts messages, and is slower beside them
            start, share = self.cost.start_seconds(ranks - 1), self.cost.share
        core_busy = start + share * (sent - start)  # seconds that sending one chunk adds to compute beside it
        now, link_free = 0.0, 0.0  # the times at which compute and the link are done with what they have so far
        arrivals: list[float] = []
        for _ in range(count):
            now += before + (core_busy if arrivals else 0.0)  # while the first is computed nothing is sent
            link_free = max(now, link_free) + sent
            arrivals.append(link_free)
        now += beside
        for at, arrived in enumerate(arrivals):
            now = max(now, arrived) + behind + (core_busy if at < count - 1 else 0.0)  # nor while the last is consumed
        return now

    def _product_seconds(self, node: fx.Node, count: int = 1) -> float:
        """Returns the predicted seconds of one of ``count`` chunks of a matrix product; 0 for other ops."""
        operations = flops_of(node)
        if not operations:
            return 0.0
        *_, x, weight = (x for x in node.all_input_nodes if ir.is_tensor(x))  # behind a bias, as in addmm
        # Bytes of rows: those of the result and of ``x``. The weight is read as a whole for each chunk.
        row_bytes = [ir.value(node).nbytes / count if ir.is_tensor(node) else 0, ir.value(x).nbytes / count]
        nbytes = sum(row_bytes) + ir.value(weight).nbytes
        return self.compute.compute_seconds(operations / count, nbytes, ir.value(x).dtype)


def _is_activation_collective(node: fx.Node) -> bool:
    """Returns whether ``node`` is a gather or reduction of an activation, not of a parameter."""
    if collective_kind(node) not in _KINDS or [user.target for user in node.users] != [WAIT]:
        return False
    above = node
    # Before the gather of a parameter there are only ops of one operand, such as casts: up, to a placeholder or an op
    # of several operands.
    while above.op == "call_function" and len(above.all_input_nodes) == 1:
        (above,) = above.all_input_nodes
    return above.op != "placeholder" or ir.role(above).kind != "param"


class _Cuts:
    """Nodes of a graph that are computed in chunks. A *stretch* is the ops between two collectives.

    Args:
        starts: the collectives to split, as far as possible.

    Attributes:
        count: number of chunks of each node.
        cuts: node -> the dim and size of its chunks.
        sharers: node -> number of chunked collectives at the ends of its stretch, which share its time.
        stretch: node -> position of the last collective before it, which identifies its stretch.
        stopped: collective -> the reason for which it is not chunked.
        place: node -> its position in the graph.
    """

    def __init__(self, graph: fx.Graph, count: int, starts: list[fx.Node]) -> None:
        self.graph, self.count = graph, count
        self.place = {node: at for at, node in enumerate(graph.nodes)}
        self.stopped: dict[fx.Node, str] = {}
        collectives = list(starts)
        # Leaves out collectives beside which no product is cut: there is nothing that could hide them. The ops beside
        # these are then whole, which may leave other collectives without a product: repeat.
        while True:
            self.cuts: dict[fx.Node, ChunkSpec] = {}
            self._cut_nodes(set(collectives))
            self._prune()
            self.stretch = self._stretches()
            cut = [node for node in collectives if node in self.cuts]
            near = {node: before | behind for node in cut for before, behind in [self.beside(node)]}
            self.sharers = Counter(x for ops_beside in near.values() for x in ops_beside)
            alone = [node for node, ops_beside in near.items() if not any(x.target in PRODUCTS for x in ops_beside)]
            self.stopped |= dict.fromkeys(alone, "no matrix product is beside it")
            if not alone:
                break
            collectives = [node for node in collectives if node not in alone]

    def beside(self, node: fx.Node) -> tuple[set[fx.Node], set[fx.Node]]:
        """Returns (chunked ops before a collective, chunked ops after it). Both sets end at the neighbouring
        collectives.
        """
        (wait,) = node.users
        return self._chunked_neighbours(node, up=True), self._chunked_neighbours(wait, up=False)

    def seconds_beside(self, node: fx.Node, seconds: Callable[[fx.Node], float]) -> float:
        """Returns the total of ``seconds(op)`` over matrix products that run while a collective is in flight: those
        between it and the first use of its result.
        """
        (wait,) = node.users
        first = min(self.place[user] for user in wait.users)
        nodes = [
            other for other, at in self.place.items() if self.place[node] < at < first and other.op == "call_function"
        ]
        return sum(seconds(other) for other in nodes if flops_of(other))

    def _chunked_neighbours(self, node: fx.Node, up: bool) -> set[fx.Node]:
        """Returns the chunked ops of the stretch of ``node`` that it depends on (``up``) or that depend on it (not
        ``up``). The search ends at the collectives before and after it.
        """
        seen: set[fx.Node] = set()
        work = [node]
        while work:
            current = work.pop()
            for x in current.all_input_nodes if up else current.users:
                is_end = x.target is WAIT if up else collective_kind(x) is not None
                if x in self.cuts and x not in seen and not is_end and self.stretch[x] == self.stretch[node]:
                    seen.add(x)
                    work.append(x)
        return seen

    def _stretches(self) -> dict[fx.Node, int]:
        """Returns chunked node -> position of the last collective (of its wait) that it depends on; -1 for none."""
        stretch: dict[fx.Node, int] = {}
        for node in self.cuts:  # in the graph's order
            last = max((stretch[x] for x in node.all_input_nodes if x in self.cuts), default=-1)
            stretch[node] = self.place[node] if node.target is WAIT else last  # a wait begins a stretch
        return stretch

    # --- the choice of nodes

    def _cut_nodes(self, starts: set[fx.Node]) -> None:
        """Enters in ``cuts`` (node -> its chunks) the collectives ``starts``, in graph order, and the nodes that are
        computed in chunks with them.
        """
        for node in self.graph.nodes:
            if node in starts:
                self._cut_collective(node)
            # An op behind them: chunks of its operands may give chunks of its result. Other collectives stay whole.
            elif node not in self.cuts and collective_kind(node) is None:
                read = {x: self.cuts[x] for x in node.all_input_nodes if x in self.cuts}
                cut = through(node, read) if read else None
                if cut is not None:
                    self.cuts[node] = cut

    def _cut_collective(self, node: fx.Node) -> None:
        """Enters a collective in ``cuts``, with the ops that compute its input, or in ``stopped``, with the reason. Of
        the dims that can be divided, takes the one whose chunks are in the fewest contiguous blocks of rows of the
        matrix products beside the collective.
        """
        source: fx.Node = arguments_of(node)["input"]
        # Its input is in chunks already, for a collective before it: it takes these, and has no choice of its own.
        if source in self.cuts:
            cut = through(node, {source: self.cuts[source]})
            if cut is None:
                self.stopped[node] = "its input is in pieces that ranks split"
            else:
                self.cuts[node] = cut
            return
        tried: list[tuple[tuple[int, bool, int], dict[fx.Node, ChunkSpec]]] = []  # (sort key, cuts)
        for cut in self._divisions(node):
            need = operands(node, cut)
            assert need is not None
            source_cut = need[source]
            assert source_cut is not None
            above: dict[fx.Node, ChunkSpec] = {}  # filled by the search
            has_product_above = self._follow_to_products_above(source, source_cut, above)
            below = self._follow_to_products_below(node, cut)
            # `outer`: in how many blocks of its rows a chunk of a product lies. Best is one, which is contiguous.
            blocks = [spec.outer for x, spec in (above | below).items() if x.target in PRODUCTS]
            if blocks:
                # On a tie: the input comes from products, so that chunks of it are sent early; the outermost dim.
                sort_key = (max(blocks), not has_product_above, cut.dim)
                tried.append((sort_key, {node: cut} | above))  # `_cut_nodes` enters those below when it comes to them
        if tried:
            self.cuts |= min(tried, key=itemgetter(0))[1]
        elif node not in self.stopped:
            self.stopped[node] = "no matrix product is beside it whose rows divide"

    def _divisions(self, node: fx.Node) -> Iterator[ChunkSpec]:
        """Yields the ways to divide the result of a collective into chunks: a `ChunkSpec` for each dim whose size the
        number of chunks divides (for dim 0 of an all-gather, the size that each rank contributes). A tensor of one dim
        has none: it has no rows.
        """
        shape = ir.value(node).shape
        ranks = arguments_of(node).get("group_size", 1) if collective_kind(node) == "all_gather" else 1
        for dim, size in enumerate(shape if len(shape) > 1 else ()):
            # An all-gather joins the ranks' shards along dim 0, and a chunk is a part of each of these shards.
            outer = ranks if dim == 0 else 1
            if size % (outer * self.count) == 0:
                yield ChunkSpec(dim, outer, self.count, size // (outer * self.count))

    def _follow_to_products_above(self, node: fx.Node, cut: ChunkSpec, marks: dict[fx.Node, ChunkSpec]) -> bool:
        """Returns whether the chunks ``cut`` of ``node`` can be computed from chunks of matrix products. Adds the nodes
        that take part to ``marks``, as node -> its chunks.

        Args:
            cut: the chunks of ``node``.
            marks: node -> its chunks, filled with the nodes in between.
        """
        if node in self.cuts or node in marks:  # seen before: it fits if it has the same chunks
            return (self.cuts.get(node) or marks[node]) == cut
        # Another collective ends the search: it is cut by itself.
        need = None if collective_kind(node) or node.target is WAIT else operands(node, cut)
        # An operand that is in other chunks already would have to be concatenated first.
        if need is None or any(x in self.cuts and self.cuts[x] != part for x, part in need.items()):
            return False
        parts = [(x, part) for x, part in need.items() if part is not None]
        # A list, not a generator: every operand may lead to a product, and all have to be recorded.
        if node.target in PRODUCTS or any([self._follow_to_products_above(x, part, marks) for x, part in parts]):
            marks[node] = cut
        return node in marks

    def _follow_to_products_below(self, node: fx.Node, cut: ChunkSpec) -> dict[fx.Node, ChunkSpec]:
        """Follows the chunks ``cut`` of ``node`` forward to the next matrix products. Returns node -> its chunks, for
        each node that can be computed from these chunks alone.
        """
        cuts = {node: cut}
        work = [node]
        while work:
            current = work.pop()
            for user in current.users:
                # The next collective ends the search, as a product does.
                user_cut = None if user in cuts or collective_kind(user) else through(user, {current: cuts[current]})
                if user_cut is not None:
                    cuts[user] = user_cut
                    if user.target not in PRODUCTS:
                        work.append(user)
        return cuts

    def _prune(self) -> None:
        """Drops from ``cuts`` the nodes that lead to no chunked product and no chunked collective: nothing is gained by
        chunks of these. ``cuts`` is then in the graph's order.
        """
        useful: set[fx.Node] = set()
        for node in filter(self.cuts.__contains__, reversed(self.graph.nodes)):
            is_end = collective_kind(node) is not None or node.target is WAIT or node.target in PRODUCTS
            if is_end or not useful.isdisjoint(node.users):
                useful.add(node)
        self.cuts = {node: self.cuts[node] for node in self.graph.nodes if node in useful}


def candidates(graph: fx.Graph, decompose: Decompose) -> list[Candidate]:
    """Returns what the pass ``decompose`` would do with each collective of activations in ``graph``, which is not
    changed.
    """
    reported: list[Candidate] = []
    replace(decompose, report=reported.append)(fx.GraphModule(nn.Module(), ir.copied(graph)))
    return reported
