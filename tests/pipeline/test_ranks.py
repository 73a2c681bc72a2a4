"""Pipeline stages on gloo ranks: training beside one device, outputs and gradients used in other ways."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardc
from examples.models import gpt2, llama
from shardc.errors import BackwardError, InputError
from shardc.ir.mesh import Mesh
from tests.microbatches.programs import Case, contrastive
from tests.microbatches.test_outputs import Averages
from tests.pipeline.programs import CASES, Blocks, blocks, tied
from tests.ranks import device_mesh, run_ranks

PP2, PP4, DP_PP = Mesh(pp=2), Mesh(pp=4), Mesh(dp=2, pp=2)


def pp(schedule: str = "1f1b", microbatches: int = 4, **more: object) -> shardc.Plan:
    return shardc.pp("pp", schedule, microbatches=microbatches, **more)


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def compiled(model: nn.Module, mesh: Mesh, plan: shardc.Plan, **how: object) -> nn.Module:
    return shardc.compile(model, device_mesh(mesh), plan, **{"backend": "eager"} | how)


def gradients_agree(module: nn.Module, model: nn.Module, within: float = 1e-9) -> None:
    for name, p in model.named_parameters():
        grad = module.get_parameter(name).grad
        if p.grad is None:
            assert grad is None, f"{name} has a gradient"
        else:
            assert grad is not None, f"{name} has no gradient"
            scale = max(float(p.grad.norm()), 1e-6)
            error = float((whole(grad) - p.grad).norm()) / scale
            assert error < within, f"{name}: {error}"


def backwards_agree(module: nn.Module, model: nn.Module, loss: Tensor, expected: Tensor, within: float = 1e-9) -> None:
    """Runs both backwards and compares losses and gradients, which are cleared then."""
    loss.backward()
    expected.backward()
    torch.testing.assert_close(whole(loss).detach(), expected.detach(), rtol=within, atol=0)
    gradients_agree(module, model, within)
    module.zero_grad()
    model.zero_grad()


def trained(case: Case, mesh: Mesh, plan: shardc.Plan, within: float = 1e-9, **how: object) -> None:
    """Three steps of AdamW with clipping, beside one device; then an evaluation."""
    module = compiled(case.model, mesh, plan, loss=case.loss, **how)
    trainable = [[p for p in m.parameters() if p.requires_grad] for m in (module, case.model)]
    optimizers = [torch.optim.AdamW(params, lr=1e-2) for params in trainable]
    for _ in range(3):
        loss = module(*module.shard_inputs(*case.args))
        loss.backward()
        expected = case.reference_loss()
        expected.backward()
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=within, atol=0)
        gradients_agree(module, case.model, within)
        for p, q in zip(module.parameters(), case.model.parameters(), strict=True):
            if p.grad is not None:  # AdamW magnifies differences of gradients that are nearly 0
                q.grad = whole(p.grad).clone()
        norms = [torch.nn.utils.clip_grad_norm_(params, 0.5) for params in trainable]
        torch.testing.assert_close(whole(norms[0]), norms[1], rtol=within, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for p, q in zip(module.parameters(), case.model.parameters(), strict=True):
        torch.testing.assert_close(whole(p.detach()), q.detach(), rtol=1e-7, atol=1e-9)
    module.eval(), case.model.eval()
    with torch.no_grad():
        loss = module(*module.shard_inputs(*case.args))
        torch.testing.assert_close(loss, case.reference_loss(), rtol=within, atol=0)


def of_case(name: str, mesh: Mesh, plan: shardc.Plan, **how: object) -> None:
    torch.set_default_dtype(torch.float64)
    trained(CASES[name](), mesh, plan, **how)


def trained_beside_one_device() -> None:
    trained(blocks(), PP2, pp())


class Several(nn.Module):
    """Returns the loss, rows of results, a second loss of an early stage, a number and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Blocks()
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, target: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        first = self.body.first(x)
        hidden = first
        for block in self.body.blocks:
            hidden = hidden + block(hidden)
        out = self.body.last(hidden)
        return {
            "loss": F.mse_loss(out, target), "logits": out, "early": first.square().mean(), "hidden": first,
            "rows": x.shape[0] * torch.ones((), dtype=torch.long), "x": x,
        }  # fmt: skip


