"""What a generate run has to do, decided before the first request: which prompts, in which order, how many rows.

Prompts are rendered once, streaming, to Parquet parts; DuckDB, which spills to disk, then drops duplicates and applies
the caps. A prompt's place comes from a hash of its name, so a larger cap extends a smaller one, partitions and lengths
are mixed, and a job that stops early leaves a fair sample. What comes out:

    plan/units/*.parquet   a row per unit: one prompt, one sample, all its turns; bad rows with their reason
    plan/plan.json         the counts, and what they were made from
"""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import ray
import ray.data

from eagle3_ray.errors import explain, root_cause
from eagle3_ray.plan_units import PART_SCHEMA, choose
from eagle3_ray.prompts import BadPrompt, Prompt, PromptSourceError, Source, parse, read, stamp
from eagle3_ray.runs import RunError, read_json, write_json
from eagle3_ray.target.files import TargetError

_BLOCK_BYTES = 8 << 20  # of raw rows that one task renders
_PROBE_TEXT = """Grüße, 世界! Unbelievable internationalisation costs 3.14159 or 1234567 dollars; привет, добрый день.
def add(first, second):\n        return first + second  # the quick brown fox jumps over the lazy dog"""
_PROBE_PROMPT = b'{"prompt": "Name three colours, then count from one to five."}'


@dataclass(frozen=True)
class PartitionPlan:
    """Counts of one partition: `read` = prompts + duplicates + over_cap + bad; `expected` = answers + bad rows."""

    partition: str
    read: int
    duplicates: int
    over_cap: int
    bad: int
    prompts: int
    expected: int
    prompt_tokens: int
    longest_prompt: int


@dataclass(frozen=True)
class TargetTokens:
    """What the target's tokenizer says of itself: its control tokens, a text with some of them, and a chat prompt."""

    special_ids: list[int]
    text: str
    text_ids: list[int]
    prompt_ids: list[int]


