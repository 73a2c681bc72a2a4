"""Decomposes nn.LSTM, nn.GRU and nn.RNN layers to matmuls and one op for all steps (`recurrent_ops`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._decomp import decompositions

from shardc.custom_ops.recurrent_ops import STEPS

Hidden = Any  # a tensor; for an LSTM (hidden, cell)


def _layer(
    input: Tensor, hidden: Hidden, params: Sequence[Tensor], has_biases: bool, hidden_fn: str, reverse: bool = False
) -> tuple[Tensor, Hidden]:
    """Computes one direction of one layer: input [time, batch, in] -> (outputs [time, batch, out], last state)."""
    h, c = hidden if hidden_fn == "lstm" else (hidden, None)
    w_input, w_state, *rest = params
    gates = F.linear(input, w_input, rest[0] if has_biases else None)
    of_state: Tensor | None = rest[1] if has_biases else None
    size = w_state.shape[0] // (4 if c is not None else 3 if hidden_fn == "gru" else 1)
    if hidden_fn == "gru":  # the state's part of the new gate is kept separate
        gates = F.pad(gates, (0, size))
        if of_state is not None:
            of_state = torch.cat([of_state[: 2 * size], torch.zeros_like(of_state[:size]), of_state[2 * size :]])
    gates = gates.flip(0) if reverse else gates
    gates = gates if of_state is None else gates + of_state
    projection = rest[-1] if len(rest) in (1, 3) else None
    # Fold the projection into the state's weight; step 0 uses the projected state.
    if projection is not None and c is not None:
        gates = torch.cat([gates[:1] + F.linear(h, w_state), gates[1:]])
        h, w_state = torch.zeros_like(c), w_state @ projection
    state = h if c is None else torch.cat([h, c], -1)
    states, _ = STEPS(gates, state.to(gates.dtype), w_state.to(gates.dtype), hidden_fn)
    out = states[..., :size]
    out = out if projection is None else F.linear(out, projection)
    last = out[-1] if c is None else (out[-1], states[-1, :, size:])
    return out.flip(0) if reverse else out, last


def _layers(
    input: Tensor, hidden: Sequence[Hidden], params: Sequence[Any], has_biases: bool, num_layers: int, dropout: float,
    train: bool, bidirectional: bool, batch_first: bool, layer_fn: Callable[..., tuple[Tensor, Hidden]],
) -> tuple[Tensor, list[Hidden]]:  # fmt: skip
    """Computes all layers, with the dropout between them, which torch's decomposition leaves out."""
    input, ways, last = input.transpose(0, 1) if batch_first else input, 1 + bidirectional, []
    for at in range(0, num_layers * ways, ways):
        directions = [layer_fn(input, hidden[at + n], params[at + n], has_biases, reverse=bool(n)) for n in range(ways)]
        last += [state for _, state in directions]
        input = torch.cat([out for out, _ in directions], -1) if bidirectional else directions[0][0]
        if dropout and train and at + ways < num_layers * ways:
            input = F.dropout(input, dropout)
    return input.transpose(0, 1) if batch_first else input, last


# (owner, attribute name, replacement) in torch's decompositions; a cell function becomes its name.
OTHER_FORMS: tuple[tuple[Any, str, Any], ...] = (
    (decompositions, "select_one_layer_lstm_function", lambda *_: partial(_layer, hidden_fn="lstm")),
    (decompositions, "one_layer_rnn", _layer),
    (decompositions, "gru_cell", "gru"),
    (decompositions, "rnn_cell", lambda function: function.__name__),
    (decompositions, "_rnn_helper", _layers),
)
