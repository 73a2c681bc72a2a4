"""Plans are written with globs that mean what the solution says, and nothing else."""

import pytest
from torch import nn

import shardc
from examples.models import llama
from shardc.ir.mesh import Mesh
from shardc.ir.repeat import Repeat, Repeats
from shardc.plan.match import matching
from shardc.plan.ports import resolve_activations
from shardc.search.plan_writer import Writer

BLOCKS = Repeats((Repeat("layers", 0, 6),), 4)
MESH = Mesh(dp=2, tp=2)


@pytest.fixture
def writer() -> Writer:
    """Of a decoder of six blocks, four of which are captured."""
    return Writer(llama.Llama(llama.LlamaConfig(layers=6)), MESH, BLOCKS)


@pytest.mark.parametrize("rest", ["", ".attn", ".attn.wq", ".mlp", ".mlp_norm", ".attn.wq.weight"])
def test_a_glob_matches_what_it_stands_for_alone(writer: Writer, rest: str) -> None:
    ((glob, value),) = writer.by_glob({f"layers.{at}{rest}": "x" for at in range(4)})
    names = [*dict(writer.model.named_modules()), *dict(writer.model.named_parameters())]
    assert matching(glob, names) == [f"layers.{at}{rest}" for at in range(6)] and value == "x"


def test_a_glob_has_stars_of_one_part_where_names_nest(writer: Writer) -> None:
    assert [glob for glob, _ in writer.by_glob({f"layers.{at}.mlp.up": 0 for at in range(4)})] == ["layers.*.mlp.up"]
    assert [glob for glob, _ in writer.by_glob(dict.fromkeys(writer.block_names("layers.1"), 0))] == ["./layers.*"]


def test_a_pin_of_a_block_pins_nothing_inside(writer: Writer) -> None:
    pins = dict(writer.by_glob({f"layers.{at}": "_@dp, _, _" for at in range(4)}))
    names = [name for name, _ in writer.model.named_modules()]
    assert [pin.module for pin in resolve_activations(shardc.Plan(activations=pins), names)] == [
        f"layers.{at}" for at in range(6)
    ]


def test_a_module_of_a_nested_name_is_not_meant() -> None:
    """``norm`` of a block, beside ``inner.norm`` of the same block."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.inner = nn.LayerNorm(4), nn.ModuleDict({"norm": nn.LayerNorm(4)})

    model = nn.ModuleDict({"layers": nn.ModuleList(Block() for _ in range(6))})
    writer = Writer(model, MESH, BLOCKS)
    ((glob, _),) = writer.by_glob({f"layers.{at}.norm.weight": 1 for at in range(4)})
    assert matching(glob, dict(model.named_parameters())) == [f"layers.{at}.norm.weight" for at in range(6)]
