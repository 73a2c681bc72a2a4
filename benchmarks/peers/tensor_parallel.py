"""`parallelize_module`: tensor parallel, and the same with the rest of each block split over the sequence."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
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
from benchmarks.work import Step, Work, model_loss, train_step


def _styles(sequence: bool, whole_logits: bool) -> tuple[dict[str, ParallelStyle], dict[str, ParallelStyle]]:
    """(of a block, of the rest); between blocks activations are whole, or split over the sequence."""
    between = Shard(1) if sequence else Replicate()
    logits = Replicate() if whole_logits else Shard(-1)
    block: dict[str, ParallelStyle] = {
        **{name: ColwiseParallel() for name in ("attn.wq", "attn.wk", "attn.wv", "mlp.gate", "mlp.up")},
        **{name: RowwiseParallel(output_layouts=between) for name in ("attn.wo", "mlp.down")},
    }
    rest: dict[str, ParallelStyle] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=logits, use_local_output=whole_logits),
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


def _parallel(work: Work, mesh: DeviceMesh, sequence: bool, whole_logits: bool) -> nn.Module:
    model = work.model(mesh.device_type)
    block, rest = _styles(sequence, whole_logits)
    for layer in model.layers:
        parallelize_module(layer, mesh, block)
    return parallelize_module(model, mesh, rest)


def _eager(work: Work, mesh: DeviceMesh, sequence: bool) -> Step:
    """The logits stay split over the vocabulary, which `loss_parallel` needs to see in forward and backward."""
    model = _parallel(work, mesh, sequence, whole_logits=False)
    step = train_step(model_loss(model), model.parameters())

    def parallel_step(tokens: Tensor, targets: Tensor) -> Tensor:
        with loss_parallel():
            value = step(tokens, targets)
        return value.full_tensor()

    return parallel_step


def _compiled(work: Work, mesh: DeviceMesh, sequence: bool) -> Step:
    """The logits are gathered: compiled code and `loss_parallel` do not go together (torch 2.13)."""
    model = _parallel(work, mesh, sequence, whole_logits=True)
    return train_step(torch.compile(model_loss(model), dynamic=False), model.parameters())


ROWS = (
    Row("tp/eager", "TP", "tp", partial(_eager, sequence=False), whole_batch=True),
    Row("tp/compiled", "TP", "tp", partial(_compiled, sequence=False), whole_batch=True),
    Row("tp+sp/eager", "TP+SP", "tp", partial(_eager, sequence=True), whole_batch=True),
    Row("tp+sp/compiled", "TP+SP", "tp", partial(_compiled, sequence=True), whole_batch=True),
)
