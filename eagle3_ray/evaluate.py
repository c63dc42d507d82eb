"""What drafters are worth in the engine that will serve them, beside each other and beside none.

prompt sets -> the plain engine answers every turn, and so fixes the prompts of later turns -> each drafter's engine
answers the same prompt ids -> acceptance length, histogram, tokens/s, lossless check -> a diagnosis where the figure
cannot be believed -> a table and a summary. Engines run one after the other, so that none disturbs another.
"""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from eagle3_ray import cluster
from eagle3_ray.acceptance.diagnosis import OF_THE_ENGINE, examine
from eagle3_ray.acceptance.engine import EngineFailed, EngineInfo, Measured, answer_conversations, engine_info, measure
from eagle3_ray.acceptance.kept import Kept, answers_of
from eagle3_ray.acceptance.lossless import compare
from eagle3_ray.acceptance.questions import Question, load_questions
from eagle3_ray.acceptance.serving import Serving
from eagle3_ray.acceptance.table import by_group, table
from eagle3_ray.acceptance.tally import EVERYTHING, PLAIN, VALIDATION_STEPS
from eagle3_ray.config import Config, ConfigError, Evaluate, Target
from eagle3_ray.errors import ENDS, explain, root_cause
from eagle3_ray.file_hashes import folder_sha
from eagle3_ray.rendering import Renderer
from eagle3_ray.run_log import say
from eagle3_ray.runs import DRAFTER, EVALUATE, INITIAL, SUCCESS, TRAIN, RunDir, WriterLock
from eagle3_ray.sglang.processes import ServerFailed
from eagle3_ray.sglang.protocol import Sampling
from eagle3_ray.stages import carried_out
from eagle3_ray.target.files import TargetError, TargetFiles, resolve


@dataclass(frozen=True)
class EvaluateSettings:
    """All that a measurement is made of; it stands in the result."""

    section: Evaluate  # names the drafters; its endpoints are split below
    target: Target
    expected: tuple[tuple[str, float], ...] = ()  # acceptance length of a drafter that training found
    endpoints: tuple[tuple[str, str], ...] = ()  # (drafter or "none", URL) of engines that run already
    boundary_ids: tuple[int, ...] = ()
    api_key: str | None = field(default=None, repr=False)


@carried_out(EVALUATE)
def run(config: Config) -> dict[str, Any]:
    """Runs the stage and returns its summary; a run that was evaluated with these drafters and settings is left alone.

    Raises:
        ConfigError, PromptSourceError, TargetError, RunError: before anything is measured; says what to change.
    """
    run_dir = RunDir(config.run.dir)
    settings = settings_of(config)
    with WriterLock(run_dir):
        questions = questions_of(settings.section)
        key = _key(settings, settings.section.drafters, resolve(settings.target.model), questions)
        if run_dir.succeeded_with(EVALUATE, key) and (known := run_dir.summary(EVALUATE)) is not None:
            say(f"{run_dir.path} is evaluated; nothing to do")
            say(table(known["engines"]))
            return known
        if settings.section.gpus:
            cluster.connect()
            cluster.require(cluster.Need("engine", 1, 1, settings.section.gpus))
        (run_dir.stage(EVALUATE) / SUCCESS).unlink(missing_ok=True)
        summary = evaluate(settings, Kept(run_dir.stage(EVALUATE) / "measured"))
        run_dir.write_summary(EVALUATE, summary)
        in_doubt = any(_is_in_doubt(settings, name, engine) for name, engine in summary["engines"].items())
        if summary["status"] == "complete" and not in_doubt:
            run_dir.succeed(EVALUATE, key)
        return summary


def dry_run(config: Config) -> str:
    """What would be measured, for people; starts nothing."""
    settings = settings_of(config)
    section, running = settings.section, dict(settings.endpoints)
    questions = questions_of(section)
    turns = sum(question.turns for question in questions)
    engines = [f"{name} ({running.get(name, 'started here')})" for name in (PLAIN, *section.drafters)]
    return (
        f"{len(questions)} questions, {turns} answers of at most {section.max_new_tokens} tokens from each engine: "
        f"{', '.join(engines)}"
    )


