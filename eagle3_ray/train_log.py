"""The log of a training: RUN/train/steps.jsonl, which workers write, the driver tells, and the report draws."""

import json
import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3_ray import run_log
from eagle3_ray.batches import Step
from eagle3_ray.run_log import say
from eagle3_ray.runs import write_text
from eagle3_ray.trackers import Trackers

LOG = "steps.jsonl"
_SAY_EVERY_S = 5.0
_LOOK_EVERY_S = 0.5  # until the first step


class StepLog:
    """RUN/train/steps.jsonl, a line a start, step, validation and checkpoint, and the trackers; of one worker."""

    def __init__(self, folder: Path, plan: str, first: int) -> None:
        path = folder / LOG
        lines = read_log(path)
        self._number = _newest(lines)
        kept = [line for line in lines if line["step"] <= first]
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))  # what is trained again is told again
        self._file = path.open("a", buffering=1)
        self._write({"step": first, "started": True})
        self._trackers = Trackers(folder, folder.parent.name, {"plan": plan}, first)

    def step(self, step: Step, total: int, numbers: Mapping[str, Any]) -> None:
        done = step.number + 1
        self._write({"step": done, "of": total, "epoch": step.epoch, **numbers})
        self._trackers.log(done, {f"train/{k}": v for k, v in numbers.items() if not isinstance(v, list)})

    def validation(self, done: int, numbers: Mapping[str, Any]) -> None:
        self._write({"step": done, "validation": numbers})
        flat = {f"validation/{k}": v for k, v in numbers.items() if k != "partitions"}
        flat |= {f"validation/{name}": value for name, value in numbers["partitions"].items()}
        self._trackers.log(done, flat)

    def checkpoint(self, done: int, best: bool) -> None:
        self._write({"step": done, "checkpoint": True, "best": best})

    def _write(self, line: Mapping[str, Any]) -> None:
        self._number += 1  # and never back, though lines are cut off
        self._file.write(json.dumps({**line, "line": self._number, "time": time.time()}) + "\n")

    def close(self) -> None:
        self._file.close()
        self._trackers.close()


def read_log(path: Path) -> list[dict[str, Any]]:
    """The lines of a training log. A last line that a kill cut short is left out, and so is one that is damaged."""
    if not path.exists():
        return []
    lines = (_read_line(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n"))
    return [line for line in lines if line is not None]


def _read_line(line: bytes) -> dict[str, Any] | None:
    try:
        read = json.loads(line)
    except ValueError:
        return None
    whole = isinstance(read, dict) and isinstance(read.get("step"), int) and isinstance(read.get("line"), int)
    return read if whole else None


class Watch:
    """Prints how the training goes, from its log, in a thread of the driver, and writes its events to the run's log."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._told = self._before = _newest(read_log(path))
        self._starts = 0
        self.first_step: float | None = None
        """When the first step of this job began, by this process's monotonic clock."""

    def __enter__(self) -> "Watch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._tell()

    def own(self, lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Those of this job, and not of one that it goes on from."""
        return [line for line in lines if line["line"] > self._before]

    def _run(self) -> None:
        while not self._end.wait(_LOOK_EVERY_S if self.first_step is None else _SAY_EVERY_S):
            self._tell()

    def _tell(self) -> None:
        lines = read_log(self._path)
        new = [line for line in lines if line["line"] > self._told]
        self._told = max(self._told, _newest(lines))
        for line in new:
            self._log(line)
            if "validation" in line:
                say(_validation_text(line))
        trained = [line for line in new if "loss" in line]
        if trained:
            self.first_step = self.first_step or time.monotonic() - sum(map(seconds_of, trained))
            say(_step_text(trained[-1]))

    def _log(self, line: Mapping[str, Any]) -> None:
        if "started" in line:
            self._starts += 1
            again = self._starts > 1
            run_log.event("training restarted" if again else "training started", _level(again), step=line["step"])
        elif "checkpoint" in line:
            run_log.event("checkpoint written", step=line["step"], best=line["best"])
        elif line.get("set_aside"):
            run_log.event("sequences set aside", logging.WARNING, step=line["step"], sequences=line["set_aside"])


def seconds_of(line: Mapping[str, Any]) -> float:
    """How long the step of a line took."""
    return float(line["tokens"] / line["tokens_per_second"])


def _newest(lines: Sequence[Mapping[str, Any]]) -> int:
    """The number of the last line."""
    return max((line["line"] for line in lines), default=0)


def _level(bad: bool) -> int:
    return logging.WARNING if bad else logging.INFO


def _step_text(line: Mapping[str, Any]) -> str:
    seconds = (line["of"] - line["step"]) * line["tokens"] / max(1.0, line["tokens_per_second"])
    accuracies = " ".join(f"{accuracy:.2f}" for accuracy in line["step_accuracies"])
    return (
        f"{time.strftime('%H:%M:%S')} step {line['step']}/{line['of']} | loss {line['loss']:.3f} | "
        f"accuracy by TTT step {accuracies} | {line['tokens_per_second']:,.0f} tokens/s, "
        f"{line['wait_share']:.0%} waiting | ETA {math.ceil(seconds / 60)} min"
    )


def _validation_text(line: Mapping[str, Any]) -> str:
    numbers = line["validation"]
    partitions = ", ".join(f"{name} {value:.2f}" for name, value in numbers["partitions"].items())
    return (
        f"{time.strftime('%H:%M:%S')} step {line['step']} | held out: loss {numbers['loss']:.3f}, "
        f"chain acceptance length {numbers['chain_acceptance_length']:.3f} ({partitions})"
    )
