"""How an SGLang is started and ended, with a small program in its place."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle3_ray.sglang import start

STAND_IN = """
import http.server, json, os, sys
port = int(sys.argv[sys.argv.index("--port") + 1])
told = {"words": sys.argv[1:], "pid": os.getpid(), "path": os.environ.get("PYTHONPATH"), "ours": os.environ.get("OURS")}
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(told).encode())
    def log_message(self, *_): pass
server = http.server.HTTPServer(("127.0.0.1", port), Health)
open(sys.argv[1], "w").write(json.dumps(told))
server.serve_forever()
"""


@pytest.fixture
def launch(tmp_path: Path) -> str:
    """A command that answers /health and writes what it was started with to TMP/told."""
    (tmp_path / "stand_in.py").write_text(STAND_IN)
    return f"{sys.executable} {tmp_path / 'stand_in.py'} {tmp_path / 'told'}"


def test_the_server_is_told_model_place_and_gpus_and_then_what_is_asked(
    launch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    log = tmp_path / "log"
    with start.server("/m", 4, launch, ["--trust-remote-code"], env={"OURS": "1"}, log=log) as server:
        told = json.loads((tmp_path / "told").read_text())
        where = ["--host", "127.0.0.1", "--port", str(server.port)]
        assert told["words"][1:] == ["--model-path", "/m", *where, "--tp-size", "4", "--trust-remote-code"]
        assert (told["path"], told["ours"]) == (None, "1")
        assert server.url == f"http://127.0.0.1:{server.port}"
    assert not alive(told["pid"])


def test_the_server_ends_with_the_process_that_started_it(launch: str, tmp_path: Path) -> None:
    owner = (
        "import pathlib, time; from eagle3_ray.sglang import start; "
        f"start.server('/m', 1, {launch!r}, [], log=pathlib.Path({str(tmp_path / 'log')!r})).start(); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", owner])
    until(lambda: (tmp_path / "told").exists() and (tmp_path / "told").read_text().endswith("}"))
    pid = json.loads((tmp_path / "told").read_text())["pid"]
    assert alive(pid)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: not alive(pid))


def alive(pid: int) -> bool:
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)
