"""What is done with the outputs of a net, up to the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def loss(out: Tensor) -> Tensor:
    return (out - 0.3).square().mean()


def backward(change: Callable[[Any], Any], of: Callable[[Any], Tensor] = loss) -> Callable[[Any, Tensor], Any]:
    """Changes what the net returns, then goes backward from a loss of it."""

    def act(net: Any, x: Tensor) -> Any:
        out = net(x)
        new = change(out)
        of(new if isinstance(new, type(out)) else out).backward()

    return act


def masked(out: Tensor) -> None:
    out[..., 3] = -2.0


def without_grad(change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def changed(out: Any) -> None:
        with torch.no_grad():
            change(out)

    return changed


def last(net: Any, x: Tensor, hidden: Tensor, y: Tensor) -> Any:
    return y


def tanh(net: Any, x: Tensor, hidden: Tensor, y: Tensor) -> Any:
    return y.tanh()


def both(net: Any, x: Tensor, hidden: Tensor, y: Tensor) -> Any:
    return hidden, y


def heads(net: Any, x: Tensor, hidden: Tensor, y: Tensor) -> Any:
    return y.sin(), hidden * 2


def twice(net: Any, x: Tensor, hidden: Tensor, y: Tensor) -> Any:
    return y, y


def either(out: Any) -> Tensor:
    return loss(out[0]) + loss(out[1])


def first(out: Any) -> Tensor:
    return loss(out[0])


def second(out: Any) -> Tensor:
    return loss(out[1])


def hooked(net: Any, x: Tensor) -> Any:
    out = net(x)
    out.register_hook(lambda grad: grad * 3)
    loss(out).backward()


def hook_sees(net: Any, x: Tensor) -> Any:
    seen: list[Tensor] = []
    out = net(x)
    out.register_hook(seen.append)
    out.mul_(2.0)
    out.register_hook(seen.append)
    loss(out).backward()
    return seen


def retained(net: Any, x: Tensor) -> Any:
    out = net(x)
    out.retain_grad()
    loss(out * 2).backward()
    return out.grad


def retained_then_changed(net: Any, x: Tensor) -> Any:
    out = net(x)
    out.retain_grad()
    out.mul_(2.0)
    loss(out).backward()
    return out.grad


def multi_grad_hook(net: Any, x: Tensor) -> Any:
    seen: list[Any] = []
    out = net(x)
    torch.autograd.graph.register_multi_grad_hook(out, lambda grads: seen.extend(grads))
    either(out).backward()
    return seen


def multi_grad_hook_any(net: Any, x: Tensor) -> Any:
    seen: list[Any] = []
    out = net(x)
    torch.autograd.graph.register_multi_grad_hook(out, seen.append, mode="any")
    either(out).backward()
    return len(seen)


def retained_hidden(net: Any, x: Tensor) -> Any:
    out = net(x)
    out[0].retain_grad()
    either(out).backward()
    return out[0].grad


def hooked_hidden(net: Any, x: Tensor) -> Any:
    """The hook outlives the output."""
    hidden, y = net(x)
    hidden.register_hook(lambda grad: grad * 2)
    del hidden
    loss(y).backward()


def hooked_unused(net: Any, x: Tensor) -> Any:
    """No gradient comes, and no hook is called."""
    out = net(x)
    out[0].register_hook(lambda grad: grad * 2)
    out[0].retain_grad()
    second(out).backward()
    return out[0].grad


def hook_removed(net: Any, x: Tensor) -> Any:
    out = net(x)
    out[0].register_hook(lambda grad: grad * 2).remove()
    out[1].register_hook(lambda grad: grad * 3)
    either(out).backward()


def hooked_alone(net: Any, x: Tensor) -> Any:
    hidden, _ = net(x)
    hidden.register_hook(lambda grad: grad * 2)
    loss(hidden).backward()


def node_hooks(net: Any, x: Tensor) -> Any:
    out = net(x)
    out.grad_fn.register_prehook(lambda grads: tuple(None if g is None else g * 2 for g in grads))
    loss(out).backward()


def saved_on_cpu(net: Any, x: Tensor) -> Any:
    with torch.autograd.graph.save_on_cpu():
        out = net(x)
    loss(out).backward()


def saved_in_float(net: Any, x: Tensor) -> Any:
    """Hooks that keep a copy: what happens to the output is of no matter."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        out = net(x)
    loss(out).backward()


def saved_transposed(net: Any, x: Tensor) -> Any:
    pack = lambda t: t.clone(memory_format=torch.contiguous_format)  # noqa: E731
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = net(x)
    loss(out).backward()


def kept_graph(net: Any, x: Tensor) -> Any:
    out = net(x)
    for keep in (True, True, False):
        loss(out).backward(retain_graph=keep)


def second_backward(net: Any, x: Tensor) -> Any:
    out = net(x)
    of_out = loss(out)
    of_out.backward()
    loss(out).backward()


