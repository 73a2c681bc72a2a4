"""The workflow of `examples/ci`: its commands run, pass where nothing grew, and fail where communication did."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parents[2]
SMALL = {"TARGET": "examples/models/mlp.py:example", "MESH": "dp=4", "PLAN": 'fsdp("dp")'}  # quick to predict
WORKFLOW = ROOT / "examples/ci/communication.yml"


@pytest.fixture(scope="module")
def workflow() -> dict[str, Any]:
    return yaml.safe_load(WORKFLOW.read_text())


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The project as a repository with one commit, which is base and head at once."""
    for name in ("shardc", "examples"):
        (tmp_path / name).symlink_to(ROOT / name)
    git = ["git", "-c", "user.name=ci", "-c", "user.email=ci@localhost", "-c", "init.defaultBranch=main"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "base"]):
        subprocess.run([*git, *arguments], cwd=tmp_path, check=True)
    return tmp_path


def run(workflow: dict[str, Any], name: str, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """The commands of the step called ``name``, in the shell and with the variables that a runner gives them."""
    (step,) = [step for step in workflow["jobs"]["predict"]["steps"] if step.get("name") == name]
    text = step["run"].replace("${{ github.event.pull_request.base.sha }}", "HEAD")
    assert "${{" not in text
    given = {**os.environ, **workflow["env"], **env, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", text]
    return subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_the_commands_run_and_compare(workflow: dict[str, Any], checkout: Path) -> None:
    for name, plan in (("Predict the base", SMALL["PLAN"]), ("Predict this commit", 'ddp("dp")')):
        (checkout / "predicted").mkdir(exist_ok=True)
        done = run(workflow, name, checkout, **{**SMALL, "PLAN": plan})
        assert done.returncode == 0, done.stderr
    assert (checkout / "predicted/after.html").read_text().startswith("<!doctype html>")
    worse = run(workflow, "Compare", checkout)
    assert worse.returncode == 1 and "broken: memory is " in worse.stdout
    shutil.copy(checkout / "predicted/before.json", checkout / "predicted/after.json")
    same = run(workflow, "Compare", checkout)
    assert (same.returncode, same.stdout) == (0, "no difference\n")


def test_the_workflow_runs_on_pull_requests(workflow: dict[str, Any]) -> None:
    assert workflow[True] == "pull_request"  # YAML reads a bare `on` as true
    names = [step.get("name") or step["uses"] for step in workflow["jobs"]["predict"]["steps"]]
    assert names == [
        "actions/checkout@v4", "actions/setup-python@v5", "Install", "Predict this commit", "Predict the base",
        "Compare", "actions/upload-artifact@v4",
    ]  # fmt: skip
