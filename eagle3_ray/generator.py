"""The actor that turns planned units into rows: it asks the servers, judges the answers and keeps a journal.

One task is one block in and the rows of its units out, in input order and in blocks of whole units. Every row can be
asked for again: Ray may repeat a task on another actor without losing or doubling a row.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray

from eagle3_ray.audit import AuditRules, Evidence, cut_in_reasoning, judge
from eagle3_ray.errors import StoppedEarly, explain
from eagle3_ray.journal import Journal
from eagle3_ray.metrics import GenerateMetrics
from eagle3_ray.plan import PlanSettings, later_turns, make_renderer
from eagle3_ray.prompts import BadPrompt
from eagle3_ray.records import BLOCK_SCHEMA, FOLDER, REJECTED, SEQUENCES, Row, sequence_id, token_sha
from eagle3_ray.registry import Roster
from eagle3_ray.sglang.fleet import Fleet, RowFailed
from eagle3_ray.sglang.probe import ProbeMaterial, ServerFacts
from eagle3_ray.sglang.protocol import Refused, Sampling, Unauthorized
from eagle3_ray.sglang.transport import open_session
from eagle3_ray.telemetry import EndpointState, PartitionCounts, Report

_MOST_BYTES = 32 << 20
"""Of a block. Ray Data gathers up to 128 MiB, and what is half as large again it cuts by rows, also between turns."""


@dataclass(frozen=True)
class GeneratorSettings:
    """All that an actor needs; plain data, so that it travels."""

    facts: list[ServerFacts]
    material: ProbeMaterial
    sampling: Sampling
    rules: AuditRules
    plan: PlanSettings
    journal: str
    actors: int
    max_in_flight: int
    attempts: int
    request_timeout_s: float
    outage_limit_s: float
    api_key: str | None = field(repr=False)


class Generator:
    """Ray Data's async map: a batch of units to blocks of BLOCK_SCHEMA. Failed units are left to the next run."""

    def __init__(self, settings: GeneratorSettings, telemetry: Any, registry: Any) -> None:
        self._settings = settings
        self._telemetry = telemetry
        self._registry = registry
        self._name = uuid.uuid4().hex
        self._journal = Journal(Path(settings.journal))
        self._lengths = AnswerLengths(settings.sampling.max_new_tokens)
        self._metrics = GenerateMetrics()
        self._report = Report({}, {}, {})
        self._first_request: float | None = None
        self._last_answer: float | None = None
        self._fleet = Fleet(
            settings.facts,
            lambda: open_session(settings.api_key, settings.request_timeout_s),
            settings.material,
            settings.sampling,
            max_in_flight=-(-settings.max_in_flight // settings.actors),
            share=1 / settings.actors,
            attempts=settings.attempts,
            outage_limit_s=settings.outage_limit_s,
            say=self._say,
        )
        self._out: dict[str, str] = {}
        self._starting: asyncio.Task[None] | None = None

    async def __call__(self, batch: pa.Table) -> AsyncIterator[pa.Table]:
        if self._starting is None:
            self._starting = asyncio.get_running_loop().create_task(self._start())
        await self._starting
        try:
            rows = await asyncio.gather(*(self._unit(unit) for unit in batch.to_pylist()))
        except (OSError, StoppedEarly, Unauthorized) as error:
            await self._telemetry.stop.remote(explain(error))
            raise
        await self._send_report()  # the last block of a job may be followed by the actor's end
        for block in blocks_of(rows, _MOST_BYTES):
            yield block

    def _say(self, event: str) -> None:
        self._telemetry.say.remote(event)

    async def _start(self) -> None:
        await self._fleet.start()
        await self._follow_registry()  # settings.facts are those of the job's start
        loop = asyncio.get_running_loop()
        self._background = [loop.create_task(self._report_forever()), loop.create_task(self._follow_forever())]

    async def _unit(self, unit: Row) -> list[Row]:
        """The rows of all turns of a unit, or none where one of them has to wait for the next run."""
        rows: list[Row] = []
        reason: str | None = unit["reason"]
        prompt_ids: list[int] = unit["prompt_ids"]
        counts = self._report.partitions.setdefault(unit["partition"], PartitionCounts())
        for turn in range(unit["turns"]):
            answer: Row = {}
            try:
                if reason is None and turn > 0:
                    prompt_ids = self._next_prompt(unit, [row["output_ids"] for row in rows])
                if reason is None:
                    self._check_length(prompt_ids)
                    near = rows[-1]["endpoint"] if rows else None
                    answer = await self._answer(unit, turn, prompt_ids, near)
                    reason = answer.pop("reason")
            except (BadPrompt, Refused) as error:
                reason = str(error)
            except RowFailed as failed:
                counts.failed += unit["turns"]
                self._report.last_failure = f"{unit['partition']}/{unit['prompt_id']}: {failed}"
                self._metrics.row(unit["partition"], "failed")
                self._note("row failed", unit, turn, str(failed))
                return []
            rows.append(self._row(unit, turn, prompt_ids, answer, reason))
            if reason is not None:
                prompt_ids, reason = [], f"an earlier turn was rejected: {reason}"
            elif cut_in_reasoning(prompt_ids, answer["output_ids"], answer["finish_reason"], self._settings.rules):
                prompt_ids, reason = [], "an earlier turn was cut in its reasoning, so there is no answer to go on from"
        for row in rows:
            rejected = row[FOLDER] == REJECTED
            counts.rejected += rejected
            counts.rows += not rejected
            self._metrics.row(unit["partition"], "rejected" if rejected else "sequence")
            if rejected:
                self._note("row rejected", unit, row["turn"], row["reason"])
        return rows

    def _note(self, event: str, unit: Row, turn: int, reason: str) -> None:
        name = sequence_id(unit["partition"], unit["prompt_id"], turn, unit["sample_index"])
        ids = {"sequence_id": name, "partition": unit["partition"], "prompt_id": unit["prompt_id"]}
        self._telemetry.note.remote(event, **ids, reason=reason)

    def _row(self, unit: Row, turn: int, prompt_ids: list[int], answer: Row, reason: str | None) -> Row:
        output_ids = answer.get("output_ids", [])
        return {
            **answer,
            "sequence_id": sequence_id(unit["partition"], unit["prompt_id"], turn, unit["sample_index"]),
            "unit": unit["unit"],
            "partition": unit["partition"],
            "prompt_id": unit["prompt_id"],
            "turn": turn,
            "sample_index": unit["sample_index"],
            "prompt_ids": prompt_ids,
            "output_ids": output_ids,
            "token_sha": token_sha(prompt_ids, output_ids),
            "file": unit["file"],
            "line": unit["line"],
            "reason": reason,
            FOLDER: SEQUENCES if reason is None else REJECTED,
        }

    def _next_prompt(self, unit: Row, answers: list[list[int]]) -> list[int]:
        conversation = later_turns(unit["prompt_id"], unit["conversation"])
        ids: list[int] = make_renderer(self._settings.plan).prompt_ids(conversation, answers)
        return ids

    def _check_length(self, prompt_ids: list[int]) -> None:
        if len(prompt_ids) > self._fleet.longest_prompt:
            raise BadPrompt(
                f"a prompt of {len(prompt_ids)} tokens, where the servers take {self._fleet.longest_prompt} beside "
                f"generate.max_new_tokens={self._settings.sampling.max_new_tokens}"
            )

    async def _answer(self, unit: Row, turn: int, prompt_ids: list[int], near: str | None) -> Row:
        """The answer's columns and the audit's `reason`, from the journal or from a server (see Fleet.generate)."""
        name = sequence_id(unit["partition"], unit["prompt_id"], turn, unit["sample_index"])
        answer = self._journal.get(name)
        partition = unit["partition"]
        counts = self._report.partitions[partition]
        if answer is not None and answer["token_sha"] == token_sha(prompt_ids, answer["output_ids"]):
            counts.journaled += 1
        else:
            self._first_request = self._first_request or time.monotonic()
            checked, url, latency_s, attempts = await self._fleet.generate(
                name, prompt_ids, self._lengths.expected(partition), near
            )
            answer = {
                **asdict(checked),
                "endpoint": url,
                "latency_s": latency_s,
                "attempts": attempts,
                "token_sha": token_sha(prompt_ids, checked.output_ids),
            }
            self._journal.append(name, answer)
            self._last_answer = time.monotonic()
            counts.output_tokens += len(checked.output_ids)
            self._metrics.answered(url, len(checked.output_ids), latency_s)
            self._lengths.learn(partition, len(checked.output_ids))
        has_tools = bool(unit["conversation"]) and '"tools": null' not in unit["conversation"]
        reason = judge(answer["output_ids"], has_tools, self._settings.rules)
        evidence = self._report.evidence.setdefault(partition, Evidence())
        evidence.add(prompt_ids, answer["output_ids"], answer["finish_reason"] == "stop", reason, self._settings.rules)
        return {**answer, "reason": reason}

    async def _report_forever(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            reason = await self._send_report()
            if reason is not None and self._fleet.stopped is None:
                self._fleet.stop(StoppedEarly(reason))

    async def _follow_forever(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            await self._follow_registry()

    async def _follow_registry(self) -> None:
        """Tells the fleet which servers there are; a registry that is lost, or just started anew, changes nothing."""
        with suppress(ray.exceptions.RayError):
            roster: Roster | None = await self._registry.roster.remote()
            if roster is not None:
                self._fleet.follow(roster.fit, roster.out)
                self._out = roster.out

    async def _send_report(self) -> str | None:
        """Tells the telemetry all that is known here; returns its reason to stop, if there is one."""
        self._report.endpoints = {url: EndpointState(healthy=False) for url in self._out}
        for url in self._out:
            self._metrics.endpoint(url, in_flight=0, healthy=False, budget=0, retries={})
        for url, endpoint in self._fleet.endpoints.items():
            self._report.endpoints[url] = EndpointState(
                endpoint.healthy,
                endpoint.withdrawn,
                endpoint.in_flight,
                endpoint.load.tokens_per_second,
                endpoint.answers,
                endpoint.output_tokens,
                endpoint.retries,
            )
            self._metrics.endpoint(url, endpoint.in_flight, endpoint.healthy, endpoint.budget, endpoint.retries)
        now = time.monotonic()
        self._report.since_first_request_s = None if self._first_request is None else now - self._first_request
        self._report.since_last_answer_s = None if self._last_answer is None else now - self._last_answer
        reason: str | None = await self._telemetry.report.remote(self._name, self._report)
        return reason


def blocks_of(units: Sequence[list[Row]], most_bytes: int) -> Iterator[pa.Table]:
    """The units' rows in blocks of about `most_bytes`, each of whole units: a unit is committed with its first row."""
    table = pa.Table.from_pylist([row for unit in units for row in unit], schema=BLOCK_SCHEMA)
    units_each = max(1, len(units) * most_bytes // max(1, table.nbytes))
    before = 0
    for first in range(0, len(units), units_each):
        rows = sum(map(len, units[first : first + units_each]))
        yield table.slice(before, rows)
        before += rows


class AnswerLengths:
    """Expected answer length of each partition, in tokens: the running mean of what has come back."""

    def __init__(self, max_new_tokens: int) -> None:
        self._first_guess = max(1, max_new_tokens // 2)
        self._most = max_new_tokens
        self._means: dict[str, float] = {}

    def expected(self, partition: str) -> int:
        return min(self._most, round(self._means.get(partition, self._first_guess)) + 1)

    def learn(self, partition: str, tokens: int) -> None:
        mean = self._means.get(partition, float(self._first_guess))
        self._means[partition] = mean + 0.02 * (tokens - mean)
