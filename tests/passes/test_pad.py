"""Sizes that the mesh does not divide, end to end: every rank of the simulation against one device, in float64."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from examples.models import convnet, gpt2, llama, mlp, vit


def trains_as_one_device(
    model: nn.Module, mesh: dict[str, int], plan: shardc.Plan, loss: Callable[..., Tensor] | None, *batch: Tensor
) -> tuple[shardc.Program, list[str]]:
    """The program, and what was warned of; loss, gradients and the parameters after two steps are compared."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", shardc.ShardcWarning)
        module = shardc.compile(model, shardc.Mesh(mesh), plan, loss=loss, backend="eager")
        sim = shardc.Simulation(module)
        ours = sim.optimizers(lambda shards: torch.optim.AdamW(shards, lr=1e-2))
        theirs = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(2):
            whole = model(batch[0]).sum() if loss is None else loss(model(batch[0]), *batch[1:])
            theirs.zero_grad()
            whole.backward()
            made = sim(*batch)
            torch.testing.assert_close(made.sum() if loss is None else made, whole.detach(), rtol=1e-9, atol=1e-9)
            sim.backward(*([] if loss is not None else [torch.ones_like(made)]))
            floor = 1e-6 * max(p.grad.abs().max().item() for p in model.parameters() if p.grad is not None)
            for name, p in model.named_parameters():
                if p.grad is not None:
                    error = (sim.grad(name) - p.grad).abs().max().item()
                    assert error < 1e-9 * max(p.grad.abs().max().item(), floor), f"gradient of {name}"
            theirs.step()
            ours()
        for name, p in model.named_parameters():
            torch.testing.assert_close(sim.param(name), p.detach(), rtol=1e-7, atol=1e-9, msg=name)
    said = [str(w.message) for w in caught if issubclass(w.category, shardc.ShardcWarning)]
    return module.lower(*batch), list(dict.fromkeys(said))


