"""All that is to be seen on a GPU, in one table: plans beside one device, graphs, profiles, a step beside its peers.

    make gpu                                        (the Python that is called python3, nothing is installed)
    python -m benchmarks.gpu --device cuda --out out/gpu --minutes 9.5
    python -m benchmarks.gpu --device cpu --short    (the same scripts at their smallest, on gloo)

Sections run one after another, the jobs of one side by side. A job that fails, or that is stopped when its section's
time is over, is a row like another. The folder has ``table.md``, ``rows.jsonl`` and ``log.txt`` from the first job on,
and ``trace.json.gz``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

from benchmarks.gpu.correct import FORMS, VARIANTS
from benchmarks.gpu.rows import Row, Skipped, append, one_line, read, table

ROOT = Path(__file__).resolve().parents[2]
SHORT = {1: ("fsdp3", "offload"), 2: ("fsdp3", "tp+sp", "offload", "no_sync", "saved", "flex, ring", "float8")}
SHARDED = "fsdp2/blocks/reshard/bf16,shardc/fsdp3/bf16"
KERNELS = "fsdp2/flex/bf16,shardc/flex/bf16,fsdp2/float8/bf16,shardc/float8/bf16"
STEPS = (("8b4", f"{SHARDED},ddp/compiled,shardc/ddp"), ("1b", f"{SHARDED},{KERNELS}"))
# Each form is tried in each variant, in half of them on one rank and in half on two.
HALVES = {1: ("inductor/f32", "eager/bf16"), 2: ("eager/f32", "inductor/bf16")}
SHORT_STEPS = (("micro", "ddp/eager,shardc/ddp,fsdp2/flex/bf16"),)
TAIL = 400  # letters of a job's last words in its row


@dataclass(frozen=True)
class Section:
    """Commands that run side by side, ``at_once`` of them; together they have ``seconds``."""

    name: str
    jobs: tuple[tuple[str, ...], ...]
    seconds: float
    at_once: int = 1


def sections(device: str, short: bool, out: Path) -> list[Section]:
    """What runs, in order; of what a section leaves of its time the next have more."""
    rows = ("--device", device)

    def correct(ranks: int) -> tuple[tuple[str, ...], ...]:
        forms = [";".join(SHORT[ranks])] if short else list(FORMS)
        variants = VARIANTS[:1] if short else HALVES[ranks]
        given = ("--ranks", str(ranks), "--variants", ",".join(variants))
        return tuple(("-m", "benchmarks.gpu.correct", *rows, *given, "--forms", form) for form in forms)

    many = 1 if device == "cpu" else 12
    backend = ("--backend", "eager" if short else "inductor")
    # Ranks that share a GPU communicate over the host, of which a profile of the GPU says nothing.
    most = 2 if device == "cpu" or torch.cuda.device_count() > 1 else 1
    trace = ("--trace", str(out / "trace.json"))
    looks = tuple(
        ("-m", "benchmarks.gpu.exposed", *rows, *backend, "--ranks", str(ranks), *(trace if ranks == most else ()))
        for ranks in range(1, most + 1)
    )
    count = ("--steps", "2" if short else "10", "--warmup", "3")
    steps = tuple(
        ("benchmarks/train_step.py", *rows, "--size", size, "--rows", wanted, *count)
        for size, wanted in (SHORT_STEPS if short else STEPS)
    )
    fewer = ("--plans", "fsdp3", "--backends", "eager") if short else ("--plans", "ddp;fsdp3;fsdp3, dropout")
    graphs = ("-m", "benchmarks.gpu.graphs", *rows, *fewer)
    offload = ("-m", "pytest", "tests/gpu/test_offload.py", "-q", "-p", "no:cacheprovider")
    return [
        Section("correct", (offload, *correct(2), *correct(1)), 230, many),
        Section("CUDA graph", (graphs,), 50),
        Section("profile", looks, 55),
        Section("step", steps, 225),
    ]


class Job:
    """A process of a section, with files of its own."""

    def __init__(self, section: Section, command: tuple[str, ...], folder: str, number: int, log: Path) -> None:
        self.section, self.command = section, command
        self.rows = Path(folder) / f"{number}.jsonl"
        self.steps = Path(folder) / f"{number}.json"
        self.words = Path(folder) / f"{number}.txt"
        self._log = log
        if command[0].endswith("train_step.py"):
            files = ["--json", str(self.steps)]
        else:
            files = ["--rows", str(self.rows)] if "benchmarks.gpu" in command[1] else []
        with self.words.open("w") as words:
            self.process = subprocess.Popen(
                [sys.executable, *command, *files], cwd=ROOT, env=_environment(section), stdout=words,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
        self.began = time.monotonic()

    def stop(self) -> None:
        """Ends it with all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def ended(self, stopped: bool) -> list[Row]:
        """Its rows; of cases that it began and did not finish, and of a job without any, one that says why."""
        text = self.words.read_text(errors="replace")
        with self._log.open("a") as log:
            log.write(f"\n$ python {' '.join(self.command)}\n{text}")
        rows, open_cases = read(self.rows)
        seconds, code = time.monotonic() - self.began, self.process.returncode
        result = "stopped" if stopped else "failed"
        why = one_line(f"its time was over after {seconds:.0f} s" if stopped else f"exit code {code}: {text[-TAIL:]}")
        rows += [Row(section, case, result, seconds, why) for section, case in open_cases]
        rows += stepped(self.steps)
        if "pytest" in self.command:
            lines = [line for line in text.splitlines() if line.strip()] or ["no output"]
            rows.append(Row("pytest", self.command[2], "ok" if code == 0 else result, seconds, one_line(lines[-1])))
        elif (stopped or code) and not open_cases:
            rows.append(Row(self.section.name, " ".join(self.command)[:80], result, seconds, why))
        return rows


