"""Prompts become exact token sequences.

plan (which prompts, how many rows) -> probe (are the servers fit?) -> claim the run -> units -> generate (async actors)
-> write Parquet with row checkpoints -> count what is there -> _SUCCESS. Run again after any end, the same command goes on
where it was: committed rows are skipped right after the read, finished ones come out of the journal.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import ray
from ray.data import ActorPoolStrategy, DataContext
from ray.data.checkpoint import CheckpointConfig
from ray.data._internal.datasource.parquet_datasink import ParquetDatasink

from eagle3_ray import plan, telemetry
from eagle3_ray.audit import AuditRules, report
from eagle3_ray.config import Config, ConfigError
from eagle3_ray.generator import BLOCK_SCHEMA, FOLDER, Generator, GeneratorSettings
from eagle3_ray.plan import Plan, PlanSettings
from eagle3_ray.prompts import find
from eagle3_ray.records import REJECTED, SEQUENCES
from eagle3_ray.runs import SUCCESS, RunDir, RunError, WriterLock, write_json
from eagle3_ray.sglang.probe import ProbeMaterial, ServerFacts, Unfit, compare, probe
from eagle3_ray.sglang.protocol import Sampling, Transient
from eagle3_ray.sglang.transport import open_session
from eagle3_ray.target.files import TargetFiles, resolve

STAGE = "generate"
_ROWS_PER_BLOCK = 32
_ROWS_PER_FILE = 1024
_REQUESTS_PER_ACTOR = 512


def run(config: Config) -> dict[str, Any]:
    """Runs the stage to its end, or from where an earlier job stopped, and returns its summary.

    Raises:
        ConfigError, PromptSourceError, TargetError, Unfit, RunError: before anything is generated, saying what to change.
    """
    started = time.monotonic()
    run_dir = RunDir(config.run.dir)
    with WriterLock(run_dir) as lock:
        target = resolve(config.target.model)
        settings = plan_settings(config, target)
        finished = _finished(run_dir, config, target, settings)
        if finished is not None:
            return finished
        _connect()
        material = _material_task(config, target, settings)
        the_plan = plan.make(run_dir.stage(STAGE) / "plan", settings, rows_folder(run_dir))
        if the_plan.expected == 0:
            raise ConfigError(f"prompts.path={config.prompts.path} selects no prompts.")
        probe_material, special_ids = ray.get(material)
        sampling = _sampling(config, target)
        facts, down = probe_servers(config, probe_material, sampling)
        run_dir.claim(STAGE, fingerprint(config, target, facts[0]), _about(config, facts))
        (run_dir.stage(STAGE) / SUCCESS).unlink(missing_ok=True)
        rules = _rules(config, sampling, special_ids)
        actors, calls = _pool_size(config, facts, the_plan)
        stage = run_dir.stage(STAGE)
        generator = GeneratorSettings(
            facts=facts,
            down=down,
            material=probe_material,
            sampling=sampling,
            rules=rules,
            plan=settings,
            journal=str(stage / "journal"),
            actors=actors,
            max_in_flight=config.generate.max_in_flight,
            attempts=config.generate.attempts,
            request_timeout_s=config.generate.request_timeout_s,
            outage_limit_s=config.generate.outage_limit_s,
            api_key_env=config.generate.api_key_env,
        )
        observer = telemetry.start(rules)
        done = _count_by_partition(run_dir)
        expected = {p.partition: p.expected for p in the_plan.partitions}
        stopped = None
        with telemetry.Progress(observer, expected, done):
            try:
                _pipeline(run_dir, the_plan, generator, observer, actors, calls, lock.token)
            except (ray.exceptions.RayError, OSError) as error:
                stopped = ray.get(observer.view.remote()).stop_reason or _first_line(error)
            except SystemExit:
                stopped = "SIGTERM"
        view = ray.get(observer.view.remote())
        summary = _summarise(run_dir, config, the_plan, view, stopped, time.monotonic() - started)
        if summary["status"] == "complete":
            for path in (stage / "journal").glob("*.jsonl"):
                path.unlink()
            write_json(stage / SUCCESS, {"rows": summary["rows"], "rejected": summary["rejected"]})
        run_dir.write_summary(STAGE, summary)
        return summary


def _pipeline(
    run_dir: RunDir, the_plan: Plan, generator: GeneratorSettings, observer: Any, actors: int, calls: int, token: str
) -> None:
    """read -> generate and audit -> write. A row's `unit` is its checkpoint: what is committed is not read again."""
    light = {"num_cpus": 0.25}
    units = ray.data.read_parquet(the_plan.units, ray_remote_args=light)
    units.context.checkpoint_config = CheckpointConfig(
        id_column="unit",
        checkpoint_path=str(run_dir.stage(STAGE) / "checkpoint"),
        delete_checkpoint_on_success=False,  # a second run is a no-op
    )
    rows = units.repartition(target_num_rows_per_block=_ROWS_PER_BLOCK).map_batches(
        Generator,
        fn_constructor_args=(generator, observer),
        batch_size=_ROWS_PER_BLOCK,
        batch_format="pyarrow",
        num_cpus=0.25,
        compute=ActorPoolStrategy(
            size=actors, max_concurrent_calls_per_actor=calls, max_tasks_in_flight_per_actor=calls + 2
        ),
    )
    sink = SequenceSink(run_dir, token, fingerprint_of=run_dir.manifest()[STAGE]["fingerprint"])
    rows.repartition(target_num_rows_per_block=_ROWS_PER_FILE).write_datasink(sink, ray_remote_args=light)