def token_batch(rows: int, length: int, vocab: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(vocab, (rows, length + 1))
    targets = tokens[:, 1:].contiguous()
    targets[0, 2:] = -100
    return tokens[:, :-1].contiguous(), targets


FSDP = shardc.fsdp("dp")
TOKENS: dict[str, tuple[Any, dict[str, int], shardc.Plan, tuple[int, int]]] = {
    "batch 5, dp 2": (llama, {"dp": 2}, FSDP, (5, 8)),
    "sequence 7, tp 2": (llama, {"tp": 2}, llama.llama_tp("tp", sequence=True), (2, 7)),
    "batch 5, sequence 7": (llama, {"dp": 2, "tp": 2}, FSDP | llama.llama_tp("tp", sequence=True), (5, 7)),
    "batch 5, dp 4, fused projection": (gpt2, {"dp": 4}, FSDP, (5, 8)),
    "sequence 5, tp 4, fused projection": (gpt2, {"tp": 4}, gpt2.gpt2_tp("tp", sequence=True), (2, 5)),
}


MARKS = {"batch 5, sequence 7": [pytest.mark.slow], "sequence 5, tp 4, fused projection": []}


@pytest.mark.parametrize("case", [pytest.param(case, marks=MARKS.get(case, [pytest.mark.long])) for case in TOKENS])
def test_decoders(case: str) -> None:
    source, mesh, plan, (rows, length) = TOKENS[case]
    torch.manual_seed(0)
    model, args = source.tiny()
    model = model.double()
    batch = token_batch(rows, length, model(args[0]).shape[-1])
    trains_as_one_device(model, mesh, plan, source.loss, *batch)


@pytest.mark.parametrize(
    ("source", "plan"),
    [
        pytest.param(mlp, FSDP, id="mlp"),
        pytest.param(vit, FSDP | vit.vit_tp("tp", sequence=True), id="vit", marks=pytest.mark.long),
        pytest.param(convnet, FSDP, id="convnet", marks=pytest.mark.slow),
    ],
)
def test_others_at_a_batch_of_five(source: Any, plan: shardc.Plan) -> None:
    torch.manual_seed(0)
    model, args = source.tiny()
    model = model.double()
    x = torch.randn(5, *args[0].shape[1:], dtype=torch.float64)
    out = model(x)
    target = torch.randn_like(out) if source is mlp else torch.randint(out.shape[-1], (5,))
    mesh = {"dp": 2, "tp": 2} if source is vit else {"dp": 2}
    loss = F.mse_loss if source is mlp else F.cross_entropy
    trains_as_one_device(model, mesh, plan, loss, x, target)


class Reductions(nn.Module):
    """Every reduction over the padded batch, each with the filling that it ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, 3, dtype=torch.float64) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        kinds = [y.sum(0), y.mean(0), y.amax(0), y.amin(0), y.prod(0), y.std(0), y.logsumexp(0), y.cumsum(0)[-1]]
        counts = [(y > 1).any(0), (y > 1).all(0), (y > 1).sum(0), y.argmax(0), (y < 9).all(0)]
        return torch.stack([*kinds, *(count.double() for count in counts)]).sum(0) * y.softmax(0).amax(0)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_filling_is_what_each_reduction_ignores(sign: float) -> None:
    torch.manual_seed(0)
    x = sign * (torch.rand(5, 4, dtype=torch.float64) + 0.5)
    trains_as_one_device(Reductions(), {"dp": 2}, FSDP, None, x)


class Spectrum(nn.Module):
    """Sums of complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        made = torch.fft.rfft(self.lin(x)) * torch.polar(x[:, :4].abs(), x[:, :4])
        return torch.view_as_real(made.sum(0)).square().mean()


def test_complex_numbers() -> None:
    batch = torch.randn(5, 6, dtype=torch.float64)
    trains_as_one_device(Spectrum().double(), {"dp": 2}, FSDP, lambda out: out, batch)


class Views(nn.Module):
    """The padded sequence goes through views, and is cut and joined."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.proj(x)  # [2, 7, 6]
        flat = y.reshape(14, 6).t().reshape(3, 2, 14).transpose(0, 1)
        ends = torch.cat([y[:, -1:], y[:, :3], y.flip(1)], 1)
        return flat.square().sum() + ends.exp().mean() + y[:, 2:].view(2, 5, 2, 3).amax((1, 3)).sum()


def test_padded_values_through_views_and_cuts() -> None:
    torch.manual_seed(0)
    plan = shardc.Plan(activations={"proj": "~, @tp, ~"})
    program, _ = trains_as_one_device(Views(), {"tp": 2}, plan, None, torch.randn(2, 7, 4, dtype=torch.float64))
    assert "f64[2,8@tp,6]" in program.text("propagate")


class Scattered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(4, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        index = torch.tensor([0, 2, 1, 0, 1])
        return self.proj(x).new_zeros(3, 6).index_add(0, index, self.proj(x)).square()


def test_where_no_filling_is_known_the_value_is_whole_with_a_warning() -> None:
    torch.manual_seed(0)
    _, said = trains_as_one_device(Scattered(), {"dp": 2}, FSDP, None, torch.randn(5, 4, dtype=torch.float64))
    (text,) = [one for one in said if "index_add" in one]
    what, source, fix = text.splitlines()
    assert what.startswith("proj.add") and what.endswith(
        "of shape (5, 6) is padded for axis dp, and aten.index_add.default (index_add) needs it unpadded: no filling "
        "is known that the op ignores; it is kept whole there, 240 bytes"
    )
    assert source.startswith("  source: ") and "test_pad.py:" in source
    assert fix == "  fix: use sizes that dp divides"


class Block(nn.Module):
    """An embedding, attention of ``heads`` heads, a layer of ``width`` and a head over ``vocab`` words."""

    def __init__(self, vocab: int = 16, heads: int = 2, width: int = 16) -> None:
        super().__init__()
        self.heads, dim = heads, 8 * heads
        self.tok = nn.Embedding(vocab, dim)
        self.qkv, self.back = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3)), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, width), nn.Linear(width, dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens)
        q, k, v = (one(x).unflatten(-1, (self.heads, 8)).transpose(1, 2) for one in self.qkv)
        x = x + self.back(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.head(x + self.down(F.silu(self.up(x))))


TP = shardc.tp("tp", colwise=["qkv.*", "up", "head"], rowwise=["back", "down"])
TP |= shardc.Plan(params={"tok.weight": "@tp, _"})


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@pytest.mark.parametrize(
    ("mesh", "sizes"),
    [({"tp": 2}, {"vocab": 17, "width": 13}), ({"dp": 2, "tp": 4}, {"vocab": 13, "width": 5, "heads": 4})],
    ids=["tp2", "dp2-tp4-with-empty-shards"],
)
def test_parameters_that_do_not_divide_are_split_padded(mesh: dict[str, int], sizes: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = Block(**sizes).double()
    batch = token_batch(4, 8, sizes["vocab"])
    plan = TP | FSDP if "dp" in mesh else TP
    program, _ = trains_as_one_device(model, mesh, plan, cross_entropy, *batch)
    grown = {name: -(-size // mesh["tp"]) * mesh["tp"] for name, size in sizes.items()}
    made = [line.split(" = ")[0] for line in program.text("collectives").splitlines()]
    rows = "32@dp" if "dp" in mesh else "32"
    assert f"  %up.mm: f64[{rows},{grown['width']}@tp]" in made
    assert f"  %head.mm: f64[{rows},{grown['vocab']}@tp]" in made


def test_heads_that_do_not_divide_are_whole_with_a_warning() -> None:
    torch.manual_seed(0)
    model = Block(heads=3).double()
    _, said = trains_as_one_device(model, {"tp": 2}, TP, cross_entropy, *token_batch(2, 4, 16))
    (query, *others) = [one for one in said if "qkv" in one]
    assert len(others) == 2
    what, source, fix = query.splitlines()
    assert what == (
        "a view turns qkv.0.add [8,24@tp] into [2,4,3,8], whose sizes axis tp does not divide: it is gathered, "
        "768 bytes a rank"
    )
    assert source.startswith("  source: ") and "test_pad.py:" in source
    assert fix == (
        "  fix: use sizes that tp divides, or leave tp off where they are split; of queries, keys and values in one "
        "weight, split each: shardc.Plan(params={'*.qkv.weight': '(3 _@tp), _'})"
    )
