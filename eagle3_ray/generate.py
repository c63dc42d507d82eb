"""Prompts become exact token sequences.

plan (which prompts, how many rows) -> probe (are the servers fit?) -> claim the run -> read units -> generate and audit
-> write Parquet with row checkpoints -> count what is there -> _SUCCESS. After any end, the same command goes on where
it was: committed units are skipped right behind the read, finished answers come out of the journal.
"""

import math
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import ray
from ray.data import ActorPoolStrategy

from eagle3_ray import cluster, plan, telemetry
from eagle3_ray.audit import AuditRules
from eagle3_ray.commits import LIGHT, SequenceSink, read_units
from eagle3_ray.config import Config, ConfigError
from eagle3_ray.crew import Crew, kept_up, servers_to_start, serving
from eagle3_ray.errors import ENDS, explain, root_cause
from eagle3_ray.generator import Generator, GeneratorSettings
from eagle3_ray.ledger import Ledger
from eagle3_ray.plan import Plan, PlanSettings, TargetTokens
from eagle3_ray.plan_units import ROWS_PER_GROUP
from eagle3_ray.prompts import find
from eagle3_ray.registry import Registry
from eagle3_ray.run_log import say
from eagle3_ray.runs import GENERATE, FingerprintMismatch, RunDir, RunError, WriterLock, command
from eagle3_ray.sglang.checkup import check_up
from eagle3_ray.sglang.probe import ProbeMaterial, ServerFacts, Unfit, logprob_difference, same_model
from eagle3_ray.sglang.protocol import Sampling
from eagle3_ray.stages import carried_out
from eagle3_ray.target.files import TargetFiles, resolve

_REQUESTS_PER_ACTOR = 512
_KINDS = 20  # of rejection that the summary counts; the report has all


@carried_out(GENERATE)
def run(config: Config) -> dict[str, Any]:
    """Runs the stage to its end, or on from where an earlier job stopped, and returns its summary.

    Raises:
        ConfigError, PromptSourceError, TargetError, Unfit, RunError: before anything is generated; says what to change.
    """
    started = time.monotonic()
    run_dir = RunDir(config.run.dir)
    target = resolve(config.target.model)
    with WriterLock(run_dir) as lock:
        settings = _plan_settings(config, target)
        key = settings.key()  # prompts that come while the job runs are another job's
        _check_ours(run_dir, _fingerprint(config, target))
        planned = plan.load(run_dir.stage(GENERATE) / "plan") is not None  # training reads the plan, too
        complete = planned and run_dir.succeeded_with(GENERATE, key)
        if complete and (summary := run_dir.summary(GENERATE)) is not None:
            say(f"{run_dir.path} is complete; nothing to do")
            return summary
        Ledger(run_dir).check()
        cluster.connect()
        with serving(config, target) as crew:
            work = _prepare(run_dir, config, target, settings, crew)
            if work.plan.expected == 0:
                raise ConfigError(f"prompts.path={config.prompts.path} selects no prompts.")
            _claim(run_dir, config, target, work.facts)
            observer = cluster.beside_the_driver(telemetry.Telemetry, work.rules, max_task_retries=-1)
            registry = _registry(run_dir, config, work, observer)
            expected = {p.partition: p.expected for p in work.plan.partitions}
            stopped_by = None
            done = Ledger(run_dir).by_partition()
            with kept_up(crew, registry, observer), telemetry.Progress(observer, expected, done):
                try:
                    _pipeline(run_dir, config, work, observer, registry, lock.token)
                except ENDS as end:
                    stopped_by = ray.get(observer.view.remote()).stop_reason or explain(root_cause(end))
            view = ray.get(observer.view.remote())
            ray.kill(registry)
        summary = _summarise(run_dir, config, work.plan, view, stopped_by, time.monotonic() - started)
        try:
            run_dir.write_summary(GENERATE, summary)
            if summary["status"] == "complete":
                run_dir.succeed(GENERATE, key)
                for path in (run_dir.stage(GENERATE) / "journal").glob("*.jsonl"):
                    path.unlink()
        except OSError as error:
            summary["status"], summary["stopped_by"] = "stopped", explain(error)
        return summary