def several() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    return Several().double(), (torch.randn(16, 8).double(), torch.randn(16, 4).double())


def outputs_beside_the_loss() -> None:
    model, batch = several()
    module = compiled(model, PP2, pp())
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            results, expected = module(*batch), model(*batch)
        assert list(results) == list(expected)
        for key, value in expected.items():
            torch.testing.assert_close(results[key].detach(), value.detach(), rtol=1e-12, atol=0)
    assert int(module.calls) == int(model.calls) == 2
    results, expected = module(*batch), model(*batch)
    backwards_agree(module, model, results["loss"], expected["loss"])


def two_losses() -> None:
    model, batch = several()
    module = compiled(model, PP2, pp())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for used in (("loss", "early"), ("early",), ("logits",), ("hidden", "loss")):
            results, expected = module(*batch), model(*batch)
            terms = [sum((x[key] * x[key]).sum() for key in used) for x in (results, expected)]
            backwards_agree(module, model, *terms)


def without_a_loss(schedule: str) -> None:
    """The loss is computed outside: a call runs forward alone, its backward the microbatches."""
    case = blocks()
    x, y = case.args
    module = compiled(case.model, PP2, pp(schedule))
    for rows in (16, 8):
        out, expected = module(x[:rows]), case.model(x[:rows])
        torch.testing.assert_close(out.detach(), expected.detach(), rtol=1e-12, atol=0)
        backwards_agree(module, case.model, F.mse_loss(out, y[:rows]), F.mse_loss(expected, y[:rows]))


def modes_and_shapes() -> None:
    """Training, evaluation and calls without gradients of several shapes, in turns."""
    case = blocks()
    x, y = case.args
    module = compiled(case.model, PP2, pp(), loss=case.loss)
    for rows, training, grad in (
        (16, True, True),
        (8, False, True),
        (12, True, False),
        (16, True, True),
        (5, True, True),
    ):
        module.train(training), case.model.train(training)
        with torch.set_grad_enabled(grad):
            loss, expected = module(x[:rows], y[:rows]), F.mse_loss(case.model(x[:rows]), y[:rows])
        if grad:
            backwards_agree(module, case.model, loss, expected)
        else:
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    with torch.inference_mode():
        torch.testing.assert_close(module(x, y), F.mse_loss(case.model(x), y), rtol=1e-12, atol=0)


def gradient_of_an_input() -> None:
    case = blocks()
    x, y = case.args
    module = compiled(case.model, PP2, pp(), loss=case.loss)
    wanted, local = x.clone().requires_grad_(), x.clone().requires_grad_()
    backwards_agree(module, case.model, module(local, y), F.mse_loss(case.model(wanted), y))
    torch.testing.assert_close(local.grad, wanted.grad, rtol=1e-9, atol=1e-14)


