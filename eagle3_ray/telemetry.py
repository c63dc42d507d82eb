"""What happens in a generate run while it runs: actors report to one named actor, the driver prints what it says.

Nothing here decides what is stored. The final counts come from the data; these are for people and for stopping early.
"""

import logging
import sys
import threading
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any, cast

import ray

from eagle3_ray import run_log
from eagle3_ray.audit import AuditRules, Evidence

_SAY_EVERY_S = 5.0
_WINDOW_S = 30.0
_SILENT_S = 10.0
"""An actor that has reported nothing for so long is lost; what it did counts, what it had in flight does not."""
_MOST_NOTES = 1000
"""Rows of a job that its log names; all others are counted."""


@dataclass
class PartitionCounts:
    """Rows and tokens of one partition; `journaled` rows were answered in an earlier run."""

    rows: int = 0
    rejected: int = 0
    failed: int = 0
    journaled: int = 0
    output_tokens: int = 0


@dataclass
class EndpointState:
    """One server, as an actor sees it. A withdrawn one is gone for good and nobody's trouble."""

    healthy: bool = True
    withdrawn: bool = False
    in_flight: int = 0
    tokens_per_second: float = 0.0
    answers: int = 0
    output_tokens: int = 0
    retries: Counter[str] = field(default_factory=Counter)


@dataclass
class Report:
    """Everything that one actor has seen since it started; a later report replaces the earlier one."""

    partitions: dict[str, PartitionCounts]
    evidence: dict[str, Evidence]
    endpoints: dict[str, EndpointState]
    since_first_request_s: float | None = None
    since_last_answer_s: float | None = None
    last_failure: str | None = None


@dataclass
class View:
    """The reports of all actors together. Instants are of this node's monotonic clock, which nobody sets."""

    partitions: dict[str, PartitionCounts] = field(default_factory=dict)
    endpoints: dict[str, EndpointState] = field(default_factory=dict)
    first_request: float | None = None
    last_answer: float | None = None
    last_failure: str | None = None
    best_tokens_per_second: float = 0.0
    most_in_flight: int = 0
    stop_reason: str | None = None
    events: list[str] = field(default_factory=list)

    @property
    def output_tokens(self) -> int:
        return sum(counts.output_tokens for counts in self.partitions.values())

    @property
    def answers(self) -> int:
        return sum(endpoint.answers for endpoint in self.endpoints.values())

    @property
    def generating_s(self) -> float:
        """Seconds from the first request to the last answer."""
        if self.first_request is None or self.last_answer is None:
            return 0.0
        return self.last_answer - self.first_request

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.generating_s if self.generating_s > 0 else 0.0