def dry_run(config: Config) -> str:
    """The plan and what the servers say, for people; generates nothing."""
    run_dir = RunDir(config.run.dir)
    target = resolve(config.target.model)
    with WriterLock(run_dir):
        cluster.connect()
        try:
            settings, generate = _plan_settings(config, target), config.generate
            if servers_to_start(generate):
                the_plan = plan.make(run_dir.stage(GENERATE) / "plan", settings, Ledger(run_dir).files())
                return f"{_plan_text(config, the_plan)}\nservers: the job starts them (servers={generate.servers})"
            work = _prepare(run_dir, config, target, settings, Crew(generate.endpoints))
        except Unfit as unfit:
            known = plan.load(run_dir.stage(GENERATE) / "plan")
            return f"{_plan_text(config, known[0]) if known else ''}\nservers: {unfit}"
    room = sum(fact.capacity_tokens for fact in work.facts)
    return (
        f"{_plan_text(config, work.plan)}\nservers: {len(work.facts)} fit, {len(work.silent)} silent, "
        f"{room:,} tokens of KV cache; {work.pool.actors} generating actors"
    )


@dataclass(frozen=True)
class Pool:
    """Generating actors, blocks that each works on at once, and row groups of the plan in a block."""

    actors: int
    blocks_per_actor: int
    groups_per_block: int


@dataclass(frozen=True)
class _Work:
    """All that is known before the first row."""

    plan: Plan
    settings: PlanSettings
    facts: list[ServerFacts]
    silent: list[str]
    material: ProbeMaterial
    sampling: Sampling
    rules: AuditRules
    pool: Pool


def _prepare(run_dir: RunDir, config: Config, target: TargetFiles, settings: PlanSettings, crew: Crew) -> _Work:
    """Makes the plan and probes the servers."""
    generate, endpoints = config.generate, crew.urls()
    if not endpoints:
        raise ConfigError(
            "generate.endpoints names no server. Set generate.endpoints=http://HOST:PORT[,...], or generate.servers=1 "
            "to have the job start one."
        )
    if generate.api_key_env and generate.api_key_env not in os.environ:
        raise ConfigError(f"generate.api_key_env={generate.api_key_env}: no such environment variable is set.")
    stops = target.stop_ids()
    if not stops:
        raise ConfigError(f"target.model={config.target.model}: its config.json names no eos_token_id. Add it there.")
    the_plan = plan.make(run_dir.stage(GENERATE) / "plan", settings, Ledger(run_dir).files())
    material = _probe_material(config, target, the_plan.tokens)
    sampling = Sampling(
        max_new_tokens=generate.max_new_tokens,
        temperature=generate.temperature,
        top_p=generate.top_p,
        logprobs=generate.record_logprobs,
        vocab_size=target.vocab_size,
        stop_ids=frozenset(stops),
    )
    facts, silent = check_up(endpoints, material, sampling, _api_key(config), generate.request_timeout_s)
    rules = AuditRules(
        stop_ids=sampling.stop_ids,
        special_ids=frozenset(the_plan.tokens.special_ids),
        boundary_ids=frozenset(config.audit.boundary_ids),
        loop_tokens=config.audit.loop_tokens,
        evidence_rows=config.audit.evidence_rows,
    )
    nodes = cluster.nodes_that_reach(endpoints)
    cpus = sum(node["Resources"].get("CPU", 0.0) for node in nodes) - crew.cpus()
    if cpus < LIGHT:
        raise ConfigError(
            f"The nodes that reach {', '.join(endpoints)} give Ray no CPUs to ask from. Name the servers by an address "
            "that other nodes reach, or start this node's Ray with some."
        )
    pool = _pool(generate.max_in_flight, generate.max_new_tokens, facts, crew.most(), the_plan, cpus)
    return _Work(the_plan, settings, facts, silent, material, sampling, rules, pool)


def _registry(run_dir: RunDir, config: Config, work: _Work, observer: Any) -> Any:
    timeout_s = config.generate.request_timeout_s
    known = (work.facts, work.material, work.sampling, _api_key(config), timeout_s, observer)
    return cluster.beside_the_driver(Registry, *known, name=f"servers of {run_dir.path}")


