"""Layers that read neighbours in the sequence: ranks exchange the edges of their pieces, and results are those of one
device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from shardc.ir.comm_volume import collective_kind
from tests.models.alike import relative, trains_alike

WIDTH, TAPS = 4, 4


class Layer(nn.Module):
    """A function of a sequence [rows, length, WIDTH] and of a convolution, between two linear layers."""

    def __init__(self, function: Callable[[Tensor, nn.Conv1d], Tensor], **options: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.before, self.after = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        given = {"kernel_size": TAPS, "groups": WIDTH, **options}
        self.conv = nn.Conv1d(WIDTH, WIDTH, **given)

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        return x + self.after(F.silu(self.function(x, self.conv)))


def cut(x: Tensor, conv: nn.Conv1d) -> Tensor:
    return conv(x.mT)[..., : x.shape[1]].mT


def cut_behind_an_activation(x: Tensor, conv: nn.Conv1d) -> Tensor:
    return F.silu(conv(x.transpose(1, 2)).transpose(1, 2))[:, : x.shape[1], :]


def cut_from_the_end(x: Tensor, conv: nn.Conv1d) -> Tensor:
    return F.relu(conv(x.mT)[:, :, : -conv.padding[0]].contiguous()).mT


def padded(x: Tensor, conv: nn.Conv1d) -> Tensor:
    reach = conv.dilation[0] * (conv.kernel_size[0] - 1)
    return conv(F.pad(x.mT, (reach, 0))).mT


def padded_before_it_is_turned(x: Tensor, conv: nn.Conv1d) -> Tensor:
    return conv(F.pad(x, (0, 0, conv.kernel_size[0] - 1, 0)).mT).mT


def centred(x: Tensor, conv: nn.Conv1d) -> Tensor:
    return conv(x.mT).mT


def after_zeros(x: Tensor, conv: nn.Conv1d) -> Tensor:
    return torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1) - x


def zero_pad(x: Tensor, conv: nn.Conv1d) -> Tensor:
    return x * nn.ZeroPad2d((0, 0, 1, -1))(x)


def padded_and_cut(x: Tensor, conv: nn.Conv1d) -> Tensor:
    return F.pad(x, (0, 0, 2, 0))[:, :-2] + F.pad(x[:, 3:], (0, 0, 0, 3))


def written(x: Tensor, conv: nn.Conv1d) -> Tensor:
    y = torch.zeros_like(x)
    y[:, 1:] = x[:, :-1]
    return y


def far(x: Tensor, conv: nn.Conv1d) -> Tensor:
    """Taps further away than a rank's piece is long."""
    return sum((F.pad(x, (0, 0, by, -by)) for by in (1, 5, 6, 7)), torch.zeros_like(x))


def after_a_row(x: Tensor, conv: nn.Conv1d) -> Tensor:
    """Other elements than zeros come in."""
    return torch.cat([conv.bias[None, None].expand(x.shape[0], 2, -1), x[:, :-2]], 1) * torch.cat(
        [x[:, 1:], x[:, :1]], 1
    )


def rolled(x: Tensor, conv: nn.Conv1d) -> Tensor:
    return x.roll(1, 1) - x.roll(-1, -2)


def summed(x: Tensor, conv: nn.Conv1d) -> Tensor:
    return x.cumsum(1) * torch.flip(torch.cumsum(torch.flip(x, [1]), 1), [1])


def ends(x: Tensor, conv: nn.Conv1d) -> Tensor:
    return x - x[:, -1:] * x[:, :1]


def not_only_cut(x: Tensor, conv: nn.Conv1d) -> Tensor:
    """The end is read as well: no causal convolution."""
    y = conv(x.mT)
    return (y[..., : x.shape[1]] + y[..., -x.shape[1] :]).mT


