"""`Options` of `shardc.compile`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch

from shardc.cost.hardware import H100, Hardware
from shardc.cost.model import CostModel
from shardc.cost.step_sequence import CHOICES
from shardc.passes.pipeline import Hook, Pipeline
from shardc.plan.value import Plan
from shardc.validate import Bytes, Range, check_fields, renamed

Size = Annotated[int | str, Bytes(-1)]


# Value in `Options.skip_comm` -> kinds of collectives that it replaces by local copies.
SILENCED = {"gather": ("all_gather",), "reduce": ("reduce_scatter", "all_reduce")}


@renamed(
    chooser="layout_solver",
    direct="p2p_collectives",
    comm="skip_comm",
    lower_by="compile_regions",
    store="program_cache",
)
@dataclass(frozen=True)
class Options:
    """Settings of a compilation. Sizes are numbers of bytes, or text with a unit: ``"8 MiB"``, ``"1.5GB"``.

    Args:
        strict: raise instead of warn at an op without a sharding rule.
        cost: the cost model or the `Hardware` by which layouts and algorithms are chosen. A cost model knows a group of
            ranks by its size. Hardware has links of different speed, and the backend's own collectives.
        layout_solver: chooses the layouts that the plan leaves open. "greedy" takes one op after another. "exact" finds
            the least total time (`shardc.passes.layout.exact`), in seconds, or in minutes on three axes.
        verify: check the graph after every pass.
        bucket_size: bytes of a bucket of collectives, per rank. -1 makes one bucket, 0 none. A `Hardware`: for each
            group of ranks the size at which latency is a twentieth of a bucket's time, one block of the model at most
            (`shardc.passes.schedule.bucket.ByLink`); a size in the plan goes first. None: on GPUs by ``cost`` if that
            is a `Hardware`, else by `H100`; on CPU ranks the same share of latency by ``cost``, and 8 MiB at most
            (`shardc.measure_links` measures real links).
        max_in_flight: bytes of collectives' results that may be started ahead of their use; -1 is no limit. None: two
            buckets, 16 MiB at least; if buckets are sized by a `Hardware`, a sixty-fourth of its memory.
        memory_budget: bytes on each rank for level-3 parameters that stay gathered from forward to backward; -1 for
            all. Those that save most time per byte are kept first, on a tie those that forward uses last.
        checkpoint_collectives: collectives of activations in a `torch.utils.checkpoint` region. "recompute" runs them
            again in backward, "keep" keeps their results. "auto" recomputes those whose result is larger than what a
            rank sends for it (gathers, all-to-alls), and keeps the others (reductions).
        overlap: overlap collectives with compute; False waits for each where it starts.
        decompose: the number of chunks into which a collective of an activation and the product beside it are cut, so
            that a chunk is computed while another travels. 1 is off. "auto" takes the fastest by a measured ``cost``.
        p2p_collectives: send collectives as messages between ranks (`shardc.ir.comm`), faster than gloo's own. None:
            on CPU ranks only.
        skip_comm: replace collectives by local copies: values are wrong, for timing only. ``("gather",)`` skips
            all-gathers alone, ``("reduce",)`` reduce-scatters and all-reduces.
        fold: capture and plan four to six of the repeated blocks, and replicate the result (`shardc.fold`). The program
            is the same, except that ``decompose`` may order independent ops otherwise. None: if the module runs. True
            warns if blocks look equal and their plans differ.
        compile_regions: "whole": Inductor lowers each half as one graph. "blocks": repeated segments are compiled once.
            "auto": "blocks" if four segments are equal (`shardc.ir.repeat`).
        program_cache: keep programs on disk, in Inductor's cache folder. The next start of the same code neither
            captures nor plans, and one rank of a machine does so for all. Only if the module runs. ``SHARDC_STORE=0``
            in the environment is False; ``SHARDC_STORE`` may be the absolute path of another folder.
        uneven: ranks may pass different numbers of rows of the batch. Each call exchanges the numbers; if they differ,
            it computes on the rows of all ranks together.
        capture: replaces `shardc.capture.capture`: a `shardc.capture.CaptureOnce`, for several plans of a model.
        pipeline: maps the `shardc.passes.Pipeline` of the other options to the one that runs.
        hooks: called around every pass (`shardc.passes.Hook`).
        dump: directory for the text of every stage; by default the environment's ``SHARDC_DUMP``.

    Raises:
        InputError: a value of another type, out of range, or not one of the choices.
    """

    strict: bool = False
    cost: CostModel | Hardware = field(default_factory=CostModel)
    layout_solver: Literal["greedy", "exact"] = "greedy"
    verify: bool = True
    bucket_size: Size | Hardware | None = None
    max_in_flight: Size | None = None
    memory_budget: Size = 0
    checkpoint_collectives: Annotated[str, Literal[CHOICES]] = "auto"
    overlap: bool = True
    decompose: Annotated[int, Range(1, 64)] | Literal["auto"] = "auto"
    p2p_collectives: bool | None = None
    skip_comm: bool | tuple[Literal["gather", "reduce"], ...] = False
    fold: bool | None = None
    compile_regions: Literal["auto", "blocks", "whole"] = "auto"
    program_cache: bool = field(default_factory=lambda: os.environ.get("SHARDC_STORE", "1") != "0")
    uneven: bool = False
    capture: Callable[..., Any] | None = field(default=None, repr=False, compare=False)
    pipeline: Callable[[Pipeline], Pipeline] | None = field(default=None, repr=False, compare=False)
    hooks: tuple[Hook, ...] = field(default=(), repr=False, compare=False)
    dump: str | Path | None = field(default_factory=lambda: os.environ.get("SHARDC_DUMP"))

    def __post_init__(self) -> None:
        check_fields(self)

    def bucket_bytes(self) -> int:
        """Returns the size of a bucket in bytes: ``bucket_size`` if that is a size. If not, the size at which a
        collective's latency by ``cost`` is a twentieth of its time, at most 8 MiB.

        A `Hardware` as ``bucket_size`` gives each group of ranks its own size (`shardc.passes.bucket_size`); this one
        is for where a single size is needed.
        """
        if self.bucket_size is not None and not isinstance(self.bucket_size, Hardware):
            return cast(int, self.bucket_size)  # `check_fields` has converted text
        direct = self.p2p_collectives is not False  # None: on CPU ranks, the only ones whose messages a model prices
        latency, bandwidth = self.cost.linear(direct)
        # A bucket takes latency + size / bandwidth seconds: latency is about a twentieth of that at this size.
        return min(int(20 * latency * bandwidth), 8 << 20)

    def budget_bytes(self) -> int:
        """Returns the bytes on each rank for parameters that stay gathered from forward to backward; -1 is no limit."""
        return cast(int, self.memory_budget)  # `check_fields` has converted text

    def in_flight_bytes(self) -> int:
        """Returns the limit of bytes in flight: results of collectives that are started before they are needed. -1 is
        no limit.
        """
        if self.max_in_flight is not None:
            return cast(int, self.max_in_flight)
        if isinstance(self.bucket_size, Hardware):
            return int(self.bucket_size.memory / 64)
        # No limit if the size of a bucket has none (below 0); else two buckets, at least 16 MiB.
        return -1 if self.bucket_bytes() < 0 else max(2 * self.bucket_bytes(), 16 << 20)

    def silent(self) -> frozenset[str] | None:
        """Returns the kinds of collectives that are replaced by local copies because ``skip_comm`` asks for it. None
        stands for all kinds.
        """
        if isinstance(self.skip_comm, bool):
            return None if self.skip_comm else frozenset()
        return frozenset(kind for what in self.skip_comm for kind in SILENCED[what])

    def with_plan_settings(self, plan: Plan, device: torch.device) -> Options:
        """Returns these options with ``bucket_size`` and ``overlap`` filled in from ``plan`` and ``device``.

        The plan's ``bucket_size`` replaces None or a `Hardware`. If it is still None, it becomes the hardware of
        ``cost``, or `H100` on a GPU. Collectives overlap with compute if both options and plan allow it.
        """
        size = self.bucket_size
        # A size in the options goes before that in the plan, which goes before a `Hardware`.
        if size is None or isinstance(size, Hardware):
            size = size if plan.setting("bucket_size") is None else plan.setting("bucket_size")
        if size is None and isinstance(self.cost, Hardware) and not self.cost.is_host:
            size = self.cost
        elif size is None and device.type != "cpu" and not isinstance(self.cost, Hardware):
            size = H100
        return replace(self, bucket_size=size, overlap=self.overlap and plan.setting("overlap"))
