"""A loss in chunks computes what the whole one does, and no more than two chunks of its logits exist at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import shardc
from shardc.errors import PlanError, ShardcWarning
from shardc.ir import graph as ir
from shardc.ir.comm import WAIT
from tests.microbatches.programs import IGNORED, Case
from tests.microbatches.test_exact import _float64, agrees  # noqa: F401  (a fixture)
from tests.ranks import device_mesh, run_ranks

VOCABULARY = 48
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


class Head(nn.Module):
    """Tokens ``[B, S]`` to a loss, which is computed from features ``[B, S, 16]`` and the module ``head``."""

    def __init__(self, loss: Loss, bias: bool = False, tied: bool = False) -> None:
        super().__init__()
        self.loss = loss
        self.embed, self.up = nn.Embedding(VOCABULARY, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, VOCABULARY, bias=bias)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        return self.loss(self.head, x + torch.tanh(self.up(x)), targets)


def entropy(head: nn.Module, x: Tensor, targets: Tensor, **options: object) -> Tensor:
    return F.cross_entropy(head(x).flatten(0, 1), targets.flatten(), **options)


def upcast(head: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    """The loss of a Hugging Face model: logits in another dtype, targets shifted, a sum divided by their number."""
    labels = F.pad(targets, (0, 1), value=IGNORED)[..., 1:].flatten()
    logits = head(x).to(torch.float64).view(-1, VOCABULARY)
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") / (labels != IGNORED).sum()


def weighted(head: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    return entropy(head, x, targets, weight=torch.linspace(1, 2, VOCABULARY), label_smoothing=0.1)


def distilled(head: nn.Module, x: Tensor, targets: Tensor) -> Tensor:
    """Two products with logits, whose rows are compared; capped, as Gemma's are."""
    logits, teacher = 5 * torch.tanh(head(x) / 5), F.linear(x.detach() * 1.5, head.weight).softmax(-1)
    return (
        F.kl_div(logits.log_softmax(-1), teacher, reduction="batchmean") + 1e-3 * logits.logsumexp(-1).square().mean()
    )


def of_weight(head: nn.Module, x: Tensor, targets: Tensor, **options: object) -> Tensor:
    return F.linear_cross_entropy(x.flatten(0, 1), head.weight, targets.flatten(), **options)


LOSSES: dict[str, Callable[[], Head]] = {
    "mean": lambda: Head(entropy),
    "sum, a bias": lambda: Head(partial(entropy, reduction="sum"), bias=True),
    "smoothed": lambda: Head(partial(entropy, label_smoothing=0.1)),
    "weighted": lambda: Head(weighted, bias=True),
    "upcast": lambda: Head(upcast),
    "distilled": lambda: Head(distilled, bias=True),
    "tied": lambda: Head(entropy, tied=True),
    "linear_cross_entropy": lambda: Head(of_weight),
}
COLWISE = shardc.tp("tp", colwise=["head"])
SEQUENCE = COLWISE | shardc.Plan(activations={"embed.output": "~, @tp, _", "up.output": "~, @tp, _"})
PLANS = {
    "ddp": (shardc.Mesh(dp=2), shardc.ddp("dp")),
    "fsdp": (shardc.Mesh(dp=3), shardc.fsdp("dp")),
    "tp": (shardc.Mesh(tp=2), COLWISE),
    "tp of 3": (shardc.Mesh(tp=3), COLWISE),
    "sequence": (shardc.Mesh(dp=2, tp=2), shardc.fsdp("dp") | SEQUENCE),
    "fsdp and tp": (shardc.Mesh(dp=2, tp=2), shardc.fsdp("dp") | COLWISE),
    "microbatches": (shardc.Mesh(dp=2), shardc.fsdp("dp") | shardc.microbatches(2)),
    "rowwise": (shardc.Mesh(tp=2), shardc.tp("tp", rowwise=["head"])),
}


def case(loss: str) -> Case:
    torch.manual_seed(0)
    model = LOSSES[loss]()
    tokens, targets = torch.randint(VOCABULARY, (2, 12, 8)).unbind()
    targets[torch.rand(targets.shape) < 0.3] = IGNORED if loss != "distilled" else 0
    targets[:3] = IGNORED if loss != "distilled" else 0
    return Case(model, (tokens, targets))


BOTH = (
    ("mean", "fsdp"), ("mean", "microbatches"), ("sum, a bias", "rowwise"), ("smoothed", "fsdp and tp"),
    ("weighted", "tp of 3"), ("upcast", "ddp"), ("upcast", "sequence"), ("distilled", "fsdp"),
    ("distilled", "sequence"), ("tied", "tp"), ("tied", "fsdp and tp"), ("linear_cross_entropy", "tp"),
)  # fmt: skip


@pytest.mark.parametrize("loss, plan", BOTH)
@pytest.mark.filterwarnings("error::shardc.ShardcWarning")
def test_exact(loss: str, plan: str) -> None:
    mesh, entries = PLANS[plan]
    agrees(case(loss), mesh, entries | shardc.chunked_loss(4))


def chunks_of(program: shardc.Program) -> int:
    """The number of chunks in which forward computes logits."""
    graph = program.graph("chunk_loss")
    return 1 + sum("order.after" in str(n.target) and ir.info(n).origin.phase == "forward" for n in graph.nodes)


