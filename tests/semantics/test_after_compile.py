"""What a person changes of a module after it was compiled: the next call is of the changed module, as on one device."""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardc
from shardc.errors import CaptureError, ShardcWarning

FACTOR = 1.0
TABLE = {"scale": 1.0}


class Settings:
    def __init__(self) -> None:
        self.power, self.flags = 1.0, {"shift": False}


def closed(factor: list[float]) -> Callable[[Tensor], Tensor]:
    return lambda x: x * factor[0]


class Net(nn.Module):
    """Reads whatever a forward can read."""

    kind = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.drop, self.act = nn.Dropout(0.0), nn.Tanh()
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.alpha, self.scales, self.named = 1.0, [1.0, 1.0], {"gain": 1.0}
        self.settings, self.constant = Settings(), torch.ones((), dtype=torch.float64)
        self.cell = [1.0]
        self.function = closed(self.cell)
        self.steps, self.log = 0, []

    @property
    def twice(self) -> float:
        return 2.0 * self.alpha

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.act(self.inner(x))) * self.alpha * self.kind * FACTOR * TABLE["scale"] * self.twice
        for block, scale in zip(self.blocks, self.scales, strict=False):
            x = block(x) * scale
        x = x * self.named["gain"] ** self.settings.power * self.constant
        if self.settings.flags["shift"]:
            x = x + 1
        if hasattr(self, "extra"):
            x = x * self.extra
        return self.function(x)


def loss(out: Tensor) -> Tensor:
    return out.square().mean()


def inputs() -> Tensor:
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def pair(model: nn.Module | None = None, **options: Any) -> tuple[Any, nn.Module]:
    """A module compiled for two ranks of an abstract mesh, and the same on one device."""
    torch.manual_seed(0)
    source = (Net() if model is None else model).double()
    module = shardc.compile(
        copy.deepcopy(source), shardc.Mesh(dp=2), shardc.fsdp("dp"), loss=loss, backend="eager", **options
    )
    return module, source


def alike(module: Any, source: nn.Module, x: Tensor | None = None, what: str = "") -> None:
    """Loss and gradients of a step are one device's."""
    x = inputs() if x is None else x
    sim = shardc.Simulation(module)
    ours = sim(x)
    sim.backward()
    source.zero_grad()
    theirs = loss(source(x))
    theirs.backward()
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-9, atol=1e-12, msg=lambda text: f"{what}: {text}")
    for name, param in source.named_parameters():
        if param.grad is not None:
            torch.testing.assert_close(sim.grad(name), param.grad, rtol=1e-9, atol=1e-12)


@pytest.fixture(autouse=True)
def same_globals() -> Iterator[None]:
    yield
    globals()["FACTOR"], TABLE["scale"], Net.kind = 1.0, 1.0, 1.0


def set_factor(value: float) -> None:
    globals()["FACTOR"] = value


