"""What the run says of itself, added up by hand and on a clock that the test turns."""

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from eagle3_ray import run_log
from eagle3_ray.audit import AuditRules, Evidence
from eagle3_ray.telemetry import EndpointState, PartitionCounts, Progress, Report, Telemetry, View

RULES = AuditRules(frozenset({2}), frozenset({2, 4}), frozenset({4}), loop_tokens=64, evidence_rows=100)
URL, OTHER = "http://a:1", "http://b:2"


class Clock:
    """time.monotonic, turned by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("eagle3_ray.telemetry.time.monotonic", clock)
    return clock


def _report(tokens: int = 0, speed: float = 0.0, **more: Any) -> Report:
    return Report(
        partitions={"B1": PartitionCounts(output_tokens=tokens)},
        evidence={},
        endpoints={URL: EndpointState(tokens_per_second=speed)},
        **more,
    )


def test_the_view_adds_up_the_last_report_of_each_actor() -> None:
    telemetry = Telemetry(RULES)
    telemetry.report("a", Report({"B1": PartitionCounts(rows=99)}, {}, {}))
    telemetry.report(
        "a",
        Report({"B1": PartitionCounts(rows=3, rejected=1, failed=2, journaled=1, output_tokens=50)}, {}, {}),
    )
    telemetry.report(
        "b",
        Report({"B1": PartitionCounts(rows=5, output_tokens=70), "B2": PartitionCounts(rows=1)}, {}, {}),
    )
    view = telemetry.view()
    assert view.partitions == {
        "B1": PartitionCounts(rows=8, rejected=1, failed=2, journaled=1, output_tokens=120),
        "B2": PartitionCounts(rows=1),
    }
    assert view.output_tokens == 120


def test_what_actors_did_at_a_server_adds_up_and_what_the_server_says_counts_once() -> None:
    telemetry = Telemetry(RULES)
    for writer, in_flight, answers, retries in (("a", 3, 10, {"429": 2}), ("b", 4, 20, {"429": 1, "reset": 5})):
        state = EndpointState(
            in_flight=in_flight,
            tokens_per_second=800.0,
            answers=answers,
            output_tokens=answers * 10,
            retries=Counter(retries),
        )
        telemetry.report(writer, Report({}, {}, {URL: state, OTHER: EndpointState(answers=1)}))
    view = telemetry.view()
    state = view.endpoints[URL]
    assert (state.in_flight, state.answers, state.output_tokens) == (7, 30, 300)
    assert state.retries == {"429": 3, "reset": 5}
    assert state.tokens_per_second == 800.0
    assert view.answers == 30 + 2


def test_what_an_actor_had_in_flight_is_forgotten_when_it_is_lost_and_its_answers_are_not(clock: Clock) -> None:
    telemetry = Telemetry(RULES)
    telemetry.report("lost", Report({}, {}, {URL: EndpointState(in_flight=3, answers=10)}))
    clock.now += 9
    telemetry.report("lives", Report({}, {}, {URL: EndpointState(in_flight=4, answers=20)}))
    assert telemetry.view().endpoints[URL] == EndpointState(in_flight=7, answers=30)
    clock.now += 2
    assert telemetry.view().endpoints[URL] == EndpointState(in_flight=4, answers=30)


def test_a_view_does_not_change_what_was_reported() -> None:
    telemetry = Telemetry(RULES)
    report = _report(tokens=5)
    report.endpoints[URL].retries["429"] += 1
    telemetry.report("a", report)
    telemetry.report("b", _report(tokens=7))
    assert telemetry.view() == telemetry.view()
    assert report.partitions["B1"].output_tokens == 5
    assert report.endpoints[URL].retries == {"429": 1}


def test_generating_lasts_from_the_first_request_to_the_last_answer_of_any_actor(clock: Clock) -> None:
    telemetry = Telemetry(RULES)
    telemetry.report("idle", _report())
    clock.now = 1160.0  # it asked at 1110 and was last answered at 1150; the other one at 1100 and 1120
    times = {"since_first_request_s": 50.0, "since_last_answer_s": 10.0}
    telemetry.report("a", _report(tokens=400, last_failure="x: reset", **times))
    clock.now = 1200.0
    times = {"since_first_request_s": 100.0, "since_last_answer_s": 80.0}
    telemetry.report("b", _report(tokens=600, **times))
    view = telemetry.view()
    assert view.generating_s == 50.0
    assert view.tokens_per_second == 20.0
    assert view.last_failure == "x: reset"


def test_before_the_first_answer_nothing_is_divided_by_nothing() -> None:
    assert (View().generating_s, View().tokens_per_second) == (0.0, 0.0)
    assert View(first_request=5.0, last_answer=5.0).tokens_per_second == 0.0
    assert View(first_request=5.0).generating_s == 0.0


def test_the_best_is_not_told_before_half_a_minute_is_nearly_full(clock: Clock) -> None:
    telemetry = Telemetry(RULES)
    for _ in range(25):  # 24 s between the first and the last
        telemetry.report("a", _report(speed=500.0))
        clock.now += 1
    assert telemetry.view().best_tokens_per_second == 0.0
    telemetry.report("a", _report(speed=500.0))
    assert telemetry.view().best_tokens_per_second == 500.0


def test_the_best_is_the_highest_mean_of_half_a_minute_that_the_servers_showed(clock: Clock) -> None:
    telemetry = Telemetry(RULES)
    speeds = [100.0] * 40 + [900.0] * 40 + [100.0] * 80
    for speed in speeds:
        telemetry.report("a", _report(speed=speed))
        clock.now += 1
    means = [sum(speeds[i : i + 31]) / 31 for i in range(len(speeds) - 30)]
    assert telemetry.view().best_tokens_per_second == pytest.approx(max(means)) == 900.0


@pytest.mark.parametrize("seed", range(5))
def test_the_best_is_the_maximum_over_all_windows_of_any_history(clock: Clock, seed: int) -> None:
    rng = random.Random(seed)
    telemetry = Telemetry(RULES)
    history: list[tuple[float, float, int]] = []
    tokens, best = 0, 0.0
    for _ in range(150):
        clock.now += rng.choice([0.5, 1.0, 2.0])
        tokens += rng.randrange(0, 2000)
        history.append((clock.now, rng.uniform(0, 1500), tokens))
        telemetry.report("a", _report(tokens=tokens, speed=history[-1][1]))
        window = [entry for entry in history if clock.now - entry[0] <= 30]
        if clock.now - window[0][0] > 24:
            said = sum(entry[1] for entry in window) / len(window)
            came = (window[-1][2] - window[0][2]) / (window[-1][0] - window[0][0])
            best = max(best, said, came)
    assert best > 0
    assert telemetry.view().best_tokens_per_second == pytest.approx(best)


def test_tokens_that_came_count_where_the_servers_say_less(clock: Clock) -> None:
    telemetry = Telemetry(RULES)
    for second in range(31):
        telemetry.report("a", _report(tokens=250 * second, speed=10.0))
        clock.now += 1
    assert telemetry.view().best_tokens_per_second == pytest.approx(250.0)


def test_the_speeds_of_several_servers_add_up(clock: Clock) -> None:
    telemetry = Telemetry(RULES)
    for _ in range(31):
        states = {URL: EndpointState(tokens_per_second=300.0), OTHER: EndpointState(tokens_per_second=200.0)}
        telemetry.report("a", Report({}, {}, states))
        clock.now += 1
    assert telemetry.view().best_tokens_per_second == pytest.approx(500.0)


def test_evidence_of_several_actors_together_stops_the_run() -> None:
    telemetry = Telemetry(RULES)
    half = Evidence(rows=60, boundary_due=60)
    assert telemetry.report("a", Report({}, {"B1": half}, {})) is None
    assert telemetry.report("a", Report({}, {"B1": half}, {})) is None  # again the same 60, not 120
    reason = telemetry.report("b", Report({}, {"B1": half}, {}))
    assert reason is not None
    assert "Partition B1: none of 120 whole answers" in reason
    assert telemetry.report("c", _report()) == reason
    assert telemetry.view().stop_reason == reason
    assert half == Evidence(rows=60, boundary_due=60)


def test_evidence_of_different_partitions_is_not_mixed() -> None:
    telemetry = Telemetry(RULES)
    evidence = {name: Evidence(rows=60, boundary_due=60) for name in ("B1", "B2")}
    assert telemetry.report("a", Report({}, evidence, {})) is None


def test_the_first_reason_to_stop_stays() -> None:
    telemetry = Telemetry(RULES)
    telemetry.stop("all servers are down")
    telemetry.stop("something later")
    reason = telemetry.report("a", Report({}, {"B1": Evidence(rows=200, boundary_due=200)}, {}))
    assert reason == telemetry.view().stop_reason == "all servers are down"


def _view(rows: int, answers: int, tokens: int, **more: Any) -> View:
    endpoints = {URL: EndpointState(answers=answers, in_flight=7)}
    return View(partitions={"B1": PartitionCounts(rows=rows, output_tokens=tokens)}, endpoints=endpoints, **more)


def test_a_line_has_counts_rates_share_and_time_left(clock: Clock) -> None:
    progress = Progress(None, {"B1": 100, "B2": 50}, {"B1": 10})
    clock.now += 10
    view = _view(rows=20, answers=20, tokens=2000, best_tokens_per_second=400.0)
    view.partitions["B2"] = PartitionCounts(rows=5, rejected=3, failed=2)
    time_of_day, *parts = progress.line(view).split(" ", 1)
    assert len(time_of_day) == 8
    assert parts[0].split(" | ") == [
        "B1 30/100, B2 8/50 (3 rejected, 2 failed)",
        "2.0 req/s, 100 tokens mean, 200 tokens/s (50% of the servers' best)",
        "7 in flight",
        "rejected 3, failed 2",
        "ETA 55 s",  # 70 + 42 - 2 rows at 2 a second
    ]


def test_rates_are_those_of_the_last_half_minute(clock: Clock) -> None:
    progress = Progress(None, {"B1": 10_000}, {})
    for second in range(1, 101):
        clock.now += 1
        line = progress.line(_view(rows=second * 10, answers=second * 10, tokens=second * 100))
    assert "10.0 req/s, 10 tokens mean, 100 tokens/s |" in line
    for _ in range(31):
        clock.now += 1
        line = progress.line(_view(rows=1000, answers=1000, tokens=10_000))
    assert "0.0 req/s" in line
    assert line.endswith("ETA unknown")


def test_a_line_before_the_first_answer_knows_no_time_and_a_server_that_is_down_is_named(clock: Clock) -> None:
    view = View(endpoints={URL: EndpointState(healthy=False), OTHER: EndpointState()})
    line = Progress(None, {"B1": 5}, {}).line(view)
    assert "B1 0/5" in line
    assert "0 tokens mean" in line
    assert "ETA unknown" in line
    assert line.endswith(f"DOWN: {URL}")


def test_a_server_that_was_withdrawn_is_not_told_as_down(clock: Clock) -> None:
    endpoints = {URL: EndpointState(healthy=False, withdrawn=True), OTHER: EndpointState(healthy=False)}
    assert Progress(None, {"B1": 5}, {}).line(View(endpoints=endpoints)).endswith(f"| DOWN: {OTHER}")


def test_rows_that_a_repeated_task_counted_twice_do_not_overshoot(clock: Clock) -> None:
    progress = Progress(None, {"B1": 10}, {"B1": 4})
    clock.now += 1
    view = _view(rows=9, answers=9, tokens=90)
    view.partitions["B1"].failed = 30
    line = progress.line(view)
    assert "B1 10/10" in line
    assert "ETA 0 s" in line


@pytest.mark.parametrize(
    ("left", "eta"),
    [(59, "59 s"), (60, "1 min 0 s"), (3599, "59 min 59 s"), (3600, "1 h 0 min"), (90_000, "25 h 0 min")],
)
def test_time_left_is_told_in_the_unit_that_fits(clock: Clock, left: int, eta: str) -> None:
    progress = Progress(None, {"B1": left + 1}, {})
    clock.now += 1
    assert progress.line(_view(rows=1, answers=1, tokens=1)).endswith(f"ETA {eta}")


def test_the_log_names_the_first_thousand_rows_and_counts_the_others() -> None:
    telemetry = Telemetry(RULES)
    for number in range(1003):
        telemetry.note("row rejected", sequence_id=str(number), reason="a loop")
    notes, unnamed = telemetry.notes(998)
    assert [note["sequence_id"] for note in notes] == ["998", "999"]
    assert unnamed == 3


def test_what_is_new_goes_to_the_log_once_and_an_endpoint_out_and_back(tmp_path: Path) -> None:
    progress = Progress(None, {"B1": 5}, {})
    note = {"event": "row failed", "sequence_id": "s", "partition": "B1", "reason": "6 attempts failed"}
    said = ["12:00:00 http://a:1 is taken out after a timeout"]
    out, back = ({URL: EndpointState(healthy=healthy)} for healthy in (False, True))
    with run_log.writing(tmp_path, "generate"):
        progress.log(View(endpoints={URL: EndpointState()}), [note], 0)
        progress.log(View(endpoints=out, events=said), [], 0)
        progress.log(View(endpoints=out, events=said), [], 0)
        progress.log(View(endpoints=back, events=said), [], 0)
    lines = [json.loads(line) for line in (tmp_path / "logs" / "generate.jsonl").read_text().splitlines()]
    head = {"run": str(tmp_path), "stage": "generate", "level": "WARNING"}
    assert [{k: v for k, v in line.items() if k != "time"} for line in lines] == [
        {**head, **note},
        {**head, "event": "fleet", "text": "http://a:1 is taken out after a timeout"},
        {**head, "event": "endpoint out", "endpoint": URL},
        {**head, "level": "INFO", "event": "endpoint back", "endpoint": URL},
    ]
