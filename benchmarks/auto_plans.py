"""Plans that are found: what finding them takes, and their predicted steps beside those of plans written by hand.

    python benchmarks/auto_plans.py [--only WORD] [--skip-large]

Two tables. The first has the size of the problem of choosing all layouts (storage and batch open, parameters stored
over the first axis), the seconds that making and solving it took, its value, bound and gap, and the memory of the
process. The second has the predicted step of the plan that a search finds, and that of the best plan by hand: the
library's forms, ``Plan.from_hf`` and the tensor parallel plans of ``examples/models``.

autoparallel (meta-pytorch/autoparallel, as its documentation and issues report): Llama 3 8B on 64 ranks 453,000
variables, 15 s to build and 36.5 s to solve; 44 to 60 s for 8B and DeepSeek-V3; 32 layers before folding 29.5 minutes.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import combinations
from multiprocessing import get_context
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import shardc  # noqa: E402
from examples.models import convnet, gpt2, llama, vit  # noqa: E402
from shardc.cost.hardware import H100  # noqa: E402
from shardc.passes.layout.exact.chooser import (  # noqa: E402
    OpenLayoutProblem,
    StorageChoice,
    Weights,  # noqa: E402
)
from shardc.search.captured_model import CapturedModel, ModelCall  # noqa: E402
from shardc.search.memory_fit import LEAST  # noqa: E402
from shardc.search.plan_search import COPIES, Search, storages  # noqa: E402
from shardc.solver import solve  # noqa: E402

LIMIT = 80e9


def _decoder(layers: int, size: int = 8, length: int = 8192) -> ModelCall:
    config = llama.LlamaConfig(128256, 4096, layers, heads=32, kv_heads=8, hidden=14336, rope_theta=500000.0)
    return _model(*llama.build(config, "meta", size=size, length=length))


def _405b() -> ModelCall:
    return _model(*llama.llama3_405b(126, size=1024))


def _gpt2(layers: int = 12) -> ModelCall:
    config = gpt2.GPT2Config(50304, 1024, 768, layers, 12)
    with torch.device("meta"):
        return _model(gpt2.GPT2(config), gpt2.batch(config, size=64, length=1024, device="meta")[:1])


def _vision(kind: Any, batch: Callable[..., Any], config: Any) -> ModelCall:
    with torch.device("meta"):
        return _model(kind(config), batch(config, size=256, device="meta")[:1])


def _model(model: torch.nn.Module, args: tuple[Any, ...]) -> ModelCall:
    return ModelCall(model.train(), args, {}, None, torch.device("cpu"))


class VGG(nn.Sequential):
    """VGG 16: convolutions with most of the operations, then products with most of the parameters."""

    def __init__(self) -> None:
        widths, last = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0), 3
        layers: list[nn.Module] = []
        for width in widths:
            layers += [nn.Conv2d(last, width, 3, padding=1), nn.ReLU()] if width else [nn.MaxPool2d(2)]
            last = width or last
        head = [nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)]
        super().__init__(*layers, nn.Flatten(), *head)


class Clicks(nn.Module):
    """A recommender: tables of 2 million rows, looked up by id, and a small network over what they give."""

    def __init__(self, tables: int = 8, rows: int = 2_000_000, width: int = 64) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, width) for _ in range(tables))
        self.mlp = nn.Sequential(nn.Linear(tables * width, 1024), nn.ReLU(), nn.Linear(1024, 512), nn.ReLU())
        self.last = nn.Linear(512, 1)

    def forward(self, ids: Tensor) -> Tensor:
        found = [table(ids[:, at]) for at, table in enumerate(self.tables)]
        return self.last(self.mlp(torch.cat(found, 1)))


def _vgg() -> ModelCall:
    with torch.device("meta"):
        return _model(VGG(), (torch.empty(256, 3, 224, 224),))


def _clicks() -> ModelCall:
    with torch.device("meta"):
        return _model(Clicks(), (torch.empty(16384, 8, dtype=torch.int64),))


VIT = vit.ViTConfig(image=224, patch=16, dim=1024, layers=24, heads=16, classes=1024)
CONVNET = convnet.ConvNetConfig(image=64, widths=(64, 128, 256, 512), classes=1024)
FACES = convnet.ConvNetConfig(image=112, widths=(64, 128, 256, 512), classes=1_000_000)
MODELS: dict[str, Callable[[], ModelCall]] = {
    "Llama 8B, 1 layer": partial(_decoder, 1),
    "Llama 8B": partial(_decoder, 32),
    "Llama 405B": _405b,
    "GPT-2": _gpt2,
    "ViT": lambda: _vision(vit.ViT, vit.batch, VIT),
    "convnet": lambda: _vision(convnet.ConvNet, convnet.batch, CONVNET),
    "faces": lambda: _vision(convnet.ConvNet, convnet.batch, FACES),
    "VGG": _vgg,
    "clicks": _clicks,
}
SIZES = [
    ("Llama 8B", {"dp": 8}), ("Llama 8B", {"dp": 8, "tp": 8}), ("Llama 8B", {"dp": 2, "cp": 2, "tp": 2}),
    ("GPT-2", {"dp": 8, "tp": 8}), ("Llama 405B", {"dp": 128, "cp": 16, "tp": 8}),
]  # fmt: skip
PAIRS = [
    ("Llama 8B, 1 layer", {"dp": 8}), ("Llama 8B, 1 layer", {"tp": 8}), ("Llama 8B, 1 layer", {"dp": 8, "tp": 8}),
    ("Llama 8B, 1 layer", {"dp": 4, "tp": 2}), ("Llama 8B", {"dp": 8, "tp": 8}), ("Llama 8B", {"dp": 16, "tp": 4}),
    ("GPT-2", {"dp": 8}), ("GPT-2", {"dp": 2, "tp": 4}), ("GPT-2", {"tp": 4}),
    ("ViT", {"dp": 4, "tp": 2}), ("ViT", {"tp": 4}), ("convnet", {"dp": 4, "tp": 2}),
    ("VGG", {"dp": 8}), ("VGG", {"dp": 4, "tp": 2}), ("clicks", {"dp": 8}), ("clicks", {"dp": 4, "tp": 2}),
    ("faces", {"dp": 8}), ("faces", {"dp": 4, "tp": 2}),
]  # fmt: skip
HANDS: dict[str, list[Callable[[str], shardc.Plan]]] = {
    "Llama": [llama.llama_tp, partial(llama.llama_tp, sequence=True)],
    "GPT-2": [gpt2.gpt2_tp, partial(gpt2.gpt2_tp, sequence=True)],
    "ViT": [vit.vit_tp, partial(vit.vit_tp, sequence=True)],
    "convnet": [convnet.convnet_channels],
    "faces": [convnet.convnet_channels, lambda axis: shardc.tp(axis, colwise=["head"])],
    "VGG": [lambda axis: shardc.tp(axis, colwise=["32", "36"], rowwise=["34"])],
    "clicks": [
        lambda axis: shardc.tp(axis, vocab=["tables.*"], colwise=["mlp.0"], rowwise=["mlp.2"]),
        lambda axis: shardc.tp(axis, vocab=["tables.*"]),
    ],
}


def size_row(name: str, axes: dict[str, int]) -> tuple[Any, ...]:
    """What the problem of one model on one mesh takes."""
    mesh = shardc.Mesh(axes)
    captured_model = CapturedModel.of(MODELS[name](), shardc.Plan(), mesh)
    start = time.perf_counter()
    planned = captured_model.graph(mesh, shardc.Plan(), shardc.Options(cost=H100), None)
    batches = tuple(some for count in range(len(mesh.axes) + 1) for some in combinations(mesh.axes, count))
    free = StorageChoice(mesh.axes[:1], partial(storages, mesh.axes[:1]), batches, COPIES)
    choice = OpenLayoutProblem(planned.problem, planned.graph, Weights(of=captured_model.weight), free=free)
    energy = choice.energy(LEAST)
    built = time.perf_counter()
    solution = solve(energy)
    solved = time.perf_counter()
    labels = [len(costs) for costs in energy.unary]
    return (
        name, str(mesh), len(labels), f"{sum(labels) / len(labels):.0f}", f"{built - start:.1f}",
        f"{solved - built:.1f}", f"{solution.value * 1e3:.1f}", f"{solution.bound * 1e3:.1f}", f"{solution.gap:.0e}",
        f"{getrusage(RUSAGE_SELF).ru_maxrss / 1e6:.1f}",
    )  # fmt: skip


def hands(name: str, mesh: shardc.Mesh) -> Iterator[shardc.Plan]:
    """The tensor parallel plans by hand of a model: the last axis, and FSDP or DDP over the rest."""
    axis, rest = mesh.axes[-1], mesh.axes[:-1]
    for plan in next(found for word, found in HANDS.items() if name.startswith(word)):
        yield plan(axis)
        for form in (lambda axes: shardc.fsdp(axes), lambda axes: shardc.fsdp(axes, level=2)):
            if rest:
                yield form(rest) | plan(axis)


def pair_row(name: str, axes: dict[str, int]) -> tuple[Any, ...]:
    """The plan that a search finds beside the best by hand."""
    mesh = shardc.Mesh(axes)
    captured_model = CapturedModel.of(MODELS[name](), shardc.Plan(), mesh)
    search = Search(
        captured_model, mesh, shardc.Plan(), H100, LIMIT, shardc.Options(cost=H100, verify=False, p2p_collectives=False)
    )
    start = time.perf_counter()
    search.forms()
    search.run()
    while (best := search.best()) is not None and best.estimate is not None:
        search.confirm(best)
    took = time.perf_counter() - start
    assert best is not None, "no plan fits"
    forms = [(each.seconds, each.memory) for each in search.tried.values() if each.origin != "found"]
    hand = filter(None, (search.schedule(plan, captured_model) for plan in hands(name, mesh)))
    by_hand = [*forms, *((s.seconds, s.memory.peak.total) for s in hand)]
    fitting = [seconds for seconds, memory in by_hand if memory <= LIMIT]
    least = min(fitting, default=float("inf"))
    return (
        name, str(mesh), f"{best.seconds * 1e3:.1f}", f"{best.memory / 1e9:.1f}",
        f"{least * 1e3:.1f}" if fitting else "none fits", f"{best.seconds / least:.3f}" if fitting else "",
        f"{took:.0f}", best.origin,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="WORD", help="rows whose model and mesh have this word")
    parser.add_argument("--skip-large", action="store_true", help="leave out the mesh of 16,384 ranks")
    options = parser.parse_args()
    head = ("model", "mesh", "variables", "labels", "build s", "solve s", "value ms", "bound ms", "gap", "GB")
    _table("the problem, as it is and solved, on one core", head, size_row, SIZES, options)
    head = ("model", "mesh", "found ms", "GB/rank", "hand ms", "ratio", "search s", "origin")
    _table("predicted steps: found, and the best by hand (H100, 80 GB)", head, pair_row, PAIRS, options)


def _table(
    title: str, head: tuple[str, ...], row: Callable[..., Any], cases: list[Any], options: argparse.Namespace
) -> None:
    """Prints a table, each row from a process of its own."""
    rows = []
    for name, axes in cases:
        text = f"{name} {shardc.Mesh(axes)}"
        if options.only in text and not (options.skip_large and shardc.Mesh(axes).ranks > 1024):
            with ProcessPoolExecutor(1, get_context("spawn"), _alone) as pool:
                rows.append(pool.submit(row, name, axes).result())
            print(*rows[-1], sep="  ", file=sys.stderr)
    print(f"\n{title}\n\n{tabulate(rows, head, disable_numparse=True)}")


def _alone() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


if __name__ == "__main__":
    main()
