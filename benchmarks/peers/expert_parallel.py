"""Experts over ranks by hand: a dispatcher in the manner of torchtitan's, beside FSDP2 for everything else.

Tokens are sorted by expert, counts are exchanged, and rows are sent by an all-to-all of exactly as many as there are.
They are sorted again by expert, go through a grouped product, and are sent back. Experts' weights are DTensors split
over all ranks. `fully_shard` has the other parameters, one unit a block. Blocks are compiled, up to the dispatcher.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

PRODUCTS = ("grouped", "loop")


def expert_parallel(model: nn.Module, mesh: DeviceMesh, product: str = "grouped", compiled: bool = True) -> nn.Module:
    """``model``, a decoder of ``transformers`` whose layers hold ``mlp.experts``, over a mesh of one dim."""
    ignored: set[nn.Parameter] = set()
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            whole = getattr(experts, name)
            param = nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)]))
            # Each rank's loss is a mean over its own tokens, and experts' gradients are sums over all ranks' tokens.
            param.register_hook(lambda grad: grad / mesh.size())
            setattr(experts, name, param)
            ignored.add(param)
        dispatch = _Dispatcher(mesh, experts.num_experts, product)
        experts.forward = MethodType(torch.compiler.disable(dispatch), experts)
    for layer in model.model.layers:
        if compiled:
            layer.compile(dynamic=False)
        fully_shard(layer, mesh=mesh, ignored_params=ignored)
    fully_shard(model, mesh=mesh, ignored_params=ignored)
    return model


class _Dispatcher:
    """The forward of a layer's experts: tokens [t, d], choices and their weights [t, k] -> [t, d]."""

    def __init__(self, mesh: DeviceMesh, experts: int, product: str) -> None:
        self.group, self.ranks, self.experts, self.product = mesh.get_group(), mesh.size(), experts, product

    def __call__(self, module: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        own = self.experts // self.ranks
        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True)
        token = order // chosen.shape[1]
        sends = flat.bincount(minlength=self.experts)
        comes = all_to_all_single(sends, None, None, self.group).view(self.ranks, own)
        splits = sends.view(self.ranks, own).sum(1).tolist(), comes.sum(1).tolist()
        rows = all_to_all_single_autograd(x[token], splits[1], splits[0], self.group)
        expert = torch.arange(own).repeat(self.ranks).repeat_interleave(comes.reshape(-1))
        sort = expert.argsort(stable=True)
        made = self._products(rows[sort], comes.sum(0), module)
        back = torch.empty_like(made).index_copy(0, sort, made)
        back = all_to_all_single_autograd(back, splits[0], splits[1], self.group)
        scaled = back * weights.reshape(-1)[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, token, scaled)

    def _products(self, rows: Tensor, counts: Tensor, module: Any) -> Tensor:
        up, down = module.gate_up_proj.to_local(), module.down_proj.to_local()
        if self.product == "grouped":
            ends = counts.cumsum(0).to(torch.int32)
            gate, inner = F.grouped_mm(rows, up.transpose(1, 2), offs=ends).chunk(2, -1)
            return F.grouped_mm(module.act_fn(gate) * inner, down.transpose(1, 2), offs=ends)
        made = []
        for at, part in enumerate(rows.split(counts.tolist())):
            gate, inner = F.linear(part, up[at]).chunk(2, -1)
            made.append(F.linear(module.act_fn(gate) * inner, down[at]))
        return torch.cat(made)