class Scales(nn.Module):
    """Parameters without dims, in both stages and in front of them, one read by both."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.body = Blocks()
        self.last = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x * self.gain) * self.last * self.gain


def scalars(mesh: Mesh, plan: shardc.Plan) -> None:
    torch.manual_seed(0)
    model = Scales().double()
    x, y = torch.randn(16, 8).double(), torch.randn(16, 4).double()
    trained(Case(model, (x, y), F.mse_loss), mesh, plan)


def frozen() -> None:
    """Some parameters, and all of the first stage, of the last, and of both."""
    for at in ((0,), (0, 1), (2, 3)):
        trained(blocks(frozen=at), PP2, pp())
    case = blocks(frozen=(0, 1))
    case.model.first.requires_grad_(False)
    trained(case, PP2, pp())
    case = blocks(frozen=(2, 3))
    case.model.last.requires_grad_(False)
    trained(case, PP2, pp("zbv", cut="auto"))
    case = blocks(frozen=(0, 1, 2, 3))
    case.model.first.requires_grad_(False), case.model.last.requires_grad_(False)
    module = compiled(case.model, PP2, pp(), loss=case.loss)
    torch.testing.assert_close(module(*case.args), case.reference_loss(), rtol=1e-12, atol=0)


def backward_twice() -> None:
    case = blocks()
    module = compiled(case.model, PP2, pp(), loss=case.loss)
    loss = module(*case.args)
    loss.backward(retain_graph=True)
    loss.backward()
    (2 * case.reference_loss()).backward()
    gradients_agree(module, case.model)
    with pytest.raises(BackwardError, match="already run"):
        loss.backward()


def two_calls_before_the_backward() -> None:
    case = blocks()
    module = compiled(case.model, PP2, pp(), loss=case.loss)
    first, second = module(*case.args), module(*(2 * x for x in case.args))
    expected = case.reference_loss() + 3 * F.mse_loss(case.model(2 * case.args[0]), 2 * case.args[1])
    backwards_agree(module, case.model, first + 3 * second, expected)


def looked_at_between() -> None:
    """A rank that found the program in the store compiles one to look at, and goes on with that of the others."""
    case = blocks()
    module = compiled(case.model, PP2, pp(), loss=case.loss)
    module(*case.args).backward()
    for _ in range(2):
        assert module.shardc.lower(*case.args).text("propagate")
        module.zero_grad()
        module(*case.args).backward()
    case.reference_loss().backward()
    gradients_agree(module, case.model)


def copied() -> None:
    case = blocks()
    module = copy.deepcopy(compiled(case.model, PP2, pp(), loss=case.loss))
    backwards_agree(module, case.model, module(*case.args), case.reference_loss())


def changes_buffers() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.tail = Blocks(), Averages()

        def forward(self, x: Tensor) -> Tensor:
            return self.tail(self.body.features(x))

    torch.manual_seed(0)
    model, x = Model().double(), torch.randn(16, 8).double()
    module = compiled(model, PP2, pp())
    for _ in range(2):
        backwards_agree(module, model, module(x).square().mean(), model(x).square().mean())
    torch.testing.assert_close(module.tail.scale, model.tail.scale)


def dropout(mesh: Mesh, plan: shardc.Plan) -> None:
    """Draws are those of the same batch without stages."""
    torch.set_default_dtype(torch.float64)
    results = []
    for case_plan, case_mesh in ((shardc.microbatches(4), Mesh(one=1)), (plan, mesh)):
        case = tied(dropout=0.2)
        if case_mesh == mesh:
            module = compiled(case.model, mesh, case_plan, loss=gpt2.loss)
            run, args = module, module.shard_inputs(*case.args)
        else:
            run = shardc.Simulation(shardc.compile(case.model, case_mesh, case_plan, loss=gpt2.loss, backend="eager"))
            args = case.args
        losses = []
        torch.manual_seed(7)
        for _ in range(2):
            losses.append(run(*args).detach())
        results.append(losses)
    torch.testing.assert_close(results[0], results[1], rtol=1e-10, atol=0)


def library_model() -> None:
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, use_cache=False)).double().train()
    tokens = torch.randint(3, 64, (8, 8))
    labels = tokens.clone()
    labels[0, 3:] = -100
    batch = {"input_ids": tokens, "attention_mask": torch.ones(8, 8).long(), "labels": labels}
    module = compiled(model, PP2, pp())
    results, expected = module(**batch), model(**batch)
    torch.testing.assert_close(results.logits.detach(), expected.logits.detach(), rtol=1e-9, atol=1e-12)
    backwards_agree(module, model, results.loss, expected.loss, within=1e-6)  # its norms are in float32


def in_bfloat16() -> None:
    """Stages of a policy compute what the same policy computes without stages."""
    case = blocks()
    case.model.float()
    args = [x.float() for x in case.args]
    precision = shardc.precision(param=torch.bfloat16, reduce=torch.float32)
    results = []
    for plan, mesh in ((shardc.ddp("dp") | shardc.microbatches(4), Mesh(dp=2)), (pp(), PP2)):
        module = compiled(case.model, mesh, plan | precision, loss=case.loss)
        loss = module(*args)
        loss.backward()
        results.append([loss.detach(), *(whole(p.grad) for p in module.parameters())])
    torch.testing.assert_close(results[0], results[1], rtol=2e-2, atol=1e-4)


def in_autocast() -> None:
    case = blocks()
    case.model.float()
    args = [x.float() for x in case.args]
    module = compiled(case.model, PP2, pp(), loss=case.loss)
    with torch.autocast("cpu", torch.bfloat16):
        loss, expected = module(*args), case.loss(case.model(args[0]), args[1])
    backwards_agree(module, case.model, loss, expected, within=3e-2)


def compares_rows() -> None:
    """A contrastive loss, whose layers run before the forward, too."""
    torch.set_default_dtype(torch.float64)
    case = contrastive()
    trained(case, PP2, pp())
    with torch.no_grad():
        module = compiled(case.model, PP2, pp("zbv"))
        torch.testing.assert_close(module(*case.args), case.reference_loss(), rtol=1e-9, atol=0)


def in_one_call(plan: shardc.Plan, wraps: bool) -> None:
    """`train_step` clips, returns the norm, updates and schedules; `value_and_grad` gives the gradients."""
    case = blocks()
    module = compiled(case.model, PP2, plan, loss=case.loss)
    value, grads = shardc.value_and_grad(module)(*case.args)
    expected = case.reference_loss()
    torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=0)
    expected.backward()
    for name, p in case.model.named_parameters():
        torch.testing.assert_close(whole(grads[name]), p.grad, rtol=1e-9, atol=1e-14)
        assert module.get_parameter(name).grad is None
    case.model.zero_grad()
    plain = torch.optim.SGD(case.model.parameters(), lr=0.1, momentum=0.9)
    args = {"lr": 0.1, "momentum": 0.9}
    ours = shardc.optim.wrap(torch.optim.SGD, module, **args) if wraps else torch.optim.SGD(module.parameters(), **args)
    schedulers = [torch.optim.lr_scheduler.StepLR(x, 1, 0.5) for x in (ours, plain)]
    step = shardc.train_step(module, ours, max_norm=0.05, scheduler=schedulers[0])
    for _ in range(3):
        loss, expected = step(*case.args), case.reference_loss()
        expected.backward()
        norm = nn.utils.clip_grad_norm_(case.model.parameters(), 0.05)
        plain.step()
        plain.zero_grad()
        schedulers[1].step()
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-9, atol=0)
        torch.testing.assert_close(step.norm, norm, rtol=1e-9, atol=0)
        assert all(p.grad is None for p in module.parameters())
    assert ours.param_groups[0]["lr"] == plain.param_groups[0]["lr"] == 0.0125
    for p, q in zip(module.parameters(), case.model.parameters(), strict=True):
        torch.testing.assert_close(whole(p.detach()), q.detach(), rtol=1e-9, atol=1e-12)


SMALL: dict[str, list[Callable[[], None]]] = {
    "training": [
        trained_beside_one_device,
        frozen,
        partial(scalars, PP2, pp()),
        partial(scalars, PP2, pp("dualpipev")),
    ],
    "one call": [partial(in_one_call, pp(), True), partial(in_one_call, pp("zbv"), False)],
    "outputs": [outputs_beside_the_loss, two_losses, changes_buffers, library_model],
    "calls": [modes_and_shapes, partial(without_a_loss, "1f1b"), partial(without_a_loss, "zb")],
    "backwards": [looked_at_between, gradient_of_an_input, backward_twice, two_calls_before_the_backward, copied],
    "whole batch": [partial(of_case, "balanced experts", PP2, pp("zb"), backend="inductor"), compares_rows],
    "dtypes and draws": [in_bfloat16, in_autocast, partial(dropout, PP2, pp())],
}


@pytest.mark.parametrize("name", SMALL)
def test_two_ranks(name: str) -> None:
    run_ranks(2, *SMALL[name])


@pytest.mark.slow
def test_saved_values_of_backwards_in_two() -> None:
    run_ranks(
        2,
        partial(of_case, "blocks", PP2, shardc.save("blocks.*", on="host") | pp("zbv"), backend="inductor"),
        partial(of_case, "blocks", PP2, shardc.save("blocks.*", on="recompute") | pp("zb")),
    )


def stages_of_experts() -> None:
    """Expert parallel inside of a stage, against one device."""
    torch.set_default_dtype(torch.float64)
    case = CASES["experts"]()
    plan = shardc.ddp("dp") | shardc.ep("dp", "model.model.layers.*.mlp.experts") | pp()
    trained(case, DP_PP, plan, within=1e-5)


def stages_over_capacity() -> None:
    """The last layer's router chooses two experts of one rank: ranks of both stages raise."""
    torch.set_default_dtype(torch.float64)
    case = CASES["experts"]()
    with torch.no_grad():
        for layer, second in zip(case.model.model.model.layers, (2, 2, 2, 1), strict=True):
            weight = layer.mlp.gate.weight
            weight.copy_(torch.tensor([-0.9] * 4).unsqueeze(1).expand_as(weight))
            weight[0], weight[second], weight[3 - second] = 1.0, 0.9, -1.0
    blocks = {"dispatch": "bounded", "capacity": 1.0}
    plan = shardc.ddp("dp") | shardc.ep("dp", "model.model.layers.*.mlp.experts", **blocks) | pp()
    module = compiled(case.model, DP_PP, plan)
    with pytest.raises(InputError, match="layers.3.mlp.experts: rank|experts of another stage") as caught:
        module(*module.shard_inputs(*case.args))
    assert ("another stage" in str(caught.value)) == (dist.get_rank() % 2 == 0)
    assert all(p.grad is None for p in module.parameters())


