"""Explain: layouts and who decided them, the strategies that there were, and costs that add up to the schedule's."""

from __future__ import annotations

import pytest
import torch

import shardc
from examples.models import llama
from shardc.__main__ import main
from shardc.debug.explain_layout import explain
from shardc.errors import InputError
from shardc.ir.mesh import Mesh
from tests import golden

TARGET = ["examples/models/llama.py:example", "--mesh", "dp=2,tp=2", "--plan", 'fsdp("dp") | llama_tp("tp")']


def program(plan: shardc.Plan) -> shardc.Program:
    config = llama.LlamaConfig(layers=1)
    with torch.device("meta"):
        model, (tokens, targets) = llama.Llama(config), llama.batch(config)
    return shardc.compile(model, Mesh(dp=2, tp=2), plan, loss=llama.loss).lower(tokens, targets)


@pytest.fixture(scope="module")
def composed() -> shardc.Program:
    return program(shardc.fsdp("dp") | llama.llama_tp("tp"))


def test_a_parameter_says_which_entries_decided(composed: shardc.Program) -> None:
    found = explain(composed, "layers.0.attn.wo.weight")
    assert [(d.what, d.type, d.who) for d in found.decisions] == [
        ("storage", "f32[64@dp,64@tp]", 'fsdp("dp", level=3)'),
        ("compute", "f32[64,64@tp]", 'tp("tp", rowwise=["layers.*.attn.wo"])'),
        ("gradient", "f32[64@dp,64@tp]", "as storage, so that the optimizer is local"),
    ]
    assert [(u.phase, u.op, [m.kind for m in u.moves]) for u in found.uses] == [
        ("forward", "layers.0.attn.wo.t", ["all_gather"]),
        ("backward", "d.layers.0.attn.wo.mm.1", ["all_gather"]),
        ("backward", "d.layers.0.attn.wo.mm", ["reduce_scatter"]),
    ]


def test_what_uses_cost_adds_up_to_the_schedule(composed: shardc.Program) -> None:
    rows = composed.schedule("cpu", stage="localize").collectives
    for name, _ in llama.Llama(llama.LlamaConfig(layers=1)).named_parameters():
        expected = sum(row.wire for row in rows if row.cause.tensor == name)
        assert explain(composed, name, "cpu").wire == expected > 0


def test_a_value_is_decided_by_the_cheapest_strategy(composed: shardc.Program) -> None:
    found = explain(composed, "layers.0.mlp.down.mm")
    assert (
        found.decisions[0].who == "rule mm: i k, k j -> i j; k: sum, from its operands at [128@dp,128@tp], [128@tp,64]"
    )
    seconds = [price for price, _, _ in found.alternatives]
    assert len(seconds) == 4 and seconds == sorted(seconds)
    assert found.alternatives[0][1:] == ("[128@dp,128@tp], [128@tp,64]", "[128@dp,64]{sum:tp}")


def test_a_pinned_value_names_its_entry() -> None:
    found = explain(program(llama.llama_tp("tp", sequence=True)), "layers.0.mlp.down.view.1.scattered")
    assert (found.kind, found.decisions[0].type) == ("value", "f32[8,16@tp,64]")
    assert found.decisions[0].who.startswith('activations["layers.*.mlp.output"] = "~, @tp, _"')


@pytest.mark.slow
def test_whole_parameters_and_inputs() -> None:
    made = program(shardc.ddp("dp"))
    weight, tokens = explain(made, "norm.weight"), explain(made, "%tokens")
    assert [d.who for d in weight.decisions[:2]] == [
        "no entry speaks of it: whole on every rank",
        "no entry splits it for compute: it is whole there",
    ]
    assert [m.kind for u in weight.uses for m in u.moves] == ["all_reduce"]
    assert (tokens.kind, tokens.decisions[0].who, tokens.wire) == ("input", 'ddp("dp")', 0)


def test_a_name_that_is_not_there(composed: shardc.Program) -> None:
    with pytest.raises(InputError, match="no tensor 'layers.0.attn.q.weight'") as raised:
        explain(composed, "layers.0.attn.q.weight")
    assert "did you mean 'layers.0.attn.wq.weight'" in str(raised.value.fix)


@pytest.mark.slow
def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("layers.0.attn.wq.weight", "layers.0.attn.wo.mm"):
        assert main(["explain", *TARGET, "--hardware", "cpu", "--tensor", name]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    golden.check("\n".join(line.partition(" at /")[0] for line in out.splitlines()) + "\n", "cli/explain")
    assert main(["explain", *TARGET, "--tensor", "nothing"]) == 2
    assert capsys.readouterr().err.startswith("shardc: error: the program has no tensor 'nothing'; ")
