"""`StageLoops`: runs one rank's share of the graphs of a pipeline's step, and exchanges values with ranks of other
stages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from shardc.ir.executable import GATHER, SUM, TRANSFER, Port, Run, saved_key
from shardc.ir.graph import Role, Value
from shardc.ir.stage_runs import Key, Message
from shardc.runtime.loops import Loops, Results


class Link(Protocol):
    """Connection of a rank of a pipeline to the ranks of other stages: sends and receives messages of values. An
    interface.
    """

    def begin(self, actions: Iterable[Run | Message]) -> None:
        """Begins a step with the given actions (runs of graphs, and messages). May start to receive
        messages already.
        """

    def send(self, message: Message, values: list[Any]) -> None:
        """Starts to send ``values`` to another stage of the pipeline, as the content of ``message``. Does not wait
        until they are received.
        """

    def arrived(self, message: Message) -> bool:
        """Returns whether `receive` of ``message`` can be called now. True if ranks are processes, since `receive`
        waits there; in a simulation, False until the message is sent.
        """

    def receive(self, message: Message, received: int) -> Sequence[Any]:
        """Waits for ``message`` from another stage, and returns its values.

        Args:
            received: how many messages of this rank its source has received before it sends this one.
        """

    def finish(self) -> None:
        """Waits until all messages that this rank has sent have left it."""


@dataclass
class StageLoops(Loops):
    """Runs the graphs of one rank of a pipeline on given inputs.

    Args:
        rank: its coordinate along the axis of the stages.
        link: its connection to the others.
        prepare: lowers the graphs that the rank runs: of a training step if its argument is true, else of inference.
        absent: returns the empty gradient of a parameter that another stage stores, given the gradient's type there;
            None leaves such gradients out.
    """

    rank: int = 0
    link: Link = field(kw_only=True)
    prepare: Callable[[bool], None] | None = None
    absent: Callable[[Value], Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.copies: dict[str, Any] = {}  # parameters of other stages

    def run_step(self, training: bool, tangents: Mapping[int, Any]) -> Results:
        """Runs this rank's part of a step, as `Loops.run_step`, and waits for other ranks in `Link.receive`."""
        if self.prepare is not None:
            self.prepare(training)
        results: Results = {}
        for _ in self.steps(training, tangents, results):
            raise AssertionError("a rank waits for others that run in its own thread")
        return results

    def steps(self, training: bool, tangents: Mapping[int, Any], results: Results) -> Iterator[None]:
        """Runs this rank's part of a step as a generator, and fills ``results`` in place. Yields while a message has
        not arrived, so that a simulation can run other ranks.
        """
        program = self.program
        actions = program.actions(self.rank, training)
        self.link.begin(actions)
        # Per action: the values that no later action reads, and for a receive, how many of this rank's messages its
        # source has received before.
        last_uses, received = program.last_uses(self.rank, training), program.received(self.rank, training)
        # An action is a run of a graph, or a message that this rank sends or receives.
        for action, last_used, received_before in zip(actions, last_uses, received, strict=True):
            if isinstance(action, Run):
                self._run_graph(action, last_used, tangents)
            elif action.source == self.rank:
                pairs = zip(action.keys, action.examples, strict=True)
                self.link.send(action, [self._sent(key, example) for key, example in pairs])
                self._free(last_used)
            else:
                while not self.link.arrived(action):
                    yield
                for key, x in zip(action.keys, self.link.receive(action, received_before), strict=True):
                    self._store_received(key, x)
        self.link.finish()
        results |= self._joined()
        if training and self.absent is not None:  # without rows: gradients of what other stages store
            grads = program.stage_runs(True).grads.items()
            results |= {("grad", name): self.absent(like) for name, (rank, like) in grads if rank != self.rank}

    def _run_graph(self, run: Run, last_used: Iterable[Key], tangents: Mapping[int, Any]) -> None:
        """Runs a graph for a microbatch and stores its results. Before it starts, the values ``last_used`` are dropped:
        the graph then has the only reference to them, and frees what it has read.
        """
        half, microbatch = run.half, run.microbatch
        # The arguments that another graph of the stage has saved for this microbatch, in `shared`.
        keys = {port.name: saved_key(half, port.name, microbatch) for port in half.takes}
        saved = {name: self.shared[key] for name, key in keys.items() if key in self.shared}
        feed = [self._value(port, microbatch, saved, tangents) for port in half.takes]
        saved.clear()  # a reference less
        self._free(last_used)
        for role, x in zip(half.gives, self.run(half, feed), strict=True):
            if role.kind == "saved":
                self.shared[saved_key(half, role.name, microbatch)] = x
            else:
                self._store(role, x, microbatch)

    def _free(self, keys: Iterable[Key]) -> None:
        """Drops the values ``keys``, (kind, name, microbatch), which are not read again."""
        for key in keys:
            if key[0] == SUM:
                self.sums.pop(key[1], None)
            else:
                self.shared.pop(key, None)

    def _sent(self, key: Key, example: Value) -> Any:
        """Returns the value to send to another stage for ``key`` (kind, name, microbatch). It is a kept value, a sum,
        a parameter, or a result in ``parts``.
        """
        kind, name, microbatch = key
        if kind == TRANSFER:  # such as an activation or its gradient
            return self.shared[key]
        if kind == SUM:
            return self._total(name)
        if kind == "param":
            return self.argument(Port(Role(kind, name), name, example), 0)  # the same in all microbatches
        return self.parts[kind, name][microbatch]

    def _store_received(self, key: Key, x: Any) -> None:
        """Stores ``x``, which another stage has sent, by its ``key`` (kind, name, microbatch)."""
        kind, name, _ = key
        if kind == TRANSFER:
            self.shared[key] = x
        elif kind == SUM:
            # For a gather, `_total` joins a list of terms: the sender's is one term.
            self.sums[name] = [x] if self.program.reduce[name] == GATHER else x
        elif kind == "param":
            self.copies[name] = x
        else:
            self.parts.setdefault((kind, name), []).append(x)

    def _store(self, role: Role, x: Any, microbatch: int) -> None:
        """Stores a result of a graph as `Loops._store` does; one that another stage takes, under its `Key`."""
        if role.kind == TRANSFER:
            self.shared[TRANSFER, role.name, microbatch] = x
        else:
            super()._store(role, x, microbatch)

    def _value(self, port: Port, microbatch: int, saved: Mapping[str, Any], tangents: Mapping[int, Any]) -> Any:
        """Returns an argument of a graph as `Loops._value` does. It may also come from another stage: a transferred
        value, or a copy of a parameter. A sum stays, since several graphs may take it (`_free` drops it).
        """
        role = port.role
        if port.name in saved:
            return saved[port.name]
        if role.kind == TRANSFER:
            return self.shared[TRANSFER, role.name, microbatch]
        if role.kind == "param" and role.name in self.copies:
            return self.copies[role.name]
        if role.kind == SUM:
            return self._total(role.name)
        return super()._value(port, microbatch, saved, tangents)

    def _total(self, name: str) -> Any:
        """Returns the value ``name`` (a gradient or an output) of all microbatches: the sum of its terms, or their
        concatenation if its reduction is a gather.
        """
        total = self.sums[name]
        return self.gathered(total) if self.program.reduce[name] == GATHER else total