def _pipeline(run_dir: RunDir, config: Config, work: _Work, observer: Any, registry: Any, token: str) -> None:
    """read -> generate and audit -> write. A row's `unit` is its checkpoint: what is committed is not read again."""
    stage, generate = run_dir.stage(GENERATE), config.generate
    settings = GeneratorSettings(
        facts=work.facts,
        material=work.material,
        sampling=work.sampling,
        rules=work.rules,
        plan=work.settings,
        journal=str(stage / "journal"),
        actors=work.pool.actors,
        max_in_flight=generate.max_in_flight,
        attempts=generate.attempts,
        request_timeout_s=generate.request_timeout_s,
        outage_limit_s=generate.outage_limit_s,
        api_key=_api_key(config),
    )
    units = read_units(run_dir, work.plan.units, work.pool.groups_per_block)
    rows = units.map_batches(
        Generator,
        fn_constructor_args=(settings, observer, registry),
        batch_size=None,
        batch_format="pyarrow",
        num_cpus=LIGHT,
        label_selector=cluster.label_of_those_that_reach([fact.url for fact in work.facts]),
        compute=ActorPoolStrategy(
            size=work.pool.actors,
            max_concurrent_calls_per_actor=work.pool.blocks_per_actor,
            max_tasks_in_flight_per_actor=work.pool.blocks_per_actor + 2,
        ),
    )
    rows.write_datasink(SequenceSink(run_dir, token), ray_remote_args={"num_cpus": LIGHT})


def _check_ours(run_dir: RunDir, ours: dict[str, Any]) -> None:
    """Our half of the fingerprint against the run's, before anything is planned. Raises FingerprintMismatch."""
    stored = run_dir.manifest().get(GENERATE, {}).get("fingerprint", {})
    engine = {field: value for field, value in stored.items() if field.startswith("engine.")}
    run_dir.check(GENERATE, {**ours, **engine})


def _claim(run_dir: RunDir, config: Config, target: TargetFiles, facts: list[ServerFacts]) -> None:
    """Makes the run ours to write to: same fingerprint, and servers of the model that began it.

    Raises:
        FingerprintMismatch: the run's data was made with other settings or by another model.
    """
    began = run_dir.manifest().get(GENERATE, {}).get("prompt_logprobs", list(facts[0].prompt_logprobs))
    if not same_model(began, facts[0].prompt_logprobs):
        raise FingerprintMismatch(
            f"{facts[0].url} serves another model than the one that began {run_dir.path}: the log-probabilities of the "
            f"probe's prompt differ by {logprob_difference(began, facts[0].prompt_logprobs):.2f} nats a token."
        )
    about = {
        "command": command(sys.argv),
        "config": config.model_dump(),
        "versions": {"ray": ray.__version__, "python": sys.version.split()[0]},
        "servers": [{"url": fact.url, **fact.settings} for fact in facts],
        "prompt_logprobs": began,
    }
    try:
        run_dir.claim(GENERATE, {**_fingerprint(config, target), **facts[0].settings}, about)
    except OSError as error:
        raise RunError(explain(error)) from None


def _api_key(config: Config) -> str | None:
    return os.environ.get(config.generate.api_key_env or "")


def _plan_settings(config: Config, target: TargetFiles) -> PlanSettings:
    return PlanSettings(
        sources=find(config.prompts.path, config.prompts.partitions),
        tokenizer_folder=str(target.folder),
        tokenizer=target.fingerprint(),
        vocab_size=target.vocab_size,
        trust_remote_code=config.target.trust_remote_code,
        boundary_ids=list(config.audit.boundary_ids),
        limit=config.prompts.limit,
        max_tokens_total=config.prompts.max_tokens_total,
        dedupe=config.prompts.dedupe,
        samples_per_prompt=config.generate.samples_per_prompt,
    )


def _fingerprint(config: Config, target: TargetFiles) -> dict[str, Any]:
    """Our half of what changes tokens: the target's files and the sampling. The other half is what the servers are."""
    names = ("max_new_tokens", "temperature", "top_p", "record_logprobs")
    return {
        **target.fingerprint(),
        "target.stop_ids": str(target.stop_ids()),
        **{f"generate.{name}": getattr(config.generate, name) for name in names},
        "audit.boundary_ids": str(sorted(config.audit.boundary_ids)),  # they shape the later turns of a conversation
    }


def _probe_material(config: Config, target: TargetFiles, tokens: TargetTokens) -> ProbeMaterial:
    return ProbeMaterial(
        model=target.name,
        served_as=config.target.served_as,
        architectures=tuple(target.config.get("architectures") or ()),
        text=tokens.text,
        text_ids=tuple(tokens.text_ids),
        prompt_ids=tuple(tokens.prompt_ids),
        forced_ids=tuple(dict.fromkeys([*config.audit.boundary_ids, *target.stop_ids(), *tokens.special_ids[:6]])),
    )


