"""Every test process computes on one thread, so that workers do not fight for cores; GPU tests need a GPU.

Property tests try the same examples in every run. ``pytest -m hypothesis --hypothesis-profile=long`` tries others, many
more, and makes what fails smaller.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("SHARDC_STORE", "0")  # a test compiles what it tests; tests of the store turn it on

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import Phase, settings  # noqa: E402

from shardc.runtime.surroundings import Surroundings  # noqa: E402

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked ``gpu`` where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def _by_itself() -> Iterator[None]:
    """Each test starts from the same random state, and leaves torch's settings as they were."""
    torch.manual_seed(0)
    before = Surroundings.now(torch.device("cpu"))
    yield
    assert Surroundings.now(torch.device("cpu")) == before, "the test leaves torch otherwise than it found it"