def questions_of(section: Evaluate) -> list[Question]:
    """What the section asks for.

    Raises:
        ConfigError: nothing.
        PromptSourceError: see `load_questions`.
    """
    if not section.prompts:
        raise ConfigError("evaluate.prompts names no questions. Set evaluate.prompts=FILE[,FILE].")
    return load_questions(section.prompts, section.limit)


def settings_of(config: Config) -> EvaluateSettings:
    """The settings of the `evaluate` section. Without drafters these are the run's own, as it began and as it ended.

    Raises:
        ConfigError: no drafter to measure, or an endpoint of none of them.
    """
    section, run_dir = config.evaluate, RunDir(config.run.dir)
    trained, fresh = run_dir.stage(TRAIN) / DRAFTER, run_dir.stage(TRAIN) / INITIAL
    drafters = section.drafters or [str(folder) for folder in (fresh, trained) if folder.is_dir()]
    if not section.drafters and not trained.is_dir():
        raise ConfigError(
            f"{run_dir.path} has no drafter to evaluate. Train one to the end, or set evaluate.drafters=FOLDER[,...]."
        )
    endpoints = tuple((name, url) for name, _, url in (word.rpartition("=") for word in section.endpoints))
    for name, url in endpoints:
        if name not in (PLAIN, *drafters):
            raise ConfigError(
                f"evaluate.endpoints={name}={url}: write DRAFTER=URL with one of {PLAIN}, {', '.join(drafters)}."
            )
    for drafter in drafters:
        if drafter not in dict(endpoints) and not Path(drafter).is_dir():
            raise ConfigError(f"evaluate.drafters={drafter} is no folder. Name an exported drafter.")
    began_with = run_dir.manifest().get(TRAIN, {}).get("fingerprint", {}).get("train.drafter")
    expected = {} if began_with else {str(fresh): 1.0}
    if (found := (run_dir.summary(TRAIN) or {}).get("chain_acceptance_length")) is not None:
        drafted = min(section.steps, VALIDATION_STEPS) / VALIDATION_STEPS
        expected[str(trained)] = 1.0 + (found - 1.0) * drafted  # at least: earlier drafts are right more often
    return EvaluateSettings(
        section=section.model_copy(update={"drafters": drafters}),
        target=config.target,
        expected=tuple((drafter, expected[drafter]) for drafter in drafters if drafter in expected),
        endpoints=endpoints,
        boundary_ids=tuple(config.audit.boundary_ids),
        api_key=os.environ.get(config.generate.api_key_env or ""),
    )


def evaluate(settings: EvaluateSettings, kept: Kept) -> dict[str, Any]:
    """Measures all drafters that `kept` has not, and returns the summary of what is measured when an engine fails.

    Raises:
        PromptSourceError, TargetError: before anything is measured; says what to change.
    """
    started = time.monotonic()
    work = _prepare(settings)
    of = work.target, work.questions
    engines: dict[str, Any] = {}
    clock = _Clock(time.monotonic() - started)
    warnings: list[str] = []
    stopped_by = None
    try:
        measured = kept.get("plain engine", _key(settings, (), *of), partial(_measure_plain, work, clock))
        plain = _Plain(answers_of(measured["answers"]), measured["speed"])
        engines[PLAIN] = {"speed": plain.speed, "engine": measured["engine"], **_shape(plain.answers)}
        for drafter in settings.section.drafters:
            measure_it = partial(_measure_drafter, work, drafter, plain, clock)
            measured = kept.get(drafter, _key(settings, (drafter,), *of), measure_it)
            engines[drafter] = measured["result"]
            if _is_in_doubt(settings, drafter, measured["result"]):
                kept.forget(_key(settings, (drafter,), *of))
            warnings += [f"{drafter}: {warning}" for warning in measured["warnings"]]
            say(table(engines))
    except (EngineFailed, ServerFailed, *ENDS) as end:
        stopped_by = explain(root_cause(end))
    best = max(
        (drafter for drafter in settings.section.drafters if drafter in engines),
        key=lambda drafter: engines[drafter]["acceptance"][EVERYTHING]["acceptance_length"] or 0.0,
        default=None,
    )
    return {
        "stage": EVALUATE,
        "status": "stopped" if stopped_by else "complete",
        "stopped_by": stopped_by,
        "warnings": warnings,
        "best_drafter": best,
        "acceptance_length": engines[best]["acceptance"][EVERYTHING]["acceptance_length"] if best else None,
        "wall_s": round(time.monotonic() - started, 1),
        "start_up_s": round(clock.start_up_s, 1),
        "busy_s": round(clock.busy_s, 1),
        "settings": _told(settings),
        "target": work.target.fingerprint(),
        "engines": engines,
    }


