"""What people do around a model while they train it: ``habit(model, x)`` trains it, or returns what it computes.

``model(x)`` is a loss; ``model.up`` and ``model.qkv`` are layers, ``model.scale`` is a number.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parametrizations, prune
from torch.optim import swa_utils

HABITS: dict[str, Callable[[Any, Tensor], Any]] = {}


def habit(f: Callable[[Any, Tensor], Any]) -> Callable[[Any, Tensor], Any]:
    HABITS[f.__name__] = f
    return f


def train(model, x, optimizer, steps=2, change=None):
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).backward()
        if change is not None:
            with torch.no_grad():
                change(model)
        optimizer.step()


def sgd(model):
    return optim.SGD((p for p in model.parameters() if p.requires_grad), 0.01)


def _with(cls, model, x, **options):
    train(model, x, cls(model.parameters(), **options), 3)


_ALL = (optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop,
        optim.Adagrad, optim.Adadelta, optim.ASGD)  # fmt: skip
for one in _ALL:
    for foreach in (False, True):
        HABITS[f"{one.__name__} foreach={foreach}"] = partial(_with, one, lr=0.01, foreach=foreach)
for one in (optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad):
    HABITS[f"{one.__name__} fused"] = partial(_with, one, lr=0.01, fused=True)
HABITS |= {
    "Adafactor": partial(_with, optim.Adafactor, lr=0.01, foreach=False),
    "Adafactor foreach": partial(_with, optim.Adafactor, lr=0.01, foreach=True),
    "SGD, all options": partial(_with, optim.SGD, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam amsgrad": partial(_with, optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    "AdamW amsgrad fused": partial(_with, optim.AdamW, lr=0.01, amsgrad=True, fused=True),
    "Adam, its rate a tensor": partial(_with, optim.Adam, lr=torch.tensor(0.01)),
    "RMSprop centered": partial(_with, optim.RMSprop, lr=0.01, centered=True, momentum=0.5),
}


@habit
def muon(model, x):
    train(model, x, optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.01), 3)


def _lbfgs(model, x, **options):
    optimizer = optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, **options)

    def closure():
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)


HABITS["LBFGS"] = _lbfgs
HABITS["LBFGS, strong Wolfe"] = partial(_lbfgs, line_search_fn="strong_wolfe")
for options in ({}, {"foreach": True}, {"norm_type": float("inf")}, {"norm_type": 1.0}, {"error_if_nonfinite": True}):
    clip = partial(lambda options, model: clip_grad_norm_(model.parameters(), 0.1, **options), options)
    HABITS[f"clip_grad_norm_ {options}"] = partial(lambda clip, model, x: train(model, x, sgd(model), 2, clip), clip)


@habit
def clips_values(model, x):
    train(model, x, sgd(model), 2, lambda model: clip_grad_value_(model.parameters(), 0.05))


@habit
def clips_on_a_condition(model, x):
    def change(model):
        norm = clip_grad_norm_(model.parameters(), 1e9)
        if norm > 0.5 or torch.isnan(norm):
            for p in model.parameters():
                p.grad = p.grad * (0.5 / norm)

    train(model, x, sgd(model), 2, change)


@habit
def clips_units(model, x):
    def change(model):
        for p in (p for p in model.parameters() if p.dim() == 2):
            size = p.norm(dim=1, keepdim=True).clamp(min=1e-3) * 0.01
            norm = p.grad.norm(dim=1, keepdim=True)
            p.grad.copy_(torch.where(norm > size, p.grad * (size / norm.clamp(min=1e-6)), p.grad))

    train(model, x, sgd(model), 2, change)


def _averaged(model, x, **options):
    average = swa_utils.AveragedModel(model, **options)
    for _ in range(3):
        train(model, x, sgd(model), 1)
        average.update_parameters(model)
    return [p.detach() for p in average.module.parameters()]


HABITS["averages"] = _averaged
HABITS["moving averages"] = partial(_averaged, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
HABITS["moving averages, each"] = partial(_averaged, avg_fn=swa_utils.get_ema_avg_fn(0.9))


@habit
def averages_by_hand(model, x):
    averages = {name: p.detach().clone() for name, p in model.named_parameters()}
    whole = {name: torch.zeros(p.shape, dtype=p.dtype) for name, p in model.named_parameters()}
    copied = copy.deepcopy(model)
    train(model, x, sgd(model))
    with torch.no_grad():
        for (name, p), other in zip(model.named_parameters(), copied.parameters(), strict=True):
            averages[name].mul_(0.9).add_(p, alpha=0.1)
            whole[name].lerp_(p, 0.1)
            other.lerp_(p, 0.1)
    return [*averages.values(), *whole.values(), *(p.detach() for p in copied.parameters())]


@habit
def looks_ahead(model, x):
    slow, params = [p.detach().clone() for p in model.parameters()], list(model.parameters())
    train(model, x, optim.Adam(params, 0.01))
    with torch.no_grad():
        torch._foreach_lerp_(slow, params, 0.5)
        torch._foreach_copy_(params, slow)


@habit
def keeps_spectral_norm(model, x):
    train(model, x, sgd(model), 1)
    with torch.no_grad():
        w = model.up.weight
        u = torch.ones(len(w), dtype=w.dtype)
        for _ in range(2):
            v = nn.functional.normalize(torch.mv(w.t(), u), dim=0)
            u = nn.functional.normalize(torch.mv(w, v), dim=0)
        w.div_(torch.dot(u, torch.mv(w, v)))


@habit
def keeps_norms(model, x):
    train(model, x, sgd(model), 1)
    with torch.no_grad():
        for p in (p for p in model.parameters() if p.dim() == 2):
            p.mul_((1.0 / (1e-7 + p.norm(2, dim=1, keepdim=True))).clamp(max=1.0))
        model.qkv.weight.data = torch.renorm(model.qkv.weight.data, 2, 0, 0.1)


def _pruned(model, x, cut):
    train(model, x, sgd(model), 1)
    cut(model)
    values = model.up.weight.detach().clone()
    prune.remove(model.up, "weight")
    train(model, x, sgd(model), 1)
    return values


def _at_random(model):
    torch.manual_seed(5)
    prune.random_unstructured(model.up, "weight", 0.3)


HABITS |= {
    "prunes the smallest": partial(_pruned, cut=lambda model: prune.l1_unstructured(model.up, "weight", 0.3)),
    "prunes at random": partial(_pruned, cut=_at_random),
    "prunes rows": partial(_pruned, cut=lambda model: prune.ln_structured(model.up, "weight", 0.3, 2, 0)),
    "prunes by mask": partial(
        _pruned, cut=lambda model: prune.custom_from_mask(model.up, "weight", torch.ones(9, 6).tril())
    ),
}


@habit
def masks_gradients(model, x):
    mask = torch.ones(9, 6, dtype=torch.float64).tril()
    model.qkv.weight.register_hook(lambda grad: grad * torch.ones(12, 9, dtype=torch.float64).triu())
    train(model, x, optim.Adam(model.parameters(), 0.01), 2, lambda model: model.up.weight.grad.mul_(mask))


@habit
def adds_noise(model, x):
    generator = torch.Generator().manual_seed(0)

    def change(model):
        for p in model.parameters():
            p.grad += torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.01

    train(model, x, sgd(model), 2, change)


@habit
def scales(model, x):
    optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(model(x)).backward()
        with torch.no_grad():
            if step == 1:
                model.up.weight.grad[0, 0] = float("inf")  # on one rank only
            if step == 2:
                model.scale.grad.fill_(float("nan"))
        scaler.unscale_(optimizer)
        clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


@habit
def penalises(model, x):
    old = [p.detach().clone() for p in model.parameters()]
    zeros = [torch.zeros(p.shape, dtype=p.dtype) for p in model.parameters()]
    optimizer = sgd(model)
    for _ in range(2):
        optimizer.zero_grad()
        loss = model(x) + 0.01 * sum(p.pow(2).sum() for p in model.parameters())
        loss = loss + sum(p.abs().sum() for p in model.parameters()) * 0.01
        for anchors in (old, zeros):
            loss = loss + sum(((p - q) ** 2).sum() for p, q in zip(model.parameters(), anchors, strict=True))
        loss.backward()
        optimizer.step()
    return loss.item()


@habit
def vectors(model, x):
    vector = nn.utils.parameters_to_vector(model.parameters())
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
    train(model, x, sgd(model), 1)
    return vector.detach()


@habit
def loads_state(model, x):
    optimizer = optim.AdamW(model.parameters(), 0.01)
    train(model, x, optimizer, 1)
    state = copy.deepcopy(optimizer.state_dict())
    optimizer = optim.AdamW(model.parameters(), 0.1)
    optimizer.load_state_dict(state)
    train(model, x, optimizer, 1)


@habit
def runs_with_other_values(model, x):
    halves = {name: p.detach() * 0.5 for name, p in model.named_parameters()}
    return torch.func.functional_call(model, halves, (x,)).item()


@habit
def lion(model, x):
    averages = [torch.zeros_like(p) for p in model.parameters()]
    for _ in range(2):
        model.zero_grad()
        model(x).backward()
        with torch.no_grad():
            for p, average in zip(model.parameters(), averages, strict=True):
                p.mul_(0.999).add_(torch.sign(average * 0.9 + p.grad * 0.1), alpha=-0.01)
                average.lerp_(p.grad, 0.01)


@habit
def shampoo_and_galore(model, x):
    model(x).backward()
    with torch.no_grad():
        for p in (p for p in model.parameters() if p.dim() == 2):
            values, vectors = torch.linalg.eigh(p.grad @ p.grad.T + 0.1 * torch.eye(len(p), dtype=p.dtype))
            p.sub_(vectors @ torch.diag(values.clamp(min=1e-3) ** -0.5) @ vectors.T @ p.grad * 0.01)
            left = torch.linalg.svd(p.grad, full_matrices=False)[0][:, :2]
            p.sub_(0.01 * (left @ (left.T @ p.grad)))


@habit
def statistics(model, x):
    train(model, x, sgd(model), 1)
    numbers = []
    for p in model.parameters():
        flat = p.detach().flatten()
        numbers += [p.mean().item(), p.grad.abs().mean().item(), (p.grad == 0).double().mean().item()]
        numbers += [float(torch.quantile(flat, 0.9)), *flat.histc(4).tolist()]
    return numbers


@habit
def freezes(model, x):
    model.up.weight.requires_grad_(False)
    train(model, x, sgd(model))


@habit
def starts_anew(model, x):
    with torch.no_grad():
        for p in model.parameters():
            torch.manual_seed(3)
            nn.init.orthogonal_(p) if p.dim() == 2 else nn.init.zeros_(p)
    gram = model.up.weight.T @ model.up.weight
    nn.init.constant_(model.up.weight, 0.1), nn.init.constant_(model.qkv.weight, 0.1), nn.init.ones_(model.one.weight)
    train(model, x, sgd(model), 1)
    return gram.detach()


@habit
def gradients_by_hand(model, x):
    sums = [torch.zeros_like(p) for p in model.parameters()]
    for _ in range(2):
        torch._foreach_add_(sums, torch.autograd.grad(model(x), list(model.parameters())))
    for p, total in zip(model.parameters(), sums, strict=True):
        p.grad = total / 2
    sgd(model).step()


# What a compiled module refuses, and what the error says.
REFUSED = {
    "prunes for good": (lambda model, x: (prune.l1_unstructured(model.up, "weight", 0.3), model(x)), "then compile it"),
    "parametrises": (lambda model, x: (parametrizations.weight_norm(model.up), model(x)), "then compile it"),
    "differentiates twice": (
        lambda model, x: torch.autograd.grad(model(x), list(model.parameters()), create_graph=True),
        "create_graph",
    ),
}
