"""The stand-in SGLang server as a process: start it, kill it, read what it saw.

    with FakeServer(mean_tokens=20, faults={"reset": [0], "http_503": 0.1}) as server:
        ... server.url ...; server.kill(); server.restart(); server.requests()

By hand: `python -m tests.fakes.sglang_server --port 30000 --options '{"token_latency_s": 0.01}'`. `fake_http.py` has
the routes, `fake_engine.py` options, admission and queue, `fake_model.py` what is answered.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.request
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from tests.fakes.fake_engine import FAULTS, Options
from tests.fakes.fake_http import FakeSglang
from tests.fakes.fake_model import answer, token_logprobs

__all__ = ["FAULTS", "FakeServer", "Options", "answer", "token_logprobs"]

REPOSITORY = Path(__file__).resolve().parents[2]


class FakeServer:
    """A stand-in in a process of its own, which ends with this one. Options: the fields of `fake_engine.Options`."""

    def __init__(self, **options: Any) -> None:
        self.options = Options(**options)
        self.url = ""
        self.port = 0  # chosen by the first start, kept by restarts
        self._process: subprocess.Popen[str] | None = None
        self._log = tempfile.TemporaryFile("a+b")  # noqa: SIM115 - the server writes to our descriptor: a kill loses no line

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server was never started"
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        command = [sys.executable, "-m", "tests.fakes.sglang_server", "--port", str(self.port), "--die-with-stdin"]
        command += ["--options", json.dumps(asdict(self.options)), "--log-fd", str(self._log.fileno())]
        self._process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[self._log.fileno()],
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the stand-in server did not start (exit code {self._process.wait()})")
        self.url = json.loads(line)["url"]
        self.port = int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        """`kill -9`."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def restart(self) -> None:
        """The same options on the same port; in-flight requests are lost, fault indices start again."""
        self.kill()
        self.start()

    def set(self, **options: Any) -> None:
        """Change options of the running server; a restart keeps them. Naming `faults` restarts their request count."""
        self.options = Options(**(asdict(self.options) | options))
        body = json.dumps(options).encode()
        urllib.request.urlopen(urllib.request.Request(f"{self.url}/fake/set", data=body), timeout=10).close()

    def requests(self) -> list[dict[str, Any]]:
        """Every `/generate` seen, over restarts, in order of arrival: rid, prompt_length, start, outcome, boot, index.

        outcome: "answered", "aborted by client", "fault:NAME", "refused: 400", or "in flight" (for ever, if killed).
        """
        size = os.fstat(self._log.fileno()).st_size
        written = os.pread(self._log.fileno(), size, 0)
        lines = written[: written.rfind(b"\n") + 1].splitlines()  # the server may be writing the last one
        entries = (json.loads(line) for line in lines)
        return list({(entry["boot"], entry["index"]): entry for entry in entries}.values())

    def max_in_flight(self) -> int:
        """The most `/generate` requests that this process held at once, running or waiting."""
        with urllib.request.urlopen(f"{self.url}/fake/stats", timeout=10) as response:
            return int(json.load(response)["max_in_flight"])

    def _end(self, sign: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.send_signal(sign)
        self._process.wait(timeout=10)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


async def serve(port: int, options: Options, log_fd: int | None, host: str = "127.0.0.1") -> None:
    runner = web.AppRunner(FakeSglang(options, log_fd).app(), access_log=None, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, host, port, backlog=4096)
    await site.start()
    bound = runner.addresses[0][1]
    print(json.dumps({"url": f"http://{host}:{bound}"}), flush=True)
    await asyncio.Event().wait()


def die_with_stdin() -> None:
    """The parent holds the other end of this pipe: its end, however it comes, is ours."""
    sys.stdin.buffer.read()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON object: fields of fake_engine.Options")
    parser.add_argument("--log-fd", type=int, help="inherited descriptor for the request log")
    parser.add_argument("--die-with-stdin", action="store_true", help="exit when standard input ends")
    arguments = parser.parse_args()
    if arguments.die_with_stdin:
        threading.Thread(target=die_with_stdin, daemon=True).start()
    asyncio.run(serve(arguments.port, Options(**arguments.options), arguments.log_fd))


if __name__ == "__main__":
    main()
