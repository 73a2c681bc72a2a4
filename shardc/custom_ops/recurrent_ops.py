"""Ops of recurrent layers (RNN, GRU, LSTM). One op runs all time steps, so that graphs do not grow with their number.

The products of the inputs (``gates``) are computed before the op; a step adds ``state @ weight.t()`` to them. The gates
of a GRU are reset, update, new of the input and new of the state, so that every gate is a sum; those of an LSTM are
input, forget, cell and output, and its state is [hidden, cell].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardc.custom_ops.op_library import OpLibrary


def _steps(gates: Tensor, state: Tensor, weight: Tensor, cell: str) -> tuple[Tensor, Tensor]:
    """Run all time steps of a recurrent layer. Return (state after each step [time, batch, features], activations for
    backward [time, batch, gates]).

    Args:
        gates: products of the inputs, [time, batch, gates].
        state: first state, [batch, features].
        weight: weight of the state, [gates, hidden].
        cell: "lstm", "gru", "tanh" or "relu".
    """
    size = weight.shape[1]
    states, activations = gates.new_empty(*gates.shape[:2], state.shape[1]), torch.empty_like(gates)
    for at, x in enumerate(gates):
        h, y = state[:, :size], state[:, :size] @ weight.t()
        if cell == "lstm":
            x = x + y
            i, f, o = (x[:, n * size : (n + 1) * size].sigmoid() for n in (0, 1, 3))
            g = x[:, 2 * size : 3 * size].tanh()
            c = f * state[:, size:] + i * g
            state, keep = torch.cat([o * c.tanh(), c], 1), [i, f, g, o]
        elif cell == "gru":
            r, z = (x[:, : 2 * size] + y[:, : 2 * size]).sigmoid().split(size, 1)
            m = x[:, 3 * size :] + y[:, 2 * size :]
            n = (x[:, 2 * size : 3 * size] + r * m).tanh()
            state, keep = (h - n) * z + n, [r, z, n, m]
        else:
            state = (x + y).tanh() if cell == "tanh" else (x + y).relu()
            keep = [1 - state.square() if cell == "tanh" else (state > 0).to(state.dtype)]
        states[at] = state
        torch.cat(keep, 1, out=activations[at])
    return states, activations


def _steps_backward(
    grad: Tensor, state: Tensor, weight: Tensor, states: Tensor, activations: Tensor, cell: str
) -> tuple[Tensor, Tensor]:
    """Return (gradient of the gates, gradient of the first state) of `_steps`, given ``grad``, the gradient of its
    states.
    """
    size = weight.shape[1]
    grads, d = torch.empty_like(activations), torch.zeros_like(state)
    for at in reversed(range(len(activations))):
        before = states[at - 1] if at else state
        d = d + grad[at]
        dh = d[:, :size]
        if cell == "lstm":
            i, f, g, o = activations[at].split(size, 1)
            t = states[at, :, size:].tanh()
            dc = d[:, size:] + dh * o * (1 - t * t)
            parts = [
                dc * g * i * (1 - i),
                dc * before[:, size:] * f * (1 - f),
                dc * i * (1 - g * g),
                dh * t * o * (1 - o),
            ]
            of_state = torch.cat(parts, 1)
            d = torch.cat([of_state @ weight, dc * f], 1)
        elif cell == "gru":
            r, z, n, m = activations[at].split(size, 1)
            dn = dh * (1 - z) * (1 - n * n)
            parts = [dn * m * r * (1 - r), dh * (before - n) * z * (1 - z), dn, dn * r]
            d = dh * z + torch.cat([*parts[:2], parts[3]], 1) @ weight
        else:
            parts = [dh * activations[at]]
            d = parts[0] @ weight
        torch.cat(parts, 1, out=grads[at])
    return grads, d


def _fake_steps(gates: Tensor, state: Tensor, weight: Tensor, cell: str) -> tuple[Tensor, Tensor]:
    return gates.new_empty(*gates.shape[:2], state.shape[1]), torch.empty_like(gates)


def _fake_backward(
    grad: Tensor, state: Tensor, weight: Tensor, states: Tensor, activations: Tensor, cell: str
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(activations), torch.empty_like(state)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, str], output: tuple[Tensor, Tensor]) -> None:
    _, state, weight, ctx.cell = inputs
    ctx.save_for_backward(state, weight, *output)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: object) -> tuple[Tensor, Tensor, Tensor, None]:
    state, weight, states, activations = ctx.saved_tensors
    gates, first = torch.ops.shardc_recurrent.steps_backward(grad, state, weight, states, activations, ctx.cell)
    size = weight.shape[1]
    before = torch.cat([state[None], states[:-1]])[..., :size]
    of_state = torch.cat([gates[..., : 2 * size], gates[..., 3 * size :]], -1) if ctx.cell == "gru" else gates
    return gates, first, of_state.flatten(0, 1).t() @ before.flatten(0, 1), None


_library = OpLibrary("shardc_recurrent")
STEPS = _library.define(
    "steps(Tensor gates, Tensor state, Tensor weight, str cell) -> (Tensor, Tensor)", _steps, _fake_steps
)
STEPS_BACKWARD = _library.define(
    "steps_backward(Tensor grad, Tensor state, Tensor weight, Tensor states, Tensor kept, str cell)"
    " -> (Tensor, Tensor)",
    _steps_backward,
    _fake_backward,
)
torch.library.register_autograd(STEPS, _backward, setup_context=_setup)