@dataclass
class _Clock:
    """Seconds until engines answer, and seconds in which they do."""

    start_up_s: float
    busy_s: float = 0.0

    @contextmanager
    def engine(self, serving: Serving, drafter: str) -> Iterator[str]:
        """The engine of `serving`, its start taken down."""
        started = time.monotonic()
        with serving.engine(drafter) as url:
            self.start_up_s += time.monotonic() - started
            yield url

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Takes down how long the engine answers."""
        started = time.monotonic()
        yield
        self.busy_s += time.monotonic() - started


@dataclass(frozen=True)
class _Work:
    """All that is known before the first engine starts."""

    settings: EvaluateSettings
    target: TargetFiles
    questions: list[Question]
    renderer: Renderer
    sampling: Sampling
    serving: Serving

    @property
    def concurrency(self) -> int:
        return max(self.settings.section.concurrencies)


@dataclass(frozen=True)
class _Plain:
    """The engine without a drafter."""

    answers: Measured
    speed: dict[str, float]


def _prepare(settings: EvaluateSettings) -> _Work:
    section, named = settings.section, settings.target
    target = resolve(named.model)
    stops = target.stop_ids()
    if not stops:
        raise TargetError(f"target.model={named.model}: its config.json names no eos_token_id. Add it there.")
    args = tuple(named.server_args)
    return _Work(
        settings,
        target,
        questions_of(section),
        Renderer(target.folder, trust_remote_code=named.trust_remote_code, boundary_ids=settings.boundary_ids),
        Sampling(section.max_new_tokens, 0.0, 1.0, False, target.vocab_size, frozenset(stops)),
        Serving(target.for_sglang(), section.steps, named.launch, section.gpus, settings.endpoints, args),
    )


def _told(settings: EvaluateSettings) -> dict[str, Any]:
    return {
        **settings.section.model_dump(),
        "target": settings.target.model_dump(),
        "expected": settings.expected,
        "endpoints": settings.endpoints,
        "boundary_ids": settings.boundary_ids,
    }


def _key(
    settings: EvaluateSettings, drafters: Sequence[str], target: TargetFiles, questions: Sequence[Question]
) -> str:
    """Of all that a measurement of these drafters depends on: settings, questions, target, the drafters' files."""
    about = _told(settings) | {
        "drafters": drafters,
        "expected": [pair for pair in settings.expected if pair[0] in drafters],
        "endpoints": [pair for pair in settings.endpoints if pair[0] in (PLAIN, *drafters)],
    }
    digest = hashlib.sha256(json.dumps([about, target.fingerprint()]).encode())
    digest.update(repr(questions).encode())
    for folder in (Path(drafter) for drafter in drafters):
        if folder.is_dir():  # an engine that runs elsewhere may call it by a name that is none here
            digest.update(folder_sha(folder).encode())
    return digest.hexdigest()[:16]