VALUES: dict[str, Callable[[Any], object]] = {
    "an attribute": lambda m: setattr(m, "alpha", 3.0),
    "one of another type": lambda m: setattr(m, "alpha", 2),
    "a new attribute": lambda m: setattr(m, "extra", 2.0),
    "a class attribute": lambda m: setattr(Net, "kind", 3.0),
    "an attribute over the class's": lambda m: setattr(m, "kind", 2.0),
    "an attribute of a submodule": lambda m: setattr(m.drop, "p", 1.0),
    "a submodule": lambda m: setattr(m, "act", nn.GELU()),
    "a submodule for None": lambda m: setattr(m, "drop", nn.Identity()),
}
CONTAINERS: dict[str, Callable[[Any], object]] = {
    "an item of a list": lambda m: m.scales.__setitem__(0, 2.0),
    "a shorter list": lambda m: m.scales.pop(),
    "an item of a dict": lambda m: m.named.update(gain=2.0),
    "an attribute of an object": lambda m: setattr(m.settings, "power", 2.0) or m.named.update(gain=3.0),
    "something deep inside": lambda m: m.settings.flags.update(shift=True),
    "an object": lambda m: setattr(m, "settings", types.SimpleNamespace(power=0.0, flags={"shift": True})),
    "a constant tensor": lambda m: setattr(m, "constant", torch.full((), 2.0, dtype=torch.float64)),
}
FUNCTIONS: dict[str, Callable[[Any], object]] = {
    "what a function closes over": lambda m: m.function.__closure__[0].cell_contents.__setitem__(0, 3.0),
    "a function": lambda m: setattr(m, "function", torch.sin),
    "a global": lambda m: set_factor(2.0),
    "an item of a global dict": lambda m: TABLE.update(scale=2.0),
    "forward of a module": lambda m: setattr(m.act, "forward", torch.cos),
    "forward of a module, as a method": lambda m: setattr(
        m, "forward", types.MethodType(lambda self, x: self.inner(x) * self.alpha, m)
    ),
    "a forward hook": lambda m: m.inner.register_forward_hook(lambda module, args, out: out * 2),
    "a forward pre-hook": lambda m: m.inner.register_forward_pre_hook(lambda module, args: (args[0] * 2,)),
    "a hook of the whole": lambda m: m.register_forward_hook(lambda module, args, out: out * 2),
    "a hook with keywords": lambda m: m.register_forward_pre_hook(
        lambda module, args, kw: (args, kw), with_kwargs=True
    ),
    "a hook that registers one for the gradient": lambda m: m.inner.register_forward_hook(
        lambda module, args, out: out.register_hook(lambda grad: grad * 2) and None
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", [VALUES, CONTAINERS, FUNCTIONS], ids=["values", "containers", "functions"])
def test_changes_are_compiled_for(changes: dict[str, Callable[[Any], object]]) -> None:
    """One after the other, each once."""
    module, source = pair()
    alike(module, source)
    for made, (what, change) in enumerate(changes.items(), 2):
        change(module)
        change(source)
        for _ in range(2):
            alike(module, source, what=what)
        assert len(module.shardc.programs) == made, what


def test_before_it_is_compiled_too() -> None:
    """What a model has of its own before, in places that a copy may forget."""
    torch.manual_seed(0)
    source = Net().double()
    source.listed = [source.blocks[1]]
    source.forward = types.MethodType(lambda self, x: self.listed[0](self.shared["inner"](x)), source)
    source.shared = {"inner": source.inner.forward}
    source.register_forward_hook(lambda module, args, out: out * 2)
    module = shardc.compile(source, shardc.Mesh(dp=2), shardc.fsdp("dp"), loss=loss, backend="eager")
    alike(module, source)
    with torch.no_grad():  # the compiled module's parameters are these on an abstract mesh
        source.inner.weight.mul_(2)
    alike(module, source)


def test_going_back_finds_the_first_program() -> None:
    module, source = pair()
    for alpha in (1.0, 3.0, 1.0, 3.0):
        module.alpha = source.alpha = alpha
        alike(module, source)
    hook = module.inner.register_forward_hook(lambda module, args, out: out * 2)
    other = source.inner.register_forward_hook(lambda module, args, out: out * 2)
    alike(module, source)
    hook.remove(), other.remove()
    alike(module, source)
    assert len(module.shardc.programs) == 3


def test_a_list_may_go_and_come_back() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.scales = nn.Linear(4, 4), [2.0, 3.0]

        def forward(self, x: Tensor) -> Tensor:
            x = self.inner(x)
            for scale in self.scales or ():
                x = x * scale
            return x

    module, source = pair(Scaled())
    for scales in ([2.0, 3.0], None, [5.0], None):
        module.scales = source.scales = scales
        alike(module, source, what=str(scales))
    assert len(module.shardc.programs) == 3


def test_what_is_not_read_compiles_nothing() -> None:
    module, source = pair()
    for step in range(3):
        module.steps, module.unread = step, object()
        module.log.append(step)
        module.inner.note = step
        alike(module, source)
    assert len(module.shardc.programs) == 1


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.count


def test_what_changes_in_each_step_is_named() -> None:
    module, source = pair(Counting())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(9):
            module.count = source.count = step
            alike(module, source)
    (said,) = [str(w.message) for w in caught if isinstance(w.message, ShardcWarning)]
    assert "compiled 8 times" in said and "model.count is int 7 and was int 6" in said


class Weighted(nn.Module):
    """A loss with numbers of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.weight = 1.0, nn.Buffer(torch.ones(4, dtype=torch.float64))

    def forward(self, out: Tensor) -> Tensor:
        return (out * self.weight).square().mean() * self.factor


def test_the_loss_is_read_too() -> None:
    torch.manual_seed(0)
    source, weighted = nn.Linear(4, 4).double(), Weighted()
    module = shardc.compile(source, shardc.Mesh(dp=2), shardc.fsdp("dp"), loss=weighted, backend="eager")
    for change in (
        lambda: None,
        lambda: setattr(weighted, "factor", 2.0),
        lambda: weighted.weight.copy_(torch.arange(4)),
        lambda: setattr(weighted, "weight", torch.full((4,), 3.0, dtype=torch.float64)),
    ):
        change()
        torch.testing.assert_close(shardc.Simulation(module)(inputs()), weighted(source(inputs())).detach())
    assert len(module.shardc.programs) == 4


def test_a_constant_changed_in_place() -> None:
    module, source = pair()
    alike(module, source)
    module.constant.fill_(3.0)
    source.constant.fill_(3.0)
    alike(module, source)
    alike(module, source)
    assert len(module.shardc.programs) == 2


@pytest.mark.parametrize("kind", ["full_backward", "full_backward_pre", "backward"])
def test_a_backward_hook_is_refused(kind: str) -> None:
    def doubles(*_: Any) -> None: ...

    for of in (lambda m: m[0], lambda m: m):
        module, source = pair(nn.Sequential(nn.Linear(4, 4)))
        alike(module, source)
        handle = getattr(of(module), f"register_{kind}_hook")(doubles)
        with pytest.raises(CaptureError, match=r"backward hook .*doubles, which a compiled program cannot run"):
            shardc.Simulation(module)(inputs())
        handle.remove()
        alike(module, source)
        getattr(of(source), f"register_{kind}_hook")(doubles)
        with pytest.raises(CaptureError, match="backward hook"):
            pair(source)[0].lower(inputs())


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward"])
def test_a_hook_of_all_modules_is_refused(kind: str) -> None:
    module, source = pair(nn.Linear(4, 4))
    alike(module, source)
    handle = getattr(nn.modules.module, f"register_module_{kind}_hook")(lambda *_: None)
    try:
        with pytest.raises(CaptureError, match="is registered for all modules"):
            shardc.Simulation(module)(inputs())
    finally:
        handle.remove()
    alike(module, source)


def test_dynamic_sizes_too() -> None:
    module, source = pair(Counting(), dynamic={"x": {0: "b"}})
    for alpha in (1.0, 3.0, 1.0):
        module.count = source.count = alpha
        for rows in (4, 8):
            alike(module, source, inputs().repeat(rows // 4, 1))


def test_what_an_import_registers_is_nothing_that_the_model_reads() -> None:
    """Libraries register containers of their own, and the program is the same."""
    module = shardc.compile(nn.Linear(4, 4), shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager")
    x = torch.randn(4, 4)
    module.lower(x)
    kind = type("Registered", (), {})
    torch.utils._pytree.register_pytree_node(kind, lambda _: ([], None), lambda *_: kind())
    module.lower(x)
    assert len(module.shardc.programs) == 1
