"""Makes prompt partitions for the generate job out of public instruction sets and files of your own.

Each --source becomes one partition, in the order given. Every row read ends in one of five ways:

    bad           it cannot be used (the reasons: _set_aside.jsonl)
    duplicates    the same conversation, but for case and white space, stood earlier in this or an earlier source
    contaminated  it shares n words in a row with an evaluation set (which, and the words: _set_aside.jsonl)
    over_limit    beyond the cap of its partition, drawn by a hash: a larger cap keeps all that a smaller one kept
    kept          it stands in NAME.jsonl with its system, user and tool messages; the target gives the answers

    OUT/NAME.jsonl         what prompts.path=OUT of the generate job reads
    OUT/_set_aside.jsonl   bad and contaminated rows; the generate job does not read it
    OUT/prepared.json      settings, hashes of what was read, and the summary

OUT appears complete or not at all. The same command again prints the same summary and changes nothing; other settings
or changed files are refused. Memory: about 200 bytes for each row read and 150 for each word of the evaluation sets.
"""

import hashlib
import json
import re
import shutil
from array import array
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, TextIO

import numpy as np

from eagle3_ray.config import ConfigError
from eagle3_ray.decontaminate import EvaluationTexts
from eagle3_ray.instruction_sets import PUBLIC_SETS, Named, Place, PublicSet, RunQuestions, parse_row, rows_of
from eagle3_ray.prompts import BadPrompt, Prompt, PromptSourceError, Source, find, open_filesystem, read
from eagle3_ray.records import SEQUENCES
from eagle3_ray.runs import FingerprintMismatch, RunDir, RunError, WriterLock, read_json, write_json

STAGE = "prepare"
RECORD = "prepared.json"
SET_ASIDE = "_set_aside.jsonl"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_BAD_ROW_EXCERPT = 2000


@dataclass
class Counts:
    """What became of a source's rows: `read` = kept + duplicates + contaminated + bad + over_limit."""

    read: int = 0
    duplicates: int = 0
    contaminated: int = 0
    bad: int = 0
    over_limit: int = 0
    kept: int = 0


def parse_source(text: str) -> tuple[str, str | Named]:
    """A --source as its partition and its place: NAME=PATH, NAME=hf://DATASET[:SPLIT], NAME=run://RUN, or a public set.

    Raises:
        ConfigError: the text is none of these.
    """
    name, equals, place = text.partition("=")
    if not equals:
        if name not in PUBLIC_SETS:
            raise ConfigError(
                f"--source {text} is not a known public set ({', '.join(PUBLIC_SETS)}); "
                "give NAME=PATH or NAME=hf://DATASET[:SPLIT]."
            )
        return name, PUBLIC_SETS[name]
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"--source {text}: the name {name!r} has to consist of letters, digits, '.', '_' and '-', "
            "the first one a letter or digit; it becomes the partition's file name."
        )
    if not place:
        raise ConfigError(f"--source {text}: nothing behind the '='; give NAME=PATH or NAME=hf://DATASET[:SPLIT].")
    return name, RunQuestions(place.removeprefix("run://")) if place.startswith("run://") else place


def run(
    out: str, sources: Sequence[str], against: Sequence[str] = (), limit: int | None = None, ngram: int = 13
) -> dict[str, Any]:
    """Prepares the folder `out`, or finds it prepared by these very settings; returns the summary.

    Raises:
        ConfigError: a setting cannot be used.
        PromptSourceError: a source or an evaluation set cannot be read, or none of its rows can be used.
        RunError: `out` holds something else, was made with other settings, or another job is writing it.
    """
    named = _check(out, sources, limit, ngram)
    folder = Path(out).expanduser().resolve()
    files: dict[str, Place] = {n: find(place) if isinstance(place, str) else place for n, place in named.items()}
    evaluation_files = [source for path in against for source in find(path)]
    made_with = {"sources in order": ", ".join(named), "--limit": limit, "--ngram": ngram} | {
        f"--source {name}": _content(place) for name, place in files.items()
    }
    made_with["--against"] = _content(evaluation_files) if evaluation_files else None
    done = _finished(folder, made_with)
    if done is not None:
        return done
    scratch = folder.parent / f".{folder.name}.preparing"
    with WriterLock(RunDir(scratch)):
        try:
            done = _finished(folder, made_with)  # another job may just have made it
            if done is not None:
                return done
            data = scratch / "data"
            shutil.rmtree(data, ignore_errors=True)  # of a job that was killed
            data.mkdir()
            summary: dict[str, Any] = {"stage": STAGE, "status": "complete", "stopped_by": None, "out": str(folder)}
            summary |= _write(data, files, evaluation_files, limit, ngram)
            sizes = {file.name: file.stat().st_size for file in sorted(data.iterdir())}
            write_json(data / RECORD, {"made_with": made_with, "files": sizes, "summary": summary})
            data.rename(folder)
            return summary
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def _check(out: str, sources: Sequence[str], limit: int | None, ngram: int) -> dict[str, str | Named]:
    if "://" in out:
        raise ConfigError(f"OUT {out} has to be a local folder; copy it to the storage when it is done.")
    if limit is not None and limit < 1:
        raise ConfigError(f"--limit {limit} has to be at least 1; leave it out to keep all prompts.")
    if ngram < 1:
        raise ConfigError(f"--ngram {ngram} has to be at least 1; 13 is usual.")
    if not sources:
        raise ConfigError("--source is missing; give NAME=PATH, NAME=hf://DATASET[:SPLIT] or a public set's name.")
    named: dict[str, str | Named] = {}
    for text in sources:
        name, place = parse_source(text)
        if name in named:
            raise ConfigError(f"--source {text}: the name {name} is given twice; each source is a partition.")
        named[name] = place
    return named