@pytest.mark.filterwarnings("error::shardc.ShardcWarning")
def test_chunks_of_the_model_are_kept() -> None:
    """``linear_cross_entropy`` with a number of rows in its options needs no plan entry; the plan's comes first."""
    options_of = pytest.importorskip("torch.nn.modules.linear_cross_entropy_options").LinearCrossEntropyOptions
    options = options_of(batch_chunk_size=16, chunking_method=None)
    for plan, expected in ((shardc.fsdp("dp"), 3), (shardc.fsdp("dp") | shardc.chunked_loss(4), 4)):
        torch.manual_seed(0)
        model, args = Head(partial(of_weight, options=options)), case("mean").args
        module = shardc.compile(model, shardc.Mesh(dp=2), plan, backend="eager")
        assert chunks_of(module.lower(*args)) == expected
    agrees(Case(model, args), shardc.Mesh(dp=2), shardc.fsdp("dp"))


def most_alive(program: shardc.Program, chunks: int) -> int:
    """The largest number of chunks of which a half of the program has a value as large as logits, at any time."""
    most = 0
    for stage in ("plan_memory", "plan_memory.backward"):
        graph = program.graph(stage)
        ops = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)
        heads = [n for n in ops if ir.info(n).name.startswith("head.mm.piece")]
        assert len(heads) == chunks
        of: dict[fx.Node, int] = {}  # value as large as logits -> its chunk
        for node in graph.nodes:
            read = [heads.index(node)] if node in heads else [of[x] for x in node.all_input_nodes if x in of]
            if read and node.op == "call_function" and ir.value(node).shape == ir.value(heads[0]).shape:
                of[node] = read[0]
        place = {node: at for at, node in enumerate(graph.nodes)}
        ends = {node: max((place[user] for user in node.users), default=place[node]) for node in of}
        for at in place.values():
            most = max(most, len({of[node] for node in of if place[node] <= at <= ends[node]}))
    return most


@pytest.mark.parametrize("plan", ["fsdp", "tp", "fsdp and tp", "sequence"])
def test_two_chunks_of_logits_at_most(plan: str) -> None:
    mesh, entries = PLANS[plan]
    reference = case("mean")
    program = shardc.compile(reference.model, mesh, entries | shardc.chunked_loss(4)).lower(*reference.args)
    assert most_alive(program, 4) <= 2
    for stage in ("plan_memory", "plan_memory.backward"):  # the weight is gathered once for all chunks
        waits = program.graph(stage).find_nodes(op="call_function", target=WAIT)
        assert sum(ir.info(wait).name.startswith("head.weight") for wait in waits) == (
            "fsdp" in plan or plan == "sequence"
        )


class Outputs(Head):
    """A loss with logits beside it."""

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(torch.tanh(self.up(self.embed(tokens))))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), logits


class AllRows(Head):
    """Logits over a number that depends on all of them."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.up(self.embed(tokens)))).flatten(0, 1)
        return F.cross_entropy(logits / logits.square().mean(), targets.flatten())


class Total(Head):
    """Logits over their sum, which is reduced by no collective if a rank has all of them."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        logits = self.head(torch.tanh(self.up(self.embed(tokens)))).flatten(0, 1)
        return F.cross_entropy(logits / logits.sum(), targets.flatten())


@pytest.mark.parametrize(
    "kind, chunks, message",
    [
        (Outputs, 4, "%head.view.1 is an output"),
        (AllRows, 4, "%div.1 needs a value of all rows"),
        (partial(Head, entropy), 49, "48 rows of each rank have no divisor from 49 to 196"),
    ],
)
def test_logits_that_stay_whole(kind: Callable[..., nn.Module], chunks: int, message: str) -> None:
    model, args = kind(entropy) if isinstance(kind, type) else kind(), case("mean").args
    module = shardc.compile(model, shardc.Mesh(dp=2), shardc.fsdp("dp") | shardc.chunked_loss(chunks))
    with pytest.warns(ShardcWarning, match=message) as caught:
        program = module.lower(*args)
    assert "chunked_loss(" in str(caught[0].message) and "test_chunk_loss.py" in str(caught[0].message)
    assert chunks_of(program) == 1


def test_sums_that_no_collective_reduces() -> None:
    module = shardc.compile(Total(entropy), shardc.Mesh(dp=1), shardc.fsdp("dp") | shardc.chunked_loss(4))
    with pytest.warns(ShardcWarning, match="%div needs a value of all rows"):
        assert chunks_of(module.lower(*case("mean").args)) == 1


def test_bad_number() -> None:
    with pytest.raises(PlanError, match="chunks"):
        shardc.chunked_loss(0)


def trained(loss: str, mesh: shardc.Mesh, plan: shardc.Plan) -> None:
    """One step on ranks beside one device."""
    torch.set_default_dtype(torch.float64)
    reference = case(loss)
    module = shardc.compile(reference.model, device_mesh(mesh), plan | shardc.chunked_loss(4))
    actual = module(*module.shard_inputs(*reference.args))
    actual.backward()
    expected, grads = reference.reference()
    torch.testing.assert_close(actual.detach(), expected, rtol=1e-9, atol=0)
    for name, grad in grads.items():
        torch.testing.assert_close(module.get_parameter(name).grad.full_tensor(), grad, rtol=1e-9, atol=1e-12)


@pytest.mark.slow
def test_two_ranks() -> None:
    run_ranks(
        2,
        partial(trained, "weighted", *PLANS["tp"]),
        partial(trained, "tied", shardc.Mesh(dp=2), shardc.fsdp("dp")),
        partial(trained, "upcast", *PLANS["microbatches"]),
    )
