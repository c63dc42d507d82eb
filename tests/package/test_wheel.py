"""The package as it is shipped: built, and installed from the wheel into an environment that has no checkout.

The environment borrows its dependencies from this one; installing torch again would take minutes.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.runs import make_run, sequence

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"])

RUN_ALL = """
import contextlib, io, json, runpy, sys
said = []
for script, *words in json.loads(sys.argv[1]):
    sys.argv, out = [script, *words], io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            print("exit code", end.code or 0)
    said.append(out.getvalue())
import eagle3_ray
from eagle3_ray.sglang_cpu import venv
steps = [step.requirements for step in venv.read_steps()]
print(json.dumps({"said": said, "package": eagle3_ray.__file__, "steps": steps}))
"""
"""Runs the commands' own scripts one after the other in one process: starting torch and Ray anew each time is slow."""


@dataclass(frozen=True)
class Installed:
    """What an environment with the package has said."""

    packages: Path
    folder: Path  # where its commands ran
    module: Path  # the package that they imported
    help: dict[str, str]
    plan: str
    report: str
    steps: list[list[str]]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    folder = tmp_path_factory.mktemp("wheel")
    source, work, place = folder / "source", folder / "work", folder / "venv"
    shutil.copytree(REPOSITORY / "eagle3_ray", source / "eagle3_ray", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", source])  # wheel out of sdist
    [wheel] = (folder / "dist").glob("*.whl")
    venv.create(place)
    pip = [sys.executable, "-m", "pip", "--python", place / "bin" / "python", "install", "--quiet"]
    _run([*pip, "--no-deps", "--no-index", wheel])
    [packages] = place.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    make_run(work / "run", [sequence("a", [1, 2], [3, 4])])
    plan = ["eagle3-pipeline", "smollm2-cpu", "run.dir=new", "prompts.path=prompts", "--dry-run"]
    words = [*([script, "--help"] for script in SCRIPTS), plan, ["eagle3-report", "run"]]
    scripts = json.dumps([[str(place / "bin" / script), *rest] for script, *rest in words])
    result = json.loads(_run([place / "bin" / "python", "-c", RUN_ALL, scripts], cwd=work).splitlines()[-1])
    *helps, planned, report = result["said"]
    module = Path(result["package"])
    return Installed(packages, work, module, dict(zip(SCRIPTS, helps, strict=True)), planned, report, result["steps"])


def _run(command: list[str | Path], cwd: Path | None = None) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_job_of_the_checkout_is_a_command() -> None:
    assert sorted(f"eagle3-{path.stem}" for path in (REPOSITORY / "jobs").glob("*.py")) == SCRIPTS


def test_the_package_that_is_imported_is_the_installed_one(installed: Installed) -> None:
    assert installed.module.is_relative_to(installed.packages)


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_command_answers_help(installed: Installed, script: str) -> None:
    assert installed.help[script].startswith(f"usage: {script} ")
    assert installed.help[script].endswith("exit code 0\n")


def test_the_presets_are_installed(installed: Installed) -> None:
    assert f"pipeline in {installed.folder / 'new'}\n" in installed.plan
    assert installed.plan.count(" to do\n") == 4
    assert installed.plan.endswith("exit code 0\n")


def test_a_report_is_written_with_what_is_installed(installed: Installed) -> None:
    assert installed.report == "run/report.html\nexit code 0\n"
    page = (installed.folder / "run" / "report.html").read_text()
    assert (REPOSITORY / "eagle3_ray" / "report" / "page.css").read_text() in page


def test_what_starts_a_server_on_a_cpu_is_installed(installed: Installed) -> None:
    assert any("sglang==0.5.23" in step for step in installed.steps)
    ours = REPOSITORY / "eagle3_ray" / "sglang_cpu" / "in_venv"
    there = installed.packages / "eagle3_ray" / "sglang_cpu" / "in_venv"
    assert _modules(there) == _modules(ours)


def _modules(folder: Path) -> set[Path]:
    return {path.relative_to(folder) for path in folder.rglob("*.py")}
