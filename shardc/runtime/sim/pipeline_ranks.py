"""`run_pipeline_step`: simulates all ranks of a pipeline in one process. It runs each rank's list of actions (graphs,
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

    # (source, target) -> messages under way, as (keys of the values, values).
    queues: dict[tuple[int, int], deque[tuple[tuple[Key, ...], list[Any]]]] = field(default_factory=dict)
    moved: int = 0  # sends and receives so far: whether ranks make progress

    def begin(self, actions: Iterable[Run | Message]) -> None:
        """Does nothing: only real ranks prepare for the messages of a step."""

    def send(self, message: Message, values: list[Any]) -> None:
        """Appends a message to the queue from its source to its target."""
        self.queues.setdefault((message.source, message.target), deque()).append((message.keys, values))
        self.moved += 1

    def arrived(self, message: Message) -> bool:
        """Returns whether ``message`` was sent. Messages of two ranks arrive in order, so if there is any, it is it."""
        return bool(self.queues.get((message.source, message.target)))

    def receive(self, message: Message, received: int) -> Sequence[Any]:
        """Takes ``message`` from its queue and returns its values. Only real ranks use ``received``, to tell which of
        their sends are done.
        """
        keys, values = self.queues[message.source, message.target].popleft()
        assert keys == message.keys, f"rank {message.target} expects {message.keys}, {message.source} sent {keys}"
        self.moved += 1
        return values

    def finish(self) -> None:
        """Does nothing: a message leaves its sender as soon as it is sent."""


def run_pipeline_step(
    program: Executable, loops: Callable[..., StageLoops], training: bool, tangents: Mapping[int, Any]
) -> Results:
    """Runs a pipeline's step in one process, and returns its results: takes turns between ranks, each of which runs the
    graphs of its stages until it waits for a message.

    Args:
        program: the program.
        loops: returns the `StageLoops` of a rank: ``loops(rank=0, link=link)``.
        training, tangents: as in `Loops.run_step`.
    """
    wires = Wires()
    # Each rank adds what it has: outputs are sent to all ranks; a parameter's gradient is on the rank that stores it.
    results: Results = {}
    # Rank -> generator that yields where the rank has to wait for a message.
    running = {
        rank: loops(rank=rank, link=wires).steps(training, tangents, results) for rank in range(program.stage_ranks)
    }
    while running:
        moved_before = wires.moved
        # Each rank runs until it waits for a message; `wires` is the default that says that it has ended.
        ended = [rank for rank, steps in running.items() if next(steps, wires) is wires]
        for rank in ended:
            del running[rank]
        progress = ended or wires.moved > moved_before
        assert progress, f"ranks {sorted(running)} of the pipeline wait for each other"
    assert not any(wires.queues.values()), f"messages that no rank received: {wires.queues}"
    return results