class SequenceSink(ParquetDatasink):  # type: ignore[misc]
    """Writes a block's rows to sequences/ and rejected/, by the column `folder`, as one commit of Ray's checkpoint.

    Every file carries the fingerprint. A task that a killed job left behind finds that the run has another owner.
    """

    def __init__(self, run_dir: RunDir, token: str, fingerprint_of: dict[str, Any]) -> None:
        import json

        metadata = {"eagle3_ray.fingerprint": json.dumps(fingerprint_of)}
        super().__init__(
            str(rows_folder(run_dir)),
            partition_cols=[FOLDER],
            arrow_parquet_args={
                "schema": BLOCK_SCHEMA.with_metadata(metadata),
                "compression": "zstd",
                "partitioning_flavor": None,  # plain folder names
            },
        )
        self._run_path = str(run_dir.path)
        self._token = token

    def write(self, blocks: Any, ctx: Any) -> None:
        """One block's files. Raises RunError where another job has taken over the run."""
        if not WriterLock.is_current(self._run_path, self._token):
            raise RunError(f"another job has taken over {self._run_path}; this one writes nothing more")
        super().write(blocks, ctx)


def rows_folder(run_dir: RunDir) -> Path:
    """The folder of sequences/ and rejected/."""
    return run_dir.stage(STAGE) / "rows"


def committed_files(run_dir: RunDir, folder: str) -> list[str]:
    """Files of `folder` whose checkpoint is committed; a killed job leaves others, which the next one removes."""
    pending = [
        p.name.removesuffix(".pending.parquet") for p in (run_dir.stage(STAGE) / "checkpoint").glob("*.pending.parquet")
    ]
    files = sorted((rows_folder(run_dir) / folder).glob("*.parquet"))
    return [str(file) for file in files if not any(file.name.startswith(name) for name in pending)]


def plan_settings(config: Config, target: TargetFiles) -> PlanSettings:
    """What decides the plan. Raises PromptSourceError."""
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


def fingerprint(config: Config, target: TargetFiles, facts: ServerFacts | None) -> dict[str, Any]:
    """Everything that changes tokens: the target's files, sampling, and the engine with its settings."""
    generate = config.generate
    sampling = {name: getattr(generate, name) for name in ("max_new_tokens", "temperature", "top_p", "record_logprobs")}
    ours = {**target.fingerprint(), **{f"generate.{name}": value for name, value in sampling.items()}}
    return ours if facts is None else {**ours, **facts.settings}