class Telemetry:
    """The named actor. `report` answers with the reason to stop, if there is one."""

    def __init__(self, rules: AuditRules) -> None:
        self._rules = rules
        self._reports: dict[str, Report] = {}
        self._heard: dict[str, float] = {}
        self._stop_reason: str | None = None
        self._speeds: deque[tuple[float, float]] = deque()
        self._totals: deque[tuple[float, int]] = deque()
        self._best = 0.0
        self._most_in_flight = 0
        self._events: list[str] = []
        self._notes: list[dict[str, Any]] = []
        self._unnamed = 0

    def say(self, event: str) -> None:
        """Keeps a sentence for the driver to print."""
        self._events.append(f"{time.strftime('%H:%M:%S')} {event}")

    def note(self, event: str, **about: str) -> None:
        """Keeps what happened to a row for the log: its ids and the reason. Of very many the last are only counted."""
        if len(self._notes) < _MOST_NOTES:
            self._notes.append({"event": event, **about})
        else:
            self._unnamed += 1

    def notes(self, told: int) -> tuple[list[dict[str, Any]], int]:
        """The notes behind the first `told`, and how many rows have none."""
        return self._notes[told:], self._unnamed

    def report(self, writer: str, report: Report) -> str | None:
        self._reports[writer] = report
        self._heard[writer] = time.monotonic()
        self._follow_best(self.view())
        if self._stop_reason is None:
            self._stop_reason = self._finding()
        return self._stop_reason

    def stop(self, reason: str) -> None:
        """Says why the run ends early, for the driver to print."""
        self._stop_reason = self._stop_reason or reason

    def view(self) -> View:
        """All reports added up; what a server says of itself is taken once, from whoever reported it last."""
        view = View(
            best_tokens_per_second=self._best,
            most_in_flight=self._most_in_flight,
            stop_reason=self._stop_reason,
            events=list(self._events),
        )
        now = time.monotonic()
        for writer, report in self._reports.items():
            heard = self._heard[writer]
            lost = now - heard > _SILENT_S
            for name, counts in report.partitions.items():
                total = view.partitions.setdefault(name, PartitionCounts())
                for key, value in vars(counts).items():
                    setattr(total, key, getattr(total, key) + value)
            for url, state in report.endpoints.items():
                known = view.endpoints.get(url, EndpointState())
                view.endpoints[url] = EndpointState(
                    **{
                        **vars(state),
                        "in_flight": known.in_flight + (0 if lost else state.in_flight),
                        "answers": known.answers + state.answers,
                        "output_tokens": known.output_tokens + state.output_tokens,
                        "retries": known.retries + state.retries,
                    }
                )
            view.last_failure = report.last_failure or view.last_failure
            if report.since_first_request_s is not None:
                first = heard - report.since_first_request_s
                view.first_request = first if view.first_request is None else min(view.first_request, first)
            if report.since_last_answer_s is not None:
                last = heard - report.since_last_answer_s
                view.last_answer = last if view.last_answer is None else max(view.last_answer, last)
        return view

    def _follow_best(self, view: View) -> None:
        """The servers' best: the highest mean over 30 s of what they say they generate or, if higher, of what came."""
        now = time.monotonic()
        self._most_in_flight = max(self._most_in_flight, sum(state.in_flight for state in view.endpoints.values()))
        self._speeds.append((now, sum(state.tokens_per_second for state in view.endpoints.values())))
        self._totals.append((now, view.output_tokens))
        for window in (self._speeds, self._totals):
            while now - window[0][0] > _WINDOW_S:
                window.popleft()
        if now - self._speeds[0][0] > 0.8 * _WINDOW_S:
            said = sum(speed for _, speed in self._speeds) / len(self._speeds)
            came = (self._totals[-1][1] - self._totals[0][1]) / (now - self._totals[0][0])
            self._best = max(self._best, said, came)

    def _finding(self) -> str | None:
        merged: dict[str, Evidence] = {}
        for report in self._reports.values():
            for partition, evidence in report.evidence.items():
                merged.setdefault(partition, Evidence()).merge(evidence)
        findings = (evidence.finding(partition, self._rules) for partition, evidence in merged.items())
        return next((finding for finding in findings if finding is not None), None)


