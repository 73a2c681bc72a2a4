"""`shardc.experts`, and the marker ops with which a trace encloses the function of one expert.

The first marker returns all tokens as the rows of one expert, and that expert's parameters; the last one takes its
result. `shardc.passes.layout.experts` replaces the ops between them by one op, and their gradient by another. Outside
of a trace the experts run one after another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from shardc.custom_ops.expert_ops import sort
from shardc.custom_ops.op_library import OpLibrary
from shardc.errors import InputError


def _enter(tensors: list[Tensor], index: Tensor) -> list[Tensor]:
    """Marker op at the start of one expert's function. Given ``tensors`` [tokens, routing weights, *parameters of all
    experts], it returns what one expert gets: [rows, routing weight of each row [n, 1], *its parameters].
    """
    x, weight, *params = tensors
    return [x.clone(), weight.new_empty(x.shape[0], 1), *(p.new_empty(p.shape[1:]) for p in params)]


def _enter_grad(grads: list[Tensor], index: Tensor, sizes: list[int]) -> list[Tensor]:
    """Gradient of the marker op `_enter`. Given the gradients of one expert's operands, it returns those of tokens,
    routing weights and the parameters of all experts (``sizes`` has the number of experts of each parameter).
    """
    x, scale, *params = grads
    return [
        x.clone(),
        scale.new_empty(index.shape),
        *(p.new_empty(n, *p.shape) for p, n in zip(params, sizes, strict=True)),
    ]


def _enter_setup(ctx: Any, inputs: tuple[list[Tensor], Tensor], output: list[Tensor]) -> None:
    (_, _, *params), index = inputs
    ctx.save_for_backward(index)
    ctx.sizes = [p.shape[0] for p in params]
    ctx.set_materialize_grads(False)
    ctx.like = [(x.shape, x.dtype, x.device) for x in output]


def _enter_backward(ctx: Any, grads: list[Tensor | None]) -> tuple[list[Tensor | None], None]:
    whole = [
        torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
        for grad, (shape, dtype, device) in zip(grads, ctx.like, strict=True)
    ]
    results = ENTER_GRAD(whole, ctx.saved_tensors[0], ctx.sizes)
    # A tensor that no expert reads has no gradient: optimizers treat None and zeros differently.
    return [None if grad is None else result for grad, result in zip(grads, results, strict=True)], None


def _copy(x: Tensor, index: Tensor) -> Tensor:
    """Marker op at the end of one expert's function. Given the function's results ``x``, it returns a copy of them."""
    return x.clone()


_library = OpLibrary("shardc_experts")
ENTER = _library.define("enter(Tensor[] tensors, Tensor index) -> Tensor[]", _enter)
ENTER_GRAD = _library.define("enter_grad(Tensor[] grads, Tensor index, int[] sizes) -> Tensor[]", _enter_grad)
EXIT = _library.define("exit(Tensor rows, Tensor index) -> Tensor", _copy)
EXIT_GRAD = _library.define("exit_grad(Tensor grad, Tensor index) -> Tensor", _copy)
torch.library.register_autograd(ENTER, _enter_backward, setup_context=_enter_setup)
torch.library.register_autograd(
    EXIT,
    lambda ctx, grad: (EXIT_GRAD(grad, ctx.saved_tensors[0]), None),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[1]),
)


# --- functions of one expert

Function = Callable[..., Tensor]


def experts(function: Function) -> Function:
    """Turn ``function``, the function of one expert, into a function that routes tokens to all experts.

    ``function(rows, *weights) -> rows`` computes each row of its result from that row of its argument alone.
    `shardc.ep` then splits the experts over an axis. In a model that is not compiled, the experts run one after
    another.

    Returns:
        A function of ``(x, index, weight, *weights)``: tokens [t, d], the experts chosen for each token, int64 [t, k],
        their routing weights [t, k], and the parameters of all experts, [e, ...] each. It returns the weighted sum of
        the results for each token, [t, o].

    Raises:
        InputError: the shapes are different. At compile time, CaptureError: the function mixes rows, or reads a tensor
            that is not an argument.

    >>> import shardc, torch
    >>> @shardc.experts
    ... def products(rows, weight):
    ...     return rows @ weight
    >>> x, index, scale = torch.ones(3, 4), torch.tensor([[0], [1], [1]]), torch.ones(3, 1)
    >>> products(x, index, scale, torch.ones(2, 4, 5)).shape
    torch.Size([3, 5])
    """

    @wraps(function)
    def of_all(x: Tensor, index: Tensor, weight: Tensor, *weights: Tensor) -> Tensor:
        shapes = [tuple(tensor.shape) for tensor in (x, index, weight, *weights)]
        tokens = len(shapes[0]) == 2 and len(shapes[1]) == 2 and shapes[1] == shapes[2] and shapes[0][0] == shapes[1][0]
        if not tokens or not weights or any(len(shape) < 2 or shape[0] != shapes[3][0] for shape in shapes[3:]):
            raise InputError(
                f"experts get tensors of the shapes {shapes}",
                fix="pass tokens [t, d], index [t, k], weight [t, k], and weights whose first dim is the experts",
            )
        result: Tensor = apply(function, x, index, weight, weights)
        return result

    return of_all


def one_by_one(
    function: Function, x: Tensor, index: Tensor, weight: Tensor, params: Sequence[Tensor], scaled: bool = False
) -> Tensor:
    """Run each expert on its tokens, one expert after another. Return for each token the weighted sum of its experts'
    results, [t, o].

    Args:
        scaled: whether ``function`` takes the routing weights [n, 1] after the rows, and applies them.
    """
    order, ends = sort(index, params[0].shape[0])
    take, scale = order // index.shape[1], weight.flatten()[order].unsqueeze(1)
    results, start = [], 0
    for expert, end in enumerate(ends.tolist()):
        rows, by, weights = x[take[start:end]], scale[start:end], [p[expert] for p in params]
        results.append(function(rows, by, *weights) if scaled else function(rows, *weights) * by)
        start = end
    rows = torch.cat(results)
    return rows.new_zeros(x.shape[0], *rows.shape[1:]).index_add(0, take, rows).to(x.dtype)


def marked(
    function: Function, x: Tensor, index: Tensor, weight: Tensor, params: Sequence[Tensor], scaled: bool = False
) -> Tensor:
    """Replaces `one_by_one` in a trace: calls ``function`` once, for one expert, between the marker ops. Arguments and
    results are those of `one_by_one`.
    """
    index = index.clone()  # unique to this call
    rows, scale, *weights = ENTER([x, weight, *params], index)
    result = function(rows, scale, *weights) if scaled else function(rows, *weights) * scale
    out: Tensor = EXIT(result.to(x.dtype), index)
    return out


apply = one_by_one  # `marked` while a model is captured
