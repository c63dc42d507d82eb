"""RUN/logs/STAGE.jsonl: what happened to a stage, one JSON object a line, for machines and for those who look back.

Every line has `time` (ISO 8601 with the offset to UTC), `run`, `stage`, `level` and `event`; the rest depends on the
event (docs/logs.md). Ordinary rows have no lines. Only the driver writes: what actors see reaches it as before.
"""

import json
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_logger = logging.getLogger("eagle3_ray.run")
_logger.setLevel(logging.INFO)
_logger.propagate = False  # these lines are for the file; what people have to know is printed
_logger.addHandler(logging.NullHandler())


class _JsonLines(logging.Formatter):
    """A record as one line of JSON."""

    def __init__(self, run: str, stage: str) -> None:
        super().__init__()
        self._about = {"run": run, "stage": stage}

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(record.created))
        head = {"time": stamp, **self._about, "level": record.levelname, "event": record.getMessage()}
        return json.dumps(head | record.__dict__.get("about", {}), default=str)


class _Quiet(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk stops the job at the next row or state; a line of the log is not worth a second complaint."""


@contextmanager
def writing(run: Path, stage: str) -> Iterator[None]:
    """Sends events to RUN/logs/STAGE.jsonl, behind those of earlier jobs; nowhere if that cannot be written."""
    path = run / "logs" / f"{stage}.jsonl"
    handler: logging.Handler | None = None
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _Quiet(path, encoding="utf-8")
        handler.setFormatter(_JsonLines(str(run), stage))
        _logger.addHandler(handler)
    try:
        yield
    finally:
        if handler is not None:
            _logger.removeHandler(handler)
            handler.close()


def event(name: str, level: int = logging.INFO, **about: Any) -> None:
    """Writes a line: `name` is the kind of event, `about` its ids and reasons."""
    _logger.log(level, "%s", name, extra={"about": about})


def say(text: str) -> None:
    """Tells people, on stderr: stdout is for the summary."""
    print(text, file=sys.stderr, flush=True)
