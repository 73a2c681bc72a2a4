"""What the schedule predicts for configurations that others have trained, beside what they report. No GPU is needed.

    python benchmarks/published.py [WORD ...]     (only the configurations whose name has each word)

A prediction lowers the program ahead of time for the mesh of the run. Sources are torchtitan's
``docs/performance.md`` (at 04133643) and, in its ``benchmarks/``, ``llama3_h100_202412_torchtitan.md`` and
``asyncTP_llama3_h100_2025-06_torchtitan.md``. Reported memory is the most that the allocator reserved.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import shardc  # noqa: E402
from examples.models import llama  # noqa: E402
from shardc.report.predicted_schedule import Schedule  # noqa: E402

LLAMA3_8B = llama.LlamaConfig(128256, 4096, 32, 32, 8, 14336, 500000.0)
LLAMA3_70B = llama.LlamaConfig(128256, 8192, 80, 64, 8, 28672, 500000.0)
LLAMA2_13B = llama.LlamaConfig(32000, 5120, 40, 40, 40, 13824)
LLAMA2_70B = llama.LlamaConfig(32000, 8192, 80, 64, 8, 28672)
GIB = 2**30


def _every_second(counts: Counter[bool], ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keeps attention and every second matrix product of a block, as "selective op" does in the published runs."""
    kept = "scaled_dot_product" in str(op)
    if op is torch.ops.aten.mm.default:
        counts[ctx.is_recompute] += 1
        kept = counts[ctx.is_recompute] % 2 == 1
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _contexts() -> Any:
    return create_selective_checkpoint_contexts(partial(_every_second, Counter()))


class Selective(llama.Llama):
    """A Llama whose blocks are checkpointed but for attention and every second matrix product."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        cos, sin = llama.rotary_tables(tokens.shape[1], self.config, like=x)
        for layer in self.layers:
            x = checkpoint(layer, x, cos, sin, use_reentrant=False, context_fn=_contexts)
        return self.head(self.norm(x))


def _full(config: llama.LlamaConfig) -> nn.Module:
    return llama.Llama(replace(config, checkpoint=True))


CHECKPOINTED: dict[str, Callable[[llama.LlamaConfig], nn.Module]] = {
    "none": llama.Llama, "full": _full, "selective op": Selective,
}  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """One configuration.

    Args:
        size: sequences of a batch on each rank of ``dp``.
        saved: which activations are checkpointed.
        tokens: per second and rank, as reported.
        gib: reserved, as reported; 0: not reported. That of 70B is of a run with float8 products, which keeps the same
            activations: between 8B with and without them there are 0.2 GiB.
        fitted: whether the hardware's share of the peak for matrix products was fitted to ``tokens``.
        products: scaling of the layers' products in float8; "" for products in bfloat16.
    """

    name: str
    config: llama.LlamaConfig
    mesh: dict[str, int]
    size: int
    length: int
    saved: str
    hardware: str
    tokens: float
    gib: float = 0.0
    fitted: bool = False
    products: str = ""

    def schedule(self) -> Schedule:
        plan = shardc.fsdp("dp") | shardc.precision(param=torch.bfloat16, reduce=torch.float32)
        if self.products:
            plan |= shardc.precision(matmul="float8", scaling=self.products, modules="layers")
        if "tp" in self.mesh:
            plan |= llama.llama_tp("tp", sequence=True)
        with torch.device("meta"):
            model = CHECKPOINTED[self.saved](self.config)
        given = llama.batch(self.config, size=self.size * self.mesh["dp"], length=self.length, device="meta")
        module = shardc.compile(model, shardc.Mesh(self.mesh), plan, loss=llama.loss, options=shardc.Options(fold=True))
        return module.lower(*given).schedule(self.hardware)

    def predicted(self, schedule: Schedule) -> tuple[float, float]:
        """Tokens per second and rank, and GiB."""
        tokens = self.size * self.length / self.mesh.get("tp", 1) / schedule.seconds
        return tokens, schedule.memory.peak.total / GIB


FSDP64 = {"dp": 64}
TRAINED = (
    Trained("Llama 3 8B, 64 A100", LLAMA3_8B, FSDP64, 1, 8192, "selective op", "a100", 2973, fitted=True),
    Trained("Llama 3 70B, 64 A100", LLAMA3_70B, FSDP64, 1, 8192, "full", "a100", 331),
    Trained("Llama 2 13B, 64 A100", LLAMA2_13B, FSDP64, 2, 4096, "none", "a100", 2162),
    Trained("Llama 2 13B selective, 64 A100", LLAMA2_13B, FSDP64, 2, 4096, "selective op", "a100", 1904),
    Trained("Llama 2 70B, 64 A100", LLAMA2_70B, FSDP64, 2, 4096, "full", "a100", 353),
    Trained("Llama 2 70B selective, 64 A100", LLAMA2_70B, FSDP64, 1, 4096, "selective op", "a100", 355),
    Trained(
        "Llama 3.1 8B, 8 H100", LLAMA3_8B, {"dp": 8}, 2, 8192, "selective op", "h100-500w", 6667, 77.0, fitted=True
    ),
    Trained(
        "Llama 3.1 8B float8, 8 H100",
        LLAMA3_8B,
        {"dp": 8},
        2,
        8192,
        "selective op",
        "h100-500w",
        8532,
        76.8,
        products="tensorwise",
    ),
    Trained("Llama 3.1 8B, 128 H100", LLAMA3_8B, {"dp": 128}, 2, 8192, "selective op", "h100-500w", 6514, 62.0),
    Trained("Llama 3.1 8B, 64 H100, TP 8", LLAMA3_8B, {"dp": 8, "tp": 8}, 12, 8192, "selective op", "h100-500w", 4378),
    Trained(
        "Llama 3.1 70B, 256 H100, TP 8", LLAMA3_70B, {"dp": 32, "tp": 8}, 16, 8192, "full", "h100-500w", 597.3, 71.9
    ),
)


HEADERS = (
    "configuration", "checkpoint", "fitted", "tokens/s", "predicted", "ratio", "reserved GiB", "predicted GiB", "ratio",
)  # fmt: skip


def row(each: Trained) -> tuple[str, ...]:
    """A row of the table: ``HEADERS``."""
    tokens, gib = each.predicted(each.schedule())
    memory = (f"{each.gib:.1f}", f"{gib:.1f}", f"{gib / each.gib:.2f}") if each.gib else ("", f"{gib:.1f}", "")
    fitted = "time" if each.fitted else "held out"
    return (
        each.name, each.saved, fitted, f"{each.tokens:,.0f}", f"{tokens:,.0f}", f"{tokens / each.tokens:.2f}", *memory
    )  # fmt: skip


def main() -> None:
    named = [each for each in TRAINED if all(word in each.name for word in sys.argv[1:])]
    print(tabulate([row(each) for each in named], HEADERS, "github", disable_numparse=True))


if __name__ == "__main__":
    main()
