"""FSDP2 with kernels written beside it as torchtitan does: compiled `flex_attention`, and products in float8 by hand.

Beside them stand the same in shardc. All compute in bfloat16; the masks of documents are made once.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import shardc
from benchmarks.documents import documents, packed
from benchmarks.gpu.rows import Skipped
from benchmarks.peers import ours
from benchmarks.peers.row import OURS, Row
from benchmarks.peers.sharded import HALF
from benchmarks.work import Step, Work, model_loss, train_step
from examples.models.llama import Llama

E4, E5 = torch.float8_e4m3fn, torch.float8_e5m2
Change = Callable[[Work, Llama], Llama]


def with_documents(work: Work, model: Llama) -> Llama:
    """Attention of sequences of several documents each, an eighth as long as the sequence on average."""
    document = documents(work.length, max(work.length // 16, 1), work.length // 8 + work.length // 16)
    return packed(model, document.to(model.head.weight.device), once=True)


def _quantised(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """``x`` in float8 with one scale, and the inverse of the scale."""
    top = torch.finfo(dtype).max
    scale = top / x.abs().max().float().clamp(min=1e-12)
    return (x.float() * scale).clamp(-top, top).to(dtype), scale.reciprocal()


def _product(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    """The product of two quantised matrices, laid out as the kernel takes them."""
    (qa, inverse_a), (qb, inverse_b) = a, b
    by_columns = qb.t().contiguous().t()
    return torch._scaled_mm(qa.contiguous(), by_columns, inverse_a, inverse_b, out_dtype=dtype)


class _Scaled(torch.autograd.Function):
    """``x @ weight.T`` in float8; gradients are rounded with more exponents."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x, weight)
        (qw, inverse) = _quantised(weight, E4)
        return _product(_quantised(x, E4), (qw.t(), inverse), x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        rows, inverse = _quantised(grad, E5)
        by_weight = _product((rows, inverse), _quantised(weight, E4), x.dtype)
        return by_weight, _product((rows.t(), inverse), _quantised(x, E4), x.dtype)


class Float8Linear(nn.Linear):
    """A linear layer without a bias whose three products are in float8."""

    def forward(self, x: Tensor) -> Tensor:
        return _Scaled.apply(x.flatten(0, -2), self.weight).unflatten(0, x.shape[:-1])  # type: ignore[no-any-return]


def in_float8(work: Work, model: Llama) -> Llama:
    """The linear layers of the blocks, in float8."""
    for module in model.layers.modules():
        if type(module) is nn.Linear:
            module.__class__ = Float8Linear
    return model


def _fsdp2(work: Work, mesh: DeviceMesh, change: Change) -> Step:
    if change is with_documents and mesh.device_type == "cpu":
        raise Skipped("torch's flex_attention has no backward on a CPU")
    model = change(work, work.model(mesh.device_type))
    for layer in model.layers:
        layer.compile(dynamic=False)
        fully_shard(layer, mesh=mesh, reshard_after_forward=True, mp_policy=HALF)
    fully_shard(model, mesh=mesh, mp_policy=HALF)
    return train_step(model_loss(model), model.parameters())


def _float8(axis: str) -> shardc.Plan:
    return ours.half(axis, 3) | shardc.precision(matmul="float8", modules="layers")


_FLEX = partial(ours.build, plan=partial(ours.half, level=3), change=with_documents)
ROWS = (
    Row("fsdp2/flex/bf16", "FSDP2", "flex-bf16", partial(_fsdp2, change=with_documents)),
    Row("shardc/flex/bf16", OURS, "flex-bf16", _FLEX),
    Row("fsdp2/float8/bf16", "FSDP2", "float8-bf16", partial(_fsdp2, change=in_float8)),
    Row("shardc/float8/bf16", OURS, "float8-bf16", partial(ours.build, plan=_float8)),
)