def _content(place: Place) -> str:
    """What tells a changed source from the same one: the files' names and bytes, and of a dataset only its name."""
    if isinstance(place, PublicSet):
        return str(place)
    if isinstance(place, RunQuestions):
        place = [Source("", file) for file in place.ledger.files(SEQUENCES)]
    digest = hashlib.sha256()
    for source in place:
        if source.path.startswith("hf://"):
            digest.update(source.path.encode())
            continue
        filesystem, root, _ = open_filesystem(source.path)
        digest.update(f"{source.partition}\0{PurePosixPath(root).name}\0".encode())
        try:
            with filesystem.open_input_stream(root, compression=None) as stream:
                while chunk := stream.read(1 << 20):
                    digest.update(chunk)
        except OSError as error:
            raise PromptSourceError(f"{source.path} cannot be read: {error}. Repair or remove the file.") from error
    return f"{len(place)} {'file' if len(place) == 1 else 'files'}, sha256 {digest.hexdigest()}"


def _finished(folder: Path, made_with: Mapping[str, Any]) -> dict[str, Any] | None:
    """The summary of a folder that these settings made; None where there is nothing yet."""
    if folder.is_dir() and not any(folder.iterdir()):
        return None
    if not folder.exists():
        return None
    if not (folder / RECORD).is_file():
        raise RunError(f"{folder} was not made by the prepare job; give another OUT.")
    remedy = f"Move {folder} aside and run again."
    record = read_json(folder / RECORD, remedy)
    try:
        known, sizes, summary = record["made_with"], record["files"], record["summary"]
    except KeyError as error:
        raise RunError(f"{folder / RECORD} is damaged (it has no {error}). {remedy}") from None
    differing = [field for field in {**known, **made_with} if known.get(field) != made_with.get(field)]
    if differing:
        said = "; ".join(f"{field} was {known.get(field)} and is now {made_with.get(field)}" for field in differing)
        raise FingerprintMismatch(
            f"{folder} was prepared from other settings: {said}. Give another OUT, or move this one aside."
        )
    for name, size in sizes.items():
        if not (folder / name).is_file() or (folder / name).stat().st_size != size:
            raise RunError(f"{folder / name} is gone or was changed after; move {folder} aside and run again.")
    return {**summary, "out": str(folder)}


def _write(
    data: Path,
    files: Mapping[str, Place],
    evaluation_files: Sequence[Source],
    limit: int | None,
    ngram: int,
) -> dict[str, Any]:
    evaluation, rows_in = _load_evaluation(evaluation_files, ngram)
    counts: dict[str, Counts] = {}
    with open(data / SET_ASIDE, "w") as aside:
        sieve = _Sieve(evaluation, aside)
        for name, place in files.items():
            counts[name] = sieve.write(data / f"{name}.jsonl", name, place, limit)
    warnings = [
        f"{name}: {mine.bad} of {mine.read} rows cannot be used; the reasons are in {SET_ASIDE}."
        for name, mine in counts.items()
        if mine.bad
    ]
    warnings += [f"{name}: none of its {mine.read} rows is kept." for name, mine in counts.items() if not mine.kept]
    return {
        "sources": {name: asdict(mine) for name, mine in counts.items()},
        "against": {name: {"rows": rows, "contaminated": sieve.hits[name]} for name, rows in rows_in.items()},
        "ngram": ngram,
        "limit": limit,
        "warnings": warnings,
    }


def _load_evaluation(files: Sequence[Source], ngram: int) -> tuple[EvaluationTexts, dict[str, int]]:
    """The evaluation sets' texts and how many rows each set has; its name is that of its file."""
    texts, rows_in = EvaluationTexts(ngram), Counter[str]()
    for source in files:
        for number, raw in read(source):
            try:
                prompt = parse_row(raw, f"row {number}", column=None)
            except BadPrompt as error:
                raise PromptSourceError(
                    f"{source.path}, row {number}: {error}. Every row of an evaluation set has to be usable."
                ) from None
            # Only what the user says: a usual system prompt would mark every row that has the same one.
            texts.add(source.partition, prompt.prompt_id, _texts(prompt, {"user"}))
            rows_in[source.partition] += 1
        if not rows_in[source.partition]:
            raise PromptSourceError(f"--against {source.path} holds no rows; leave it out or mend it.")
    return texts, dict(rows_in)


