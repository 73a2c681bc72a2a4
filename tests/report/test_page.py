"""The page of a schedule: well formed, alone, true to the schedule; run by a JS engine and a browser, if any."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardc
from examples.models import llama
from shardc.__main__ import main
from shardc.ir import graph as ir
from shardc.ir.mesh import Mesh
from shardc.report.findings import Finding
from shardc.report.page import curve, record
from shardc.report.predicted_memory import OWNERS
from shardc.report.predicted_schedule import Schedule
from tests.report.test_schedule import stack_program

ROOT = Path(__file__).parents[2]
VOID = {"meta", "input", "br", "link", "img"}


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    config = llama.LlamaConfig(layers=1)
    with torch.device("meta"):
        model, (tokens, targets) = llama.Llama(config), llama.batch(config)
    plan = shardc.fsdp("dp") | llama.llama_tp("tp")
    program = shardc.compile(model, Mesh(dp=2, tp=2), plan, loss=llama.loss).lower(tokens, targets)
    return program.schedule("cpu", stage="localize")


class Page(HTMLParser):
    """Elements must close in order; ``links`` are addresses, ``held`` the texts of scripts by id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.held: dict[str, str] = {}
        self._script = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = dict(attrs)
        self.links += [of[name] or "" for name in ("src", "href", "action") if name in of]
        self.ids.add(of.get("id") or "")
        self._script = of.get("id") or ""
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.held[self._script] = self.held.get(self._script, "") + data


def test_the_page_is_whole_and_alone(schedule: Schedule) -> None:
    text = schedule.to_html()
    page = Page(text)
    assert page.links == [] and "http" not in page.held["script"] and "@import" not in text and "url(" not in text
    assert json.loads(page.held["data"]) == json.loads(json.dumps(record(schedule)))
    # The window and the page say of what it is, and the legend has every owner that ever holds something.
    assert schedule.title.startswith('Llama, fsdp("dp", level=3) | tp("tp"') and "dp=2 tp=2 on cpu" in schedule.title
    assert re.findall("<title>(.*)</title>", text) == [escape(schedule.title)]
    asked = set(re.findall(r"""\$\("(\w+)"\)""", page.held["script"]))
    assert asked and asked <= page.ids


def test_no_name_ends_the_script(schedule: Schedule) -> None:
    first = schedule.collectives[0]
    rude = replace(first, cause=replace(first.cause, entry="</script><script>alert(1)</script><!--"))
    page = Page(replace(schedule, transfers=(rude, *schedule.collectives[1:])).to_html())
    assert json.loads(page.held["data"])["collectives"][0]["entry"] == rude.cause.entry


def test_ops_and_causes_are_the_programs(schedule: Schedule) -> None:
    data, ops = record(schedule), schedule.step.ops
    assert len(data["ops"]) == len(ops)
    names = [ir.info(op.node).name for op in ops]
    for row, c in zip(data["collectives"], schedule.collectives, strict=True):
        assert (names[row["op"]], row["wire"], row["entry"]) == (c.name, c.wire, c.cause.entry)
        causes = {*c.cause.tensors, c.cause.reason.removeprefix("needed by ")} & set(names)
        assert {names[at] for at in row["from"]} == causes != set()
    gather = next(c for c in data["collectives"] if c["tensor"] == "layers.0.mlp.up.weight" and c["phase"] == "forward")
    assert data["ops"][gather["from"][0]][0] == "param %layers.0.mlp.up.weight: f32[32,64]"


def test_the_curve_ends_as_the_step_and_holds_the_peak(schedule: Schedule) -> None:
    points = curve(schedule)
    assert max(sum(held) for _, held in points) == schedule.memory.peak.total
    assert points[-1] == (schedule.seconds, schedule.memory.samples[-1].sizes)
    times = [seconds for seconds, _ in points]
    assert times == sorted(times) and max(times.count(t) for t in times) <= 2


def test_findings_have_a_table() -> None:
    program = stack_program(shardc.ddp("dp"), dp=2)
    found = Finding("rule", "high", "layers.0.up", "layers.0", "model.py:3", 2e-3, 10, "is sent twice", "send it once")
    data = json.loads(Page(program.schedule().to_html([found])).held["data"])
    assert data["findings"] == [
        {
            "severity": "high", "us": 2000.0, "bytes": 10, "subject": "layers.0.up", "message": "is sent twice",
            "change": "send it once", "source": "model.py:3",
        }
    ]  # fmt: skip
    assert json.loads(Page(program.schedule().to_html()).held["data"])["findings"] == []


