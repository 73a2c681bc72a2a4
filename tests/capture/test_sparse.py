"""Sparse tensors and gradients are refused by name or line."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardc
from shardc.errors import CaptureError, InputError


class Net(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.rows = nn.Embedding(10, 4, sparse=kind == "module")
        self.bags = nn.EmbeddingBag(10, 4, sparse=kind == "bag")

    def forward(self, x):
        if self.kind == "bag":
            return self.bags(x.unsqueeze(1)).sum()
        if self.kind == "inside":
            return torch.sparse.mm(torch.eye(8).to_sparse(), self.rows(x)).sum()
        return F.embedding(x, self.rows.weight, sparse=True).sum() if self.kind == "function" else self.rows(x).sum()


@pytest.mark.parametrize("kind", ["module", "bag", "function", "inside"])
def test_a_sparse_gradient_is_refused_with_its_line(kind):
    module = shardc.compile(Net(kind), shardc.Mesh(dp=2), shardc.fsdp("dp"))
    with pytest.raises(CaptureError, match=r"sparse tensor, which no rank(.|\n)*source: .*\.py:\d+(.|\n)*fix: "):
        module.lower(torch.zeros(8, dtype=torch.long))


@pytest.mark.parametrize("register", ["register_buffer", "register_parameter"])
def test_a_sparse_buffer_is_refused_by_name(register):
    net = nn.Linear(4, 4)
    value = torch.eye(4).to_sparse()
    getattr(net, register)("adjacent", nn.Parameter(value) if register == "register_parameter" else value)
    with pytest.raises(InputError, match="'adjacent' is a sparse_coo tensor"):
        shardc.compile(net, shardc.Mesh(dp=2), shardc.fsdp("dp"))