CONVOLUTIONS = {
    "cut": Layer(cut, padding=TAPS - 1),
    "cut_behind_an_activation": Layer(cut_behind_an_activation, padding=TAPS - 1),
    "cut_from_the_end": Layer(cut_from_the_end, padding=TAPS - 1, groups=1),
    "padded": Layer(padded, groups=2),
    "padded_dilated": Layer(padded, dilation=2),
    "padded_long": Layer(padded, kernel_size=9),
    "padded_before_it_is_turned": Layer(padded_before_it_is_turned),
    "centred": Layer(centred, kernel_size=5, padding=2),
}
SHIFTS = {
    f.__name__: Layer(f)
    for f in (after_zeros, zero_pad, padded_and_cut, written, far, after_a_row, rolled, summed, ends)
}
ALL = {**CONVOLUTIONS, **SHIFTS, "not_only_cut": Layer(not_only_cut, padding=TAPS - 1)}
MESHES = (({"cp": 2}, 16), ({"cp": 3}, 18), ({"cp": 4}, 16), ({"dp": 2, "cp": 2}, 8), ({"cp": 3}, 16), ({"cp": 4}, 7))


QUICK = ({"cp": 2}, 16, "contiguous"), ({"cp": 3}, 16, "striped")
CASES = [
    pytest.param(mesh, length, order, marks=() if (mesh, length, order) in QUICK else pytest.mark.slow)
    for mesh, length in MESHES
    for order in ("contiguous", "striped")
]


def plan(mesh: dict[str, int], order: str = "contiguous") -> shardc.Plan:
    cp = shardc.cp("cp", order=order)
    return shardc.fsdp(("dp", "cp")) | cp if "dp" in mesh else cp


@pytest.mark.parametrize(("mesh", "length", "order"), CASES)
@pytest.mark.parametrize("layer", ALL)
def test_equals_one_device(layer: str, mesh: dict[str, int], length: int, order: str) -> None:
    trains_alike(ALL[layer], (torch.randn(2, length, WIDTH),), mesh, plan(mesh, order), steps=1)


def halos(layer: str, ranks: int, length: int = 16) -> tuple[list[int], int]:
    """Elements that a rank sends to neighbours in forward and in backward; and whether it sends anything else but sums
    of gradients.
    """
    module = shardc.compile(
        copy.deepcopy(ALL[layer]), shardc.Mesh(cp=ranks), plan({"cp": ranks}), loss=lambda y: y.square().mean()
    )
    program = module.lower(torch.empty(2, length, WIDTH))
    sent, others = [], 0
    for half in ("partition", "partition.backward"):
        nodes = [node for node in program.graph(half).nodes if node.op == "call_function"]
        kinds = [(node, collective_kind(node)) for node in nodes]
        sent.append(sum(node.meta["val"].numel() for node, kind in kinds if kind == "permute_ranks"))
        others += sum(kind not in (None, "permute_ranks", "all_reduce") for _, kind in kinds)
    return sent, others


ROW = 2 * WIDTH  # elements of all rows of the batch at one place of the sequence


@pytest.mark.parametrize(
    ("layer", "places"),
    [
        ("cut_behind_an_activation", 3),
        ("padded_and_cut", 2 + 3),
        *(
            pytest.param(layer, places, marks=pytest.mark.slow)
            for layer, places in (("cut", 3), ("padded_dilated", 6), ("padded_long", 8), ("centred", 4), ("written", 1))
        ),
    ],
)
def test_a_rank_sends_the_edges_of_its_piece(layer: str, places: int) -> None:
    """As many places as the window reaches, and as many of the gradient, however long the sequence is."""
    for ranks, length in ((2, 16), (4, 64)):
        assert halos(layer, ranks, length) == ([places * ROW] * 2, 0)


# --- layers that are not, or not only, shifts and causal convolutions


def one_place_later(x: Tensor, conv: nn.Conv1d) -> Tensor:
    return conv(F.pad(x.mT, (4, 0)))[..., 1:].mT


def after_a_state(x: Tensor, conv: nn.Conv1d) -> Tensor:
    return conv(torch.cat([conv.bias[None, :, None].expand(x.shape[0], -1, 3), x.mT], -1)).mT


