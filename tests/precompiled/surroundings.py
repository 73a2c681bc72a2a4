"""Models of one start that read what is around them, and what the store says of them. Run with a folder and a name."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardc

PREFIX = "SHARDC_TESTS_"


def scale() -> float:
    return float(os.getenv("SHARDC_TESTS_SCALE", "1"))


READS: dict[str, Callable[[], float]] = {
    "environ": lambda: float(os.environ["SHARDC_TESTS_SCALE"]),
    "getenv in a function": lambda: scale(),
    "a computed name": lambda: float(os.environ[f"{PREFIX}SCALE"]),
    "getenv of a computed name": lambda: float(os.getenv(f"{PREFIX}SCALE", "1")),
    "a name in environ": lambda: 2.0 if "SHARDC_TESTS_OTHER" in os.environ else 3.0,
    "arguments": lambda: float(len(sys.argv)),
    "world size": lambda: float(dist.get_world_size()),
    "default dtype": lambda: 2.0 if torch.get_default_dtype() == torch.float64 else 3.0,
    "tf32": lambda: 2.0 if torch.backends.cuda.matmul.allow_tf32 else 3.0,
    "mkldnn": lambda: 2.0 if torch.backends.mkldnn.enabled else 3.0,
    "cudnn.benchmark": lambda: 2.0 if torch.backends.cudnn.benchmark else 3.0,
    "cudnn.deterministic": lambda: 2.0 if torch.backends.cudnn.deterministic else 3.0,
    "autocast": lambda: 2.0 if torch.is_autocast_enabled("cpu") else 3.0,
    "deterministic algorithms": lambda: 2.0 if torch.are_deterministic_algorithms_enabled() else 3.0,
    "autocast of CUDA": lambda: 2.0 if torch.is_autocast_enabled("cuda") else 3.0,
    "dtype of an autocast that is off": lambda: 2.0 if torch.get_autocast_dtype("cpu") == torch.float16 else 3.0,
    "autocast cache": lambda: 2.0 if torch.is_autocast_cache_enabled() else 3.0,
    "reduced precision": lambda: 2.0 if torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction else 3.0,
    "default device": lambda: 2.0 if torch.empty(0).is_meta else 3.0,
    "grad mode": lambda: 2.0 if torch.is_grad_enabled() else 3.0,
}


class Net(nn.Module):
    """A layer, and what the function ``reads`` gives in forward."""

    def __init__(self, reads: Callable[[], float]) -> None:
        super().__init__()
        self.linear, self.reads = nn.Linear(4, 4), reads

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.reads()


def other(what: str) -> AbstractContextManager[Any]:
    """Makes ``what`` something else than it is by default."""
    if what == "autocast":
        return torch.autocast("cpu", torch.bfloat16)
    if what == "grad mode":
        return torch.no_grad()
    if what == "default device":
        return torch.device("meta")
    set_to: dict[str, Callable[[], Any]] = {
        "default dtype": lambda: torch.set_default_dtype(torch.float64),
        "tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
        "mkldnn": lambda: setattr(torch.backends.mkldnn, "enabled", False),
        "cudnn.benchmark": lambda: setattr(torch.backends.cudnn, "benchmark", True),
        "cudnn.deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", True),
        "deterministic algorithms": lambda: torch.use_deterministic_algorithms(True),
        "autocast of CUDA": lambda: torch.set_autocast_enabled("cuda", True),
        "dtype of an autocast that is off": lambda: torch.set_autocast_dtype("cpu", torch.float16),
        "autocast cache": lambda: torch.set_autocast_cache_enabled(False),
        "reduced precision": lambda: reduces_in_half(False),
    }
    set_to.get(what, lambda: None)()
    return nullcontext()


def reduces_in_half(allowed: bool) -> None:
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = allowed


def as_by_default() -> None:
    torch.set_autocast_enabled("cuda", False)
    torch.set_autocast_dtype("cpu", torch.bfloat16)
    torch.set_autocast_cache_enabled(True)
    reduces_in_half(True)
    torch.set_default_dtype(torch.float32)
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = False
    torch.backends.mkldnn.enabled = True


if __name__ == "__main__":
    folder, changes = Path(sys.argv[1]), "other" in sys.argv
    os.environ |= {"SHARDC_STORE": "1", "SHARDC_TESTS_SCALE": "2" if changes else "3"}
    os.environ |= {"SHARDC_TESTS_OTHER": "1"} if changes else {}
    # Nobody else is in this world; its mesh is the same, however large it is.
    dist.init_process_group("fake", rank=0, world_size=4 if changes else 2, store=FakeStore())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)) if not changes else None
    mesh = mesh or torch.distributed.DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
    warnings.simplefilter("ignore")
    for what, reads in READS.items():
        model = Net(reads)
        module = shardc.compile(model, mesh, shardc.Plan(), backend="eager")
        x = torch.ones(2, 4)
        with other(what) if changes else nullcontext():
            out, expected = module(x), model(x)
        as_by_default()
        torch.testing.assert_close(out.float(), expected.float(), atol=0.02, rtol=0.02)
        program = list(module.shardc.programs.values())[-1]  # without gradients, the second
        print(f"{what}: {program.stored.replace(str(folder), 'FOLDER')}")
