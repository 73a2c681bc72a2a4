"""Models of one start on one rank, and what the store says of their programs. Run with a folder and a name."""

from __future__ import annotations

import os
import sys
import warnings
from collections import namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import shardc

Point = namedtuple("Point", "x y")


class Typed(NamedTuple):
    """A result with names."""

    x: Tensor
    y: Tensor


@dataclass
class Out:
    """A result that pytree knows."""

    x: Tensor
    y: Tensor


@dataclass
class Inside:
    """Made and left in forward."""

    x: Tensor
    by: float = 2.0

    def scaled(self) -> Tensor:
        return self.x * self.by


class Net(nn.Module):
    """A layer, whose two results are given as ``kind``."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor) -> Any:
        y = self.linear(x)
        return self.kind(y, Inside(y).scaled())


def patched(self: Any, x: Tensor) -> Any:
    """In the place of ``Net.forward``."""
    return self.kind(self.linear(x), x * 3)


class Ranked(nn.Module):
    """Reads the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * (1.0 if dist.get_rank() == 0 else 2.0)


def local_tuple() -> nn.Module:
    return Net(namedtuple("Local", "x y"))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, vocab_size=32, **sizes))


def models() -> dict[str, tuple[Any, dict[str, Any]]]:
    """Name -> a model and the arguments of a call."""
    torch.export.register_dataclass(Out)
    x, ids = torch.randn(2, 4), torch.zeros(2, 4, dtype=torch.long)
    return {
        "a named tuple": (Net(Point), {"x": x}),
        "a typed named tuple": (Net(Typed), {"x": x}),
        "a dataclass": (Net(Out), {"x": x}),
        "a named tuple inside of a function": (local_tuple(), {"x": x}),
        "the rank": (Ranked(), {"x": x}),
        "a model of transformers": (llama(), {"input_ids": ids, "labels": ids, "use_cache": False}),
    }


if __name__ == "__main__":
    folder, name = Path(sys.argv[1]), sys.argv[2]
    os.environ["SHARDC_STORE"] = "1"
    dist.init_process_group("gloo", init_method=f"file://{folder / name}", rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    warnings.simplefilter("ignore")
    if len(sys.argv) > 3:  # another forward is bound
        Net.forward = patched
    for what, (model, given) in models().items():
        module = shardc.compile(model, mesh, shardc.fsdp("dp"), backend="eager")
        out, expected = module(**given), model(**given)
        assert type(out) is type(expected)
        torch.testing.assert_close(list(pytree.tree_leaves(out)), list(pytree.tree_leaves(expected)))
        (program,) = module.shardc.programs.values()
        print(f"{what}: {program.stored.replace(str(folder), 'FOLDER')}")
