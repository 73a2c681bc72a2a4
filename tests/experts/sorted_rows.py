"""A mixture of experts with the interfaces of torchtitan's: rows are sorted by expert around grouped experts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc

PAGE = Path(__file__).parents[2] / "docs" / "experts.md"


def _run_experts_for_loop(w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    sizes = counts.tolist()
    made = []
    for at, rows in enumerate(torch.split(x, [int(n) for n in sizes])):
        inner = F.silu(torch.matmul(rows, w1[at].transpose(-2, -1))) * torch.matmul(rows, w3[at].transpose(-2, -1))
        made.append(torch.matmul(inner, w2[at].transpose(-2, -1)))
    return torch.cat(made)


def _run_experts_grouped_mm(w1: Tensor, w2: Tensor, w3: Tensor, x: Tensor, counts: Tensor) -> Tensor:
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    inner = F.silu(torch._grouped_mm(x.bfloat16(), w1.bfloat16().transpose(-2, -1), offs=ends))
    inner = inner * torch._grouped_mm(x.bfloat16(), w3.bfloat16().transpose(-2, -1), offs=ends)
    return torch._grouped_mm(inner, w2.bfloat16().transpose(-2, -1), offs=ends).type_as(x)


class GroupedExperts(nn.Module):
    def __init__(self, dim: int, hidden_dim: int, num_experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(num_experts, hidden_dim, dim) / 3)
        self.w2 = nn.Parameter(torch.randn(num_experts, dim, hidden_dim) / 3)
        self.w3 = nn.Parameter(torch.randn(num_experts, hidden_dim, dim) / 3)
        self.use_grouped_mm = False

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        run_experts_fn = _run_experts_grouped_mm if self.use_grouped_mm else _run_experts_for_loop
        return run_experts_fn(self.w1, self.w2, self.w3, x, num_tokens_per_expert)


def counted(chosen: Tensor, experts: int) -> Tensor:
    return torch.histc(chosen.view(-1).to(torch.float32), bins=experts, min=0, max=experts)


class TokenChoiceTopKRouter(nn.Module):
    def __init__(self, dim: int, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, num_experts, bias=False)
        self.num_experts, self.top_k = num_experts, top_k

    def forward(self, x: Tensor, expert_bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        scores = self.gate(x).sigmoid()
        chosen = (scores if expert_bias is None else scores + expert_bias).topk(self.top_k, dim=1).indices
        return scores.gather(1, chosen), chosen, counted(chosen, self.num_experts)


class TokenReorderer(nn.Module):
    def __init__(self, num_experts: int, top_k: int) -> None:
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k

    def forward(self, scores: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        order = chosen.view(-1).argsort(stable=True)
        return scores.view(-1)[order], order // self.top_k, counted(chosen, self.num_experts)


class MoE(nn.Module):
    def __init__(self, dim: int, hidden_dim: int, before: bool, shared: bool) -> None:
        super().__init__()
        self.experts = GroupedExperts(dim, hidden_dim, 8)
        self.router, self.reorderer = TokenChoiceTopKRouter(dim, 8, 2), TokenReorderer(8, 2)
        self.shared_experts = nn.Linear(dim, dim, bias=False) if shared else None
        self.score_before_experts = before
        self.register_buffer("expert_bias", torch.linspace(-0.1, 0.1, 8))
        self.register_buffer("tokens_per_expert", torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, dim = x.shape
        x = x.view(-1, dim)
        top_scores, chosen, counts = self.router(x, self.expert_bias)
        with torch.no_grad():
            self.tokens_per_expert.add_(counts)
        scores, take, counts = self.reorderer(top_scores, chosen)
        take = take.reshape(-1, 1).expand(-1, dim)
        routed = torch.gather(x, dim=0, index=take)
        if self.score_before_experts:
            routed = routed * scores.reshape(-1, 1)
        made = self.experts(routed, counts)
        out = torch.zeros_like(x) if self.shared_experts is None else self.shared_experts(x)
        if not self.score_before_experts:
            made = made * scores.reshape(-1, 1)
        return out.scatter_add(dim=0, index=take, src=made).reshape(rows, length, dim)


def documented(name: str, **others: Any) -> Any:
    """What the page on experts defines by ``name`` for layers as these, with ``others`` in the place of its names."""
    (block,) = re.findall(
        r"^```python\n(@shardc.experts\ndef expert.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE
    )
    defined: dict[str, Any] = {"shardc": shardc, "torch": torch, "F": F}
    exec(block, defined)
    defined |= others
    return defined[name]


class Registered(MoE):
    """The layer with the forward of the page."""

    forward = documented("routed")


class SortedExperts(GroupedExperts):
    """Experts of rows sorted by expert: each row is a token that goes to one expert."""

    expert = staticmethod(documented("expert"))

    def forward(self, x: Tensor, num_tokens_per_expert: Tensor) -> Tensor:
        ends = num_tokens_per_expert.to(torch.int64).cumsum(0)
        chosen = torch.searchsorted(ends, torch.arange(x.shape[0], device=x.device), right=True).unsqueeze(1)
        return self.expert(x, chosen, torch.ones_like(x[:, :1]), self.w1, self.w2, self.w3)


class OtherMoE(MoE):
    """A layer with code of its own, whose experts alone are replaced."""

    def __init__(self, dim: int, hidden_dim: int, before: bool, shared: bool) -> None:
        super().__init__(dim, hidden_dim, before, shared)
        self.experts.__class__ = SortedExperts

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.tanh())


class Decoder(nn.Module):
    def __init__(self, layer: type[MoE] = Registered, hidden_dim: int = 12, vocab: int = 64) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab, 16), nn.Linear(16, vocab)
        self.layers = nn.ModuleList(layer(16, hidden_dim, before=at == 0, shared=at == 1) for at in range(2))

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten(), ignore_index=-100)}


def build(layer: type[MoE] = Registered) -> Decoder:
    torch.manual_seed(0)
    return Decoder(layer).double()