class Progress:
    """Prints a line every few seconds (on a terminal: one line that renews itself) from a thread of the driver, and
    writes to the run's log what the actors noted and said.
    """

    def __init__(self, telemetry: Any, expected: dict[str, int], done: dict[str, int]) -> None:
        self._telemetry = telemetry
        self._expected = expected
        self._done = done
        self._history: deque[tuple[float, int, int]] = deque([(time.monotonic(), 0, 0)])
        self._events_said = self._notes_told = self._unnamed = 0
        self._healthy: dict[str, bool] = {}
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Progress":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._look()
        if self._unnamed:
            run_log.event("further rows rejected or failed", logging.WARNING, rows=self._unnamed)
        if sys.stderr.isatty():
            sys.stderr.write("\n")

    def _run(self) -> None:
        while not self._end.wait(_SAY_EVERY_S):
            view = self._look()
            if view is None:
                continue
            line = self.line(view)
            end, start = ("", "\r\x1b[K") if sys.stderr.isatty() else ("\n", "")
            sys.stderr.write(f"{start}{line}{end}")
            sys.stderr.flush()

    def _look(self) -> View | None:
        """The view of now, after its news are told and logged; None where nobody answers."""
        try:
            view, (notes, unnamed) = ray.get(
                [self._telemetry.view.remote(), self._telemetry.notes.remote(self._notes_told)], timeout=10
            )
        except (ray.exceptions.RayError, ray.exceptions.GetTimeoutError):
            return None
        self.log(view, notes, unnamed)
        return cast(View, view)

    def log(self, view: View, notes: list[dict[str, Any]], unnamed: int) -> None:
        """Prints what was said, and logs it with what was noted and the servers that went or came."""
        for said in view.events[self._events_said :]:
            sys.stderr.write(f"{said}\n")
            run_log.event("fleet", logging.WARNING, text=said.partition(" ")[2])
        for note in notes:
            about = dict(note)
            run_log.event(about.pop("event"), logging.WARNING, **about)
        for url, state in view.endpoints.items():
            if state.healthy != self._healthy.get(url, True):
                level = logging.INFO if state.healthy else logging.WARNING
                run_log.event("endpoint back" if state.healthy else "endpoint out", level, endpoint=url)
            self._healthy[url] = state.healthy
        self._events_said = max(self._events_said, len(view.events))
        self._notes_told += len(notes)
        self._unnamed = unnamed

    def line(self, view: View) -> str:
        """One line: per partition done/total, rates of the last half minute, what went wrong, the time left."""
        now = time.monotonic()
        self._history.append((now, view.answers, view.output_tokens))
        while now - self._history[0][0] > _WINDOW_S:
            self._history.popleft()
        since, answers, tokens = self._history[0]
        seconds = max(now - since, 1e-6)
        requests_s, tokens_s = (view.answers - answers) / seconds, (view.output_tokens - tokens) / seconds
        partitions, left = [], 0
        rejected = failed = journaled = 0
        for name, total in self._expected.items():
            counts = view.partitions.get(name, PartitionCounts())
            done = min(total, self._done.get(name, 0) + counts.rows + counts.rejected)
            trouble = [f"{n} {what}" for n, what in ((counts.rejected, "rejected"), (counts.failed, "failed")) if n]
            partitions.append(f"{name} {done}/{total}" + (f" ({', '.join(trouble)})" if trouble else ""))
            left += max(0, total - done - counts.failed)
            rejected, failed = rejected + counts.rejected, failed + counts.failed
            journaled += counts.journaled
        mean = view.output_tokens / view.answers if view.answers else 0
        share = (
            f" ({min(1.0, tokens_s / view.best_tokens_per_second):.0%} of the servers' best)"
            if view.best_tokens_per_second
            else ""
        )
        in_flight = sum(endpoint.in_flight for endpoint in view.endpoints.values())
        parts = [
            ", ".join(partitions),
            f"{requests_s:.1f} req/s, {mean:.0f} tokens mean, {tokens_s:.0f} tokens/s{share}",
            f"{in_flight} in flight",
            f"rejected {rejected}, failed {failed}" + (f", {journaled} from the journal" if journaled else ""),
            f"ETA {_duration(left / requests_s)}" if requests_s > 0 else "ETA unknown",
        ]
        down = [url for url, endpoint in view.endpoints.items() if not (endpoint.healthy or endpoint.withdrawn)]
        if down:
            parts.append(f"DOWN: {', '.join(down)}")
        total = sum(self._expected.values())
        filled = 20 * (total - left) // max(1, total)
        bar = f"[{'#' * filled}{'.' * (20 - filled)}] " if sys.stderr.isatty() else ""
        return f"{time.strftime('%H:%M:%S')} {bar}" + " | ".join(parts)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"