def _environment(section: Section) -> dict[str, str]:
    # A pool of compile workers for each of several jobs would be more processes than there are cores.
    alone = {"TORCHINDUCTOR_COMPILE_THREADS": "1"} if section.at_once > 1 else {}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **alone}


def perform(section: Section, seconds: float, folder: str, log: Path) -> Iterator[list[Row]]:
    """Runs all jobs of a section, and gives the rows of each; what is not through after ``seconds`` is stopped."""
    until = time.monotonic() + seconds
    waiting, running = list(enumerate(section.jobs)), list[Job]()
    place = f"{folder}/{section.name.replace(' ', '_')}"
    Path(place).mkdir()
    try:
        while waiting or running:
            over = time.monotonic() > until
            while waiting and len(running) < section.at_once and not over:
                number, command = waiting.pop(0)
                running.append(Job(section, command, place, number, log))
            for job in list(running):
                if over and job.process.poll() is None:
                    job.stop()
                    stopped = True
                elif job.process.poll() is not None:
                    stopped = False
                else:
                    continue
                running.remove(job)
                yield job.ended(stopped)
            if over and waiting:
                left = len(waiting)
                yield [Row(section.name, f"{left} jobs", "stopped", 0.0, "not begun: the section's time was over")]
                break
            time.sleep(0.2)
    finally:
        for job in running:
            job.stop()


def stepped(path: Path) -> list[Row]:
    """What the ruler wrote of training steps, as rows."""
    if not path.exists():
        return []
    found = []
    for each in json.loads(path.read_text())["rows"]:
        case = f"{each['size']}, {each['name']}"
        if each["error"]:
            kind, _, why = each["error"].partition(": ")
            skipped = kind == Skipped.__name__
            result, note = ("skipped", why) if skipped else ("failed", each["error"])
            found.append(Row("step", case, result, 0.0, one_line(note)))
            continue
        middle = [sorted(each[name])[len(each[name]) // 2] * 1e3 for name in ("seconds", "issued")]
        note = (
            f"{middle[0]:.1f} ms a step, of which the host {middle[1]:.1f}; {each['peak_bytes'] / 2**30:.2f} GiB; "
            f"loss {each['loss']:.4f}"
        )
        numbers = {"ms": middle[0], "host_ms": middle[1], "peak_bytes": each["peak_bytes"], "loss": each["loss"]}
        found.append(Row("step", case, "ok", round(each["first_seconds"], 1), note, numbers))
    return found


def machine(device: str) -> Row:
    """What it runs on."""
    kind = "CPU" if device == "cpu" else ", ".join(
        torch.cuda.get_device_name(n) for n in range(torch.cuda.device_count())
    )  # fmt: skip
    library = "transformers" if importlib.util.find_spec("transformers") else "no transformers"
    return Row("machine", kind, "ok", 0.0, f"torch {torch.__version__}, Python {platform.python_version()}, {library}")


def write(out: Path, rows: Sequence[Row]) -> str:
    """The files, as far as there are rows; the table."""
    (out / "rows.jsonl").unlink(missing_ok=True)
    for row in rows:
        append(out / "rows.jsonl", asdict(row))
    text = table(rows)
    (out / "table.md").write_text(text + "\n")
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda"))
    parser.add_argument("--out", default=os.environ.get("OUT") or "out/gpu")
    parser.add_argument("--minutes", type=float, default=9.5)
    parser.add_argument("--short", action="store_true", help="fewer cases, the smallest sizes, no Inductor")
    parser.add_argument("--sections", help="names joined by commas; by default all")
    given = parser.parse_args()
    out = Path(given.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    (out / "log.txt").unlink(missing_ok=True)
    if given.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} finds no CUDA device; --device cpu runs the same scripts at small sizes")
    planned = sections(given.device, given.short, out)
    if given.sections is not None:
        planned = [each for each in planned if each.name in given.sections.split(",")]
    # Behind the last section something has to be written.
    scale = (given.minutes * 60 - 10) / sum(each.seconds for each in planned)
    rows, due, began = [machine(given.device)], 0.0, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        for section in (bar := tqdm(planned, disable=None)):
            bar.set_description(section.name)
            due += section.seconds * scale
            for found in perform(section, due - (time.monotonic() - began), folder, out / "log.txt"):
                rows += found
                write(out, rows)
    print(write(out, [replace(row, seconds=round(row.seconds, 1)) for row in rows]))
    return int(any(row.result in ("wrong", "failed") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
