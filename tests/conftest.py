"""Every test process computes on one thread, so that workers do not fight for cores; GPU tests need a GPU.

Property tests try the same examples in every run. ``pytest -m hypothesis --hypothesis-profile=long`` tries others, many
more, and makes what fails smaller.

Programs are stored, as by default, each test's in a folder of its own; or all in the folder that SHARDC_STORE names: a
second run with the same folder then is of second starts.

A test is medium if it took `MEDIUM` seconds or more when ``make seconds`` last noted these, in `SECONDS`. Of a function
with more than `CASES` medium cases, one in `CASES` stays medium, by a hash of its name; the others are slow.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import Phase, settings  # noqa: E402

from shardc.runtime.inputs import TorchGlobalState  # noqa: E402

torch.set_num_threads(1)

settings.register_profile(
    "default",
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    print_blob=True,
)
settings.register_profile("long", max_examples=5000, deadline=None, derandomize=False, database=None)
settings.load_profile("default")


SECONDS = Path(__file__).with_name("seconds.json")
MEDIUM = 1.0
CASES = 3


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--note-seconds", action="store_true", help=f"write anew which tests take long to {SECONDS.name}")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that are medium or slow; skip those marked ``gpu`` where there is no CUDA device."""
    medium = json.loads(SECONDS.read_text())
    cases = Counter(name.partition("[")[0] for name in medium if not config.getoption("--note-seconds"))
    for item in items:
        if item.nodeid in medium:
            item.add_marker(pytest.mark.medium)
            if cases[item.nodeid.partition("[")[0]] > CASES and crc32(item.nodeid.encode()) % CASES:
                item.add_marker(pytest.mark.slow)
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Note what each test took, where that was asked for."""
    if not config.getoption("--note-seconds"):
        return
    taken: Counter[str] = Counter()
    for report in (r for reports in terminalreporter.stats.values() for r in reports if hasattr(r, "duration")):
        taken[report.nodeid] += report.duration
    noted = {name: round(seconds, 1) for name, seconds in sorted(taken.items()) if seconds >= MEDIUM}
    SECONDS.write_text(json.dumps(noted, indent=0) + "\n")


@pytest.fixture(autouse=True)
def _by_itself() -> Iterator[None]:
    """Each test starts from the same random state and an empty store, and leaves torch's settings as they were."""
    torch.manual_seed(0)
    before = TorchGlobalState.now(torch.device("cpu"))
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        if "SHARDC_STORE" not in os.environ:
            patch.setenv("SHARDC_STORE", folder)
        yield
    assert TorchGlobalState.now(torch.device("cpu")) == before, "the test leaves torch otherwise than it found it"