def probe_servers(config: Config, material: ProbeMaterial, sampling: Sampling) -> tuple[list[ServerFacts], list[str]]:
    """The facts of every server that answers, and the URLs of those that do not.

    Raises:
        Unfit: a server answers and is not what the run needs, or none answers.
    """

    async def probe_all() -> list[ServerFacts | BaseException]:
        key = os.environ.get(config.generate.api_key_env or "")
        async with open_session(key, config.generate.request_timeout_s) as session:
            work = (probe(session, url, material, sampling) for url in config.generate.endpoints)
            return await asyncio.gather(*work, return_exceptions=True)

    if not config.generate.endpoints:
        raise ConfigError("generate.endpoints names no server. Set generate.endpoints=http://HOST:PORT[,...].")
    if config.generate.api_key_env and config.generate.api_key_env not in os.environ:
        raise ConfigError(f"generate.api_key_env={config.generate.api_key_env}: no such environment variable is set.")
    facts, down = [], []
    for url, found in zip(config.generate.endpoints, asyncio.run(probe_all()), strict=True):
        if isinstance(found, ServerFacts):
            facts.append(found)
            _say(f"{url} is fit: SGLang {found.settings['engine.version']}, {found.capacity_tokens} tokens of KV cache")
        elif isinstance(found, Transient):
            down.append(url)
            _say(f"WARNING: {url} does not answer ({found}); it is probed again while the job runs")
        else:
            raise Unfit(f"{url}: {found}") if isinstance(found, Unfit) else found
    if not facts:
        raise Unfit(f"No server answers at {', '.join(down)}. Start one, or correct generate.endpoints.")
    for warning in [w for fact in facts for w in fact.warnings] + compare(facts):
        _say(f"WARNING: {warning}")
    return facts, down


def plan_text(config: Config, the_plan: Plan) -> str:
    """The plan for people: rows, tokens and disk by partition."""
    lines = [
        f"{'partition':24} {'read':>9} {'duplicate':>9} {'over cap':>9} {'bad':>7} {'rows':>9} {'prompt tokens':>14}"
    ]
    for p in the_plan.partitions:
        lines.append(
            f"{p.partition:24} {p.read:>9} {p.duplicates:>9} {p.over_cap:>9} {p.bad:>7} {p.expected:>9} {p.prompt_tokens:>14}"
        )
    most = the_plan.answers * config.generate.max_new_tokens
    bytes_a_token = 8 if config.generate.record_logprobs else 4  # Parquet, before compression; the journal is JSON text
    disk = (the_plan.prompt_tokens * 4 + most * (bytes_a_token + 4 * bytes_a_token)) / 1e9
    lines.append(
        f"rows {the_plan.expected}, prompt tokens {the_plan.prompt_tokens}, answer tokens at most {most}, "
        f"disk at most {disk:.1f} GB (journal included)"
    )
    return "\n".join(lines)


def dry_run(config: Config) -> str:
    """The plan and what the servers say, without generating anything."""
    run_dir = RunDir(config.run.dir)
    target = resolve(config.target.model)
    with WriterLock(run_dir):
        _connect()
        settings = plan_settings(config, target)
        material = _material_task(config, target, settings)
        the_plan = plan.make(run_dir.stage(STAGE) / "plan", settings, rows_folder(run_dir))
        text = plan_text(config, the_plan)
        try:
            facts, _ = probe_servers(config, ray.get(material)[0], _sampling(config, target))
        except Unfit as unfit:
            return f"{text}\nservers: {unfit}"
    actors, calls = _pool_size(config, facts, the_plan)
    room = sum(fact.capacity_tokens for fact in facts)
    return f"{text}\nservers: {len(facts)} fit, {room} tokens of KV cache; {actors} generating actors"


def _finished(run_dir: RunDir, config: Config, target: TargetFiles, settings: PlanSettings) -> dict[str, Any] | None:
    """The summary of a run that is complete for these very settings."""
    known = plan.load(run_dir.stage(STAGE) / "plan")
    if not run_dir.succeeded(STAGE) or known is None or known[1] != settings.key():
        return None
    stored = run_dir.manifest()[STAGE]["fingerprint"]
    ours = fingerprint(config, target, None)
    run_dir.claim(STAGE, {**stored, **ours}, {})
    _say(f"{run_dir.path} is complete; nothing to do")
    return run_dir.summary(STAGE)


