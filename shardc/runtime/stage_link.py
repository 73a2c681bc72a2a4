"""`StageLink`: messages between the ranks of a pipeline, over a process group along the axis of the stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardc.errors import CollectiveError
from shardc.ir.executable import Executable
from shardc.ir.stage_runs import Message
from shardc.runtime.groups import Groups


class StageLink:
    """Connection of this rank to those of other stages that have the same place in their stage.

    Messages between two ranks arrive in the order of their sends, since gloo and NCCL match them in order.

    Args:
        groups: this rank's groups.
        program: the program whose values are sent.
        device: device of the values.
    """

    def __init__(self, groups: Groups, program: Executable, device: torch.device) -> None:
        self.groups, self.program, self.device = groups, program, device
        self._groups = [groups.along_stages(back) for back in (False, True)]
        self._pending: list[tuple[Any, Tensor]] = []  # sends that may not have left, with what they send

    def _group(self, message: Message) -> dist.ProcessGroup:
        """Returns the process group of the messages of one direction."""
        return self._groups[message.source > message.target]

    def send(self, message: Message, values: list[Any]) -> None:
        self._pending = [(work, x) for work, x in self._pending if not work.is_completed()]
        for x in values:
            x = _bytes(x)
            if x.numel():
                with self.groups.consistency.waits():
                    work = dist.isend(x, group=self._group(message), group_dst=message.target)
                self._pending.append((work, x))

    def arrived(self, message: Message) -> bool:
        return True  # `receive` waits

    def receive(self, message: Message) -> Sequence[Any]:
        out = [torch.empty(x.shape, dtype=x.dtype, device=self.device) for x in message.examples]
        for x in out:
            if x.numel():
                self._wait(message, dist.irecv(_bytes(x), group=self._group(message), group_src=message.source))
        return out

    def finish(self) -> None:
        for work, _ in self._pending:
            with self.groups.consistency.waits():
                work.wait()
        self._pending.clear()

    def _wait(self, message: Message, work: Any) -> None:
        """Waits for ``work``, a receive.

        Raises:
            CollectiveError: the other rank is gone, or too late.
        """
        consistency = self.groups.consistency
        try:
            with consistency.runs():
                work.wait()
        except RuntimeError as error:
            peer = dist.get_global_rank(self._group(message), message.source)
            kind, name, at = message.keys[0]
            more = f" and {len(message.keys) - 1} more" if len(message.keys) > 1 else ""
            raise consistency.behind() or CollectiveError(
                f"rank {dist.get_rank()}, at {message.target} of the pipeline, waited for {kind} %{name}{more} of "
                f"microbatch {at} from rank {peer}, at {message.source}, when it failed: {str(error).splitlines()[0]}",
                plan_entry=str(self.program.key.plan.setting("pp")),
                fix=f"look at rank {peer} first: it died, raised or came too late; then restart all ranks from the "
                "last checkpoint",
            ) from error


def _bytes(x: Tensor) -> Tensor:
    """Return the elements of ``x`` as bytes, which every backend sends; memory is shared if ``x`` is contiguous."""
    return x.detach().contiguous().view(-1).view(torch.uint8)
