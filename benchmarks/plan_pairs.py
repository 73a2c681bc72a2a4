"""How long the planner takes for a pair of layouts on meshes of three axes: cold, and from its memo.

    python benchmarks/plan_pairs.py [--pairs 200] [--seconds 30]

Pairs are drawn with a fixed seed from every layout of a tensor, with two sub-dims a dim and pending sums: most are far
harder than what programs ask for. *over* counts those beyond the aim of 5 ms cold and 200 us warm.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

from tabulate import tabulate

from shardc.cost.model import CostModel
from shardc.cost.redistribute import steps
from shardc.ir.layout import Layout
from shardc.ir.mesh import Mesh

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.layouts import every_layout  # noqa: E402

TENSORS = [
    (Mesh(a=2, b=2, c=2), (64, 64), ()),
    (Mesh(a=2, b=2, c=2), (64, 64), (8, 8)),
    (Mesh(dp=4, cp=2, tp=8), (1024, 4096), ()),
    (Mesh(dp=4, cp=2, tp=8), (64, 512, 4096), ()),
]
PROGRAMS = [  # on dp=4 cp=2 tp=8: gathers, scatters and exchanges that plans make
    ("[4096@(tp,dp),1024]", "[4096@tp,1024]"),
    ("[4096@tp,1024]{sum:dp}", "[4096@(tp,dp),1024]"),
    ("[64@dp,512@(cp,tp),4096]", "[64@dp,512@cp,4096]"),
    ("[64@dp,512@cp,4096]{sum:tp}", "[64@dp,512@(cp,tp),4096]"),
    ("[64@dp,512@tp,32,128]", "[64@dp,512,32@tp,128]"),
    ("[4096@dp,3072@tp]", "[4096@dp,(3 1024@tp)]"),
]


def seconds(src: Layout, dst: Layout) -> float:
    start = time.perf_counter()
    steps(src, dst, 2, CostModel())
    return time.perf_counter() - start


def row(name: str, pairs: list[tuple[Layout, Layout]], limit: float) -> list[object]:
    steps.cache_clear()
    end, cold, done = time.perf_counter() + limit, [], []
    for pair in pairs:
        cold.append(seconds(*pair))
        done.append(pair)
        if time.perf_counter() > end:
            break
    warm = sorted(seconds(*pair) for pair in done)
    cold.sort()
    cells: list[object] = [name, len(done)]
    for times, aim, unit in ((cold, 5e-3, 1e3), (warm, 200e-6, 1e6)):
        cells += [f"{times[len(times) // 2] * unit:.2f}", f"{times[-1] * unit:.2f}", sum(t > aim for t in times)]
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200, help="pairs of each tensor")
    parser.add_argument("--seconds", type=float, default=30, help="stop drawing pairs of a tensor after this long")
    options = parser.parse_args()
    draw, mesh = random.Random(0), Mesh(dp=4, cp=2, tp=8)
    common = [(Layout.parse(src, mesh), Layout.parse(dst, mesh)) for src, dst in PROGRAMS]
    table = [row(f"{mesh}: of programs", common, options.seconds)]
    for each, shape, majors in TENSORS:
        layouts = every_layout(each, shape, majors)
        pairs = [(draw.choice(layouts), draw.choice(layouts)) for _ in range(options.pairs)]
        cut = " in two" if majors else ""
        table.append(row(f"{each}: {'x'.join(map(str, shape))}{cut}", pairs, options.seconds))
    headers = ["tensor", "pairs", "cold ms", "worst", "over", "warm us", "worst", "over"]
    print(tabulate(table, headers))


if __name__ == "__main__":
    main()