@dataclass(frozen=True)
class Plan:
    """The counts of a plan, where its units stand, and what the tokenizer that rendered it says of itself."""

    folder: Path
    partitions: list[PartitionPlan]
    tokens: TargetTokens

    @property
    def units(self) -> str:
        """The folder of the units' Parquet files."""
        return str(self.folder / "units")

    @property
    def expected(self) -> int:
        """Rows that the run ends with, in sequences/ and rejected/ together."""
        return sum(p.expected for p in self.partitions)

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens of the first turns, all samples counted."""
        return sum(p.prompt_tokens for p in self.partitions)

    @property
    def answers(self) -> int:
        """Answers to generate."""
        return sum(p.expected - p.bad for p in self.partitions)

    def table(self) -> str:
        """The counts for people, a line a partition."""
        titles = ("read", "duplicates", "over_cap", "bad", "prompts", "expected", "prompt_tokens")
        lines = [f"{'partition':24}" + "".join(f"{title:>15}" for title in titles)]
        for p in self.partitions:
            lines.append(f"{p.partition:24}" + "".join(f"{getattr(p, title):>15,}" for title in titles))
        return "\n".join(lines)


@dataclass(frozen=True)
class PlanSettings:
    """All that decides a plan, so that a plan made from the same settings is used again."""

    sources: list[Source]
    tokenizer_folder: str
    tokenizer: Mapping[str, str | None]
    vocab_size: int
    trust_remote_code: bool = False
    boundary_ids: list[int] = field(default_factory=list)
    limit: int | None = None
    max_tokens_total: int | None = None
    dedupe: bool = True
    samples_per_prompt: int = 1

    def key(self) -> str:
        """A hash of the settings and of the size and time of each file."""
        about = {**asdict(self), "files": [stamp(source) for source in self.sources]}
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    def choice(self) -> dict[str, Any]:
        """What `plan_units.choose` goes by."""
        names = ("dedupe", "limit", "max_tokens_total", "samples_per_prompt")
        return {name: getattr(self, name) for name in names}


class Render:
    """Ray Data stage: raw rows to rows of the plan, a bad one with its reason."""

    def __init__(self, settings: PlanSettings) -> None:
        self._settings = settings

    def __call__(self, batch: pa.Table) -> pa.Table:
        return pa.Table.from_pylist([self._row(**row) for row in batch.to_pylist()], schema=PART_SCHEMA)

    def _row(self, partition: str, file: str, line: int, raw: bytes) -> dict[str, Any]:
        fallback_id = f"{'/'.join(Path(file).parts[-2:])}:{line}"
        row = {"partition": partition, "prompt_id": fallback_id, "file": file, "line": line, "turns": 1}
        try:
            prompt = parse(raw, fallback_id)
            ids = self._prompt_ids(prompt)
            conversation = _conversation(prompt)
        except BadPrompt as bad:  # a template may quote text that UTF-8 cannot hold
            return {**row, "prompt_ids": [], "reason": str(bad).encode(errors="backslashreplace").decode()}
        content = hashlib.sha256(pa.array(ids, pa.int32()).buffers()[1])
        if conversation is not None and len(prompt.turns) > 1:
            content.update(conversation.encode())
        row |= {"prompt_id": prompt.prompt_id, "turns": max(1, len(prompt.turns)), "content_sha": content.hexdigest()}
        return {**row, "prompt_ids": ids, "conversation": conversation}

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        ids = prompt.input_ids if prompt.input_ids is not None else make_renderer(self._settings).prompt_ids(prompt)
        for token in ids:
            if not 0 <= token < self._settings.vocab_size:  # sglang 0.5.23: such an id kills the server process
                raise BadPrompt(f"token id {token} is outside the vocabulary of {self._settings.vocab_size}")
        return list(ids)


def make_renderer(settings: PlanSettings) -> Any:
    """The renderer that the settings describe, made once in a process."""
    return _renderer(settings.tokenizer_folder, settings.trust_remote_code, tuple(settings.boundary_ids))


@cache
def _renderer(folder: str, trust_remote_code: bool, boundary_ids: tuple[int, ...]) -> Any:
    from eagle3_ray.rendering import Renderer  # imports transformers, which takes seconds: only where messages come

    return Renderer(Path(folder), trust_remote_code=trust_remote_code, boundary_ids=boundary_ids)


def _conversation(prompt: Prompt) -> str | None:
    """What later turns and the audit need of a prompt: its messages where there are several turns, or tools."""
    if len(prompt.turns) < 2 and not prompt.tools:
        return None
    about = {"turns": prompt.turns, "tools": prompt.tools, "chat_template_kwargs": prompt.chat_template_kwargs}
    try:
        return json.dumps(about)
    except RecursionError:
        raise BadPrompt("messages or tools are nested too deeply") from None


def later_turns(prompt_id: str, conversation: str) -> Prompt:
    """The messages of a unit whose `conversation` is kept."""
    about = json.loads(conversation)
    return Prompt(prompt_id, None, about["turns"], about["tools"], about["chat_template_kwargs"])


def make(folder: Path, settings: PlanSettings, answered: list[str]) -> Plan:
    """The plan in `folder`, made now unless one of the same settings stands there. Needs a running Ray.

    `answered` are the Parquet files of rows that the run has already.

    Raises:
        PromptSourceError: a file breaks off.
        TargetError: the target's tokenizer cannot be used.
        RunError: rows that were generated already have no place in the new plan, or the disk is full.
    """
    known, key = load(folder), settings.key()  # of the files as they are before they are read
    if known is not None and known[1] == key:
        return known[0]
    try:
        return _make(folder, settings, key, answered)
    except (OSError, ray.exceptions.RayError) as error:
        cause = root_cause(error)
        if isinstance(cause, PromptSourceError | RunError | TargetError):
            raise type(cause)(str(cause).partition("\n")[0]) from None  # Ray Data appends a hint on retries
        if isinstance(cause, OSError):
            raise RunError(explain(cause)) from None
        raise


def _make(folder: Path, settings: PlanSettings, key: str, answered: list[str]) -> Plan:
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    tokens = ray.remote(_target_tokens).options(num_cpus=0.5).remote(settings)
    _render_all(fresh / "parts", settings)
    chosen = ray.remote(choose).options(num_cpus=1).remote(fresh, answered, **settings.choice())
    counts = ray.get(chosen)
    plan = Plan(folder, [PartitionPlan(**count) for count in counts], ray.get(tokens))
    save(fresh, plan, key)
    shutil.rmtree(fresh / "parts")
    shutil.rmtree(folder, ignore_errors=True)
    fresh.rename(folder)
    return plan


def save(folder: Path, plan: Plan, key: str) -> None:
    """Writes all of a plan but its units to `folder`/plan.json, sealed with a hash of it."""
    about = {"key": key, "partitions": [asdict(p) for p in plan.partitions], "tokens": asdict(plan.tokens)}
    write_json(folder / "plan.json", {**about, "seal": _seal(about)})


def load(folder: Path) -> tuple[Plan, str] | None:
    """The plan that stands in `folder` and the key of its settings, None where there is none.

    Raises:
        RunError: plan.json is not as it was written.
    """
    path = folder / "plan.json"
    if not path.exists():
        return None
    about = read_json(path, _remedy(folder))
    if about.pop("seal", None) != _seal(about):
        raise RunError(f"{path} is damaged (it was changed after it was written). {_remedy(folder)}")
    partitions = [PartitionPlan(**count) for count in about["partitions"]]
    return Plan(folder, partitions, TargetTokens(**about["tokens"])), about["key"]


def damaged_units(file: str | Path, what: str) -> RunError:
    """What to say, and to do, about a file of units that is not as it was written."""
    return RunError(f"{file} is damaged ({what.splitlines()[0]}). {_remedy(Path(file).parent.parent)}")


@contextmanager
def reading_units(file: str | Path) -> Iterator[None]:
    """Raises RunError, which says what to do, where the block finds the file of units damaged."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise damaged_units(file, str(error)) from None


