"""The stand-in SGLang server as a process: start it, kill it, read what it saw.

    with FakeServer(mean_tokens=20, faults={"reset": [0], "http_503": 0.1}) as server:
        ... server.url ...; server.kill(); server.restart(); server.requests()

By hand: `python -m tests.fakes.sglang_server --port 30000 --options '{"token_latency_s": 0.01}'`. `fake_http.py` has
the routes, `fake_engine.py` options, admission and queue, `fake_model.py` what is answered.
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
import threading
import urllib.request
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

from aiohttp import web

from tests.fakes.fake_engine import FAULTS, Options
from tests.fakes.fake_http import FakeSglang
from tests.fakes.fake_model import answer, token_logprobs
from tests.forks import FORKS

__all__ = ["FAULTS", "FakeServer", "Options", "answer", "token_logprobs"]


class FakeServer:
    """A stand-in in a process of its own, which ends with this one. Options: the fields of `fake_engine.Options`."""

    def __init__(self, **options: Any) -> None:
        self.options = Options(**options)
        self.url = ""
        self.port = 0  # chosen by the first start, kept by restarts
        self._process: multiprocessing.process.BaseProcess | None = None
        self._log = tempfile.NamedTemporaryFile("rb")  # noqa: SIM115 - the server writes to it unbuffered: a kill loses no line

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
        assert self._process.pid is not None
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.is_alive()

    def start(self) -> None:
        mine, theirs = FORKS.Pipe(duplex=False)
        self._process = FORKS.Process(
            target=_serve, args=(self.port, asdict(self.options), self._log.name, theirs), daemon=True
        )
        self._process.start()
        theirs.close()
        with mine:
            try:
                self.url = mine.recv()
            except EOFError:
                self._process.join()
                raise RuntimeError(f"the stand-in server did not start (exit code {self._process.exitcode})") from None
        self.port = int(self.url.rpartition(":")[2])

    def kill(self) -> None:
        """`kill -9`."""
        if self._process is not None:
            self._process.kill()
            self._wait(self._process)

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._wait(self._process)

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

    @staticmethod
    def _wait(process: multiprocessing.process.BaseProcess) -> None:
        process.join(timeout=10)
        assert process.exitcode is not None, f"the stand-in server, process {process.pid}, does not end"


async def serve(
    port: int, options: Options, log_fd: int | None, host: str = "127.0.0.1", tell: Callable[[str], None] | None = None
) -> None:
    """Serves until the process ends. `tell`, or standard output, gets the URL as soon as it can be asked."""
    runner = web.AppRunner(FakeSglang(options, log_fd).app(), access_log=None, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, host, port, backlog=4096)
    await site.start()
    bound = runner.addresses[0][1]
    (tell or partial(print, flush=True))(f"http://{host}:{bound}")
    await asyncio.Event().wait()


def _serve(port: int, options: dict[str, Any], log: str, answer: Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    log_fd = os.open(log, os.O_WRONLY | os.O_APPEND)
    asyncio.run(serve(port, Options(**options), log_fd, tell=answer.send))


def _end_with_parent() -> None:
    """Also when it was killed, and did nothing any more to end its children."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=0, help="0: any free port")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON object: fields of fake_engine.Options")
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.port, Options(**arguments.options), None))


if __name__ == "__main__":
    main()
