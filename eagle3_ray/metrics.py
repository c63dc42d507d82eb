"""Prometheus metrics of the stages, through Ray; docs/metrics.md has the table of names.

A metric vanishes with its worker, so totals also stand in the summary, which is counted from the data itself.
"""

from collections.abc import Mapping

from ray.util.metrics import Counter, Gauge, Histogram


class GenerateMetrics:
    """What a generating actor tells Prometheus. Ray adds its own prefix `ray_`."""

    def __init__(self) -> None:
        self._rows = Counter("eagle3_generate_rows_total", "answers by outcome", ("partition", "outcome"))
        self._tokens = Counter("eagle3_generate_output_tokens_total", "answer tokens", ("endpoint",))
        self._retries = Counter("eagle3_generate_retries_total", "requests that were sent again", ("endpoint", "cause"))
        self._in_flight = Gauge("eagle3_generate_in_flight", "requests in flight", ("endpoint",))
        self._healthy = Gauge("eagle3_generate_endpoint_healthy", "1 while the server takes requests", ("endpoint",))
        self._budget = Gauge("eagle3_generate_budget_tokens", "tokens admitted to a server at once", ("endpoint",))
        self._seconds = Histogram(
            "eagle3_generate_request_seconds",
            "latency of an answer",
            [0.1, 0.3, 1, 3, 10, 30, 100, 300, 1000],
            ("endpoint",),
        )
        self._seen_retries: dict[tuple[str, str], int] = {}

    def answered(self, endpoint: str, tokens: int, seconds: float) -> None:
        self._tokens.inc(tokens, {"endpoint": endpoint})
        self._seconds.observe(seconds, {"endpoint": endpoint})

    def row(self, partition: str, outcome: str) -> None:
        """`outcome` is "sequence", "rejected" or "failed"."""
        self._rows.inc(1, {"partition": partition, "outcome": outcome})

    def endpoint(self, url: str, in_flight: int, healthy: bool, budget: float, retries: Mapping[str, int]) -> None:
        tags = {"endpoint": url}
        self._in_flight.set(in_flight, tags)
        self._healthy.set(int(healthy), tags)
        self._budget.set(budget, tags)
        for cause, count in retries.items():
            new = count - self._seen_retries.get((url, cause), 0)
            if new:
                self._retries.inc(new, {"endpoint": url, "cause": cause})
                self._seen_retries[url, cause] = count


class CaptureMetrics:
    """What a capturing actor tells Prometheus."""

    def __init__(self) -> None:
        self._sequences = Counter("eagle3_capture_sequences_total", "sequences whose states were captured")
        self._tokens = Counter("eagle3_capture_tokens_total", "tokens whose states were captured")
        self._set_aside = Counter("eagle3_capture_set_aside_total", "sequences that are not the target's own")
        self._seconds = Counter("eagle3_capture_seconds_total", "seconds spent in capturing")
        self._bytes = Counter("eagle3_capture_bytes_total", "bytes of states as the target computes them")

    def captured(self, sequences: int, tokens: int, size: int, seconds: float) -> None:
        self._sequences.inc(sequences)
        self._tokens.inc(tokens)
        self._bytes.inc(size)
        self._seconds.inc(seconds)

    def set_aside(self) -> None:
        self._set_aside.inc(1)


class TrainMetrics:
    """What a training worker tells Prometheus."""

    def __init__(self) -> None:
        names = {
            "loss": "loss of the last step",
            "tokens_per_second": "tokens of the last step over its seconds, all workers",
            "wait_share": "share of the last step that waited for states",
        }
        self._gauges = {name: Gauge(f"eagle3_train_{name}", about) for name, about in names.items()}
        self._steps = Counter("eagle3_train_steps_total", "optimiser steps")
        self._tokens = Counter("eagle3_train_tokens_total", "tokens trained on, all workers")
        self._set_aside = Counter("eagle3_train_set_aside_total", "sequences with an empty loss mask")

    def stepped(self, numbers: Mapping[str, float]) -> None:
        for name, gauge in self._gauges.items():
            gauge.set(numbers[name])
        self._steps.inc(1)
        self._tokens.inc(numbers["tokens"])
        if numbers["set_aside"]:
            self._set_aside.inc(numbers["set_aside"])