def _remedy(folder: Path) -> str:
    return f"Delete the folder {folder}; jobs/generate.py makes the plan again, and the answers stay."


def _seal(about: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


def _target_tokens(settings: PlanSettings) -> TargetTokens:
    try:
        renderer = make_renderer(settings)
    except (ImportError, OSError, ValueError) as error:
        first_line = str(error).strip().splitlines()[0]
        raise TargetError(f"the tokenizer in {settings.tokenizer_folder} cannot be loaded: {first_line}") from None
    special = renderer.special_ids
    text = f"{_PROBE_TEXT} {renderer.text(special[:8])}\n\tdone"
    try:
        prompt_ids = renderer.prompt_ids(parse(_PROBE_PROMPT, "probe"))
    except BadPrompt:  # a target without a chat template, for prompts that are ids
        prompt_ids = renderer.encode(_PROBE_TEXT)
    return TargetTokens(special, text, list(renderer.encode(text)), list(prompt_ids))


def _render_all(parts: Path, settings: PlanSettings) -> None:
    items = [{"partition": source.partition, "path": source.path} for source in settings.sources]
    sources = ray.data.from_items(items, override_num_blocks=len(items))
    sources.context.target_max_block_size = _BLOCK_BYTES
    sizes = [stamp(source) for source in settings.sources]
    small = all(size is not None and size[0] < _BLOCK_BYTES for size in sizes)
    reading = 1 if small else 0.5  # Ray fuses stages of the same CPUs: one task for each small file does it all
    rows = sources.map_batches(_read_source, batch_size=1, batch_format="pyarrow", num_cpus=reading)
    rendered = rows.map_batches(partial(_render, settings), batch_size=None, batch_format="pyarrow", num_cpus=1)
    rendered.write_parquet(str(parts), compression="zstd")


def _render(settings: PlanSettings, batch: pa.Table) -> pa.Table:
    return Render(settings)(batch)


def _read_source(batch: pa.Table) -> Any:
    schema = pa.schema([("partition", pa.string()), ("file", pa.string()), ("line", pa.int64()), ("raw", pa.binary())])
    for source in batch.to_pylist():
        rows: list[dict[str, Any]] = []
        for line, raw in read(Source(source["partition"], source["path"])):
            rows.append({"partition": source["partition"], "file": source["path"], "line": line, "raw": raw})
            if len(rows) == 2000:
                yield pa.Table.from_pylist(rows, schema=schema)
                rows = []
        yield pa.Table.from_pylist(rows, schema=schema)