def _is_in_doubt(settings: EvaluateSettings, drafter: str, result: Mapping[str, Any]) -> bool:
    """Whether an engine that runs already was started wrongly: it will be started anew there, and asked again."""
    causes = {finding["cause"] for finding in result.get("diagnosis", [])}
    return drafter in dict(settings.endpoints) and not causes.isdisjoint(OF_THE_ENGINE)


def _measure_plain(work: _Work, clock: _Clock) -> dict[str, Any]:
    with clock.engine(work.serving, PLAIN) as url:
        info = _info(work, url)
        if info.algorithm is not None:
            raise EngineFailed(f"{url} was named as the engine without a drafter, but it runs {info.algorithm}.")
        say(f"plain engine: {len(work.questions)} questions")
        with clock.busy():
            answers = answer_conversations(
                url, work.questions, work.renderer, work.sampling, work.concurrency, work.settings.api_key
            )
            speed = _speed(work, url, answers)
        return {"engine": asdict(info), "speed": speed, "answers": asdict(answers)}


def _info(work: _Work, url: str) -> EngineInfo:
    """What the engine says of itself. Raises EngineFailed: it serves another model than the target."""
    info, named = engine_info(url, work.settings.api_key), work.settings.target
    wanted = {named.served_as} if named.served_as else {named.model, work.serving.target}
    if PurePath(info.model).name not in {PurePath(name).name for name in wanted}:
        raise EngineFailed(
            f"{url} serves {info.model!r}, not {named.served_as or named.model!r}. Start it with the target, or set "
            f"target.served_as={info.model} if these are the target's weights under another name."
        )
    return info


def _measure_drafter(work: _Work, drafter: str, plain: _Plain, clock: _Clock) -> dict[str, Any]:
    """The drafter's `result`, and `warnings` about it."""
    settings = work.settings
    say(f"{drafter}: {len(plain.answers.served)} prompts")
    with clock.engine(work.serving, drafter) as url:
        info = _info(work, url)
        prompts = [one.prompt for one in plain.answers.served]
        with clock.busy():
            answers = measure(url, prompts, work.sampling, work.concurrency, settings.api_key)
            speed = _speed(work, url, answers)
        lossless = compare(plain.answers.served, answers.served, url, settings.api_key)
    acceptance = by_group(answers.served)
    findings = examine(
        info,
        Path(drafter),
        acceptance[EVERYTHING].length,
        dict(settings.expected).get(drafter),
        work.target,
        plain.answers.served,
        settings.section.steps,
        settings.target.trust_remote_code,
    )
    result = {
        "acceptance": {group: counts.as_json() for group, counts in acceptance.items()},
        "speed": speed,
        "speedup": {c: round(speed[c] / plain.speed[c], 3) for c in speed},
        "lossless": lossless.as_json(),
        "diagnosis": [asdict(finding) for finding in findings],
        "engine": asdict(info),
        "folder_sha": folder_sha(Path(drafter)) if Path(drafter).is_dir() else None,
        **_shape(answers),
    }
    warnings = [str(finding) for finding in findings]
    if lossless.unexplained:
        first = lossless.unexplained[0]
        warnings.append(
            f"{len(lossless.unexplained)} of {lossless.answers} greedy answers differ from the plain engine's by more "
            f"than a near tie; the first is {first.name}, at token {first.position}."
        )
    return {"result": result, "warnings": warnings}


def _speed(work: _Work, url: str, answers: Measured) -> dict[str, float]:
    """Tokens/s at each concurrency, over the same prompts for every engine. The engine is warm by now."""
    section = work.settings.section
    prompts = [one.prompt for one in answers.served][: section.speed_prompts]
    measured = {c: measure(url, prompts, work.sampling, c, work.settings.api_key) for c in section.concurrencies}
    return {str(c): round(one.tokens_per_second, 2) for c, one in measured.items()}


def _shape(answers: Measured) -> dict[str, Any]:
    return {
        "answers": len(answers.served),
        "output_tokens": answers.output_tokens,
        "finished": sum(one.finish_reason == "stop" for one in answers.served),
    }
