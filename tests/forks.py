"""Processes forked from one that has no threads and has imported once what they need: what starts often starts fast."""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
FORKS = multiprocessing.get_context("forkserver")
STAND_IN = "tests.fakes.sglang_server"
FORKS.set_forkserver_preload([STAND_IN])


def preload_jobs() -> None:
    """For tests that start jobs: what these import takes seconds each time. Works before the first fork only."""
    stages = [f"eagle3_ray.{stage}" for stage in ("generate", "capture", "train", "evaluate", "pipeline")]
    FORKS.set_forkserver_preload([STAND_IN, *stages])


class Job:
    """`python SCRIPT WORDS...` with an environment of its own, to be used like a Popen with pipes."""

    def __init__(self, script: str, words: Sequence[str], environment: dict[str, str]) -> None:
        self._outputs = [tempfile.NamedTemporaryFile("r", encoding="utf-8") for _ in range(2)]  # noqa: SIM115 - the job writes to them
        names = [output.name for output in self._outputs]
        self._process = FORKS.Process(target=_run, args=(script, words, environment, names), daemon=True)
        self._process.start()

    @property
    def returncode(self) -> int | None:
        """The exit code, -N where signal N ended it, None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All of stdout and stderr at its end. Raises subprocess.TimeoutExpired: it goes on."""
        self._process.join(timeout)
        if timeout is not None and self.returncode is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout)
        stdout, stderr = (Path(output.name).read_text() for output in self._outputs)
        return stdout, stderr

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()


def _run(script: str, words: Sequence[str], environment: dict[str, str], outputs: Sequence[str]) -> None:
    """As Python would begin and end with it."""
    for number, path in enumerate(outputs, start=1):
        output = os.open(path, os.O_WRONLY | os.O_APPEND)
        os.dup2(output, number)
        os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(REPOSITORY)
    paths = [str(Path(script).parent.absolute()), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    sys.path[:] = [*paths, *(path for path in sys.path if path not in paths)]
    sys.argv = [script, *words]
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        atexit._run_exitfuncs()
