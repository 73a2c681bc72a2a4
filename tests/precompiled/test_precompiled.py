"""Programs saved by one process and loaded by another: bit for bit the fresh ones, and refused where they are stale."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardc
from shardc.errors import PrecompiledError
from shardc.precompiled.record import VERSION
from tests.precompiled.steps import MESH, PLAN, Mixed, simulated, trained
from tests.state import batch, model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("saved")
    simulated()[0].lower(*batch()).save(made)
    return made


@pytest.mark.slow
def test_as_a_fresh_one_in_another_process(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.precompiled.steps", str(folder)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == trained(simulated()[1])


def test_what_is_saved_is_text_and_bare_numbers(folder: Path) -> None:
    kinds = {path.name: path.suffix for path in folder.iterdir() if not path.name[:2].isdigit()}
    assert kinds == {
        "program.json": ".json",
        "forward.txt": ".txt",
        "backward.txt": ".txt",
        "inference.txt": ".txt",
        **{f"{half}.constants.bin": ".bin" for half in ("forward", "backward", "inference")},
    }
    assert (folder / "forward.constants.bin").stat().st_size == 9 * 9 * 8
    assert (folder / "forward.txt").read_text().startswith("mesh dp=2 tp=2\n")


def test_the_certificate_is_the_fresh_ones(folder: Path) -> None:
    fresh = simulated()[0].lower(*batch())
    for training in (True, False):
        assert shardc.load(folder).certificate(training).text() == fresh.certificate(training).text()


def test_another_signature_is_captured(folder: Path) -> None:
    module, sim = simulated(folder)
    sim(*batch())
    assert len(module.shardc.programs) == 1
    sim(*(torch.cat([x, x]) for x in batch()))
    assert len(module.shardc.programs) == 2


def _wider() -> nn.Module:
    made = model()
    made.mid = nn.Linear(9, 8).double()
    return made


def _untied() -> nn.Module:
    made = model()
    made.head.weight = nn.Parameter(made.head.weight.detach().clone())
    return made


def _renamed() -> nn.Module:
    made = model()
    made.flag = 3
    return made


def use(folder: Path, model: nn.Module, mesh: Any = MESH, plan: Any = PLAN, loss: Any = None) -> None:
    shardc.compile(model, mesh, plan, loss=loss or Mixed(), backend="eager", precompiled=folder)


STALE: dict[str, Callable[[Path], object]] = {
    "the mesh was dp=2 tp=2 and is dp=4 tp=2": lambda folder: use(folder, model(), shardc.Mesh(dp=4, tp=2)),
    'the plan was fsdp("dp", level=3) | tp("tp", colwise=["mid"], rowwise=["back"]) and is fsdp("dp", level=2) | '
    'tp("tp", colwise=["mid"], rowwise=["back"])': lambda folder: use(
        folder, model(), plan=shardc.fsdp("dp", level=2) | shardc.tp("tp", colwise=["mid"], rowwise=["back"])
    ),
    "parameter 'mid.weight' was float64[12, 9] and is float64[8, 9]; parameter 'mid.bias' was float64[12] and is "
    "float64[8]; module 'mid' was Linear(in_features=9, out_features=12, bias=True), in_features=9, out_features=12 "
    "and is Linear(in_features=9, out_features=8, bias=True), in_features=9, out_features=8": lambda folder: use(
        folder, _wider()
    ),
    "parameter 'head.weight' was tied to 'odd.weight' and is float64[9, 5]": lambda folder: use(folder, _untied()),
    "module '' was Net() and is Net(), flag=3": lambda folder: use(folder, _renamed()),
}


@pytest.mark.parametrize("text", STALE)
def test_a_stale_one_is_refused_with_the_difference(text: str, folder: Path) -> None:
    with pytest.raises(PrecompiledError) as caught:
        STALE[text](folder)
    assert str(caught.value) == (f"the program in {folder} is stale: {text}\n  fix: compile and save the program again")


def test_another_loss_or_other_code_is_refused(folder: Path) -> None:
    def other(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (out - y).square().mean()

    with pytest.raises(PrecompiledError, match="is stale: module '' of the loss was Mixed"):
        use(folder, model(), loss=other)


def test_another_constant_is_refused(folder: Path) -> None:
    loss = Mixed()
    loss.table[0, 0] += 1
    with pytest.raises(PrecompiledError, match=r"module '' of the loss was Mixed\(\), table=float64\[9, 9\] sha256 "):
        use(folder, model(), loss=loss)


def copied(folder: Path, to: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    record = json.loads((to / "program.json").read_text())
    change(record)
    (to / "program.json").write_text(json.dumps(record))
    return to


def test_another_torch_is_refused(folder: Path, tmp_path: Path) -> None:
    old = copied(folder, tmp_path / "old", lambda record: record.update(torch="2.4.0"))
    with pytest.raises(PrecompiledError) as caught:
        shardc.load(old)
    assert f"the program in {old} is stale: torch was 2.4.0 and is {torch.__version__}\n" in str(caught.value)


def test_what_is_missing_or_changed_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PrecompiledError, match="there is no saved program in"):
        shardc.load(tmp_path)
    cut_off = copied(folder, tmp_path / "cut", lambda record: None)
    (cut_off / "backward.txt").write_text((cut_off / "backward.txt").read_text() + "\n")
    with pytest.raises(PrecompiledError, match=r"backward\.txt changed since it was saved"):
        shardc.load(cut_off)
    os.unlink(cut_off / "backward.txt")
    with pytest.raises(PrecompiledError, match=r"backward\.txt is missing"):
        shardc.load(cut_off)
    newer = copied(folder, tmp_path / "newer", lambda record: record.update(shardc_program=VERSION + 1))
    with pytest.raises(PrecompiledError, match=f"a program of version {VERSION + 1}; this is {VERSION}"):
        shardc.load(newer)


def test_unreduced_gradients_are_not_saved(tmp_path: Path) -> None:
    module, _ = simulated()
    with module.no_sync(), pytest.raises(PrecompiledError, match="leaves its gradients unreduced"):
        module.lower(*batch()).save(tmp_path)


def test_a_first_call_that_fits_no_saved_program_warns(folder: Path) -> None:
    """Once, with the difference; not where one has fitted a call before."""
    for fits in (False, True):
        _, sim = simulated(folder)
        if fits:
            sim(*batch())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for times in (2, 3):
                sim(*(torch.cat([x] * times) for x in batch()))
        texts = [str(each.message) for each in caught if "precompiled=" in str(each.message)]
        assert len(texts) == (0 if fits else 1)
        if not fits:
            assert "no program of precompiled= fits this call" in texts[0]
            assert re.search(r"x is float64\[8, 5\] and was float64\[4, 5\]", texts[0])


@pytest.mark.parametrize("around", ["an attribute", "autocast"])
def test_a_saved_program_is_not_used_for_another_state(around: str, tmp_path: Path) -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.factor = 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.factor

    def compiled(**options: Any) -> Any:
        return shardc.compile(Scaled(), shardc.Mesh(dp=2), shardc.fsdp("dp"), backend="eager", **options)

    x = torch.randn(4, 4)
    compiled().lower(x).save(tmp_path)
    loaded = shardc.load(tmp_path)
    module = compiled(precompiled=loaded)
    assert module.lower(x) is loaded
    if around == "autocast":
        with torch.autocast("cpu"):
            assert module.lower(x) is not loaded
    else:
        module.factor = 3.0
        assert module.lower(x) is not loaded
        module.factor = 2.0
    assert module.lower(x) is loaded


def test_recurrent_layers_are_saved(tmp_path: Path) -> None:
    layer, x = nn.LSTM(4, 6).double(), torch.randn(5, 8, 4).double()
    mesh, plan = shardc.Mesh(dp=2), shardc.fsdp("dp") | shardc.Plan(inputs="_, @dp, _")

    def loss(out: Any) -> torch.Tensor:
        return out[0].square().mean()

    fresh = shardc.compile(layer, mesh, plan, loss=loss, backend="eager")
    fresh.lower(x).save(tmp_path)
    loaded = shardc.compile(layer, mesh, plan, loss=loss, backend="eager", precompiled=tmp_path)
    values = [shardc.Simulation(module)(x) for module in (fresh, loaded)]
    torch.testing.assert_close(values[0], values[1], rtol=0, atol=0)
    torch.testing.assert_close(values[0], loss(layer(x)), rtol=1e-12, atol=1e-12)
