"""What callers do with outputs of a module: models, and what is done with what they return, up to the backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.semantics.output_acts import (
    a_view_kept,
    accumulated,
    backward,
    both,
    both_changed,
    changed_as_one,
    clipped,
    detached,
    detached_part,
    either,
    fed_again,
    first,
    given_away,
    gradient_twice,
    gradients,
    heads,
    hook_removed,
    hook_sees,
    hooked,
    hooked_alone,
    hooked_hidden,
    hooked_unused,
    input_changed,
    input_gradient,
    is_the_input,
    is_the_same,
    kept_graph,
    kept_then_changed,
    last,
    losses_of_two,
    masked,
    multi_grad_hook,
    multi_grad_hook_any,
    no_gradient,
    node_hooks,
    of_the_buffer,
    plain,
    retained,
    retained_hidden,
    retained_then_changed,
    saved_in_float,
    saved_on_cpu,
    saved_transposed,
    second,
    second_backward,
    stepped,
    stepped_unread,
    tanh,
    through_data,
    twice,
    two_forwards,
    two_losses,
    under,
    within,
    within_all,
    without_grad,
)

ROWS, SIZE, WIDTH, OUT = 4, 6, 8, 5


class Flat(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.view(-1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.view(ctx.shape)


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Net(nn.Module):
    """Two layers; what it returns is up to the case."""

    def __init__(self, returns: Callable[[Any, Tensor, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.first, self.second, self.returns = nn.Linear(SIZE, WIDTH), nn.Linear(WIDTH, OUT), returns
        self.scale = nn.Parameter(torch.full((OUT,), 1.5))
        self.register_buffer("offset", torch.arange(float(OUT)))

    def forward(self, x: Tensor) -> Any:
        hidden = self.first(x).tanh()
        return self.returns(self, x, hidden, self.second(hidden))


@dataclass(frozen=True)
class Case:
    """A model and what is done with it.

    Args:
        returns: of the net, its input, the hidden value and the last one: what the net returns.
        act: what is done with the net and its input; it gives the tensors that are compared. What it raises is, too.
        dims: of the input.
        differs: what the compiled module says instead of what one device does; "runs" where it need not refuse.
    """

    returns: Callable[[Any, Tensor, Tensor, Tensor], Any]
    act: Callable[[Any, Tensor], Any]
    dims: int = 2
    differs: str = ""


CASES: dict[str, Case] = {
    # Changed in place: a value that no backward reads, and that one does.
    "linear, divided": Case(last, backward(lambda out: out.div_(0.7))),
    "linear of three dims, divided": Case(last, backward(lambda out: out.div_(0.7)), dims=3),
    "linear of three dims, a class masked": Case(last, backward(masked), dims=3),
    "linear, a class masked": Case(last, backward(masked)),
    "linear, a column": Case(last, backward(lambda out: out[:, 0].mul_(2.0))),
    "linear, clamped": Case(last, backward(clipped)),
    "linear, masked_fill_": Case(last, backward(lambda out: out.masked_fill_(out > 0.1, -1.0))),
    "linear, a part of a part": Case(last, backward(lambda out: out[..., 1:][..., 1:3].add_(1.0))),
    "linear, a view that is kept": Case(last, a_view_kept),
    "linear, given away": Case(last, given_away),
    "tanh, doubled": Case(tanh, backward(lambda out: out.mul_(2.0))),
    "tanh, given away": Case(tanh, given_away),
    "tanh, a class masked": Case(tanh, backward(masked), dims=3),
    "tanh, a view that is kept": Case(tanh, a_view_kept),
    "tanh without recording": Case(tanh, backward(without_grad(lambda out: out.mul_(2.0)))),
    "linear without recording": Case(last, backward(without_grad(lambda out: out.mul_(2.0)))),
    "sigmoid": Case(lambda net, x, h, y: y.sigmoid(), backward(lambda out: out.mul_(2.0))),
    "relu": Case(lambda net, x, h, y: y.relu(), backward(lambda out: out.mul_(2.0))),
    "exp": Case(lambda net, x, h, y: y.exp(), backward(lambda out: out.mul_(2.0))),
    "sin": Case(lambda net, x, h, y: y.sin(), backward(lambda out: out.mul_(2.0))),
    "softmax": Case(lambda net, x, h, y: y.softmax(-1), backward(lambda out: out.mul_(2.0))),
    "log_softmax": Case(lambda net, x, h, y: y.log_softmax(-1), backward(lambda out: out.mul_(2.0))),
    "a sum": Case(lambda net, x, h, y: y + h[..., :OUT], backward(lambda out: out.mul_(2.0))),
    "a product": Case(lambda net, x, h, y: y * h[..., :OUT], backward(lambda out: out.mul_(2.0))),
    "a norm": Case(
        lambda net, x, h, y: nn.functional.layer_norm(y, (OUT,), net.scale), backward(lambda out: out.mul_(2.0))
    ),
    "a view of tanh": Case(lambda net, x, h, y: y.tanh().flatten(1), backward(lambda out: out.mul_(2.0)), dims=3),
    "transposed": Case(lambda net, x, h, y: y.transpose(1, 2), backward(lambda out: out.mul_(2.0)), dims=3),
    "a part of tanh": Case(lambda net, x, h, y: y.tanh()[..., :2], backward(lambda out: out.mul_(2.0))),
    # Two outputs, of which one is made of the other.
    "hidden and last, last changed": Case(both, backward(lambda out: out[1].mul_(2.0), either)),
    "hidden and last, hidden changed": Case(both, backward(lambda out: out[0].mul_(2.0), either)),
    "hidden and last, hidden changed, last used": Case(both, backward(lambda out: out[0].mul_(2.0), second)),
    "hidden and last, hidden changed, alone used": Case(both, backward(lambda out: out[0].mul_(2.0), first)),
    "last and its tanh, last changed": Case(
        lambda net, x, h, y: (y, y.tanh()), backward(lambda out: out[0].mul_(2.0), either)
    ),
    "last and its sine, last changed": Case(
        lambda net, x, h, y: (y, y.sin()), backward(lambda out: out[0].mul_(2.0), either)
    ),
    "last and its sine, last changed, last used": Case(
        lambda net, x, h, y: (y, y.sin()), backward(lambda out: out[0].mul_(2.0), first)
    ),
    "last and twice it, last changed": Case(
        lambda net, x, h, y: (y, y * 2), backward(lambda out: out[0].mul_(2.0), either)
    ),
    "last and its relu, last changed": Case(
        lambda net, x, h, y: (y, y.relu()), backward(lambda out: out[0].mul_(2.0), either)
    ),
    "a copy beside it": Case(lambda net, x, h, y: (y, y.clone()), backward(lambda out: out[0].mul_(2.0), either)),
    "a copy of tanh": Case(lambda net, x, h, y: y.tanh().clone(), backward(lambda out: out.mul_(2.0))),
    # Outputs that share memory.
    "the same twice": Case(twice, is_the_same),
    "the same twice, changed": Case(twice, changed_as_one),
    "the same twice, first used": Case(twice, backward(lambda out: None, first)),
    "the same twice, second used": Case(twice, backward(lambda out: None, second)),
    "a view beside it, used": Case(lambda net, x, h, y: (y, y[..., :2]), backward(lambda out: None, either)),
    "a view beside it, changed": Case(
        lambda net, x, h, y: (y, y[..., :2]), backward(lambda out: out[0].mul_(2.0), second)
    ),
    "a detached one beside it": Case(lambda net, x, h, y: (y, y.detach()), backward(lambda out: None, first)),
    "a view beside it, the view changed": Case(
        lambda net, x, h, y: (y, y[..., :2]), backward(lambda out: out[1].mul_(2.0), first)
    ),
    "a view in front of it, changed": Case(
        lambda net, x, h, y: (y[..., :2], y, y), backward(lambda out: out[2].mul_(2.0), first)
    ),
    "a view of what is read, changed": Case(
        lambda net, x, h, y: (y.tanh(), y.tanh()[..., :2], h, h.unsqueeze(-1)),
        backward(lambda out: out[3].mul_(2.0), first),
    ),
    "two views of what is not returned, changed": Case(
        lambda net, x, h, y: (y[..., :3], y[..., 2:]), backward(lambda out: out[1].mul_(2.0), either)
    ),
    "two views of tanh, changed": Case(
        lambda net, x, h, y: ((t := y.tanh())[..., :2], t[..., 2:]), backward(lambda out: out[0].mul_(2.0), either)
    ),
    "two views of what is not returned, a view of one changed": Case(
        lambda net, x, h, y: (y[..., :3], y[..., :3][..., 1:]), backward(lambda out: out[1].mul_(2.0), either)
    ),
    "a detached one beside it, changed": Case(
        lambda net, x, h, y: (y, y.detach()), backward(lambda out: out[1].mul_(2.0), first)
    ),
    "a hook of what a view is of": Case(lambda net, x, h, y: (y, y[..., :2]), hooked_hidden),
    "a hook of a view": Case(lambda net, x, h, y: (y[..., :2], y), hooked_hidden),
    "retain_grad of what a view is of": Case(lambda net, x, h, y: (y, y.t()[:2]), retained_hidden),
    "a view of a custom function": Case(lambda net, x, h, y: Flat.apply(y), backward(lambda out: out.mul_(2.0))),
    "a view of a custom function, no_grad": Case(
        lambda net, x, h, y: Flat.apply(y)[2:], backward(without_grad(lambda out: out.mul_(2.0)))
    ),
    "a custom function's own": Case(lambda net, x, h, y: Double.apply(y), backward(lambda out: out.add_(2.0))),
    "detach_ of a view of a custom function": Case(lambda net, x, h, y: Flat.apply(y), detached),
    "detach_ of a view by strides": Case(lambda net, x, h, y: y.as_strided((2, 2), (OUT, 1)), detached),
    "detach_ of a view": Case(lambda net, x, h, y: y[..., :2], detached),
    "detach_ of a product of three dims": Case(lambda net, x, h, y: h @ net.second.weight.t(), detached, dims=3),
    "detach_ of a stack": Case(lambda net, x, h, y: torch.stack([y, y * 2], 1), detached),
    "detach_ of a mean": Case(lambda net, x, h, y: torch.var_mean(y, -1)[1], detached),
    "detach_ of a norm": Case(lambda net, x, h, y: y.norm(dim=-1), detached),
    "detach_ of a cat": Case(lambda net, x, h, y: torch.cat([y, h], -1), detached),
    "detach_ of a transpose": Case(lambda net, x, h, y: y.mT, detached),
    "a view beside it, the other changed unrecorded": Case(
        lambda net, x, h, y: (y, y[..., :2]), backward(without_grad(lambda out: out[0].mul_(2.0)), second)
    ),
    "a view beside it, no_grad": Case(lambda net, x, h, y: (y, y[..., :2]), both_changed(torch.no_grad)),
    "a view beside it, inference_mode": Case(lambda net, x, h, y: (y, y[..., :2]), both_changed(torch.inference_mode)),
    "chunks, what they are of changed": Case(
        lambda net, x, h, y: (h * 2).chunk(2, -1), backward(without_grad(lambda out: out[0].mul_(2.0)), either)
    ),
    "chunks beside it, it changed": Case(
        lambda net, x, h, y: (y, *y.chunk(5, -1)), backward(lambda out: out[0].mul_(2.0), second)
    ),
    "chunks beside it, one changed": Case(
        lambda net, x, h, y: (y, *y.chunk(5, -1)), backward(lambda out: out[1].mul_(2.0), first)
    ),
    "chunks, used": Case(lambda net, x, h, y: h.chunk(2, -1), backward(lambda out: None, either)),
    "chunks, changed": Case(lambda net, x, h, y: h.chunk(2, -1), backward(lambda out: out[0].mul_(2.0), either)),
    "a chunk, changed": Case(lambda net, x, h, y: h.chunk(2, -1)[0], backward(lambda out: out.mul_(2.0))),
    "unbound, changed": Case(lambda net, x, h, y: y.unbind(-1)[1], backward(lambda out: out.mul_(2.0))),
    "expanded, changed": Case(
        lambda net, x, h, y: y.mean(-1, keepdim=True).expand(-1, 3), backward(lambda out: out.mul_(2.0))
    ),
    # Outputs that are what comes in, or what the module holds.
    "the input": Case(lambda net, x, h, y: (x, y), is_the_input),
    "a view of the input": Case(lambda net, x, h, y: (x[:, :2], y), is_the_input),
    "a copy of the input": Case(lambda net, x, h, y: (x.clone(), y), is_the_input),
    "the input, its gradient": Case(lambda net, x, h, y: (x, y), input_gradient),
    "the input, recorded and changed": Case(
        lambda net, x, h, y: (x, y), backward(lambda out: out[0].mul_(2.0), second)
    ),
    "an input with a gradient, changed": Case(lambda net, x, h, y: (x, y), input_changed),
    "a buffer": Case(lambda net, x, h, y: (net.offset, y), of_the_buffer),
    "a parameter": Case(lambda net, x, h, y: (net.scale, y * net.scale), of_the_buffer),
    "a parameter, changed": Case(
        lambda net, x, h, y: (net.scale, y * net.scale), backward(lambda out: out[0].mul_(2.0), second)
    ),
    "plain values": Case(lambda net, x, h, y: {"y": y, "none": None, "n": 3, "name": "net"}, plain),
    "plain values, no_grad": Case(lambda net, x, h, y: (y, y > 0, "net", 3, 2.5, None), within_all(torch.no_grad)),
    "without gradients": Case(
        lambda net, x, h, y: (y, y.argmax(-1), y > 0, y.detach().sin(), torch.ones(3)), no_gradient
    ),
    # Hooks, and what autograd keeps.
    "a hook": Case(tanh, hooked),
    "hooks around a change": Case(last, hook_sees),
    "retain_grad": Case(tanh, retained),
    "retain_grad, then a change": Case(last, retained_then_changed),
    "retain_grad of what another is made of": Case(both, retained_hidden, differs="made of it"),
    "a hook of what another is made of": Case(both, hooked_hidden, differs="made of it"),
    "a hook of what another is made of, alone used": Case(both, hooked_alone),
    "a hook of an unused output": Case(heads, hooked_unused),
    "a hook that is removed": Case(heads, hook_removed),
    "a hook of several heads": Case(heads, multi_grad_hook),
    "a hook of any head": Case(heads, multi_grad_hook_any),
    "a hook of several": Case(both, multi_grad_hook, differs="made of it"),
    "a hook of any": Case(both, multi_grad_hook_any, differs="made of it"),
    "a hook of the node": Case(tanh, node_hooks),
    "saved on the CPU": Case(tanh, saved_on_cpu),
    "saved as a copy": Case(tanh, saved_in_float),
    "saved as a copy, transposed": Case(lambda net, x, h, y: h.transpose(1, 2).tanh() @ y, saved_transposed, dims=3),
    "retain_graph": Case(tanh, kept_graph),
    "backward twice": Case(tanh, second_backward),
    "retain_graph, then a change": Case(last, kept_then_changed),
    "retain_graph, then a change of what is read": Case(tanh, kept_then_changed),
    "two losses": Case(tanh, two_losses),
    "two losses of two outputs": Case(both, losses_of_two),
    "gradients of outputs": Case(tanh, gradients),
    "gradients of gradients": Case(tanh, gradient_twice, differs="create_graph=True"),
    "a weight that is read, changed": Case(tanh, stepped),
    "a weight that is not, changed": Case(tanh, stepped_unread),
    "detach_": Case(last, detached),
    "detach_ of what is read": Case(both, detached_part, differs="runs"),
    "through .data": Case(last, through_data),
    # Modes.
    "no_grad": Case(tanh, within(torch.no_grad)),
    "inference_mode": Case(last, within(torch.inference_mode), dims=3),
    "no_grad, changed outside": Case(tanh, under(torch.no_grad)),
    "inference_mode, changed outside": Case(tanh, under(torch.inference_mode)),
    # Several calls.
    "accumulated": Case(last, accumulated),
    "two forwards": Case(last, two_forwards),
    "fed again": Case(last, fed_again),
}  # fmt: skip
