"""Rules for convolution and pooling: batch and channels may be split, spatial dims must be whole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardc.rules.loops import FREE, Loops, mixed
from shardc.rules.notation import WHOLE
from shardc.rules.rule import ANY, CONTIGUOUS, Call, Local, Rule, rules_for, sized, table
from shardc.rules.spec import Dims, Spec


class _Image:
    """Loops of a convolution: input ``n (g c) X``, weight ``(g o) c K`` (``(g c) o K`` if transposed), output
    ``n (g o) Y``.
    """

    def __init__(self, loops: Loops, x: tuple[int, ...], w: tuple[int, ...], y: tuple[int, ...], **kinds: str) -> None:
        call = loops.call
        groups, transposed = call["groups"], call["transposed"]
        n = loops.dim("n", x[0], kinds.get("n", FREE))
        g = loops.dim("g", groups)
        c = loops.dim("c", x[1] // groups, kinds.get("c", FREE))
        o = loops.dim("o", y[1] // groups, kinds.get("o", FREE))
        self.channels = (*g, *o)
        self.x = (n, (*g, *c), *loops.dims("x", x[2:], WHOLE))
        self.y = (n, self.channels, *loops.dims("y", y[2:], WHOLE))
        kernel = loops.dims("k", w[2:], WHOLE)
        self.w = ((*g, *c), o, *kernel) if transposed else (self.channels, c, *kernel)


def _forward(call: Call) -> Spec:
    loops = Loops(call)
    biased = len(loops.shapes) == 3
    # With c split the output is partial, and every rank would add the bias to its term.
    image = _Image(loops, loops.shapes[0], loops.shapes[1], loops.result_shapes[0], c=WHOLE if biased else "sum")
    operands = [image.x, image.w, *([(image.channels,)] if biased else [])]
    return loops.spec(operands, [image.y], linear=() if biased else [{0}, {1}])


def _backward(call: Call) -> Spec:
    loops = Loops(call)
    y, x, w = loops.shapes
    # The bias gradient does not sum over c, so splitting c would leave it replicated and not partial.
    image = _Image(loops, x, w, y, n="sum", o="sum", c=WHOLE if call["output_mask"][2] else FREE)
    grads: list[Dims] = [image.x, image.w, (image.channels,)]
    results = [dims for dims, result in zip(grads, call.results, strict=True) if result is not None]
    return loops.spec([image.y, image.x, image.w], results, linear=[{0}])


def _local_groups(local: Local) -> Any:
    """Emit the convolution with the number of groups that the local channels form."""
    weight = local.operand_layout("weight").local_shape
    if not local.call["transposed"]:
        channels = local.operand_layout("input").local_shape[1]
    elif local.call.position("grad_output") is None:
        channels = local.results[0].local_shape[1]
    else:
        channels = local.operand_layout("grad_output").local_shape[1]
    return local.same(groups=channels // weight[1])


def windowed(ops: str, ndim: int, linear: bool = False) -> list[Rule]:
    """Return rules for windows over the last ``ndim`` dims, which must be whole; leading dims may be split."""

    def spec(call: Call) -> Spec:
        return mixed(call, range(-ndim, 0), linear=[{0}] if linear else ())

    text = "... x -> ... y    x y: whole" + ("    linear in operand 0" if linear else "")
    return rules_for(ops, spec, text)


def _resize_backward(ops: str, ndim: int) -> list[Rule]:
    """Return rules as `windowed` does, for backward ops, one of whose arguments is the shape of the result."""
    return [replace(rule, localize=sized("input_size")) for rule in windowed(ops, ndim, linear=True)]


def _sampled(call: Call) -> Spec:
    """Return the spec of ``grid_sample``: an image ``n c X`` read at grid points ``n Y``, which all channels share."""
    loops = Loops(call)
    image, grid = (loops.shapes[loops.names.index(name)] for name in ("input", "grid"))
    # Channels share the grid, so the grid's gradient sums over them.
    n, c = loops.dim("n", image[0]), loops.dim("c", image[1], "sum" if "grad_output" in loops.names else FREE)
    points = loops.dims("y", grid[1:-1], WHOLE if "grad_output" in loops.names else FREE)
    x = (n, c, *loops.dims("x", image[2:], WHOLE))
    by_name = {"input": x, "grid": (n, *points, loops.dim("e", grid[-1], WHOLE)), "grad_output": (n, c, *points)}
    results = [by_name["grad_output"]]
    if "grad_output" in loops.names:
        results = [
            by_name[name] for name, result in zip(("input", "grid"), call.results, strict=True) if result is not None
        ]
    linear = [{loops.names.index(name)} for name in ("grad_output", "input") if name in loops.names][:1]
    return loops.spec([by_name[name] for name in loops.names], results, linear=linear)


def _columns(call: Call) -> Spec:
    """Return the spec of ``im2col`` and ``col2im``: windows of an image ``n c X`` as columns ``n (c k) l``, or back."""
    loops = Loops(call)
    columns, image = loops.shapes[0], loops.result_shapes[0]
    if "output_size" not in call:
        columns, image = image, columns
    lead = loops.dims("n", image[:-3])
    c = loops.dim("c", image[-3])
    window_factors = c + loops.dim("k", columns[-2] // max(image[-3], 1), WHOLE)
    sides = {
        columns: (*lead, window_factors, loops.dim("l", columns[-1], WHOLE)),
        image: (*lead, c, *loops.dims("x", image[-2:], WHOLE)),
    }
    return loops.spec([sides[loops.shapes[0]]], [sides[loops.result_shapes[0]]], linear=[{0}])


_TEXT = "n (g c) x..., (g o) c k... -> n (g o) y..."

TABLE = table(
    Rule("aten.convolution", _forward, f"{_TEXT}    c: sum; x y k: whole    linear in input, weight", _local_groups),
    Rule("aten.convolution_backward", _backward, f"backward of {_TEXT}    n o: sum; x y k: whole", _local_groups),
    strides=ANY,
) | table(
    rules_for("grid_sampler_2d grid_sampler_3d", _sampled, "n c x, n y e -> n c y    x e: whole    linear in input"),
    rules_for(
        "grid_sampler_2d_backward grid_sampler_3d_backward",
        _sampled,
        "n c y, n c x, n y e -> n c x, n y e    c: sum; x y e: whole",
    ),
    Rule("aten.im2col", _columns, "n c x -> n (c k) l    x k l: whole    linear"),
    Rule("aten.col2im", _columns, "n (c k) l -> n c x    x k l: whole    linear"),
    windowed("max_pool2d_with_indices max_pool2d_with_indices_backward adaptive_max_pool2d", 2),
    windowed("adaptive_max_pool2d_backward max_unpool2d", 2),
    windowed("max_pool3d_with_indices max_pool3d_with_indices_backward adaptive_max_pool3d", 3),
    windowed("adaptive_max_pool3d_backward", 3),
    windowed("avg_pool1d adaptive_avg_pool1d reflection_pad1d reflection_pad1d_backward", 1, linear=True),
    windowed("replication_pad1d replication_pad1d_backward", 1, linear=True),
    windowed("avg_pool2d avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward", 2, linear=True),
    windowed("reflection_pad2d reflection_pad2d_backward replication_pad2d", 2, linear=True),
    windowed("replication_pad2d_backward", 2, linear=True),
    windowed("avg_pool3d avg_pool3d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward", 3, linear=True),
    windowed("reflection_pad3d reflection_pad3d_backward replication_pad3d", 3, linear=True),
    windowed("replication_pad3d_backward", 3, linear=True),
    windowed("upsample_nearest1d _upsample_nearest_exact1d upsample_linear1d", 1, linear=True),
    windowed("upsample_nearest2d _upsample_nearest_exact2d upsample_bilinear2d upsample_bicubic2d", 2, linear=True),
    windowed("_upsample_bilinear2d_aa _upsample_bicubic2d_aa", 2, linear=True),
    windowed("upsample_nearest3d _upsample_nearest_exact3d upsample_trilinear3d", 3, linear=True),
    _resize_backward("upsample_nearest1d_backward _upsample_nearest_exact1d_backward upsample_linear1d_backward", 1),
    _resize_backward("upsample_nearest2d_backward _upsample_nearest_exact2d_backward upsample_bilinear2d_backward", 2),
    _resize_backward("upsample_bicubic2d_backward _upsample_bilinear2d_aa_backward", 2),
    _resize_backward("_upsample_bicubic2d_aa_backward", 2),
    _resize_backward("upsample_nearest3d_backward _upsample_nearest_exact3d_backward upsample_trilinear3d_backward", 3),
    strides=CONTIGUOUS,
)
