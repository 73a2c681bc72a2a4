"""A padded dim that a view joins with others has filling between its elements: every op still finds its own ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc

AT = torch.tensor([0, 7, 13, 14, 3])
ONES = torch.ones(5, dtype=torch.float64)

# Of 15 elements.
OPS: dict[str, Callable[[Tensor], Tensor]] = {
    # found by place
    "index": lambda x: x[AT],
    "index from the end": lambda x: x[torch.tensor([-1, -8])],
    "index_select": lambda x: x.index_select(0, AT),
    "gather": lambda x: x.gather(0, AT),
    "take": lambda x: x.take(AT),
    "embedding": lambda x: F.embedding(AT, x[:, None]),
    "cross entropy": lambda x: F.cross_entropy(x[None], torch.tensor([13])),
    "select": lambda x: x[7],
    "select from the end": lambda x: x[-2],
    "slice": lambda x: x[4:9],
    "steps": lambda x: x[::3],
    "split": lambda x: x.split([4, 11])[1],
    "chunk": lambda x: x.chunk(4)[2],
    "unfold": lambda x: x.unfold(0, 4, 2),
    "as_strided": lambda x: x.as_strided((3, 2), (5, 2)),
    "interpolate": lambda x: F.interpolate(x[None, None], size=30),
    "repeat_interleave": lambda x: x.repeat_interleave(2),
    "diagonal": lambda x: (x[:, None] * x).diagonal(1),
    # written by place
    "index_put": lambda x: x.index_put((AT,), ONES),
    "index_add": lambda x: x.index_add(0, AT, ONES),
    "index_copy": lambda x: x.index_copy(0, AT, ONES),
    "index_fill": lambda x: x.index_fill(0, AT, 1.5),
    "scatter": lambda x: x.scatter(0, AT, 2.0),
    "scatter_add": lambda x: x.scatter_add(0, AT, ONES),
    "select_scatter": lambda x: x.select_scatter(torch.tensor(1.0, dtype=torch.float64), 0, 7),
    "select_scatter from the end": lambda x: x.select_scatter(torch.tensor(1.0, dtype=torch.float64), 0, -1),
    "index_put from the end": lambda x: x.index_put((AT - 15,), ONES),
    "index_fill from the end": lambda x: x.index_fill(0, AT - 15, 1.5),
    "slice_scatter from the end": lambda x: x.slice_scatter(ONES[:3], 0, -4, -1),
    "slice_scatter": lambda x: x.slice_scatter(ONES[:3], 0, 6, 9),
    "triu": lambda x: (x[:, None] * x).triu(1),
    "diag_embed": lambda x: torch.diag_embed(x, 1),
    # by order
    "flip": lambda x: x.flip(0),
    "roll": lambda x: x.roll(4),
    "cumsum": lambda x: x.cumsum(0),
    "cumprod": lambda x: x.cumprod(0),
    "cummax": lambda x: x.cummax(0)[0],
    "diff": lambda x: x.diff(),
    "conv1d": lambda x: F.conv1d(x[None, None], ONES[None, None, :3]),
    "max_pool1d": lambda x: F.max_pool1d(x[None], 3),
    "pad": lambda x: F.pad(x, (2, -1)),
    "circular": lambda x: F.pad(x[None, None], (2, 1), mode="circular"),
    "unflatten": lambda x: x.unflatten(0, (3, 5)).cumsum(1),
    "repeat": lambda x: x.repeat(2),
    "cat": lambda x: torch.cat([x, x * 2]),
    # places as results
    "argmax": lambda x: x.argmax(),
    "argmin": lambda x: x.argmin(0),
    "argsort": lambda x: x.argsort(),
    "topk": lambda x: x.topk(3)[1],
    "max": lambda x: x.max(0)[1],
    # filling that a reduction must not see
    "sort": lambda x: x.sort()[0],
    "kthvalue": lambda x: x.kthvalue(4)[0],
    "median": lambda x: x.median(),
    "softmax": lambda x: x.softmax(0),
    "logsumexp": lambda x: x.logsumexp(0),
    "prod": lambda x: x.prod(),
    "amax": lambda x: x.amax(0),
    "var": lambda x: x.var(),
    "mean": lambda x: x.mean(),
    "norm": lambda x: x.norm(),
    "cov": lambda x: torch.cov(torch.stack([x, x * x])),
    "cdist": lambda x: torch.cdist(x[:, None], x[:, None] + 1),
    # beside something of that many elements
    "arange": lambda x: x * torch.arange(15, dtype=torch.float64),
    "where": lambda x: torch.where(torch.arange(15) > 6, x, -x),
    "matrix product": lambda x: torch.arange(45.0, dtype=torch.float64).view(3, 15) @ x,
}

# shape, how it is split, and the view of 15 elements
VIEWS: dict[str, tuple[tuple[int, int], tuple[str | None, ...], Callable[[Tensor], Tensor]]] = {
    "minor": ((5, 3), (None, "dp"), lambda w: w.reshape(-1)),
    "turned": ((5, 3), ("dp", None), lambda w: w.t().reshape(-1)),
    "both": ((5, 3), ("dp", "tp"), lambda w: w.reshape(-1)),
    "major": ((3, 5), ("dp", None), lambda w: w.reshape(-1)),
    "alone": ((15, 1), ("dp", None), lambda w: w.squeeze(1)),
}


class Ops(nn.Module):
    """The results of all ops on a view of a parameter, each element with a weight of its own in the sum."""

    def __init__(self, shape: tuple[int, int], view: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(shape, dtype=torch.float64))
        self.view = view

    def forward(self) -> tuple[Tensor, dict[str, Tensor]]:
        x = self.view(self.w) * 1.5
        made = {name: op(x) for name, op in OPS.items()}
        floats = [y for y in made.values() if y.is_floating_point()]
        total = sum((y * torch.arange(1, y.numel() + 1, dtype=y.dtype).view(y.shape)).sum() for y in floats)
        return total, {name: y.detach() for name, y in made.items()}


@pytest.mark.filterwarnings("ignore::shardc.errors.ShardcWarning")
@pytest.mark.parametrize(
    "view",
    [pytest.param(view, marks=[] if view in ("turned", "both", "alone") else [pytest.mark.long]) for view in VIEWS],
)
@pytest.mark.slow
def test_elements_are_those_of_the_model(view: str) -> None:
    shape, split, seen = VIEWS[view]
    torch.manual_seed(0)
    model = Ops(shape, seen)
    total, made = model()
    total.backward()
    module = shardc.compile(model, shardc.Mesh(dp=2, tp=2), shardc.Plan(params={"w": split}), backend="eager")
    simulation = shardc.Simulation(module)
    ours, theirs = simulation()
    simulation.backward()
    wrong = [name for name in OPS if not torch.allclose(theirs[name], made[name], rtol=1e-9, atol=1e-12)]
    assert not wrong
    torch.testing.assert_close(ours, total.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(simulation.grad("w"), model.w.grad, rtol=1e-9, atol=1e-12)