def _connect() -> None:
    """Joins the cluster that the job was submitted to, or starts a local one, and makes SIGTERM an orderly end."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled" if "RAY_ADDRESS" not in os.environ else "token")
    ray.init(ignore_reinit_error=True, logging_level="warning", log_to_driver=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # behind ray.init, which sets its own
    context = DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False


def _material_task(config: Config, target: TargetFiles, settings: PlanSettings) -> Any:
    """Starts the making of the probe's material in a worker, because importing transformers takes seconds."""
    stops = target.stop_ids()
    if not stops:
        raise ConfigError(
            f"target.model={config.target.model} names no eos_token_id in config.json or generation_config.json."
        )

    def make() -> tuple[ProbeMaterial, list[int]]:
        from eagle3_ray.prompts import parse

        renderer = plan.make_renderer(settings)
        special = renderer.special_ids
        prompt = parse(b'{"prompt": "Name three colours, then count from one to five."}', "probe")
        text = f"Grüße, 世界! 3.14 {renderer.text(special[:8])}\n\tdone"
        forced = dict.fromkeys([*config.audit.boundary_ids, *stops, *special[:6]])
        return (
            ProbeMaterial(
                model=config.target.model,
                served_as=config.target.served_as,
                architectures=tuple(target.config.get("architectures") or ()),
                text=text,
                text_ids=tuple(renderer.encode(text)),
                prompt_ids=tuple(renderer.prompt_ids(prompt)),
                forced_ids=tuple(forced),
            ),
            special,
        )

    return ray.remote(make).options(num_cpus=0.5).remote()


def _sampling(config: Config, target: TargetFiles) -> Sampling:
    generate = config.generate
    return Sampling(
        max_new_tokens=generate.max_new_tokens,
        temperature=generate.temperature,
        top_p=generate.top_p,
        logprobs=generate.record_logprobs,
        vocab_size=target.vocab_size,
        stop_ids=frozenset(target.stop_ids()),
    )


def _rules(config: Config, sampling: Sampling, special_ids: list[int]) -> AuditRules:
    return AuditRules(
        stop_ids=sampling.stop_ids,
        special_ids=frozenset(special_ids),
        boundary_ids=frozenset(config.audit.boundary_ids),
        loop_tokens=config.audit.loop_tokens,
        evidence_rows=config.audit.evidence_rows,
    )


def _about(config: Config, facts: list[ServerFacts]) -> dict[str, Any]:
    """What the manifest keeps beside the fingerprint."""
    versions = {"ray": ray.__version__, "python": sys.version.split()[0]}
    return {
        "config": config.model_dump(),
        "versions": versions,
        "servers": [{"url": f.url, **f.settings} for f in facts],
    }


