"""A cluster that has this package's dependencies and not the package: `ray job submit --working-dir` ships it."""

import os
import site
import subprocess
import tempfile
import venv
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from eagle3_ray.sglang.processes import HOST, free_port
from tests.forks import REPOSITORY
from tests.jobs import assert_sound, fake_server, rows, settings, wait_until, write_prompts

PLUGIN = """
from pathlib import Path
from tempfile import mkdtemp
import eagle3_ray
from eagle3_ray.node_probe import source_code
from eagle3_ray.target.sglang_server import plugin_environment
print(eagle3_ray.__file__, source_code(), plugin_environment(Path(mkdtemp()), Path(mkdtemp()), 1))
"""


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """A Python with all that is installed here but this package."""
    packages = tmp_path / "packages"
    packages.mkdir()
    for place in map(Path, site.getsitepackages()):
        for entry in place.iterdir():
            if "eagle3_ray" not in entry.name and not (packages / entry.name).exists():
                (packages / entry.name).symlink_to(entry)
    venv.create(tmp_path / "venv", symlinks=True)
    [installed] = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (installed / "packages.pth").write_text(f"{packages}\n")
    python = tmp_path / "venv" / "bin" / "python"
    imports = [python, "-c", "import ray, eagle3_ray"]
    lacks = subprocess.run(imports, cwd=tmp_path, env=environment(), capture_output=True, text=True, check=False)
    assert "No module named 'eagle3_ray'" in lacks.stderr
    return python


def test_a_working_directory_brings_the_package_and_the_plugin_to_every_worker(
    bare_python: Path, target: Path, tmp_path: Path
) -> None:
    run, prompts = tmp_path / "run", write_prompts(tmp_path / "prompts.jsonl", 20)
    with fake_server(target) as server, cluster_of(bare_python) as submit:
        done = submit(bare_python, "jobs/generate.py", "smollm2-cpu", *settings(run, target, prompts, server.url))
        assert done.returncode == 0, done.stdout
        told = submit(bare_python, "-c", PLUGIN)
        assert told.returncode == 0, told.stdout
    assert_sound(run)
    assert len(rows(run, "sequences") + rows(run, "rejected")) == 20
    assert "/working_dir_files/" in told.stdout


def environment() -> dict[str, str]:
    """This process's, without what would show this checkout to a Python."""
    shown = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS")}
    return {**shown, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}


Submit = Callable[..., subprocess.CompletedProcess[str]]


@contextmanager
def cluster_of(python: Path) -> Iterator[Submit]:
    """A cluster that runs on that Python; gives `ray job submit --working-dir CHECKOUT -- WORDS`, to its end."""
    ray = [python, "-m", "ray.scripts.scripts"]
    port, dashboard, agent = free_port(), free_port(), free_port()
    ports = [f"--port={port}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"]
    start = [*ray, "start", "--head", "--block", "--num-cpus=4", f"--node-ip-address={HOST}", *ports]
    with tempfile.TemporaryDirectory(prefix="e3", ignore_cleanup_errors=True) as folder:  # short: sockets lie in it
        env = {**environment(), "RAY_TMPDIR": folder}
        head = subprocess.Popen(start, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

        def submit(*words: str | Path) -> subprocess.CompletedProcess[str]:
            address = ["--address", f"http://{HOST}:{dashboard}", "--working-dir", REPOSITORY]
            command = [*ray, "job", "submit", *address, "--", *words]
            return subprocess.run(
                command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=240
            )

        try:
            wait_until(lambda: submit("true").returncode == 0, None, within_s=120)  # its agent takes a while
            yield submit
        finally:
            started = psutil.Process(head.pid).children(recursive=True)
            head.terminate()
            head.wait(timeout=60)
            psutil.wait_procs(started, timeout=60)