def kept_then_changed(net: Any, x: Tensor) -> Any:
    out = net(x)
    loss(out).backward(retain_graph=True)
    out.mul_(2.0)
    loss(out).backward()


def two_losses(net: Any, x: Tensor) -> Any:
    out = net(x)
    loss(out).backward(retain_graph=True)
    out.sin().mean().backward()


def losses_of_two(net: Any, x: Tensor) -> Any:
    out = net(x)
    loss(out[0]).backward(retain_graph=True)
    out[1].sin().mean().backward()


def gradients(net: Any, x: Tensor) -> Any:
    """Of outputs, by the outputs themselves."""
    out = net(x)
    return torch.autograd.grad(loss(out * 2), out)


def gradient_twice(net: Any, x: Tensor) -> Any:
    out = net(x)
    torch.autograd.grad(loss(out), list(net.parameters()), create_graph=True, allow_unused=True)


def stepped(net: Any, x: Tensor) -> Any:
    out = net(x)
    with torch.no_grad():
        net.second.weight.mul_(2.0)
    loss(out).backward()


def stepped_unread(net: Any, x: Tensor) -> Any:
    out = net(x)
    with torch.no_grad():
        net.first.weight.mul_(2.0)
    loss(out).backward()


def under(mode: Any) -> Callable[[Any, Tensor], Any]:
    def act(net: Any, x: Tensor) -> Any:
        with mode():
            out = net(x)
        out.mul_(2.0)
        return out

    return act


def within(mode: Any) -> Callable[[Any, Tensor], Any]:
    def act(net: Any, x: Tensor) -> Any:
        with mode():
            out = net(x)
            out.mul_(2.0)
            out[..., 3] = -2.0
        return out

    return act


def within_all(mode: Any) -> Callable[[Any, Tensor], Any]:
    def act(net: Any, x: Tensor) -> Any:
        with mode():
            out = net(x)
        assert out[2:] == ("net", 3, 2.5, None)
        return out[:2]

    return act


def both_changed(mode: Any) -> Callable[[Any, Tensor], Any]:
    def act(net: Any, x: Tensor) -> Any:
        with mode():
            out = net(x)
            out[0].mul_(2.0)
            out[1].add_(1.0)
        return out

    return act


def is_the_same(net: Any, x: Tensor) -> Any:
    out = net(x)
    assert out[0] is out[1]
    either(out).backward()


def changed_as_one(net: Any, x: Tensor) -> Any:
    out = net(x)
    out[0].mul_(2.0)
    loss(out[1]).backward()


def is_the_input(net: Any, x: Tensor) -> Any:
    out = net(x)
    out[0].mul_(2.0)
    second(out).backward()
    return [x, *out]


def input_gradient(net: Any, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    out = net(x)
    either(out).backward()
    return x.grad


def input_changed(net: Any, x: Tensor) -> Any:
    x = x.clone().requires_grad_()
    out = net(x)
    out[0].mul_(2.0)
    either(out).backward()


def of_the_buffer(net: Any, x: Tensor) -> Any:
    out = net(x)
    second(out).backward()
    return out[0].requires_grad


def plain(net: Any, x: Tensor) -> Any:
    out = net(x)
    assert out["none"] is None and out["n"] == 3 and out["name"] == "net"
    loss(out["y"]).backward()


def no_gradient(net: Any, x: Tensor) -> Any:
    out, best, mask, cut, count = net(x)
    assert not (best.requires_grad or mask.requires_grad or cut.requires_grad or count.requires_grad)
    best += 1
    mask.logical_not_()
    cut.mul_(2.0)
    loss(out).backward()
    return best, mask, cut


def accumulated(net: Any, x: Tensor) -> Any:
    loss(net(x).mul_(2.0)).backward()
    loss(net(x).mul_(3.0)).backward()


def two_forwards(net: Any, x: Tensor) -> Any:
    a, b = net(x), net(x * 2)
    a.add_(b)
    loss(a).backward()


def fed_again(net: Any, x: Tensor) -> Any:
    """What comes out goes in again, changed in between."""
    out = net(x)
    out.mul_(0.5)
    loss(net(torch.cat([out, out[:, :1]], -1))).backward()


def clipped(out: Tensor) -> Tensor:
    return out.clamp_(-0.5, 0.5)


def detached(net: Any, x: Tensor) -> Any:
    out = net(x)
    out.detach_()
    return out.requires_grad, (out * 2)


def detached_part(net: Any, x: Tensor) -> Any:
    out = net(x)
    out[0].detach_()
    second(out).backward()


def through_data(net: Any, x: Tensor) -> Any:
    """Autograd does not see it."""
    out = net(x)
    out.data.mul_(2.0)
    loss(out).backward()


def given_away(net: Any, x: Tensor) -> Any:
    """The output itself is gone before the backward, and a change of it counts."""
    of_out = net(x).mul_(2.0).mean()
    of_out.backward()


def a_view_kept(net: Any, x: Tensor) -> Any:
    part = net(x)[..., :2]
    part.mul_(2.0)
    loss(part).backward()
