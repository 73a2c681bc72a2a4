"""`PipelineRanks`: simulates all ranks of a pipeline in one process. It runs each rank's list of actions (graphs,
messages) as far as messages have arrived, in turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardc.ir.executable import Executable, Run
from shardc.ir.stage_runs import Key, Message
from shardc.runtime.loops import Results
from shardc.runtime.stage_loops import StageLoops


@dataclass
class Wires:
    """A `Link` (connection between ranks of a pipeline) for ranks that run in one process: a queue of messages for
    each (source, target).
    """

    queues: dict[tuple[int, int], deque[tuple[tuple[Key, ...], list[Any]]]] = field(default_factory=dict)
    moved: int = 0

    def begin(self, actions: Iterable[Run | Message]) -> None: ...

    def send(self, message: Message, values: list[Any]) -> None:
        self.queues.setdefault((message.source, message.target), deque()).append((message.keys, values))
        self.moved += 1

    def arrived(self, message: Message) -> bool:
        return bool(self.queues.get((message.source, message.target)))

    def receive(self, message: Message, received: int) -> Sequence[Any]:
        keys, values = self.queues[message.source, message.target].popleft()
        assert keys == message.keys, f"rank {message.target} expects {message.keys}, {message.source} sent {keys}"
        self.moved += 1
        return values

    def finish(self) -> None: ...


@dataclass
class PipelineRanks:
    """Runs a pipeline's step in one process: takes turns between ranks, each of which runs the graphs of its stages.

    Args:
        program: the program.
        loops: returns the `StageLoops` of a rank: ``loops(rank=0, link=link)``.
    """

    program: Executable
    loops: Callable[..., StageLoops]

    def __post_init__(self) -> None:
        self.wires = Wires()
        self.ranks = [self.loops(rank=rank, link=self.wires) for rank in range(self.program.stage_ranks)]
        self.map_ranks = self.ranks[0].map_ranks

    def train(self, tangents: Mapping[int, Any]) -> Results:
        """Runs forward and backward of each microbatch; ``tangents``: gradients of outputs by index."""
        return self._step(True, tangents)

    def infer(self) -> Results:
        """Runs the forward of each microbatch, without gradients; returns the outputs."""
        return self._step(False, {})

    def _step(self, training: bool, tangents: Mapping[int, Any]) -> Results:
        """Runs all ranks in turns, each until it waits for a message. Returns the results of the whole step."""
        results = [Results() for _ in self.ranks]
        running = {rank: loops.steps(training, tangents, results[rank]) for rank, loops in enumerate(self.ranks)}
        while running:
            before = self.wires.moved
            # Each rank runs until it waits for a message; `self` is the default that says that it has ended.
            ended = [rank for rank, steps in running.items() if next(steps, self) is self]
            for rank in ended:
                del running[rank]
            progress = ended or self.wires.moved > before
            assert progress, f"ranks {sorted(running)} of the pipeline wait for each other"
        assert not any(self.wires.queues.values()), f"messages that no rank received: {self.wires.queues}"
        # Outputs have been sent to all ranks; gradients of a parameter are on the rank that stores it.
        first = results[0]
        for other in results[1:]:
            first.grads |= other.grads
        return first
