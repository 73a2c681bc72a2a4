"""Samples of ops that move elements or make them from numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

import shardc
from tests.rules.samples.values import Draw, Sample

aten = torch.ops.aten
f64 = torch.float64


def _calls(overload: Any, *calls: tuple[Any, ...]) -> list[Sample]:
    return [Sample(overload, call) for call in calls]


def _views(d: Draw) -> dict[str, list[Sample]]:
    shapes = [
        ((4, 8), [32]),
        ((2, 4, 8), [8, 8]),
        ((8, 6), [2, 4, 6]),
        ((12, 8), [3, 4, 2, 4]),
        ((6, 4), [4, 6]),
        ((4, 6, 2), [8, 6]),
        ((4, 1, 8), [4, 8]),
        ((2, 4), [-1]),
        ((), [1, 1]),
    ]
    viewed = [(d.normal(*before), after) for before, after in shapes]
    return {
        "aten.view.default": _calls(aten.view.default, *viewed),
        "aten.reshape": _calls(aten.reshape.default, *viewed, (d.normal(8, 4).t(), [4, 2, 4])),
        "aten._unsafe_view": _calls(aten._unsafe_view.default, *viewed),
        "aten.diagonal": _calls(aten.diagonal.default, (d.normal(4, 4, 8), 0, 0, 1), (d.normal(2, 4, 8), 1, -1, 1)),
        "aten.unfold": _calls(aten.unfold.default, (d.normal(4, 8), 1, 4, 2), (d.normal(4, 8), 0, 2, 1)),
        "aten.pixel_shuffle": _calls(aten.pixel_shuffle.default, (d.normal(2, 16, 4, 4), 2), (d.normal(8, 2, 4), 2)),
        "aten.pixel_unshuffle": _calls(aten.pixel_unshuffle.default, (d.normal(2, 4, 8, 4), 2)),
        "aten.squeeze": [
            *_calls(aten.squeeze.default, (d.normal(2, 1, 4),)),
            *_calls(aten.squeeze.dim, (d.normal(2, 1, 4), 1), (d.normal(2, 1, 4), 0), (d.normal(4, 2), -1)),
            *_calls(aten.squeeze.dims, (d.normal(2, 1, 4, 1), [0, 1, -1])),
        ],
        "aten.unsqueeze": _calls(aten.unsqueeze.default, (d.normal(2, 4), 0), (d.normal(2, 4), -1)),
        "aten.t": _calls(aten.t.default, (d.normal(4, 8),), (d.normal(4),)),
        "aten.transpose": _calls(aten.transpose.int, (d.normal(4, 8, 2), 0, -1), (d.normal(4, 8, 2), 1, 1)),
        "aten.permute": _calls(aten.permute.default, (d.normal(4, 8, 2), [2, 0, -2])),
        "aten.expand": _calls(
            aten.expand.default, (d.normal(4, 1), [2, -1, 8]), (d.normal(), [4]), (d.normal(4, 2), [4, 2])
        ),
        "aten.repeat": _calls(aten.repeat.default, (d.normal(4, 2), [2, 1, 4]), (d.normal(4), [1])),
    }


def _pieces(d: Draw) -> dict[str, list[Sample]]:
    return {
        "aten.slice.Tensor": _calls(
            aten.slice.Tensor,
            (d.normal(4, 12), 1, 4, 8),
            (d.normal(4, 12), -1, -4, 2**63 - 1),
            (d.normal(4, 8), 1, 1, 7),
            (d.normal(4, 8),),
            (d.normal(8, 4), 0, 0, 8, 2),
            (d.normal(8, 4), 0, 1, 6, 3),
            (d.normal(8, 4), 0, 2, -2),
        ),
        "aten.split": _calls(aten.split.Tensor, (d.normal(4, 24), 8, 1), (d.normal(10, 4), 4)),
        "aten.split_with_sizes": _calls(
            aten.split_with_sizes.default, (d.normal(4, 16), [8, 4, 4], -1), (d.normal(7, 2), [3, 4])
        ),
        "aten.chunk": _calls(aten.chunk.default, (d.normal(4, 24), 3, -1)),
        "aten.select.int": _calls(aten.select.int, (d.normal(4, 8), 1, 3), (d.normal(4, 8), 0, -1)),
        "aten.unbind": _calls(aten.unbind.int, (d.normal(4, 8),), (d.normal(4, 2), -1)),
        "aten.slice_scatter": _calls(
            aten.slice_scatter.default,
            (d.normal(4, 12), d.normal(4, 4), 1, 4, 8),
            (d.normal(8, 4), d.normal(3, 4), 0, 1, 4),
            (d.normal(8, 4), d.normal(4, 4), 0, 0, 8, 2),
        ),
        "aten.select_scatter": _calls(
            aten.select_scatter.default, (d.normal(4, 8), d.normal(4), 1, 5), (d.normal(4, 8), d.normal(8), 0, -1)
        ),
        "aten.stack": _calls(aten.stack.default, ([d.normal(4, 8), d.normal(4, 8)], 1), ([d.normal(4)],)),
        "aten.tril": _calls(aten.tril.default, (d.normal(4, 6, 8), 1)),
        "aten.triu": _calls(aten.triu.default, (d.normal(4, 8),)),
        "aten.cat": _calls(
            aten.cat.default,
            ([d.normal(4, 8), d.normal(4, 8)], 1),
            ([d.normal(8, 4), d.normal(4, 4), d.normal(12, 4)],),
            ([d.normal(4, 3), d.normal(4, 2)], -1),
            ([d.normal(0), d.normal(4, 2)], 1),
        ),
        "aten.constant_pad_nd": _calls(
            aten.constant_pad_nd.default,
            (d.normal(4, 8), [1, 2]),
            (d.normal(4, 8), [0, 0, 4, 8], 1.5),
            (d.normal(4, 8), [8, 16]),
            (d.normal(4, 8), [-4, 4]),
        ),
        "aten.flip": _calls(aten.flip.default, (d.normal(4, 8), [1]), (d.normal(4, 8), [0, -1])),
        "aten.roll": _calls(aten.roll.default, (d.normal(4, 8), [3], [1]), (d.normal(4, 8), [3])),
    }


def _draws(d: Draw) -> dict[str, list[Sample]]:
    key, cpu = torch.tensor([2**40 + 7]), torch.device("cpu")
    cases = [(0, [4, 8], f64), (1, [2, 6, 2], torch.float32), (2, [8], torch.bfloat16), (3, [], f64)]
    return {
        "shardc_random.key": [Sample(torch.ops.shardc_random.key.default, (), {"device": cpu}, defined=False)],
        "shardc_random.uniform": [
            Sample(torch.ops.shardc_random.uniform.default, (key, stream, size), {"dtype": dtype, "device": cpu})
            for stream, size, dtype in cases
        ],
    }


def _recurrent(d: Draw) -> dict[str, list[Sample]]:
    """Three steps of four rows with two features, and the gradients of their states."""
    found: dict[str, list[Sample]] = {"shardc_recurrent.steps": [], "shardc_recurrent.steps_backward": []}
    for cell, gates, state, of_state in (("lstm", 8, 4, 8), ("gru", 8, 2, 6), ("tanh", 2, 2, 2), ("relu", 2, 2, 2)):
        given, first, weight = d.normal(3, 4, gates), d.normal(4, state), d.normal(of_state, 2)
        op = torch.ops.shardc_recurrent
        found["shardc_recurrent.steps"].append(Sample(op.steps.default, (given, first, weight, cell)))
        made = (first, weight, *op.steps(given, first, weight, cell), cell)
        sample = Sample(op.steps_backward.default, (d.normal(3, 4, state), *made))
        found["shardc_recurrent.steps_backward"].append(sample)
    return found


def _float8(d: Draw) -> dict[str, list[Sample]]:
    """Matrices with one scale, and with one for each row or column; products of such."""
    op, x, y, dtype = torch.ops.shardc_float8, d.normal(4, 12), d.normal(12, 8), torch.float8_e4m3fn
    of_x, of_y = ((z.abs().amax(), z.abs().amax(dim, keepdim=True)) for z, dim in ((x, 1), (y, 0)))
    quantise = [Sample(op.quantise.default, (x, amax, torch.float32)) for amax in of_x]  # float8 has no comparison
    products = [
        Sample(op.mm.default, (op.quantise(x, a, dtype), op.quantise(y, b, dtype), a, b, f64))
        for a, b in zip(of_x, of_y, strict=True)
    ]
    blocks = x.unflatten(1, (3, -1)).abs().amax(2, keepdim=True), y.unflatten(0, (3, -1)).abs().amax(1, keepdim=True)
    quantise += [Sample(op.quantise.default, (z, a, torch.float32)) for z, a in zip((x, y), blocks, strict=True)]
    in_blocks = (op.quantise(z, a, dtype) for z, a in zip((x, y), blocks, strict=True))
    products.append(Sample(op.mm.default, (*in_blocks, *blocks, f64)))
    return {"shardc_float8.quantise": quantise, "shardc_float8.mm": products}


def _neighbours(d: Draw) -> dict[str, list[Sample]]:
    """Shifts by less than a rank's piece, by more, and by all; convolutions that read as far."""
    op, x = torch.ops.shardc_window, d.normal(2, 16, 4)
    out = {"shardc_window.shift": _calls(op.shift.default, *((x, None, 1, by) for by in (1, -1, 4, -6, 9, 16, -20)))}
    out["shardc_window.shift"] += _calls(
        op.shift.default, (d.normal(8), None, 0, 3), (x, d.normal(2, 3, 4), 1, 3), (x, d.normal(2, 6, 4), 1, -6)
    )
    out["shardc_window.edge"] = _calls(op.edge.default, (x, 1, 0, 2), (x, 1, 11, 16), (d.normal(8), 0, 3, 4))
    out["shardc_window.cumsum"] = _calls(op.cumsum.default, *((x, 1, reverse) for reverse in (False, True)))
    for channels, groups, geometry in ((4, 4, (3, 0, 1)), (8, 2, (0, 4, 2)), (4, 1, (2, 2, 2)), (4, 4, (11, 0, 1))):
        k = (geometry[0] + geometry[1]) // geometry[2] + 1
        x, weight, grad = d.normal(2, channels, 8), d.normal(4, channels // groups, k), d.normal(2, 4, 8)
        forward, backward = (x, weight, *geometry, groups), (grad, x, weight, *geometry, groups)
        out.setdefault("shardc_window.convolve", []).append(Sample(op.convolve.default, forward))
        out.setdefault("shardc_window.convolve_weight", []).append(Sample(op.convolve_weight.default, backward))
    return out


@shardc.experts
def _gated(rows: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    gate, inner = (rows @ up).chunk(2, -1)
    return (torch.sigmoid(gate) * inner) @ down


class _Gated(torch.nn.Module):
    def forward(self, *given: torch.Tensor) -> torch.Tensor:
        return _gated(*given)


def _experts(d: Draw) -> dict[str, list[Sample]]:
    """Eight tokens, each to two of four experts of their own weights, of which one gets none."""
    x, index, weight = d.normal(8, 3), torch.tensor([[0, 1], [3, 0], [1, 0], [1, 3]] * 2), d.normal(8, 2)
    params = [d.normal(4, 3, 8), d.normal(4, 4, 5)]
    given = [one.requires_grad_() if one.is_floating_point() else one for one in (x, index, weight, *params)]
    program = shardc.compile(_Gated(), shardc.Mesh(x=1), shardc.ddp("x"), backend="eager").lower(*given)
    (call,) = (node for node in program.graph("experts").nodes if "experts.call" in str(node.target))
    said = (call.args[4], "auto", 0.0, 1, "")
    x, index, weight, *params = (one.detach() for one in given)
    op = torch.ops.shardc_experts
    return {
        "shardc_experts.call": [Sample(op.call.default, (x, index, weight, params, *said))],
        "shardc_experts.gradient": [
            Sample(op.gradient.default, (d.normal(8, 5), x, index, weight, params, *said)),
        ],
    }


def _factories(d: Draw) -> dict[str, list[Sample]]:
    x = d.normal(2)
    return {
        "aten.full": [Sample(aten.full.default, ([4, 8], 1.5), {"dtype": f64})],
        "aten.zeros": [Sample(aten.zeros.default, ([4, 8],))],
        "aten.ones": [Sample(aten.ones.default, ([4, 8],))],
        "aten.empty.memory_format": [Sample(aten.empty.memory_format, ([4, 8],), defined=False)],
        "aten.empty_strided": [Sample(aten.empty_strided.default, ([4, 8], [1, 4]), defined=False)],
        "aten.empty_permuted": [Sample(aten.empty_permuted.default, ([4, 8], [1, 0]), defined=False)],
        "aten.new_full": _calls(aten.new_full.default, (x, [4, 8], 1.5)),
        "aten.new_zeros": _calls(aten.new_zeros.default, (x, [4, 8])),
        "aten.new_ones": _calls(aten.new_ones.default, (x, [4, 8])),
        "aten.new_empty": [Sample(aten.new_empty.default, (x, [4, 8]), defined=False)],
        "aten.scalar_tensor": [Sample(aten.scalar_tensor.default, (1.5,))],
        "aten.arange": [
            Sample(aten.arange.default, (8,)),
            Sample(aten.arange.start, (3, 11), {"dtype": torch.int32}),
            Sample(aten.arange.start_step, (3, 19, 2)),
            Sample(aten.arange.start_step, (0.5, 16.5, 2.5), {"dtype": torch.int64}),
            Sample(aten.arange.start_step, (0.5, 4.5, 0.5)),
        ],
    }


_FAMILIES: tuple[Callable[[Draw], dict[str, list[Sample]]], ...] = (
    _views, _pieces, _factories, _draws, _recurrent, _float8, _float8, _neighbours, _experts,
)  # fmt: skip


def samples(op: str) -> list[Sample]:
    """The samples of a rule of views, pieces or factories."""
    for family in _FAMILIES:
        found = family(Draw(family.__name__))
        if op in found:
            return found[op]
        if (copied := op.removesuffix("_copy").replace("_copy.", ".")) != op and copied in found:
            return [replace(sample, op=_copy_of(sample.op)) for sample in found[copied]]
    return []


def _copy_of(op: Any) -> Any:
    """The overload of the copying form of a view."""
    return getattr(getattr(aten, f"{op._opname}_copy"), op._overloadname)