def around(x: Tensor, conv: nn.Conv1d) -> Tensor:
    return conv(F.pad(x.mT, (2, 1), mode="circular")).mT


def windows(x: Tensor, conv: nn.Conv1d) -> Tensor:
    return F.pad(x, (0, 0, 3, 0)).unfold(1, 4, 1).mul(conv.weight[:, 0]).sum(-1)


def both_ends(x: Tensor, conv: nn.Conv1d) -> Tensor:
    y = F.conv1d(x.mT, conv.weight, conv.bias, padding=3, groups=WIDTH)
    return (y[..., : x.shape[1]] * y[..., 3:]).mT


def in_place(x: Tensor, conv: nn.Conv1d) -> Tensor:
    y = F.conv1d(x.mT, conv.weight, conv.bias, padding=3, groups=WIDTH)
    return F.relu(y, inplace=True)[..., : x.shape[1]].mT


def shifts_of_shifts(x: Tensor, conv: nn.Conv1d) -> Tensor:
    y = F.pad(x, (0, 0, 1, -1))
    z = F.pad(y, (0, 0, 2, -2))
    return y * z + torch.cat([torch.zeros_like(z[:, :1]), z[:, :-1]], 1)


def parts_of_zeros(x: Tensor, conv: nn.Conv1d) -> Tensor:
    return torch.cat([x[:, :5], torch.zeros_like(x[:, 5:])], 1) + torch.cat([x[:, :3], x[:, 2:-1]], 1)


def step_by_step(x: Tensor, conv: nn.Conv1d) -> Tensor:
    out, state = torch.zeros_like(x), torch.zeros_like(x[:, 0])
    for at in range(x.shape[1]):
        state = 0.5 * state + x[:, at]
        out[:, at] = state
    return out


def after_nothing(x: Tensor, conv: nn.Conv1d) -> Tensor:
    """As caches of keys begin: torch joins an empty tensor of one dim with any other."""
    return torch.cat([x.new_empty(0), x], 1) * torch.cat([x, torch.tensor([], dtype=x.dtype)], -2) + torch.cat(
        [x[:, :0], x], 1
    )


def by_keyword(x: Tensor, conv: nn.Conv1d) -> Tensor:
    y = F.conv1d(input=x.permute(dims=(0, 2, 1)), weight=conv.weight, bias=conv.bias, padding=3, groups=WIDTH)
    return torch.transpose(y.permute(dims=(0, 2, 1)).transpose(dim0=1, dim1=2), dim0=-2, dim1=-1)[:, : x.shape[1]]


OTHERS = (
    one_place_later, after_a_state, around, windows, both_ends, in_place, shifts_of_shifts, parts_of_zeros,
    step_by_step, by_keyword, after_nothing,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "length", "order"),
    [({"cp": 2}, 16, "contiguous"), ({"cp": 3}, 13, "contiguous"), ({"cp": 4}, 16, "striped")],
)
@pytest.mark.parametrize("function", OTHERS)
def test_others_equal_one_device(
    function: Callable[[Tensor, nn.Conv1d], Tensor], mesh: dict[str, int], length: int, order: str
) -> None:
    trains_alike(Layer(function), (torch.randn(2, length, WIDTH),), mesh, plan(mesh, order), steps=1)


@pytest.mark.medium
def test_dynamic_lengths() -> None:
    """One program for all lengths that the ranks divide."""
    model = Layer(cut_behind_an_activation, padding=TAPS - 1).double()
    dynamic = {"x": {1: "length"}}
    module = shardc.compile(copy.deepcopy(model), shardc.Mesh(cp=2), plan({"cp": 2}), backend="eager", dynamic=dynamic)
    sim = shardc.Simulation(module)
    for length in (16, 32, 48):
        x = torch.randn(2, length, WIDTH, dtype=torch.float64)
        assert relative(sim(x), model(x).detach()) < 1e-9