STACK = """
import torch
from torch import nn

def example():
    layers = nn.Sequential(*(nn.Linear(1024, 1024, device="meta") for _ in range(12)))
    return layers, (torch.empty(4096, 1024, device="meta"),)
"""


def test_the_page_has_lines_to_paste(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stacked.py").write_text(STACK)
    monkeypatch.chdir(tmp_path)
    target = ["schedule", "stacked.py:example", "--mesh", "dp=64", "--plan", 'fsdp("dp")', "--rows", "1"]
    assert main([*target, "--option", "bucket_size=8 MiB", "--html", "page.html", "--tries"]) == 0
    findings = json.loads(Page((tmp_path / "page.html").read_text()).held["data"])["findings"]
    tried = [finding for finding in findings if finding["subject"] == "tried"]
    assert tried and all(finding["change"].startswith("Options(") for finding in tried)
    assert all(finding["message"].startswith(finding["change"]) for finding in tried)
    assert len(findings) > len(tried)


PRINT = """
import shardc
from tests.report.test_schedule import stack_program
print(stack_program(shardc.fsdp("dp"), dp=2).schedule().to_html(), end="")
"""


@pytest.mark.slow
def test_the_same_to_the_byte_in_another_process() -> None:
    made = []
    for seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", PRINT], cwd=ROOT, capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )  # fmt: skip
        made.append(done.stdout)
    assert made[0] == made[1] and len(made[0]) > 10_000


# --- the script runs

ASK = """
const fs = require("fs");
const [script, data] = process.argv.slice(2).map((path) => fs.readFileSync(path, "utf8"));
const m = eval(script + ";model")(JSON.parse(data));
const middle = m.data.collectives.map((c) => m.hit(m.lanes.indexOf(c.axis), (c.start + c.end) / 2).at);
console.log(JSON.stringify({
  lanes: m.lanes, middle, none: m.hit(1, -1),
  sorted: m.sorted(m.data.collectives, "exposed", true).map((c) => c.op),
  named: m.sorted(m.data.collectives, "tensor", false).map((c) => c.tensor),
  filtered: m.filtered(m.data.collectives, "MLP gather").map((c) => c.op),
  search: m.search("needed by layers.0.add"), nothing: m.search("no such line"),
  phases: m.spans[0].map((span) => span.kind), ticks: [m.ticks(0, 700), m.ticks(1234, 1300), m.ticks(0, 0.3)],
  causes: m.ops.map((op) => op.causes), users: m.ops.map((op) => op.users), held: m.memoryAt(m.data.us / 2),
}));
"""


def run_script(ask: str, schedule: Schedule, folder: Path, beside: Schedule | None = None) -> Any:
    """Runs ``ask`` in a JS engine with the script and the data of a page; returns the JSON that it prints."""
    held = Page(schedule.to_html(beside=beside)).held
    for name, text in (("script", held["script"]), ("data", held["data"]), ("ask.js", ask)):
        (folder / name).write_text(text)
    command = ["node", *(folder / name for name in ("ask.js", "script", "data"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(shutil.which("node") is None, reason="no JS engine")
def test_what_the_script_computes(schedule: Schedule, tmp_path: Path) -> None:
    said, data = run_script(ASK, schedule, tmp_path), json.loads(Page(schedule.to_html()).held["data"])
    rows: list[dict[str, Any]] = data["collectives"]
    assert said["lanes"] == ["compute", *dict.fromkeys(c.axis for c in schedule.collectives)]
    assert said["middle"] == list(range(len(rows))) and said["none"] is None
    assert said["sorted"] == [c["op"] for c in sorted(rows, key=lambda c: -c["exposed"])]
    assert said["named"] == sorted(c["tensor"] for c in rows)
    gathers = [c["op"] for c in rows if c["kind"] == "all_gather" and "mlp" in c["tensor"]]
    assert said["filtered"] == gathers != []
    texts = [(op[0], *(data["words"][word] for word in op[3:6])) for op in data["ops"]]
    found = [at for at, parts in enumerate(texts) if any("needed by layers.0.add" in part for part in parts)]
    assert said["search"] == found != [] and said["nothing"] == []
    assert said["phases"] == [schedule.phase_of(run) for run in schedule.runs]
    for (low, high), ticks in zip([(0, 700), (1234, 1300), (0, 0.3)], said["ticks"], strict=True):
        assert 3 <= len(ticks) <= 8 and all(low <= tick <= high for tick in ticks)
    assert said["ticks"][:2] == [list(range(0, 701, 100)), list(range(1240, 1301, 10))]
    # From a collective to its causes and back.
    assert all(at in said["causes"][place] for at, row in enumerate(rows) for place in row["from"])
    assert sum(map(len, said["causes"])) == sum(len(row["from"]) for row in rows)
    assert said["users"] == [[at for at, op in enumerate(data["ops"]) if n in op[6]] for n in range(len(texts))]
    assert said["held"] == [sample for sample in data["memory"]["samples"] if sample[0] <= data["us"] / 2][-1]


FOLDS = """
const fs = require("fs");
const [script, data] = process.argv.slice(2).map((path) => fs.readFileSync(path, "utf8"));
const m = eval(script + ";model")(JSON.parse(data)), axis = m.axis(m.folds, m.data.us);
const times = [...Array(101).keys()].map((n) => n * m.data.us / 100);
const rows = m.data.collectives.map((c) => ({ ...c, count: 1, us: c.end - c.start }));
console.log(JSON.stringify({
  folds: m.folds, end: axis.end, times, back: times.map((us) => axis.time(axis.place(us))),
  places: times.map(axis.place), wide: m.folds.map((f) => axis.place(f.to) - axis.place(f.from)),
  ticks: axis.ticks(0, axis.end),
  open: m.axis([], m.data.us).end, merged: m.merged(rows).map((row) => [row.count, row.tensor, row.wire]),
}));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no JS engine")
def test_alike_layers_fold(tmp_path: Path) -> None:
    """One layer is shown and the others are counted; places on the axis and times map to each other."""
    with torch.device("meta"):
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(12)))
        program = shardc.compile(layers, Mesh(dp=8), shardc.fsdp("dp")).lower(torch.empty(4096, 1024))
    schedule = program.schedule("a100")
    said = run_script(FOLDS, schedule, tmp_path)
    forward, backward = said["folds"]
    for fold, layers_inside in ((forward, range(1, 12)), (backward, range(10, 0, -1))):
        expected = [str(layer) for layer in layers_inside]
        assert (fold["name"], fold["count"]) == (f"{expected[0]} to {expected[-1]}", len(expected))
        first, last = fold["ops"]
        runs = [run for run in schedule.runs if first <= run.kernel.ops[0] and run.kernel.ops[-1] <= last]
        products = [run.kernel.module.split(".")[0] for run in runs if run.kernel.flops]
        assert list(dict.fromkeys(products)) == expected
        assert (fold["from"], fold["to"]) == pytest.approx((runs[0].start * 1e6, runs[-1].end * 1e6))
    for fold, wide in zip(said["folds"], said["wide"], strict=True):
        assert wide == pytest.approx(fold["wide"]) and wide < fold["to"] - fold["from"]
    assert said["open"] == pytest.approx(schedule.seconds * 1e6)
    hidden = sum(fold["to"] - fold["from"] - fold["wide"] for fold in said["folds"])
    assert said["end"] == pytest.approx(said["open"] - hidden)
    assert said["back"] == pytest.approx(said["times"]) and said["places"] == sorted(said["places"])
    assert said["ticks"] == sorted(said["ticks"])
    assert not any(fold["from"] < tick < fold["to"] for fold in said["folds"] for tick in said["ticks"])
    assert sum(count for count, _, _ in said["merged"]) == len(schedule.collectives)
    assert sum(wire for _, _, wire in said["merged"]) == schedule.wire
    assert len(said["merged"]) < len(schedule.collectives) / 2


LANES = """
const fs = require("fs");
const [script, data] = process.argv.slice(2).map((path) => fs.readFileSync(path, "utf8"));
const m = eval(script + ";model")(JSON.parse(data));
console.log(JSON.stringify({
  lanes: m.lanes, us: m.us, folds: m.folds, spans: m.spans, hit: m.hit(1, m.spans[1][0].end - 1e-3),
}));
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no JS engine")
def test_another_schedule_is_drawn_under_each_row(tmp_path: Path) -> None:
    above, beside = (stack_program(plan, dp=2).schedule() for plan in (shardc.fsdp("dp"), shardc.ddp("dp")))
    said = run_script(LANES, above, tmp_path, beside=beside)
    assert said["lanes"] == ["compute", "  beside", "dp", "  beside"] and said["folds"] == []
    assert said["us"] == pytest.approx(max(above.seconds, beside.seconds) * 1e6)
    for schedule, (compute, moved) in ((above, said["spans"][::2]), (beside, said["spans"][1::2])):
        assert [span["end"] for span in compute] == pytest.approx([run.end * 1e6 for run in schedule.runs], abs=1e-3)
        assert [span["kind"] for span in moved] == [c.kind for c in schedule.transfers]
    assert said["hit"]["name"] == beside.runs[0].kernel.name and said["hit"]["op"] is None
    (table,) = json.loads((tmp_path / "data").read_text())["beside"]["tables"]
    rows = {name: rest for name, *rest in table["rows"]}
    assert rows["count"][:2] == [str(len(above.collectives)), str(len(beside.collectives))]
    assert rows["count.all_gather"][1:] == ["0", "-100.0%"]
    assert rows["wire.all_gather"][1:] == ["0 B", "-100.0%"]


DRIVE = """
<script>
addEventListener("load", () => {
  const filter = document.getElementById("filter");
  filter.value = "all_gather mlp.up";
  filter.dispatchEvent(new Event("input"));
  document.querySelectorAll("#collectives th")[6].click();
  document.querySelector("#collectives tbody tr").click();
  addEventListener("hashchange", () => {
    const list = document.querySelector("#side ul");
    document.title = `${list.previousElementSibling.textContent}: ${list.textContent}`;
  });
});
</script>
"""


def browsed(text: str, folder: Path) -> str:
    """Returns the document of a page after its script has run in a browser."""
    (folder / "page.html").write_text(text)
    done = subprocess.run(
        ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}",
         "--virtual-time-budget=3000", "--dump-dom", f"file://{folder / 'page.html'}"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    return done.stdout


UNFOLD = """
<script>
addEventListener("load", () => {
  const rows = () => document.querySelectorAll("#collectives tbody tr").length;
  const lines = () => parseInt(document.getElementById("space").style.height) / 18;
  const box = document.getElementById("fold"), seen = [box.checked, rows(), lines()];
  const label = document.querySelector(".op.fold").textContent;
  box.click(); seen.push(box.checked, rows(), lines());
  box.click(); seen.push(box.checked, rows(), lines());
  addEventListener("hashchange", () => { document.title = JSON.stringify([...seen, label, lines()]); });
  location.hash = "op=@OP@";
});
</script>
"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser")
def test_a_browser_folds_and_unfolds(tmp_path: Path) -> None:
    with torch.device("meta"):
        layers = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(12)))
        program = shardc.compile(layers, Mesh(dp=8), shardc.fsdp("dp")).lower(torch.empty(4096, 1024))
    schedule = program.schedule("a100")
    inside = next(run.kernel.ops[0] for run in schedule.runs if run.kernel.module == "5.0")
    shown = browsed(schedule.to_html() + UNFOLD.replace("@OP@", str(inside)), tmp_path)
    title = re.findall("<title>(.*)</title>", shown)[-1]
    seen = json.loads(title)
    folded, unfolded, again = seen[:3], seen[3:6], seen[6:9]
    assert folded == again and unfolded == [False, len(schedule.collectives), len(schedule.step.ops)]
    assert folded[0] is True and folded[1] < unfolded[1] / 2 and folded[2] < unfolded[2] / 2
    label = re.fullmatch(r"1 to 11: 11 more alike, (\d+) lines; a click shows them", seen[9])
    # An op in a fold unfolds it, and no other one.
    assert label and seen[10] == folded[2] + int(label[1]) - 1


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser")
def test_a_browser_shows_it(schedule: Schedule, tmp_path: Path) -> None:
    """Filter, sort and choose a row: the side names its cause, the graph shows its line."""
    shown = browsed(schedule.to_html() + DRIVE, tmp_path)
    assert "<title>Caused by (1): param %layers.0.mlp.up.weight: f32[32,64]</title>" in shown
    owners = {owner for sample in schedule.memory.samples for owner, n in zip(OWNERS, sample.sizes, strict=True) if n}
    legend = re.search(r'<div class="legend" id="legend">(.*?)</div>', shown)
    assert legend and owners <= set(re.findall(r"</i>([^<]+)</span>", legend[1]))
    count = sum(c.kind == "all_gather" and "mlp.up" in c.cause.tensor for c in schedule.collectives)
    assert f"{count} of {len(schedule.collectives)}</span>" in shown
    assert re.search(
        r'<div class="op moves chosen"><span class="at">[^<]*</span>%layers\.0\.mlp\.up\.weight\.full', shown
    )


def test_what_is_not_tried_is_refused_before_anything_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "stacked.py").write_text(STACK)
    monkeypatch.chdir(tmp_path)
    target = [
        "schedule",
        "stacked.py:example",
        "--mesh",
        "pp=2",
        "--plan",
        'pp("pp", microbatches=2)',
        "--html",
        "page.html",
    ]
    assert main([*target, "--tries"]) == 2
    text = capsys.readouterr()
    assert text.out == "" and "advise does not know the stages of a pipeline" in text.err
    assert not (tmp_path / "page.html").exists()
