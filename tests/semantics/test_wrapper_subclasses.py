"""Frozen tensors of wrapper subclasses are stored as their inner tensors, and compute as on one device."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import shardc
from shardc.errors import CaptureError, InputError, PrecompiledError
from shardc.program import Program
from tests.semantics import quantised
from tests.semantics.quantised import Int8, Shell, adapted, batch, loss

PLANS = {
    "fsdp1": shardc.fsdp("dp", 1),
    "fsdp2": shardc.fsdp("dp", 2),
    "fsdp3": shardc.fsdp("dp", 3),
    "tp": shardc.tp("dp", colwise=["0.base"], rowwise=["2.base"]),
}
KINDS: dict[str, Any] = {
    "a quantised weight": Int8.of,
    "with metadata": lambda x: Int8.of(x, 0.25),
    "a wrapper in a wrapper": lambda x: Shell(Int8.of(x)),
}


def compiled(model: nn.Module, plan: Any = PLANS["fsdp3"], loss: Any = loss) -> Any:
    return shardc.compile(model, shardc.Mesh(dp=2), plan, loss=loss, backend="eager")


def assert_trains(model: nn.Module, module: Any) -> None:
    """Loss and gradients are those of ``model``."""
    run = shardc.Simulation(module)
    expected = loss(model(batch()[0]), batch()[1])
    torch.testing.assert_close(run(*batch()), expected.detach(), rtol=1e-9, atol=0)
    expected.backward()
    run.backward()
    trained = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert set(run.grads) == set(trained)
    for name, grad in trained.items():
        got = run.ranks.assemble(run.grads[name], run.storages[name])
        torch.testing.assert_close(got[: len(grad)], grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("plan", PLANS)
def test_adapters_on_quantised_weights_train(plan: str) -> None:
    model = adapted()
    module = compiled(model, PLANS[plan])
    assert_trains(model, module)
    assert type(model[0].base.weight) is Int8, "the model has changed"
    names = [name for name, _ in module.named_parameters() if name.startswith("0.base.")]
    assert sorted(names) == ["0.base.bias", "0.base.weight.q", "0.base.weight.scale"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind(kind: str) -> None:
    model = adapted(KINDS[kind])
    assert_trains(model, compiled(model))


def test_the_plan_splits_the_inner_tensor_of_the_same_shape() -> None:
    module = compiled(adapted(), PLANS["tp"])
    inputs = module.lower(*batch()).text("collectives").split("forward:")[0]
    assert "%0.base.weight.q: i8[16@dp,8]" in inputs
    assert "%2.base.weight.q: i8[6,16@dp]" in inputs


class Residual(quantised.Adapted):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x).tanh()


class Stack(nn.Module):
    """Residual layers with quantised weights, which are alike but for the offset of each."""

    def __init__(self, offsets: list[float]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual(6, 6).double() for _ in offsets)
        self.first, self.last = nn.Linear(6, 6).double(), nn.Linear(6, 1).double()
        for layer, offset in zip(self.layers, offsets, strict=True):
            base: Any = layer.base
            quantised.quantise(base, lambda x, offset=offset: Int8.of(x, offset))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("offsets", [[0.1] * 12, [0.1] * 5 + [0.5] + [0.1] * 6], ids=["alike", "another offset"])
def test_layers_are_alike_with_the_same_metadata_only(offsets: list[float]) -> None:
    torch.manual_seed(0)
    model, x, y = Stack(offsets), torch.randn(4, 6).double(), torch.randn(4, 1).double()
    options = shardc.Options(fold=True)
    module = shardc.compile(
        model, shardc.Mesh(dp=2), shardc.fsdp("dp"), loss=nn.functional.mse_loss, backend="eager", options=options
    )
    program = module.lower(x, y)
    assert isinstance(program, Program)
    assert (program.folded is not None) == (len(set(offsets)) == 1)
    torch.testing.assert_close(shardc.Simulation(module)(x, y), nn.functional.mse_loss(model(x), y).detach())


def test_one_tensor_in_two_places() -> None:
    model = adapted()
    model[2] = quantised.Adapted(16, 8).double()
    model[2].base = nn.Linear(8, 16).double()
    model[2].base.weight = model[0].base.weight

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = model[0], model[2].base

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x)[:, :6] + self.two(x)[:, 6:12]

    made = Tied()
    module = compiled(made)
    assert module.one.base._modules["weight"] is module.two._modules["weight"]
    assert_trains(made, module)


class Counts(nn.Module):
    """Adds a buffer of a wrapper subclass."""

    def __init__(self, changes: bool = False) -> None:
        super().__init__()
        self.linear, self.changes = nn.Linear(8, 6).double(), changes
        self.register_buffer("pair", TwoTensor(torch.ones(6).double(), torch.full((6,), 2.0).double()))

    def forward(self, x: Tensor) -> Tensor:
        if self.changes:
            self.pair.add_(1)
        both: Any = self.linear(x) + self.pair
        result: Tensor = both.a * both.b
        return result


def test_buffers_that_change() -> None:
    for changes in (False, True):
        model = Counts(changes)
        module = compiled(model)
        assert set(dict(module.named_buffers())) == {"pair.a", "pair.b"}
        run = shardc.Simulation(module)
        for _ in range(2):
            torch.testing.assert_close(run(*batch()), loss(model(batch()[0]), batch()[1]).detach(), rtol=1e-9, atol=0)
        assert run.buffers["pair.b"][0].tolist() == model.pair.b.tolist()  # type: ignore[operator,union-attr]


def test_precision_converts_as_the_class_does() -> None:
    model = adapted()
    module = compiled(model, PLANS["fsdp3"] | shardc.precision(param=torch.float32), loss=None)
    assert shardc.Simulation(module)(batch()[0]).dtype == torch.float32


# --- what is refused


def refusals(model: nn.Module, says: str, fix: str) -> None:
    with pytest.raises((InputError, CaptureError), match=f"(?s){re.escape(says)}.*fix: .*{re.escape(fix)}"):
        compiled(model).lower(*batch())


def test_a_trained_one_is_refused_at_compile() -> None:
    model = Counts()
    model.weight = nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2)))
    with pytest.raises(InputError, match=r"(?s)parameter 'weight' is a TwoTensor that is trained.*requires_grad_"):
        compiled(model)


def test_one_that_is_trained_later_is_refused() -> None:
    module = compiled(adapted())
    module[0].base.weight.scale.requires_grad_()
    with pytest.raises(CaptureError, match=r"'0.base.weight.scale' is an inner tensor of a Int8"):
        module.lower(*batch())


def test_an_output_of_such_a_class_is_refused() -> None:
    class Gives(Counts):
        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) + self.pair

    with pytest.raises(CaptureError, match=r"(?s)output 'out' of the model is of a wrapper subclass.*fix: return"):
        compiled(Gives(), loss=None).lower(batch()[0])


def test_attributes_and_inner_tensors_of_other_classes_are_refused() -> None:
    model = adapted()
    model.attribute = [model[0].base.weight]
    refusals(model, "attribute 'attribute' is a Int8", "register")
    refusals(adapted(lambda x: Shell(x.to_sparse())), "parameter '0.base.weight' is a sparse_coo tensor", "to_dense")


def test_a_conversion_or_a_replacement_is_refused() -> None:
    module = compiled(adapted())
    before = dict(module.named_parameters())
    for convert in (module.float, lambda: module.to(torch.bfloat16), lambda: module[0].half()):
        with pytest.raises(InputError, match=r"(?s)is a Int8 of torch.float64.*convert the model first"):
            convert()
    with pytest.raises(InputError, match=r"(?s)'weight' of Linear is a Int8.*it cannot be replaced"):
        module[0].base.weight = nn.Parameter(torch.rand(16, 8))
    assert all(x is before[name] and x.dtype == before[name].dtype for name, x in module.named_parameters())
    module.cpu()


# --- what a stored program is of


def is_found(program: Program, module: Any) -> bool:
    """As `shardc.precompiled.store.Store.find` compares."""
    from shardc.precompiled.program_key import described

    model = module.shardc.params.present()
    return not program.guards.unlike(model, loss) and described(model, loss) == program.key.model


def test_the_key_names_code_and_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    program = compiled(adapted()).lower(*batch())
    reached = program.guards.reads.reach(compiled(adapted()).shardc.params.present(), loss)
    assert [where for does, where in program.guards.reads.traced if does not in reached.code_hashes] == []
    assert is_found(program, compiled(adapted()))
    assert not is_found(program, compiled(adapted(KINDS["with metadata"])))
    with monkeypatch.context() as patch:
        patch.setattr(Int8, "dequantize", lambda self: self.q.to(self.dtype) * self.scale * 2)
        assert not is_found(program, compiled(adapted()))
    with monkeypatch.context() as patch:
        patch.setattr(quantised, "dequantised", lambda x: x.dequantize() * 2 if isinstance(x, Int8) else x)
        assert not is_found(program, compiled(adapted()))
    assert is_found(program, compiled(adapted()))


def test_saved_programs_are_refused(tmp_path: Path) -> None:
    """An op table of a library, say, is in no key: a saved program may be of other code."""
    model = adapted()
    compiled(model).lower(*batch()).save(tmp_path)
    for saved in (tmp_path, shardc.load(tmp_path), [shardc.load(tmp_path)]):
        with pytest.raises(PrecompiledError, match="has tensors of wrapper subclasses") as error:
            shardc.compile(model, shardc.Mesh(dp=2), PLANS["fsdp3"], loss=loss, backend="eager", precompiled=saved)
        assert error.value.fix


def test_code_that_is_replaced_after_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    model = adapted()
    module = compiled(model)
    assert_trains(model, module)
    monkeypatch.setattr(Int8, "dequantize", lambda self: self.q.to(self.dtype) * self.scale * 2)
    model.zero_grad()
    assert_trains(model, module)