FOUR: list[Callable[[], None]] = [
    partial(of_case, "blocks", PP4, pp("zb", stages_per_rank=1)),
    partial(scalars, DP_PP, shardc.fsdp("dp") | pp()),
    partial(of_case, "masked", DP_PP, shardc.fsdp("dp", level=1) | pp()),
    partial(of_case, "tied", DP_PP, shardc.fsdp("dp", level=2) | pp("zbv")),
    partial(of_case, "tied", Mesh(pp=2, dp=2), shardc.fsdp("dp") | pp("interleaved")),
    partial(of_case, "blocks", Mesh(pp=2, dp=2), shardc.fsdp("dp") | shardc.recompute("blocks.*") | pp()),
    partial(of_case, "blocks", DP_PP, shardc.fsdp("dp") | shardc.offload("blocks.*") | pp()),
    partial(of_case, "blocks", Mesh(rep=2, dp=1, pp=2), shardc.hsdp("dp", "rep") | pp()),
    partial(of_case, "masked", Mesh(pp=2, tp=2), llama.llama_tp("tp") | pp()),
    partial(dropout, DP_PP, shardc.fsdp("dp") | pp()),
    stages_of_experts,
    stages_over_capacity,
    partial(of_case, "balanced experts", DP_PP, shardc.fsdp("dp", level=2) | pp("interleaved")),
]


def by_inductor(mesh: Mesh, plan: shardc.Plan) -> None:
    """A step in float32: loss, gradients, and the parameters behind it."""
    case = blocks()
    case.model.float()
    args = [x.float() for x in case.args]
    module = compiled(case.model, mesh, plan, loss=case.loss, backend="inductor")
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (module, case.model)]
    loss, expected = module(*module.shard_inputs(*args)), case.loss(case.model(args[0]), args[1])
    loss.backward()
    expected.backward()
    torch.testing.assert_close(whole(loss).detach(), expected.detach(), rtol=1e-5, atol=0)
    gradients_agree(module, case.model, within=1e-5)
    for optimizer in optimizers:
        optimizer.step()
    for p, q in zip(module.parameters(), case.model.parameters(), strict=True):
        torch.testing.assert_close(whole(p.detach()), q.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_four_ranks_with_inductor() -> None:
    run_ranks(
        4,
        partial(by_inductor, PP4, pp("1f1b")),
        partial(by_inductor, Mesh(pp=2, dp=2), shardc.fsdp("dp") | pp("zbv")),
    )


@pytest.mark.slow
def test_four_ranks() -> None:
    run_ranks(4, *FOUR)