def _pool_size(config: Config, facts: list[ServerFacts], the_plan: Plan) -> tuple[int, int]:
    """Generating actors, and concurrent blocks of each: three times what the servers can run, so that none waits for us."""
    mean_prompt = the_plan.prompt_tokens / max(1, the_plan.answers)
    request = mean_prompt + config.generate.max_new_tokens / 4
    runnable = sum(min(fact.max_running, fact.capacity_tokens / request) for fact in facts)
    in_flight = min(config.generate.max_in_flight, runnable)
    actors = max(1, min(round(in_flight / _REQUESTS_PER_ACTOR), 64))
    blocks = -(-3 * in_flight // (_ROWS_PER_BLOCK * actors))
    return actors, int(min(max(blocks, 4), 128))


def _count_by_partition(run_dir: RunDir) -> dict[str, int]:
    counts: dict[str, int] = {}
    for folder in (SEQUENCES, REJECTED):
        for file in committed_files(run_dir, folder):
            for name in pq.read_table(file, columns=["partition"])["partition"].to_pylist():
                counts[name] = counts.get(name, 0) + 1
    return counts


def _summarise(
    run_dir: RunDir, config: Config, the_plan: Plan, view: telemetry.View, stopped: str | None, wall_s: float
) -> dict[str, Any]:
    """Counts the data itself and says whether the run is complete."""
    counts = ray.get(ray.remote(_count_rows).options(num_cpus=0.25).remote(run_dir, sorted(config.audit.boundary_ids)))
    rows, rejected = counts["rows"], counts["rejected"]
    failed = the_plan.expected - rows - rejected
    if counts["repeated"]:
        status = "damaged"
        stopped = f"{counts['repeated']} sequence ids stand in more than one row; set the data aside with doctor.py --quarantine"
    else:
        status = "complete" if failed == 0 else "stopped" if stopped else "incomplete"
    best = view.best_tokens_per_second
    share = view.tokens_per_second / best if best else None
    warnings = list(_throughput_warnings(view, share, config.generate.max_in_flight))
    return {
        "stage": STAGE,
        "status": status,
        "expected": the_plan.expected,
        "rows": rows,
        "rejected": rejected,
        "failed": failed,
        "output_tokens": counts["output_tokens"],
        "tokens_per_second": round(view.tokens_per_second, 1),
        "servers_best_tokens_per_second": round(best, 1),
        "wall_s": round(wall_s, 1),
        "run_dir": str(run_dir.path),
        "stopped_by": stopped,
        "last_failure": view.last_failure,
        "warnings": warnings,
        "retries": {url: dict(state.retries) for url, state in view.endpoints.items() if state.retries},
        "rejected_by_reason": counts["reasons"],
        "duplicates": sum(p.duplicates for p in the_plan.partitions),
        "over_cap": sum(p.over_cap for p in the_plan.partitions),
        "partitions": counts["partitions"],
        "plan": [asdict(p) for p in the_plan.partitions],
    }


def _count_rows(run_dir: RunDir, boundary_ids: list[int]) -> dict[str, Any]:
    """Counts committed rows; runs as a Ray task, so that the driver's memory stays small."""
    import duckdb

    sequences, rejected = committed_files(run_dir, SEQUENCES), committed_files(run_dir, REJECTED)
    with duckdb.connect() as db:
        partitions = report(db, sequences, boundary_ids)
        both = sequences + rejected
        repeated = (
            both
            and db.execute("SELECT count(*) - count(DISTINCT sequence_id) FROM read_parquet($1)", [both]).fetchone()[0]
        )
        reasons = (
            rejected
            and db.execute(
                "SELECT regexp_replace(reason, '[0-9]+', 'N', 'g') AS kind, count(*) FROM read_parquet($1) "
                "GROUP BY kind ORDER BY 2 DESC LIMIT 20",
                [rejected],
            ).fetchall()
        )
        return {
            "rows": sum(p["rows"] for p in partitions),
            "output_tokens": sum(p["output_tokens"] for p in partitions),
            "rejected": sum(count for _, count in reasons or []),
            "repeated": repeated or 0,
            "reasons": dict(reasons or []),
            "partitions": partitions,
        }


def _throughput_warnings(view: telemetry.View, share: float | None, max_in_flight: int) -> Iterator[str]:
    if share is None or share >= 0.8:
        return
    retries = sum((state.retries.total() for state in view.endpoints.values()), 0)
    in_flight = sum(state.in_flight for state in view.endpoints.values())
    if retries > 0.05 * max(1, view.answers):
        cause = f"{retries} requests were sent again; see retries"
    elif in_flight >= max_in_flight:
        cause = f"generate.max_in_flight={max_in_flight} was reached"
    else:
        cause = "start-up and the last long answers weigh much in a short run, or the clients lacked CPU"
    yield f"{share:.0%} of the tokens/s that the servers showed at their best; likely cause: {cause}"


def _first_line(error: BaseException) -> str:
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) and error.cause else error
    return f"{type(cause).__name__}: {cause}".strip().splitlines()[0]


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
