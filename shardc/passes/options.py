"""Options of `shardc.compile`."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from shardc.cost.hardware import Hardware
from shardc.cost.model import CostModel
from shardc.cost.recompute import CHOICES
from shardc.passes.pipeline import Hook, Pipeline
from shardc.plan.value import Plan
from shardc.validate import Bytes, Range, check_fields

Size = Annotated[int | str, Bytes(-1)]


SILENCED = {"gather": ("all_gather",), "reduce": ("reduce_scatter", "all_reduce")}


@dataclass(frozen=True)
class Options:
    """How to compile. Sizes are numbers of bytes, or text with a unit: ``"8 MiB"``, ``"1.5GB"``.

    Args:
        strict: an op without a sharding rule is an error instead of a warning.
        cost: prices layouts and algorithms: a `CostModel`, which knows how many ranks a group has, or a `Hardware`,
            which also knows the links between them and is what `Program.schedule` predicts for.
        chooser: how layouts are chosen that the plan leaves open. "greedy" takes one op after another. "exact"
            minimizes the total time (`shardc.passes.exact`); it takes seconds, and minutes on three axes.
        verify: check the graph after every pass.
        bucket_size: bytes of a bucket of collectives, per rank. -1 makes one bucket of all, 0 none. None takes the size
            at which latency is a twentieth of a bucket's time, 8 MiB at most (`shardc.measure_links` for real links).
        max_in_flight: bytes of collectives' results that may be started ahead of their use. -1 is no limit. None is two
            buckets, 16 MiB at least.
        memory_budget: bytes on each rank for parameters of level 3 (ZeRO-3) that stay gathered from forward to
            backward; -1 for all. Those that save most time per byte come first, on a tie those that the forward uses
            last.
        checkpoint_collectives: collectives of activations in a `torch.utils.checkpoint` region. "recompute" runs them
            again in backward, "keep" keeps their results. "auto" recomputes those whose result is larger than what a
            rank sends for it (gathers and all-to-alls), and keeps the results of the others (reductions).
        overlap: collectives overlap with compute; False waits for each where it starts.
        decompose: number of chunks into which collectives of activations, and the matrix products beside them, are
            split, so that one chunk is computed while another is sent; 1 is off. "auto" takes the fastest number, if
            ``cost`` was measured or set.
        direct: collectives are messages straight between ranks (`shardc.ir.comm`), which is faster than gloo's own;
            None for real CPU ranks only.
        comm: "real", or "none" for local copies instead of collectives: values are wrong, for timing only. By kind:
            ``{"gather": "none"}`` for all-gathers, ``{"reduce": "none"}`` for reduce-scatters and all-reduces.
        fold: capture and plan four to six of the repeated blocks, and replicate the result (`shardc.fold`). The program
            is the same, except for the order of independent ops with ``decompose``. None: if the module runs. True
            warns if blocks look equal and their graphs are not.
        lower_by: "whole": Inductor lowers each half (forward, backward) as one graph; "blocks": as segments, of which
            equal ones are lowered once; "auto": "blocks" if at least four segments are equal (`shardc.ir.segments`).
        store: keep programs on disk, in Inductor's cache folder, so that the next start of the same code neither
            captures nor plans, and one rank of a machine does it for all. Used if the module runs. With False, or
            ``SHARDC_STORE=0`` in the environment, each start compiles by itself. ``SHARDC_STORE`` may also be the
            absolute path of another folder for programs.
        uneven: ranks may pass different numbers of rows of the batch, which is an error otherwise: each call tells the
            others how many, and if these differ it computes on the rows of all ranks together.
        capture: replaces `shardc.capture.capture`, such as a `shardc.capture.CaptureOnce` for several plans of one
            model.
        pipeline: takes the `shardc.passes.Pipeline` of the other options; returns the one that runs.
        hooks: called around every pass; see `shardc.passes.Hook`.
        dump: directory for the text of every stage; by default the environment's ``SHARDC_DUMP``.

    Raises:
        InputError: a value of another type, out of range, or not one of the choices.
    """

    strict: bool = False
    cost: CostModel | Hardware = field(default_factory=CostModel)
    chooser: Literal["greedy", "exact"] = "greedy"
    verify: bool = True
    bucket_size: Size | None = None
    max_in_flight: Size | None = None
    memory_budget: Size = 0
    checkpoint_collectives: Annotated[str, Literal[CHOICES]] = "auto"
    overlap: bool = True
    decompose: Annotated[int, Range(1, 64)] | Literal["auto"] = "auto"
    direct: bool | None = None
    comm: Literal["real", "none"] | Mapping[Literal["gather", "reduce"], Literal["real", "none"]] = "real"
    fold: bool | None = None
    lower_by: Literal["auto", "blocks", "whole"] = "auto"
    store: bool = field(default_factory=lambda: os.environ.get("SHARDC_STORE", "1") != "0")
    uneven: bool = False
    capture: Callable[..., Any] | None = field(default=None, repr=False, compare=False)
    pipeline: Callable[[Pipeline], Pipeline] | None = field(default=None, repr=False, compare=False)
    hooks: tuple[Hook, ...] = field(default=(), repr=False, compare=False)
    dump: str | Path | None = field(default_factory=lambda: os.environ.get("SHARDC_DUMP"))

    def __post_init__(self) -> None:
        check_fields(self)

    def bucket_bytes(self) -> int:
        """Returns the bytes of a bucket; by default latency is a twentieth of a bucket's time, 8 MiB at most."""
        if self.bucket_size is not None:
            return cast(int, self.bucket_size)
        latency, bandwidth = self.cost.linear(self.direct is not False)
        return min(int(20 * latency * bandwidth), 8 << 20)

    def budget_bytes(self) -> int:
        """Returns the bytes on each rank for parameters that stay gathered from forward to backward."""
        return cast(int, self.memory_budget)

    def in_flight_bytes(self) -> int:
        """Returns the bytes of collectives' results that may be started ahead of their use."""
        if self.max_in_flight is not None:
            return cast(int, self.max_in_flight)
        return -1 if self.bucket_bytes() < 0 else max(2 * self.bucket_bytes(), 16 << 20)

    def silent(self) -> frozenset[str] | None:
        """Returns the kinds of collectives that ``comm`` replaces by local copies; None for all."""
        if isinstance(self.comm, str):
            return None if self.comm == "none" else frozenset()
        return frozenset(kind for what, how in self.comm.items() if how == "none" for kind in SILENCED[what])

    def with_plan_settings(self, plan: Plan) -> Options:
        """Returns these options with the plan's ``bucket_size`` and ``overlap``, if they leave those at the default."""
        size = plan.setting("bucket_size") if self.bucket_size is None else self.bucket_size
        return replace(self, bucket_size=size, overlap=self.overlap and plan.setting("overlap"))
