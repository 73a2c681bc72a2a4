"""Which files a stored program depends on: those of each package whose code was traced, whatever it is called."""

from __future__ import annotations

import importlib
import sysconfig
from pathlib import Path

import pytest
import torch

from shardc.precompiled import store


@pytest.mark.parametrize("near", [store.PACKAGE, Path(torch.__file__).parent, Path(sysconfig.get_path("stdlib"))])
def test_packages_beside_those_that_have_versions(near: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``torchvision`` is not torch, though its folder's name begins like torch's."""
    name = f"{near.name.replace('.', '_')}zoo"
    package = tmp_path / name
    package.mkdir()
    for file, text in (("__init__.py", ""), ("net.py", "from . import scale\n"), ("scale.py", "BY = 2\n")):
        (package / file).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module(f"{name}.net")
    monkeypatch.setattr(store, "TOLD", [tmp_path / name[: -len("zoo")], *store.TOLD])
    found = store.sources([str(package / "net.py"), torch.nn.modules.linear.__file__, importlib.__file__])
    assert found is not None and set(found) == {str(path) for path in package.glob("*.py")}
    assert store.unchanged(found)
    (package / "scale.py").write_text("BY = 3\n")
    assert not store.unchanged(found)


def test_code_of_no_file_is_unknown() -> None:
    assert store.sources(["<string>"]) is None
