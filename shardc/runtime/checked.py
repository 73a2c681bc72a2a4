"""A half run op by op, with every use of a collective's result checked: ``Options(debug="buffers")``.

What a result's slot holds is *on its way* from the start of its collective to the wait, *there* from then on, and
*released* after the last place at which the plan has it in use: then its bytes are overwritten with ones (NaN in every
floating dtype), whoever may still read them. The faults that this finds are the compiler's: none of them raises in a
run without it, and the arenas of `shardc.runtime.wire.buffers` give nothing away that is still held.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from shardc.errors import VerifyError
from shardc.ir import graph as ir
from shardc.ir.arena import INSIDE, OUTSIDE, MemoryPlan, Slot
from shardc.ir.comm import WAIT, waits_of
from shardc.ir.executable import Compiled, Half
from shardc.ir.order import last_uses
from shardc.ir.segments import whole
from shardc.ir.tally import arguments_of, collective_kind
from shardc.ir.text import op_line

ON_ITS_WAY, THERE, RELEASED = "on its way", "there", "released"
_FIX = "this is a fault of a pass, not of the model: report the half's text, program.text('plan_memory')"


@dataclass
class _Result:
    """One result of a collective, or several in one slot."""

    name: str
    slot: Slot | None
    state: str
    made: list[Tensor]
    sent_by: list[str] = field(default_factory=list)  # the collectives that send it on and were not waited for


class Ledger:
    """What is known of each result while a half runs."""

    def __init__(self) -> None:
        self._results: dict[Any, _Result] = {}

    def take(self, key: Any, name: str, slot: Slot | None, made: Tensor) -> None:
        """The result ``key`` is on its way.

        Raises:
            VerifyError: it, or another one whose bytes it would lie in, is still in use.
        """
        held = self._results.get(key)
        if held is not None and held.state == ON_ITS_WAY and held.name == name:
            held.made.append(made)  # one slot for all results of the collective
            return
        if held is not None and held.state != RELEASED:
            raise VerifyError(f"%{name} is given slot {key}, in which %{held.name} is {held.state}", fix=_FIX)
        for other in self._results.values():
            if other.state != RELEASED and _share(other.slot, slot):
                raise VerifyError(f"%{name} is given bytes in which %{other.name} is {other.state}", fix=_FIX)
        self._results[key] = _Result(name, slot, ON_ITS_WAY, [made])

    def arrive(self, key: Any) -> None:
        """The result was waited for."""
        if self._results[key].state == ON_ITS_WAY:
            self._results[key].state = THERE

    def read(self, key: Any, by: str) -> None:
        """``by`` reads the result.

        Raises:
            VerifyError: it is on its way, or released.
        """
        result = self._results[key]
        if result.state == ON_ITS_WAY:
            raise VerifyError(f"%{by} reads %{result.name} before the wait for it", fix=_FIX)
        if result.state == RELEASED:
            raise VerifyError(f"%{by} uses %{result.name} after its release", fix=_FIX)

    def send(self, key: Any, by: str) -> None:
        """``by`` starts to send the result on, which must stay as it is until it is waited for."""
        self._results[key].sent_by.append(by)

    def sent(self, by: str) -> None:
        """What ``by`` sends has arrived."""
        for result in self._results.values():
            result.sent_by = [each for each in result.sent_by if each != by]

    def release(self, key: Any) -> None:
        """The result is used no more; its bytes are overwritten.

        Raises:
            VerifyError: it was released before, or never taken, or is still being sent on.
        """
        result = self._results.get(key)
        if result is None or result.state == RELEASED:
            what = f"slot {key}" if result is None else f"%{result.name}"
            raise VerifyError(f"{what} is released twice, or was never in use", fix=_FIX)
        if result.sent_by:
            raise VerifyError(f"%{result.name} is written over while %{result.sent_by[0]} sends it", fix=_FIX)
        result.state = RELEASED
        for made in result.made:
            poison(made)
        result.made = []


def poison(made: Tensor) -> None:
    """Overwrites all bytes of the storage of ``made`` with ones."""
    storage = made.untyped_storage()
    if storage.nbytes():
        torch.empty(0, dtype=torch.uint8, device=made.device).set_(storage).fill_(0xFF)


def check_halves(*halves: Half) -> list[Compiled]:
    """Halves of a step as something that runs with its buffers checked.

    A call raises VerifyError where a result of a collective is used before it is there or after its release, or a slot
    is given away or released while it is not free or not in use.
    """
    return [Compiled(half, whole(half.gm), (_checked(half),), half.plan) for half in halves]


def _checked(half: Half) -> Callable[[list[Any]], Sequence[Any]]:
    @torch.no_grad()
    def run(inputs: list[Any]) -> Sequence[Any]:
        return _Run(half.gm, half.plan, inputs).results

    return run


class _Run:
    def __init__(self, gm: fx.GraphModule, plan: MemoryPlan, inputs: list[Tensor]) -> None:
        self.gm, self.plan, self.ledger = gm, plan, Ledger()
        self.values: dict[fx.Node, Any] = {}
        self.behind: dict[fx.Node, dict[int, Any]] = {}  # by storage, the result that lies there
        self.waits: dict[fx.Node, int] = {}  # of each collective, how many are still to come
        self.results: Sequence[Any] = ()
        feed, last = list(inputs), last_uses(gm.graph)
        inputs.clear()
        feed.reverse()
        due: dict[int, list[int]] = {}
        for number, slot in enumerate(plan.slots):
            if slot.region == INSIDE and not slot.name.endswith(".wire"):
                due.setdefault(slot.end, []).append(number)
        for at, node in enumerate(gm.graph.nodes):
            if node.op == "placeholder":
                self.values[node] = feed.pop()
            elif node.op == "get_attr":
                self.values[node] = getattr(gm, str(node.target))
            else:
                self._check(node)
                self._run(node)
            for done in last.get(node, ()):
                del self.values[done]
            for number in due.get(at, ()):
                self.ledger.release(number)

    def _check(self, node: fx.Node) -> None:
        """Every result that ``node`` reads is there; a wait, and what only makes another view of it, reads nothing."""
        name = "the output" if node.op == "output" else ir.info(node).name
        for read in node.all_input_nodes:
            for key in self.behind.get(read, {}).values():
                if node.target is WAIT:
                    self.ledger.arrive(key)
                if node.target is not getitem:
                    self._read(key, name, node)

    def _read(self, key: Any, name: str, node: fx.Node) -> None:
        try:
            self.ledger.read(key, name)
        except VerifyError as error:
            if node.op == "output":
                raise
            raise VerifyError(error.what, fix=error.fix, program=op_line(self.gm, node)) from None

    def _arrived(self, wait: fx.Node) -> None:
        """What a collective sends may change when each of its results was waited for."""
        start = wait.all_input_nodes[0]
        start = start.all_input_nodes[0] if start.target is getitem else start
        if start in self.waits:
            self.waits[start] -= 1
            if not self.waits[start]:
                self.ledger.sent(ir.info(start).name)

    def _run(self, node: fx.Node) -> None:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        if node.op == "output":
            self.results = args[0]
            return
        if node.target is WAIT:
            self._arrived(node)
        target: Any = node.target
        made = self.values[node] = target(*args, **kwargs)
        tensors = made if isinstance(made, list | tuple) else [made]
        if collective_kind(node) is not None:
            for sent in {k for read in node.all_input_nodes for k in self.behind.get(read, {}).values()}:
                self.ledger.send(sent, ir.info(node).name)
            self.waits[node] = len(waits_of(node))
            self.behind[node] = {}
            numbers: Any = _slots_of(node)
            for at, x in enumerate(tensors):
                key: Any = (numbers[at] if at < len(numbers) else numbers[0]) if numbers else (ir.info(node).name, at)
                slot = self.plan.slots[key] if numbers else None
                self.ledger.take(key, slot.name if slot else ir.info(node).name, slot, x)
                self.behind[node][_storage(x)] = key
            return
        known = {storage: key for read in node.all_input_nodes for storage, key in self.behind.get(read, {}).items()}
        mine = {_storage(x) for x in tensors if isinstance(x, Tensor)} & known.keys()
        self.behind[node] = {storage: known[storage] for storage in mine}


def _slots_of(node: fx.Node) -> list[int]:
    """The slots of a planned collective; none of torch's own."""
    return list(arguments_of(node).get("slots") or ())


def _storage(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _share(one: Slot | None, other: Slot | None) -> bool:
    """Whether two slots have bytes in common."""
    if one is None or other is None or one.region != other.region or one.region == OUTSIDE:
        return False
    return one.offset < other.offset + other.size and other.offset < one.offset + one.size
