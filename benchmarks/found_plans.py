"""Plans that are found, run: their steps on gloo ranks beside those of plans by hand, under costs measured here.

    python benchmarks/found_plans.py [--ranks 2 4] [--only llama] [--memory 2GB] [--cost FILE]

For each model and mesh, a plan is searched with the costs that ``calibrate`` measures first. Then ``measure --plans``
runs it and the plans by hand, whose steps take turns: the library's forms and the model's own tensor parallelism. The
ratio is that of the found plan's median to the least median of those by hand.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import shardc  # noqa: E402
from examples.models import convnet, gpt2, llama, vit  # noqa: E402
from shardc.search.request import Auto  # noqa: E402

llama_tp, gpt2_tp, vit_tp, convnet_channels = llama.llama_tp, gpt2.gpt2_tp, vit.vit_tp, convnet.convnet_channels
Target = tuple[nn.Module, tuple[Any, ...]]


def llama_small() -> Target:
    config = llama.LlamaConfig(1024, 256, 2, heads=8, kv_heads=4, hidden=768)
    return llama.Llama(config), llama.batch(config, size=8, length=128)


def gpt2_small() -> Target:
    config = gpt2.GPT2Config(1024, 128, 256, 2, 8)
    return gpt2.GPT2(config), gpt2.batch(config, size=8, length=128)


def vit_small() -> Target:
    config = vit.ViTConfig(image=64, patch=8, dim=256, layers=2, heads=8, classes=128)
    return vit.ViT(config), vit.batch(config, size=8)


def convnet_small() -> Target:
    config = convnet.ConvNetConfig(image=32, widths=(32, 64, 128), classes=128)
    return convnet.ConvNet(config), convnet.batch(config, size=8)


MODELS: dict[str, tuple[Callable[[], Target], list[str]]] = {
    "llama": (llama_small, ['llama_tp("{}")', 'llama_tp("{}", sequence=True)']),
    "gpt2": (gpt2_small, ['gpt2_tp("{}")', 'gpt2_tp("{}", sequence=True)']),
    "vit": (vit_small, ['vit_tp("{}")', 'vit_tp("{}", sequence=True)']),
    "convnet": (convnet_small, ['convnet_channels("{}")']),
}
MESHES = {2: ({"dp": 2},), 4: ({"dp": 2, "tp": 2},)}


def loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy, of tokens or of images."""
    return F.cross_entropy(scores.flatten(0, -2), targets.flatten())


def by_hand(name: str, axes: dict[str, int]) -> list[str]:
    """The library's forms over all axes, and tensor parallelism over the last with the forms over the others."""
    everywhere = f"({', '.join(map(json.dumps, axes))})"
    *rest, last = axes
    plans = [f"ddp({everywhere})", f"fsdp({everywhere})", f"fsdp({everywhere}, level=2)"]
    for text in MODELS[name][1]:
        plan = text.format(last)
        plans += [f"{form} | {plan}" for axis in rest for form in (f'ddp("{axis}")', f'fsdp("{axis}", level=2)')]
        plans += [] if rest else [plan]
    return plans


def shardc_does(*arguments: str) -> None:
    """A command of ``python -m shardc``, one thread a process."""
    surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "shardc", *arguments], check=True, env=surroundings, cwd=ROOT)


def row(name: str, axes: dict[str, int], cost: str, folder: Path, options: argparse.Namespace) -> tuple[Any, ...]:
    """The found plan's predicted and measured step, and those of the fastest plan by hand."""
    model, args = MODELS[name][0]()
    mesh = shardc.Mesh(axes)
    found = shardc.find_plan(model, mesh, *args, loss=loss, memory=options.memory, hardware=cost)
    print(f"\n{name} on {mesh}: {found.plan}", flush=True)
    plans, written = [str(found.plan), *by_hand(name, axes)], folder / "measured.json"
    at = ",".join(f"{axis}={size}" for axis, size in axes.items())
    shardc_does(
        "measure", f"{__file__}:{name}_small", "--loss", "loss", "--nproc", str(mesh.ranks), "--mesh", at,
        "--steps", str(options.steps), "--cost", cost, "--json", str(written), "--plans", *dict.fromkeys(plans),
    )  # fmt: skip
    made = json.loads(written.read_text())
    ours = made[0]
    limit = Auto(options.memory).memory
    fitting = [one for one in made if one["plan"] in plans[1:] and one["memory"][0] <= limit]
    least = min(fitting, key=lambda one: one["seconds"][1])
    return (
        name, str(mesh), f"{ours['seconds'][0] * 1e3:.1f}", f"{ours['seconds'][1] * 1e3:.1f}",
        f"{least['seconds'][0] * 1e3:.1f}", f"{least['seconds'][1] * 1e3:.1f}",
        f"{ours['seconds'][1] / least['seconds'][1]:.3f}", f"{max(ours['memory']) / 1e6:.0f}",
        ours["plan"], least["plan"],
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=sorted(MESHES), choices=MESHES)
    parser.add_argument("--only", default="", metavar="WORD", help="models whose name has this word")
    parser.add_argument("--memory", default="2GB", help="of a rank (default: 2GB); plans that need more are left out")
    parser.add_argument("--steps", type=int, default=21, help="timed steps of each plan (default: 21)")
    parser.add_argument("--cost", metavar="FILE", help="what `calibrate` wrote; by default it is measured first")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    made = []
    with tempfile.TemporaryDirectory() as folder:
        for ranks in options.ranks:
            cost = options.cost or str(Path(folder) / f"cost{ranks}.json")
            if options.cost is None:
                shardc_does("calibrate", "--ranks", str(ranks), "--out", cost)
            cases = [(name, axes) for name in MODELS if options.only in name for axes in MESHES[ranks]]
            made += [row(name, axes, cost, Path(folder), options) for name, axes in cases]
    head = ("model", "mesh", "found ms", "measured", "hand ms", "measured", "ratio", "peak MB", "found", "by hand")
    print("\n" + tabulate(made, head, disable_numparse=True))


if __name__ == "__main__":
    main()
