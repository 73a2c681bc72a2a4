"""`parallelize_module`: tensor parallel, and the same with the rest of each block split over the sequence."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from benchmarks.peers.row import Row
from benchmarks.work import Step, Work, train_step


def _styles(sequence: bool) -> tuple[dict[str, ParallelStyle], dict[str, ParallelStyle]]:
    """(of a block, of the rest); between blocks activations are whole, or split over the sequence."""
    between = Shard(1) if sequence else Replicate()
    block: dict[str, ParallelStyle] = {
        **{name: ColwiseParallel() for name in ("attn.wq", "attn.wk", "attn.wv", "mlp.gate", "mlp.up")},
        **{name: RowwiseParallel(output_layouts=between) for name in ("attn.wo", "mlp.down")},
    }
    rest: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Shard(-1), use_local_output=False),
    }
    if sequence:
        gather_attention = PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        )
        gather_mlp = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
        norm = SequenceParallel
        block |= {"attn_norm": norm(), "attn": gather_attention, "mlp_norm": norm(), "mlp": gather_mlp}
        rest["norm"] = norm()
    return block, rest


def _build(work: Work, mesh: DeviceMesh, sequence: bool, compiled: bool) -> Step:
    model = work.model()
    block, rest = _styles(sequence)
    for layer in model.layers:
        parallelize_module(layer, mesh, block)
        if compiled:
            layer.compile(dynamic=False)
    parallelize_module(model, mesh, rest)

    def forward(tokens: Tensor, targets: Tensor) -> Tensor:
        # The logits stay split over the vocabulary; `loss_parallel` needs to see their backward too.
        logits = model(tokens)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    step = train_step(forward, model.parameters())

    def parallel_step(tokens: Tensor, targets: Tensor) -> Tensor:
        with loss_parallel():
            value = step(tokens, targets)
        return value.full_tensor()

    return parallel_step


ROWS = tuple(
    Row(
        f"{'tp+sp' if sequence else 'tp'}/{'compiled' if compiled else 'eager'}",
        "TP+SP" if sequence else "TP",
        "tp",
        partial(_build, sequence=sequence, compiled=compiled),
        whole_batch=True,
    )
    for sequence in (False, True)
    for compiled in (False, True)
)
