"""What drafters are worth in the engine that will serve them, beside each other and beside none.

prompt sets -> the plain engine answers every turn, and so fixes the prompts of later turns -> each drafter's engine
answers the same prompt ids -> acceptance length, histogram, tokens/s, lossless check -> a diagnosis where the figure
cannot be believed -> a table and a JSON file. Engines run one after the other, so that none disturbs another.
"""

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3_ray.acceptance.engine import (
    EngineFailed,
    EngineInfo,
    Measured,
    answer_conversations,
    engine_info,
    measure,
)
from eagle3_ray.acceptance.lossless import compare
from eagle3_ray.acceptance.questions import Question, load_questions
from eagle3_ray.acceptance.serving import CPU, PLAIN, Serving
from eagle3_ray.acceptance.suspicion import examine
from eagle3_ray.acceptance.table import by_group, table
from eagle3_ray.errors import explain
from eagle3_ray.rendering import Renderer
from eagle3_ray.runs import write_json
from eagle3_ray.sglang.protocol import Sampling
from eagle3_ray.sglang_cpu.processes import ServerFailed
from eagle3_ray.target.files import TargetError, TargetFiles, resolve

STAGE = "evaluate"


@dataclass(frozen=True)
class EvaluateSettings:
    """All that a measurement is made of; it stands in the result."""

    target: str  # folder or Hugging Face name
    drafters: tuple[str, ...]  # exported folders
    prompts: tuple[str, ...]  # files, folders or globs
    limit: int | None = None  # rows of each file
    max_new_tokens: int = 512
    temperature: float = 0.0
    steps: int = 5  # drafts a verify step, in a chain
    concurrencies: tuple[int, ...] = (1, 8)  # speed is measured at each; the rest at the last
    speed_prompts: int = 32  # prompts of each speed measurement
    expected: float | None = None  # acceptance length that training or replay found
    launch: str = CPU
    endpoints: tuple[tuple[str, str], ...] = ()  # (drafter or "none", URL) of engines that run already
    boundary_ids: tuple[int, ...] = ()
    trust_remote_code: bool = False
    api_key: str | None = None
    out: str | None = None  # the JSON file


def evaluate(settings: EvaluateSettings) -> dict[str, Any]:
    """Measures all drafters and returns the summary; what was measured before an engine failed is kept.

    Raises:
        PromptSourceError, TargetError: before anything is measured; says what to change.
    """
    started = time.monotonic()
    work = _prepare(settings)
    engines: dict[str, Any] = {}
    warnings: list[str] = []
    stopped_by = None
    try:
        plain = _measure_plain(work)
        engines[PLAIN] = {"speed": plain.speed, "engine": asdict(plain.info), **_shape(plain.answers)}
        for drafter in settings.drafters:
            engines[drafter], found = _measure_drafter(work, drafter, plain)
            warnings += [f"{drafter}: {warning}" for warning in found]
            _say(table(engines))
    except (EngineFailed, ServerFailed) as error:
        stopped_by = explain(error)
    except (SystemExit, KeyboardInterrupt) as end:
        stopped_by = "SIGTERM" if isinstance(end, SystemExit) else "Ctrl-C"
    best = max(
        (drafter for drafter in settings.drafters if drafter in engines),
        key=lambda drafter: engines[drafter]["acceptance"]["all"]["acceptance_length"] or 0.0,
        default=None,
    )
    summary = {
        "stage": STAGE,
        "status": "stopped" if stopped_by else "complete",
        "stopped_by": stopped_by,
        "warnings": warnings,
        "best_drafter": best,
        "acceptance_length": engines[best]["acceptance"]["all"]["acceptance_length"] if best else None,
        "wall_s": round(time.monotonic() - started, 1),
        "settings": {name: value for name, value in asdict(settings).items() if name != "api_key"},
        "target": work.target.fingerprint(),
        "engines": engines,
    }
    if settings.out:
        write_json(Path(settings.out), summary)
    return summary


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
        return self.settings.concurrencies[-1]


@dataclass(frozen=True)
class _Plain:
    """The engine without a drafter."""

    info: EngineInfo
    answers: Measured
    speed: dict[str, float]


def _prepare(settings: EvaluateSettings) -> _Work:
    target = resolve(settings.target)
    stops = target.stop_ids()
    if not stops:
        raise TargetError(f"target.model={settings.target}: its config.json names no eos_token_id. Add it there.")
    return _Work(
        settings,
        target,
        load_questions(settings.prompts, settings.limit),
        Renderer(target.folder, trust_remote_code=settings.trust_remote_code, boundary_ids=settings.boundary_ids),
        Sampling(settings.max_new_tokens, settings.temperature, 1.0, False, target.vocab_size, frozenset(stops)),
        Serving(target.folder, settings.steps, settings.launch, settings.endpoints),
    )


def _measure_plain(work: _Work) -> _Plain:
    with work.serving.engine(PLAIN) as url:
        info = engine_info(url, work.settings.api_key)
        if info.algorithm is not None:
            raise EngineFailed(f"{url} was named as the engine without a drafter, but it runs {info.algorithm}.")
        _say(f"plain engine: {len(work.questions)} questions")
        answers = answer_conversations(
            url, work.questions, work.renderer, work.sampling, work.concurrency, work.settings.api_key
        )
        return _Plain(info, answers, _speed(work, url, answers))


def _measure_drafter(work: _Work, drafter: str, plain: _Plain) -> tuple[dict[str, Any], list[str]]:
    """The drafter's results, and warnings about them."""
    settings = work.settings
    _say(f"{drafter}: {len(plain.answers.served)} prompts")
    with work.serving.engine(drafter) as url:
        info = engine_info(url, settings.api_key)
        prompts = [one.prompt for one in plain.answers.served]
        answers = measure(url, prompts, work.sampling, work.concurrency, settings.api_key)
        speed = _speed(work, url, answers)
        lossless = None
        if settings.temperature == 0:
            lossless = compare(plain.answers.served, answers.served, url, settings.api_key)
    acceptance = by_group(answers.served)
    findings = examine(
        info,
        Path(drafter),
        acceptance["all"].length,
        settings.expected,
        work.target,
        plain.answers.served,
        settings.steps,
    )
    result = {
        "acceptance": {group: counts.as_json() for group, counts in acceptance.items()},
        "speed": speed,
        "speedup": {c: round(speed[c] / plain.speed[c], 3) for c in speed},
        "lossless": lossless.as_json() if lossless else None,
        "diagnosis": [asdict(finding) for finding in findings],
        "engine": asdict(info),
        **_shape(answers),
    }
    warnings = [str(finding) for finding in findings]
    if lossless and lossless.unexplained:
        first = lossless.unexplained[0]
        warnings.append(
            f"{len(lossless.unexplained)} of {lossless.answers} greedy answers differ from the plain engine's by more "
            f"than a near tie; the first is {first.name}, at token {first.position}."
        )
    return result, warnings


def _speed(work: _Work, url: str, answers: Measured) -> dict[str, float]:
    """Tokens/s at each concurrency, over the same prompts for every engine. The engine is warm by now."""
    prompts = [one.prompt for one in answers.served][: work.settings.speed_prompts]
    measured = {c: measure(url, prompts, work.sampling, c, work.settings.api_key) for c in work.settings.concurrencies}
    return {str(c): round(one.tokens_per_second, 2) for c, one in measured.items()}


def _shape(answers: Measured) -> dict[str, Any]:
    return {
        "answers": len(answers.served),
        "output_tokens": answers.output_tokens,
        "finished": sum(one.finish_reason == "stop" for one in answers.served),
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
