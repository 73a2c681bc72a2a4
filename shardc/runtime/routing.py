"""`Routing`: what layers of experts record when they run: the tokens per expert, and the most rows that a rank sends to
another rank's experts, which are checked against the layer's capacity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, fx

from shardc.custom_ops.expert_ops import NOTED, WITHIN, Load, Noted, experts_in
from shardc.errors import InputError

Loads = list[tuple[str, Load]]  # (module, its load) of layers of experts in the order in which they ran


@dataclass
class Routing:
    """What a module's layers of experts recorded when its graphs last ran: the tokens of each expert, and each
    layer's highest load, to be checked against its capacity.

    Attributes:
        tokens: layer -> (tokens per expert, name of the group to sum over) in the last forward.
        loads: loads of layers with a capacity that have not been checked yet.
    """

    tokens: dict[str, tuple[Tensor, str]] = field(default_factory=dict)
    loads: Loads = field(default_factory=list)

    def note(self, graph: fx.Graph, noted: Noted, adds: bool) -> None:
        """Stores what layers of experts have recorded in a run of the forward ``graph``: the numbers of tokens
        (`tokens`) of this run, and its `loads`, behind those that are still unchecked.

        Args:
            graph: the forward, by which the layers get their names.
            noted: the records of the run.
            adds: add the counts to those of earlier microbatches instead of replacing them.
        """
        if noted.counts:
            earlier = dict(self.tokens) if adds else {}
            self.tokens.clear()  # layers that did not run in this forward have no counts
            # `over`: name of the group over which counts are summed when they are read.
            for name, (counts, over) in zip(experts_in(graph, NOTED), noted.counts, strict=False):
                self.tokens[name] = (counts + earlier[name][0] if name in earlier else counts), over
        if noted.loads:
            self.loads += loads_of(graph, noted)

    def take_unchecked(self) -> Loads:
        """Returns the recorded loads (`Load`) of layers of experts that were not yet checked against the capacity,
        and removes them from the record.
        """
        loads, self.loads = self.loads, []
        return loads


def loads_of(graph: fx.Graph, noted: Noted, ranks: int = 1) -> Loads:
    """Returns the loads (rows of the fullest block of each layer of experts) that a run of ``graph`` recorded. Their
    copies to the host have started.

    Args:
        ranks: number of ranks that ran each op in turn.
    """
    names = [name for name in experts_in(graph, WITHIN) for _ in range(ranks)]
    loads = zip(names, noted.loads, strict=False)
    return [(name, replace(load, most=_to_host(load.most))) for name, load in loads if not _captured(load.most)]


def is_limited(graph: fx.Graph) -> bool:
    """Returns whether a layer of experts in ``graph`` has a capacity."""
    return any(node.target is WITHIN for node in graph.nodes)


def _captured(x: Tensor) -> bool:
    """Returns whether a CUDA graph is being captured on the device of ``x``. Nothing is recorded then, since repeats
    of the CUDA graph would not record.
    """
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _to_host(x: Tensor) -> Tensor:
    """Starts the copy of ``x`` to the host; on a CPU it is ``x`` itself."""
    return x if x.device.type == "cpu" else torch.ops.shardc.to_host(x)


def check_loads(loads: Loads, any_rank: Callable[[bool], bool] | None = None) -> None:
    """Raises InputError on all ranks if a layer of experts got more rows for one rank's experts (a block) than its
    capacity has room for.

    On an accelerator the host waits for the graph that recorded the loads, and for nothing behind it.

    Args:
        any_rank: returns whether a flag is true on any rank, if ranks have the loads of different layers; else None.
    """
    overfull = [(name, load, most) for name, load in loads if (most := _fullest(load)) > load.rows]
    if not (bool(overfull) if any_rank is None else any_rank(bool(overfull))):
        return
    fix = 'raise the capacity of shardc.ep(..., dispatch="bounded"), or use dispatch="send", which has no limit'
    if not overfull:
        raise InputError("experts of another stage get more rows than their capacity has room for", fix=fix)
    # `Load.most` has the sending rank, too: rows times the number of ranks, plus the rank.
    name, load, most = overfull[0]
    raise InputError(
        f"{name or 'the model'}: rank {int(load.most) % load.ranks} has {most} rows for the experts of one rank, and "
        f"the capacity leaves room for {load.rows}",
        fix=fix,
    )


def _fullest(load: Load) -> int:
    """Waits for the reduction of ``load`` over ranks; returns the number of rows that the fullest block of a layer of
    experts received.
    """
    # `Load.most` is rows times the number of ranks, plus the sending rank.
    return int(torch.ops._c10d_functional.wait_tensor(load.most)) // load.ranks
