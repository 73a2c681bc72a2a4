"""Schedules of a pipeline: bubbles and memory as they are played, and as they are measured on ranks of this machine.

    python benchmarks/pipeline.py --ranks 2 --size tiny16 --microbatches 8
    python benchmarks/train_step.py --size tiny16 --rows 'pipelining/*,shardc/pp/*'    # beside torch's pipelining

For each schedule, ranks train a decoder for a few steps. The seconds of each stage's forward and backward are medians
of what the ranks measured. With these the lists of the schedule are played: the step and the bubble (the share of the
ranks' time in which they wait) that this gives stand beside the measured ones. In flight are the most microbatches
whose backward has not run, by rank. Memory is the peak of a step with the optimizer's state, by rank: as predicted, and
as allocated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parent.parent))
import shardc  # noqa: E402
from benchmarks.work import LEARNING_RATE, SIZES  # noqa: E402
from examples.models.llama import loss  # noqa: E402
from shardc.ir.executable import BACKWARDS, FORWARD, LAST_BACKWARD, AtStage, Half  # noqa: E402
from shardc.ir.schedules import ORDERS, Kind, clock, play, schedule  # noqa: E402
from shardc.runtime.profile import alive, peak_of  # noqa: E402
from shardc.runtime.step import Runner  # noqa: E402
from tests.ranks import run_ranks  # noqa: E402

STEPS, WARMUP = 6, 3
KINDS = {FORWARD: Kind.FORWARD} | {phase: kind for kind, phase in BACKWARDS.items()}


@dataclass(frozen=True)
class Span:
    """One computation on a rank, by the machine's clock."""

    kind: str
    stage: int
    start: float
    end: float


def train(size: str, name: str, microbatches: int, folder: Path) -> None:
    """Train a few steps, and write what this rank computed in each."""
    work, ranks = SIZES[size], dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("pp",))
    module = shardc.compile(work.model(), mesh, shardc.pp("pp", name, microbatches=microbatches), loss=loss)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)
    spans: list[Span] = []
    run = Runner.run

    def timed(runner: Runner, half: Half, *args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        results = run(runner, half, *args, **kwargs)
        phase = half.phase.phase if isinstance(half.phase, AtStage) else ""
        if phase == LAST_BACKWARD or phase in KINDS:
            spans.append(Span(phase, half.stage or 0, start, time.perf_counter()))
        return results

    Runner.run = timed  # type: ignore[method-assign]
    steps: list[list[Span]] = []
    for at in range(WARMUP + STEPS):
        spans.clear()
        dist.barrier()
        module(*work.data(at, ranks)).backward()
        optimizer.step()
        optimizer.zero_grad()
        steps.append(list(spans))
    Runner.run = run  # type: ignore[method-assign]
    data = work.data(0, ranks)
    schedule: Any = module.shardc.lower(*data).schedule("cpu")
    state = [x for state in optimizer.state.values() for x in state.values()]
    before = alive([*module.parameters(), *module.buffers(), *data, *state])
    measured = before + peak_of(lambda: module(*data).backward()) + module.shardc.memory().arena
    memory = schedule.ranks[dist.get_rank()].peak, measured
    text = json.dumps({"steps": [[vars(span) for span in step] for step in steps[WARMUP:]], "memory": memory})
    (folder / f"{dist.get_rank()}.json").write_text(text)


def row(size: str, name: str, ranks: int, microbatches: int) -> list[str]:
    """Measure a schedule, play it with the measured seconds, and return its row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        run_ranks(ranks, partial(train, size, name, microbatches, Path(folder)))
        files = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(ranks)]
    steps = [[[Span(**span) for span in rank["steps"][at]] for rank in files] for at in range(STEPS)]
    taken: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for spans in (spans for step in steps for spans in step):
        for span in spans:
            if span.kind != LAST_BACKWARD:
                taken[KINDS[span.kind], span.stage].append(span.end - span.start)
    lists = schedule(name, ranks, microbatches)
    played = clock(
        lists, lambda kind, stage: statistics.median(taken.get((kind, stage), [0.0])), lambda source, target: 0.0
    )
    flying = [max(stages.values()) for stages in play(lists)]
    seconds, bubbles = zip(*map(_measured, steps), strict=True)
    step, bubble = statistics.median(seconds), statistics.median(bubbles)
    return [
        name, f"{1e3 * played.seconds:.0f}", f"{1e3 * step:.0f}", f"{100 * played.bubble:.1f}", f"{100 * bubble:.1f}",
        " ".join(map(str, flying)), *(" ".join(f"{rank['memory'][at] / 1e6:.1f}" for rank in files) for at in (0, 1)),
    ]  # fmt: skip


def _measured(step: Sequence[Sequence[Span]]) -> tuple[float, float]:
    """Return (seconds from the first computation to the end of the last, share of the ranks' time without any)."""
    spans = [span for rank in step for span in rank]
    seconds = max(span.end for span in spans) - min(span.start for span in spans)
    return seconds, 1 - sum(span.end - span.start for span in spans) / (seconds * len(step))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="tiny16")
    parser.add_argument("--ranks", type=int, default=2, help="pipeline ranks, one thread each")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--schedules", default=",".join(ORDERS), help="names, joined by commas")
    options = parser.parse_args()
    rows = [row(options.size, name, options.ranks, options.microbatches) for name in options.schedules.split(",")]
    head = (
        "schedule",
        "ms played",
        "ms measured",
        "bubble % played",
        "bubble % measured",
        "in flight, by rank",
        "MB predicted",
        "MB measured",
    )
    print(f"{options.size}, {options.ranks} ranks, {options.microbatches} microbatches, forward and backward of a step")
    print(tabulate(rows, head, "plain", disable_numparse=True))


if __name__ == "__main__":
    main()
