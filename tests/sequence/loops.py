"""Recurrences as Python loops write them, of ``[rows, length, WIDTH]``: that are scans, and that are not."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, CHUNK = 4, 3
Mix = Callable[["Loop", Tensor], Tensor]


class Loop(nn.Module):
    """Runs the loop ``mix``; has two products for it, ``a`` and ``b``."""

    def __init__(self, mix: Mix) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.mix = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), mix

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self, x)


# --- scans


def gated(self: Loop, x: Tensor) -> Tensor:
    a, b, state, out = self.a(x).sigmoid(), self.b(x), torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = a[:, t] * state + b[:, t]
        out.append(state)
    return torch.stack(out, 1)


def average(self: Loop, x: Tensor) -> Tensor:
    """Both recurrences start from one tensor, and the last states are read."""
    rate, x = self.a(x).sigmoid(), self.b(x)
    slow = fast = x[:, 0] * 0.5
    out = []
    for r, y in zip(rate.unbind(1), x.transpose(0, 1), strict=True):
        slow = torch.lerp(slow, y, 0.1)
        fast = fast + r * (slow - fast)
        out.append((fast - slow).unsqueeze(1))
    return torch.cat(out, 1) * slow[:, None] + fast[:, None]


def cell(self: Loop, x: Tensor) -> Tensor:
    x = self.a(x)
    state, out = torch.ones_like(x[:, 0]), torch.zeros_like(x)
    for t in range(x.shape[1]):
        state = torch.tanh(self.b(state) + x[:, t])
        out[:, t] = state * 2
    return out


def lstm(self: Loop, x: Tensor) -> Tensor:
    x = self.a(x)
    h = c = torch.zeros(x.shape[0], WIDTH // 2, dtype=x.dtype)
    out = []
    for t in range(x.shape[1]):
        i, f, g, o = (self.b(torch.cat([h, h], -1)) + x.select(1, t)).repeat(1, 2).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        out += [h]
    return torch.stack(out, dim=-2).repeat(1, 1, 2) + torch.cat([h, c], -1)[:, None]


def by_time(self: Loop, x: Tensor) -> Tensor:
    """Time comes first, outputs are of two kinds, and a table has a row for each place."""
    x, table = self.a(x).transpose(0, 1), torch.linspace(0, 1, x.shape[1], dtype=x.dtype)
    state, first, second = x[0], [], torch.empty_like(x)
    for t, y in enumerate(x):
        state = state * table[t] + y[..., None, :].mean(-2)
        first.append(state.sin())
        second[t] = self.b(state)
    return (torch.stack(first) + second).transpose(0, 1)


def chunks(self: Loop, x: Tensor) -> Tensor:
    """Products in chunks of a sequence, which are written to slices."""
    a, b, out = self.a(x), self.b(x), torch.zeros_like(x)
    state, every = torch.zeros(x.shape[0], WIDTH, WIDTH, dtype=x.dtype), []
    for t in range(x.shape[1] // CHUNK):
        here = slice(t * CHUNK, (t + 1) * CHUNK)
        every.append(a[:, here] @ state)
        out[:, here] = (a[:, here] @ b[:, here].mT).tril() @ x[:, here]
        state = 0.9 * state + b[:, here].mT @ x[:, here]
    return out + torch.cat(every, 1)


def stored(self: Loop, x: Tensor) -> Tensor:
    """The last state is written to other memory, and what is collected is changed."""
    x, state, out, last = self.a(x), torch.zeros_like(x[:, 0]), [], torch.zeros_like(x)
    for t in range(x.shape[1]):
        state = torch.tanh(self.b(state) + x[:, t])
        out.append(state)
    last[:, 0] = state
    last[:, 1].copy_(state)
    every = torch.stack(out, 1)
    every[:, 0] = 1
    return every + last


def last(self: Loop, x: Tensor) -> Tensor:
    """The last state is all that is used."""
    y, state = self.a(x), torch.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        state = self.b(state).tanh() + y[:, t]
    return x * state[:, None]


def two(self: Loop, x: Tensor) -> Tensor:
    """A loop over what another gives."""
    return cell(self, gated(self, x))


SCANS: dict[str, Mix] = {f.__name__: f for f in (gated, average, cell, lstm, by_time, chunks, stored, last, two)}


# --- loops that stay loops


def stepwise(step: Callable[..., Tensor]) -> Mix:
    """Makes a loop of ``step(self, state, x, t)``, whose states are stacked."""

    def mix(self: Loop, x: Tensor) -> Tensor:
        y, state, out = self.a(x), torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = step(self, state, y, t)
            out.append(state)
        return torch.stack(out, 1)

    return mix


def first_is_special(self: Loop, x: Tensor) -> Tensor:
    state, out = None, []
    for t in range(x.shape[1]):
        state = self.a(x[:, t]) if state is None else self.b(state).tanh() + x[:, t]
        out.append(state)
    return torch.stack(out, 1)


def from_the_second(self: Loop, x: Tensor) -> Tensor:
    out = [x[:, 0]]
    for t in range(1, x.shape[1]):
        out.append(self.b(out[-1]).tanh() + x[:, t])
    return torch.stack(out, 1)


def reads_between(self: Loop, x: Tensor) -> Tensor:
    state, out, kept = torch.zeros_like(x[:, 0]), [], []
    for t in range(x.shape[1]):
        state = self.b(state).tanh() + x[:, t]
        out.append(state)
        kept.append(state)
    return torch.stack(out, 1) + kept[3][:, None]


def two_back(self: Loop, x: Tensor) -> Tensor:
    before, state, out = x[:, 0], x[:, 1], []
    for t in range(x.shape[1]):
        before, state = state, 0.5 * state - 0.3 * before + self.b(x[:, t])
        out.append(state)
    return torch.stack(out, 1)


def reads_what_it_writes(self: Loop, x: Tensor) -> Tensor:
    state, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for t in range(x.shape[1]):
        state = self.b(state).tanh() + x[:, t] + out.mean(1)
        out[:, t] = state
    return out


def writes_what_it_reads(self: Loop, x: Tensor) -> Tensor:
    y, state = self.a(x), torch.zeros_like(x[:, 0])
    view = y.view(y.shape)
    for t in range(x.shape[1]):
        state = self.b(state).tanh() + y[:, t]
        view[:, t] = state
    return y


def changes_the_state(self: Loop, x: Tensor) -> Tensor:
    y, state, out = self.a(x), torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state *= 0.5
        state += y[:, t]
        out.append(state.clone())
    return torch.stack(out, 1)


def changed_before(self: Loop, x: Tensor) -> Tensor:
    """The slices are taken before what they show is changed."""
    y = self.a(x)
    slices, state, out = [y[:, t] for t in range(x.shape[1])], torch.zeros_like(x[:, 0]), []
    y.mul_(2)
    for t in range(x.shape[1]):
        state = self.b(state).tanh() + slices[t]
        out.append(state)
    return torch.stack(out, 1)


def last_changed_behind(self: Loop, x: Tensor) -> Tensor:
    """The last state is changed in place before all are stacked."""
    y, state, out = self.a(x), torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = self.b(state) + y[:, t]
        out.append(state)
    state.mul_(2)
    return torch.stack(out, 1)


def views_changed_behind(self: Loop, x: Tensor) -> Tensor:
    """Steps give views of what is changed before they are stacked."""
    y, state, out, views = self.a(x), torch.zeros_like(x[:, 0]), [], []
    for t in range(x.shape[1]):
        views.append(y[:, t].view(-1, 2, 2))
        state = self.b(state) + views[-1].transpose(1, 2).flatten(1)
        out.append(state)
    y[:, 1:] = 0
    return torch.stack(out, 1) + torch.stack(views, 1).flatten(2)


def indexed_by_lists(self: Loop, x: Tensor) -> Tensor:
    """A list of a number keeps the dim."""
    y, state, out = self.a(x).transpose(0, 1), torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = self.b(state) + y[[t]].sum(1)
        out.append(state)
    return torch.stack(out, 1)


def backwards(self: Loop, x: Tensor) -> Tensor:
    state, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for t in reversed(range(x.shape[1])):
        state = self.b(state).tanh() + x[:, t]
        out[:, t] = state
    return out


def every_second(self: Loop, x: Tensor) -> Tensor:
    state, out = torch.zeros_like(x[:, 0]), torch.zeros_like(x)
    for t in range(0, x.shape[1], 2):
        state = self.b(state).tanh() + x[:, t]
        out[:, t] = state
    return out


def shuffled(self: Loop, x: Tensor) -> Tensor:
    state, out = torch.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        state = self.b(state).tanh() + x[:, t]
        out.append(state)
    return torch.stack(out[::2] + out[1::2], 1)


def grows(self: Loop, x: Tensor) -> Tensor:
    """Each place reads all places before, as the rows of a triangle do in the gated delta rule."""
    y = self.a(x)
    for t in range(1, x.shape[1]):
        y[:, t] = y[:, t].clone() + y[:, :t].clone().sum(1) / x.shape[1]
    return y


def over_features(self: Loop, x: Tensor) -> Tensor:
    state, out = torch.zeros_like(x[..., 0]), []
    for t in range(WIDTH):
        state = 0.5 * state + self.a(x)[..., t]
        out.append(state)
    return torch.stack(out, -1)


LOOPS: dict[str, Mix] = {
    "number": stepwise(lambda self, state, x, t: 0.5 * state + x[:, t] * (t + 1)),
    "other step": stepwise(lambda self, state, x, t: (torch.sin if t % 3 else torch.tanh)(state) + x[:, t]),
    "next slice": stepwise(lambda self, state, x, t: 0.5 * state + x[:, t] * x[:, min(t + 1, x.shape[1] - 1)]),
    "other type": stepwise(lambda self, state, x, t: (0.5 * state.sum(-1, keepdim=True) + x[:, t, :1])[:, :1]),
    **{
        f.__name__: f
        for f in (
            first_is_special, from_the_second, reads_between, two_back, reads_what_it_writes, writes_what_it_reads,
            changes_the_state, changed_before, last_changed_behind,
            views_changed_behind, indexed_by_lists, backwards, every_second, shuffled, grows, over_features,
        )
    },
}  # fmt: skip
# Steps that scale the state and add to it.
LINEAR: dict[str, Mix] = {
    "average": stepwise(lambda self, state, x, t: state + 0.1 * (x[:, t] - state)),
    "addcmul": stepwise(lambda self, state, x, t: torch.addcmul(x[:, t], x[:, t].sigmoid(), state)),
    "alpha": stepwise(lambda self, state, x, t: torch.add(x[:, t], state, alpha=0.5).sub(x[:, t] ** 2, alpha=0.1)),
    "difference": stepwise(lambda self, state, x, t: x[:, t] - state * 0.5 - (state - state * x[:, t].sigmoid())),
}
DRAWS = stepwise(lambda self, state, x, t: F.dropout(0.5 * state + x[:, t], 0.5, self.training))