def _pool(
    max_in_flight: int, max_new_tokens: int, facts: list[ServerFacts], most: int, the_plan: Plan, cpus: float
) -> Pool:
    """Enough blocks under way that the servers never wait: three times the requests that `most` of them can run.

    Actors leave CPUs for the tasks that read and write.
    """
    request = the_plan.prompt_tokens / max(1, the_plan.answers) + max_new_tokens / 4
    runnable = sum(min(fact.max_running, fact.capacity_tokens / request) for fact in facts)
    in_flight = min(max_in_flight, runnable * most / len(facts))
    actors = max(1, min(round(in_flight / _REQUESTS_PER_ACTOR), int((cpus - 2 * LIGHT) / LIGHT)))
    groups = max(1, min(round(in_flight / actors / 2 / ROWS_PER_GROUP), 8))
    blocks = math.ceil(3 * in_flight / (actors * groups * ROWS_PER_GROUP))
    return Pool(actors, max(4, blocks), groups)


def _plan_text(config: Config, the_plan: Plan) -> str:
    most = the_plan.answers * config.generate.max_new_tokens
    parquet = 8 if config.generate.record_logprobs else 4  # bytes an answer token, before compression
    disk = (the_plan.prompt_tokens * 4 + most * parquet * 4) / 1e9  # the journal is JSON: three times as much
    return (
        f"{the_plan.table()}\n{the_plan.expected:,} rows, {the_plan.prompt_tokens:,} prompt tokens, at most {most:,} "
        f"answer tokens and {disk:.1f} GB of disk (the journal of the running job included)"
    )


def _summarise(
    run_dir: RunDir, config: Config, the_plan: Plan, view: telemetry.View, stopped_by: str | None, wall_s: float
) -> dict[str, Any]:
    """Counts the data itself and says whether the run is complete."""
    begun = time.monotonic() - wall_s
    counting = ray.remote(Ledger.count).options(num_cpus=LIGHT)
    counts = ray.get(counting.remote(Ledger(run_dir), sorted(config.audit.boundary_ids)))
    failed = the_plan.expected - counts["rows"] - counts["rejected"]
    status = "complete" if failed == 0 else "stopped" if stopped_by else "incomplete"
    if counts["repeated"]:
        status = "damaged"
        stopped_by = (
            f"{counts['repeated']} sequence ids stand in more than one row. Set the data aside with "
            f"`python jobs/doctor.py {run_dir.path} --quarantine {GENERATE}` and generate again."
        )
    share = view.tokens_per_second / view.best_tokens_per_second if view.best_tokens_per_second else None
    return {
        "stage": GENERATE,
        "status": status,
        "expected": the_plan.expected,
        "rows": counts["rows"],
        "rejected": counts["rejected"],
        "failed": failed,
        "output_tokens": counts["output_tokens"],
        "tokens_per_second": round(view.tokens_per_second, 1),
        "servers_best_tokens_per_second": round(view.best_tokens_per_second, 1),
        "wall_s": round(wall_s, 1),
        "start_up_s": None if view.first_request is None else round(view.first_request - begun, 1),
        "busy_s": round(view.generating_s, 1),
        "run_dir": str(run_dir.path),
        "stopped_by": stopped_by,
        "last_failure": view.last_failure,
        "warnings": _throughput_warnings(view, share, config.generate.max_in_flight),
        "retries": {url: dict(state.retries) for url, state in view.endpoints.items() if state.retries},
        "rejected_by_reason": dict(list(counts["reasons"].items())[:_KINDS]),
        "partitions": counts["partitions"],
        "plan": [asdict(p) for p in the_plan.partitions],
    }


def _throughput_warnings(view: telemetry.View, share: float | None, max_in_flight: int) -> list[str]:
    if share is None or share >= 0.8:
        return []
    retries = sum(state.retries.total() for state in view.endpoints.values())
    if retries > 0.05 * max(1, view.answers):
        cause = f"{retries} requests were sent again; see retries"
    elif view.most_in_flight >= max_in_flight:
        cause = f"generate.max_in_flight={max_in_flight} was reached; raise it"
    else:
        cause = "start and end weigh much in a short run, or the clients lacked CPU"
    return [f"{share:.0%} of the tokens/s that the servers showed at their best; likely cause: {cause}"]
