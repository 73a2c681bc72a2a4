"""`StageLink`: messages between the ranks of a pipeline, over a process group along the axis of the stages."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardc._compat import timeout_of
from shardc.errors import CollectiveError
from shardc.ir.executable import Executable, Run
from shardc.ir.stage_runs import Message
from shardc.runtime.groups import Groups

# Messages of a rank that are received at once, on CPUs.
_AHEAD = 2


class StageLink:
    """Sends values between pipeline stages: connects this rank to the ranks at the same position in other stages.

    Messages between two ranks arrive in the order of their sends, since gloo and NCCL match them in order. On CPUs
    receives of the next messages are posted ahead, so that gloo's sender writes them at once. Otherwise a thread of
    the sender writes them when the receive is posted, and waits some milliseconds for a busy core.

    Args:
        groups: this rank's groups.
        program: the program whose values are sent.
        device: device of the values.
    """

    def __init__(self, groups: Groups, program: Executable, device: torch.device) -> None:
        self.groups, self.program, self.device = groups, program, device
        self._groups = [groups.along_stages(back) for back in (False, True)]  # to later stages, and to earlier ones
        self._timeout = timeout_of(self._groups[0])
        # Keys: the other rank's coordinate along the axis of stages. Pairs: a work handle, and the tensor it waits for.
        # Messages to that rank: the number known to have left, and the later ones with what they send.
        self._left: Counter[int] = Counter()
        self._pending: defaultdict[int, deque[tuple[Message, list[tuple[Any, Tensor]]]]] = defaultdict(deque)
        # Messages from that rank: those that are being received, and the later ones.
        self._receiving: defaultdict[int, deque[list[tuple[Any, Tensor]]]] = defaultdict(deque)
        self._coming: defaultdict[int, deque[Message]] = defaultdict(deque)

    def _group(self, message: Message) -> dist.ProcessGroup:
        """Returns the process group for ``message``: messages to later stages use another group than those to earlier
        ones.
        """
        return self._groups[message.source > message.target]

    def begin(self, actions: Iterable[Run | Message]) -> None:
        """Begins a step of these runs and messages: on CPUs, posts receives of each source's first ones."""
        if self.device.type != "cpu":
            return  # NCCL's receives keep a part of the GPU busy
        self._coming.clear()
        self._receiving.clear()
        for action in actions:
            if isinstance(action, Message) and action.source != self.groups.stage:
                self._coming[action.source].append(action)
        for source in list(self._coming):
            self._post_receives(source)

    def send(self, message: Message, values: list[Any]) -> None:
        """Starts to send ``values``, and holds their memory until they have left (`_wait_until_sent`)."""
        sends: list[tuple[Any, Tensor]] = []
        for x in map(_bytes, values):
            if x.numel():
                with self._named_errors(message):
                    sends.append((dist.isend(x, group=self._group(message), group_dst=message.target), x))
        self._pending[message.target].append((message, sends))

    def _wait_until_sent(self, rank: int, count: int) -> None:
        """Waits until the first ``count`` messages to stage ``rank`` have been sent; their values can then be freed."""
        pending = self._pending[rank]
        while pending and self._left[rank] < count:  # in the order in which they were sent
            message, sends = pending.popleft()
            for work, _ in sends:
                with self._named_errors(message):
                    work.wait(self._timeout)
            self._left[rank] += 1

    def arrived(self, message: Message) -> bool:
        return True  # ranks are processes: `receive` waits

    def receive(self, message: Message, received: int) -> Sequence[Any]:
        """Waits for ``message``, and returns its values.

        Args:
            received: how many messages of this rank its source has received before it sends this one.
        """
        source = message.source
        receiving = self._receiving[source]
        transfers = receiving.popleft() if receiving else self._receive(message)
        for work, _ in transfers:
            if work is not None:  # None: an empty tensor, which is not sent
                with self._named_errors(message):
                    work.wait(self._timeout)
        self._post_receives(source)
        # The source had received as many messages before it sent this one: their sends are done.
        self._wait_until_sent(source, received)
        return [x for _, x in transfers]

    def _post_receives(self, source: int) -> None:
        """Posts receives of the next messages from stage ``source``, until `_AHEAD` of them are pending."""
        receiving, coming = self._receiving[source], self._coming[source]
        while coming and len(receiving) < _AHEAD:
            receiving.append(self._receive(coming.popleft()))

    def _receive(self, message: Message) -> list[tuple[Any, Tensor]]:
        """Posts the receives of a message. Returns (work handle, tensor) for each of its values; the handle is None
        for an empty tensor, which is not sent.
        """
        receives: list[tuple[Any, Tensor]] = []
        for example in message.examples:
            x, work = torch.empty(example.shape, dtype=example.dtype, device=self.device), None
            if x.numel():
                with self._named_errors(message):
                    work = dist.irecv(_bytes(x), group=self._group(message), group_src=message.source)
            receives.append((work, x))
        return receives

    def finish(self) -> None:
        """Waits until all messages of the step have left this rank."""
        for rank, pending in self._pending.items():
            self._wait_until_sent(rank, self._left[rank] + len(pending))
        self._left.clear()

    @contextmanager
    def _named_errors(self, message: Message) -> Iterator[None]:
        """Context manager around a send, a receive or a wait of ``message``. It turns an error of torch into one that
        names the message and the other rank.

        Raises:
            CollectiveError: the other rank is gone, or too late.
        """
        consistency, place = self.groups.consistency, self.groups.consistency.place
        try:
            # As part of the latest event, so that this wait is interrupted if ranks are found to differ.
            with consistency.runs():
                yield
        except RuntimeError as error:
            group = self._group(message)
            sends = dist.get_rank(group) == message.source
            peer = dist.get_global_rank(group, message.target if sends else message.source)
            kind, name, at = message.keys[0]  # the first value of the message: (kind, name, microbatch)
            more = f" and {len(message.keys) - 1} more" if len(message.keys) > 1 else ""
            raise CollectiveError(
                f"rank {place(dist.get_rank())} {'sent' if sends else 'waited for'} {kind} %{name}{more} of microbatch "
                f"{at} {'to' if sends else 'from'} rank {place(peer)} when it failed: {str(error).splitlines()[0]}",
                plan_entry=str(self.program.key.plan.setting("pp")),
                fix=consistency.advice_on_lost([peer]),
            ) from error


def _bytes(x: Tensor) -> Tensor:
    """Return the elements of ``x`` as bytes, which every backend sends; memory is shared if ``x`` is contiguous."""
    return x.detach().contiguous().view(-1).view(torch.uint8)
