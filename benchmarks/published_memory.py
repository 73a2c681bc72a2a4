"""The memory that the schedule predicts for configurations which torchtitan has trained, beside what it reports.

    python benchmarks/published_memory.py

Sources are torchtitan's ``benchmarks/llama3_h100_202412_torchtitan.md`` (96 GB H100; bf16 with float8 products) and
``docs/performance.md`` (80 GB A100). All have 8,192 tokens a sequence, checkpoint every block, cast parameters to bf16
and reduce gradients in float32. The prediction counts tensors: no allocator's rounding, workspaces or CUDA context.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import shardc  # noqa: E402
from examples.models import llama  # noqa: E402
from shardc.report.schedule import Schedule  # noqa: E402

LLAMA_70B = llama.LlamaConfig(128256, 8192, 80, 64, 8, 28672, 500000.0, checkpoint=True)
LLAMA_405B = llama.LlamaConfig(128256, 16384, 126, 128, 8, 53248, 500000.0, checkpoint=True)


@dataclass(frozen=True)
class Trained:
    """One configuration.

    Args:
        size: sequences of the global batch.
        card: GB of each card.
        reported: GiB, "" where only that it ran.
    """

    name: str
    config: llama.LlamaConfig
    mesh: dict[str, int]
    size: int
    card: int
    reported: str

    def schedule(self) -> Schedule:
        plan = shardc.fsdp("dp") | shardc.precision(param=torch.bfloat16, reduce=torch.float32)
        if "tp" in self.mesh:
            plan |= llama.llama_tp("tp", sequence=True)
        with torch.device("meta"):
            model = llama.Llama(self.config)
        given = llama.batch(self.config, size=self.size, length=8192, device="meta")
        options = shardc.Options(fold=True)
        return (
            shardc.compile(model, shardc.Mesh(self.mesh), plan, loss=llama.loss, options=options)
            .lower(*given)
            .schedule()
        )


TRAINED = (
    Trained("Llama 3 70B, FSDP 64, batch 1 a rank", LLAMA_70B, {"dp": 64}, 64, 80, ""),
    Trained("Llama 3.1 70B, FSDP 32, TP 8, batch 16", LLAMA_70B, {"dp": 32, "tp": 8}, 512, 96, "71.9; 67.6 async TP"),
    Trained(
        "Llama 3.1 405B, FSDP 64, TP 8, batch 2", LLAMA_405B, {"dp": 64, "tp": 8}, 128, 96, "72.7 to 82.5 with PP 8"
    ),
)


def main() -> None:
    rows = []
    for each in TRAINED:
        memory = each.schedule().memory
        held = memory.by_owner()
        rows.append(
            (
                each.name,
                each.card,
                f"{memory.peak.total / 2**30:.1f}",
                each.reported,
                f"{held['activations'] / 2**30:.1f}",
            )
        )
    print(tabulate(rows, ("configuration", "card GB", "predicted GiB", "reported GiB", "activations GiB"), "github"))


if __name__ == "__main__":
    main()
