"""Checkpoints that outlive a rank: saved beside the last one, named when they are complete, resumed from."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


def steps(listed: str) -> tuple[int, ...]:
    """``20,40`` as numbers."""
    return tuple(map(int, listed.split(",")))


class Checkpoints:
    """Saves module, optimizer and losses every ``every`` steps, and kills a rank where it is asked to.

    Args:
        folder: where to save; None saves nothing.
        kill_at: steps after which the last rank kills itself, once each.
    """

    def __init__(self, folder: str | None, module, optimizer, every: int = 10, kill_at: tuple[int, ...] = ()) -> None:
        self.folder = None if folder is None else Path(folder)
        self.module, self.optimizer, self.every, self.kill_at = module, optimizer, every, kill_at

    def resume(self) -> list[float]:
        """Loads the last complete checkpoint; returns the losses up to it, none if there is none."""
        done = sorted(self.folder.glob("step_*"), key=lambda path: int(path.name[5:])) if self.folder else []
        if not done:
            return []
        state = self._state() | {"losses": []}
        dcp.load(state, checkpoint_id=done[-1])
        set_state_dict(
            self.module, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        return state["losses"]

    def after(self, step: int, losses: list[float]) -> None:
        """Saves after every so many steps: what is written is named ``step_N`` once all ranks are done with it."""
        if self.folder and step % self.every == 0:
            unfinished = self.folder / "unfinished"
            dcp.save(self._state() | {"losses": losses}, checkpoint_id=unfinished)
            dist.barrier()
            if dist.get_rank() == 0:
                unfinished.rename(self.folder / f"step_{step}")
            dist.barrier()
        killed = Path(self.folder or ".", f"killed_at_{step}")
        if step in self.kill_at and dist.get_rank() == dist.get_world_size() - 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    def _state(self) -> dict:
        return dict(zip(("model", "optimizer"), get_state_dict(self.module, self.optimizer), strict=True))