class _Sieve:
    """Sorts the rows of one source after the other; knows all conversations and evaluation hits so far."""

    def __init__(self, evaluation: EvaluationTexts, aside: TextIO) -> None:
        self.hits: Counter[str] = Counter()
        self._evaluation = evaluation
        self._aside = aside
        self._seen: set[int] = set()

    def write(self, path: Path, name: str, place: Place, limit: int | None) -> Counts:
        """Writes a source's partition.

        Raises:
            PromptSourceError: there are no rows, or none that can be used.
        """
        counts, keys, ids, first_reason = Counts(), array("Q"), set[int](), ""
        column = place.column if isinstance(place, PublicSet) else None
        with open(path, "wb") as file:
            for where, fallback_id, raw in rows_of(place):
                counts.read += 1
                try:
                    prompt = parse_row(raw, fallback_id, column)
                    key = _key(prompt)
                except BadPrompt as error:
                    counts.bad += 1
                    first_reason = first_reason or f"{where}: {error}"
                    row = raw[:_BAD_ROW_EXCERPT].decode(errors="replace")
                    self._set_aside(name, where, fate="bad", reason=str(error), row=row)
                    continue
                if key in self._seen:
                    counts.duplicates += 1
                    continue
                self._seen.add(key)
                overlap = self._evaluation.overlap(_texts(prompt))
                if overlap is not None:
                    counts.contaminated += 1
                    self.hits[overlap.evaluation_set] += 1
                    reason = f"shares with {overlap.evaluation_set}, {overlap.row_id}: {overlap.words}"
                    self._set_aside(name, where, fate="contaminated", reason=reason, row=_row(prompt, prompt.prompt_id))
                    continue
                prompt_id = prompt.prompt_id
                if _hash(prompt_id) in ids:  # two files that both count from 0; the generate job wants each id once
                    prompt_id = f"{prompt_id}-{key:016x}"
                ids.add(_hash(prompt_id))
                file.write(json.dumps(_row(prompt, prompt_id), ensure_ascii=False).encode() + b"\n")
                keys.append(key)
        if not counts.read:
            raise PromptSourceError(f"--source {name} holds no rows; name another file or split.")
        if counts.bad == counts.read:
            raise PromptSourceError(f"--source {name}: none of its {counts.read} rows can be used. {first_reason}.")
        counts.over_limit = 0 if limit is None else _cut(path, keys, limit)
        counts.kept = len(keys) - counts.over_limit
        return counts

    def _set_aside(self, source: str, where: str, **about: Any) -> None:
        self._aside.write(json.dumps({"source": source, "from": where, **about}) + "\n")


def _cut(path: Path, keys: "array[int]", limit: int) -> int:
    """Keeps the lines with the `limit` smallest keys; returns how many went."""
    if len(keys) <= limit:
        return 0
    largest_kept = np.partition(np.frombuffer(keys, dtype=np.uint64), limit - 1)[limit - 1]
    whole = path.with_name(f".{path.name}.whole")
    path.rename(whole)
    with open(whole, "rb") as lines, open(path, "wb") as kept:
        kept.writelines(line for line, key in zip(lines, keys, strict=True) if key <= largest_kept)
    whole.unlink()
    return len(keys) - limit


def _texts(prompt: Prompt, roles: Collection[str] | None = None) -> list[str]:
    messages = (message for turn in prompt.turns for message in turn)
    texts = (message.get("content") for message in messages if roles is None or message["role"] in roles)
    return [text for text in texts if isinstance(text, str)]


def _row(prompt: Prompt, prompt_id: str) -> dict[str, Any]:
    row: dict[str, Any] = {"id": prompt_id, "messages": [message for turn in prompt.turns for message in turn]}
    if prompt.tools:
        row["tools"] = prompt.tools
    if prompt.chat_template_kwargs:
        row["chat_template_kwargs"] = prompt.chat_template_kwargs
    return row


def _key(prompt: Prompt) -> int:
    """A hash of all that is said, without case and white space: equal for duplicates, and the row's place in the draw.

    Raises:
        BadPrompt: the text cannot be stored.
    """
    row = _row(prompt, "")
    for at, message in enumerate(row["messages"]):
        if isinstance(message.get("content"), str):
            row["messages"][at] = {**message, "content": " ".join(message["content"].casefold().split())}
    try:
        return _hash(json.dumps(row, sort_keys=True, ensure_ascii=False))
    except UnicodeEncodeError:
        raise BadPrompt("half of a surrogate pair, which is not valid Unicode") from None


def _hash(text: str) -> int:
    """64 bits: among ten million rows, two share one by chance in about one of 400,000 runs."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())
