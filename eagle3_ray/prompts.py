"""Where prompts come from: files in partitions, read line by line into one form. Knows nothing of tokens.

A row is `{"id", "messages"}` (OpenAI roles, with `tools` and `chat_template_kwargs`), ShareGPT `conversations`,
`{"prompt": text}` (one user message), or ready `{"input_ids"}`. Answers in the rows are dropped: the target gives its
own. Only an assistant message with tool calls stays, because the tool results behind it answer it.

`{"target_asks": true}`, with a `system` text or none, asks for a question instead of an answer (jobs/prepare.py).
"""

import io
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq

_FORMATS = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")
_LONGEST_LINE = 64 << 20
_SHAREGPT_QUESTIONS = {"human": "user", "user": "user", "system": "system"}
_SHAREGPT_ANSWERS = {"gpt", "assistant", "chatgpt", "bot", "model"}
_ROLES = {"system", "developer", "user", "assistant", "tool"}
_FORMS = ("messages", "conversations", "prompt", "input_ids")
_QUESTIONS = ("instruction", "question", "problem", "query")
_SYSTEM = ("system", "system_prompt")
_BESIDE = (*_SYSTEM, "tools", "chat_template_kwargs")

Message = dict[str, Any]


class PromptSourceError(ValueError):
    """The prompts cannot be read as a whole; the message names the path and the remedy."""


class BadPrompt(ValueError):
    """One row cannot be used; the message is the reason that goes to rejected/."""


@dataclass(frozen=True)
class Source:
    """One file (or Hugging Face dataset) of prompts and the partition that it belongs to."""

    partition: str
    path: str


@dataclass(frozen=True)
class Prompt:
    """One row in one form: ready ids, or the new messages of each turn that the target has to answer."""

    prompt_id: str
    input_ids: list[int] | None
    turns: list[list[Message]]
    tools: list[Any] | None
    chat_template_kwargs: dict[str, Any]
    target_asks: bool = False  # the turn is the target's own: its template up to where a user's words begin


def find(path: str, partitions: list[str] | None = None) -> list[Source]:
    """The files behind `prompts.path`, sorted by partition and path.

    A file's partition is its sub-folder's name, or its own name without endings: `B1_glaive/prompts.jsonl` and
    `B1_glaive.jsonl` are both partition `B1_glaive`.

    Raises:
        PromptSourceError: nothing there, or a partition that was asked for is missing.
    """
    sources = [_hub_source(path)] if path.startswith("hf://") else list(_find_files(path))
    if not sources:
        raise PromptSourceError(
            f"prompts.path={path} holds no prompts; expected files ending in {', '.join(_FORMATS)}."
        )
    names = {source.partition for source in sources}
    for name in partitions or ():
        if name not in names:
            raise PromptSourceError(
                f"prompts.partitions names '{name}', but {path} has only {', '.join(sorted(names))}."
            )
    wanted = names if partitions is None else set(partitions)
    return sorted((s for s in sources if s.partition in wanted), key=lambda s: (s.partition, s.path))


def read(source: Source) -> Iterator[tuple[int, bytes]]:
    """The rows of a source, each as its line (or row) number from 1 and its JSON.

    Raises:
        PromptSourceError: the file breaks off or is not of the format that its name says.
    """
    try:
        if source.path.startswith("hf://"):
            yield from _read_hub(source.path)
        elif _without_query(source.path).endswith(".parquet"):
            yield from _read_parquet(source.path)
        else:
            yield from _read_lines(source.path)
    except PromptSourceError:
        raise
    except (OSError, EOFError, pa.ArrowException, ArithmeticError, RecursionError, ValueError) as error:
        raise PromptSourceError(
            f"{source.path} cannot be read to its end: {error}. Repair or remove the file."
        ) from error


def _without_query(path: str) -> str:
    """A path, or a URI without what it says of its server."""
    return path.partition("?")[0] if "://" in path else path


def stamp(source: Source) -> tuple[int, int] | None:
    """Size and time of a source's file, by which a changed one is known; None of a dataset or a file that is gone."""
    if source.path.startswith("hf://"):
        return None
    filesystem, root, _ = open_filesystem(source.path)
    about = filesystem.get_file_info(root)
    return (about.size, about.mtime_ns) if about.type == pafs.FileType.File else None


def parse(raw: bytes, fallback_id: str) -> Prompt:
    """One row in the common form.

    Raises:
        BadPrompt: the row cannot be used.
    """
    try:
        row = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise BadPrompt(f"not JSON: {error}") from None
    if not isinstance(row, dict):
        raise BadPrompt(f"not a JSON object but {type(row).__name__}")
    prompt_id = str(row["id"]) if row.get("id") is not None else fallback_id
    if not _is_unicode(prompt_id):
        raise BadPrompt(f"the id {prompt_id!r} is not valid Unicode")
    tools = row.get("tools") or None
    options = row.get("chat_template_kwargs") or {}
    if not (tools is None or isinstance(tools, list)):
        raise BadPrompt("tools is not a list")
    if not isinstance(options, dict):
        raise BadPrompt("chat_template_kwargs is not an object")
    if row.get("input_ids") is not None:
        return Prompt(prompt_id, _checked_ids(row["input_ids"]), [], None, {})
    options = {key: value for key, value in options.items() if value is not None}  # Arrow structs fill in nulls
    system = _system(row)
    if row.get("target_asks"):
        return Prompt(prompt_id, None, [system], None, options, target_asks=True)
    messages = _messages(row)
    if system and messages[0]["role"] == "system":
        raise BadPrompt("a system text beside the messages and one in them")
    return Prompt(prompt_id, None, _split_turns([*system, *messages]), tools, options)


def usual_form(raw: bytes, column: str | None = None) -> bytes:
    """A row as people publish instructions and questions, in a form that `parse` takes; of one `column`, if named.

    Raises:
        BadPrompt: the row has none of the known columns.
    """
    try:
        row = json.loads(raw)
    except (ValueError, RecursionError):
        return raw  # parse gives the reason
    if not isinstance(row, dict):
        return raw
    row_id = row.get("id") if row.get("id") is not None else row.get("question_id")
    if column is not None:
        row = {"id": row_id, column: row.get(column)}
    if any(row.get(form) is not None for form in _FORMS):
        return json.dumps(row).encode() if column else raw
    beside = {name: row[name] for name in _BESIDE if row.get(name) is not None}
    if isinstance(row.get("turns"), list):  # MT-bench as its authors keep it
        turns = [{"role": "user", "content": turn} for turn in row["turns"]]
        return json.dumps({"id": row_id, "messages": turns, **beside}).encode()
    question = next((row[name] for name in _QUESTIONS if isinstance(row.get(name), str)), None)
    if question is None:
        raise BadPrompt(f"none of {', '.join((*_FORMS, 'turns', *_QUESTIONS))} is there")
    if row.get("input") and isinstance(row["input"], str):  # Alpaca: what the instruction is about
        question = f"{question}\n\n{row['input']}"
    return json.dumps({"id": row_id, "prompt": question, **beside}).encode()


def _find_files(path: str) -> Iterator[Source]:
    filesystem, root, scheme = open_filesystem(path)
    query = f"?{path.partition('?')[2]}" if scheme and "?" in path else ""  # s3://...?endpoint_override=...
    wildcard = next((i for i, part in enumerate(PurePosixPath(root).parts) if set("*?[") & set(part)), None)
    base = root if wildcard is None else str(PurePosixPath(*PurePosixPath(root).parts[:wildcard]))
    try:
        about = filesystem.get_file_info(base)
        if about.type == pafs.FileType.NotFound:
            raise PromptSourceError(f"prompts.path={path} does not exist.")
        if about.type == pafs.FileType.File:
            found = [base]
        else:
            listing = filesystem.get_file_info(pafs.FileSelector(base, recursive=True))
            found = [entry.path for entry in listing if entry.type == pafs.FileType.File]
    except OSError as error:
        raise PromptSourceError(f"prompts.path={path} cannot be listed: {error}.") from error
    for file in found:
        inside = PurePosixPath(file).relative_to(base).parts
        if any(part.startswith((".", "_")) for part in inside) or not file.endswith(_FORMATS):
            continue
        if wildcard is not None and not PurePosixPath(file).match(root):
            continue
        name = PurePosixPath(file)
        stem = name.name.removesuffix(next(ending for ending in _FORMATS if name.name.endswith(ending)))
        yield Source(inside[0] if len(inside) > 1 else stem, f"{scheme}{file}{query}")


def open_filesystem(path: str) -> tuple[Any, str, str]:
    """The file system of a path or URI, the path in it, and the scheme with "://", empty of a local path.

    Raises:
        PromptSourceError: there is no such file system.
    """
    if "://" not in path:
        return pafs.LocalFileSystem(), str(PurePosixPath(os.path.abspath(os.path.expanduser(path)))), ""
    try:
        filesystem, root = pafs.FileSystem.from_uri(path)
    except (ValueError, OSError) as error:
        raise PromptSourceError(f"prompts.path={path} cannot be opened: {error}.") from error
    return filesystem, root, path.split("://")[0] + "://"


def _read_lines(path: str) -> Iterator[tuple[int, bytes]]:
    filesystem, root, _ = open_filesystem(path)
    with (
        filesystem.open_input_stream(root, compression="detect") as stream,
        io.BufferedReader(stream, 1 << 20) as lines,
    ):
        number = 0
        while line := lines.readline(_LONGEST_LINE):
            number += 1
            if len(line) == _LONGEST_LINE and not line.endswith(b"\n"):
                raise PromptSourceError(
                    f"{path}, line {number}: longer than {_LONGEST_LINE >> 20} MiB. Is it JSON lines?"
                )
            if line.strip():
                yield number, line


def _read_parquet(path: str) -> Iterator[tuple[int, bytes]]:
    filesystem, root, _ = open_filesystem(path)
    number = 0
    with filesystem.open_input_file(root) as file:
        for batch in pq.ParquetFile(file).iter_batches(batch_size=1000):
            for row in batch.to_pylist():
                number += 1
                yield number, json.dumps(_without_nulls(row), default=str).encode()


def _without_nulls(value: Any) -> Any:
    """The value without the nulls that Arrow puts where a struct of another row has a field and this one has none."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _hub_source(path: str) -> Source:
    name = path.removeprefix("hf://").split(":")[0]
    return Source(PurePosixPath(name).name, path)


def _read_hub(path: str) -> Iterator[tuple[int, bytes]]:
    name, _, split = path.removeprefix("hf://").partition(":")
    return hub_rows(name, split or "train")


def hub_rows(name: str, split: str, config: str | None = None) -> Iterator[tuple[int, bytes]]:
    """The rows of a dataset on the Hugging Face Hub, or in a folder of that form: number from 1 and JSON, streamed.

    Raises:
        PromptSourceError: `datasets` is not installed, or there is no such split.
        OSError, ValueError: it cannot be read to its end.
    """
    try:
        import datasets
    except ImportError:
        raise PromptSourceError(f"Reading the dataset {name} needs `pip install 'eagle3_ray[datasets]'`.") from None
    try:
        rows = datasets.load_dataset(name, config, split=split, streaming=True)
    except ValueError as error:  # no such split, or several configurations to choose from
        raise PromptSourceError(
            f"The dataset {name}:{split} cannot be opened: {error}. Name a split as hf://DATASET:SPLIT."
        ) from None
    for number, row in enumerate(rows, start=1):
        yield number, json.dumps(_without_nulls(row), default=str).encode()


def _is_unicode(text: str) -> bool:
    """Whether the text can be stored: JSON can spell halves of surrogate pairs, UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _checked_ids(ids: Any) -> list[int]:
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise BadPrompt("input_ids is not a list of whole numbers with at least one entry")
    return ids


def _system(row: dict[str, Any]) -> list[Message]:
    """The system text that stands in a column of its own, as a message; none where it is not there or empty."""
    texts = [row[name] for name in _SYSTEM if row.get(name)]
    return [_checked({"role": "system", "content": text}) for text in texts[:1]]


def _messages(row: dict[str, Any]) -> list[Message]:
    if row.get("messages") is not None:
        messages, form = row["messages"], "messages"
    elif row.get("conversations") is not None:
        messages, form = row["conversations"], "conversations"
    elif row.get("prompt") is not None:
        if not isinstance(row["prompt"], str) or not row["prompt"].strip():
            raise BadPrompt("prompt is not a text with content")
        return [{"role": "user", "content": row["prompt"]}]
    else:
        raise BadPrompt(f"none of {', '.join(_FORMS)} is there")
    if not isinstance(messages, list) or not messages:
        raise BadPrompt(f"{form} is empty or not a list")
    if not all(isinstance(message, dict) for message in messages):
        raise BadPrompt(f"{form} holds something that is not an object")
    return [_checked(m) for m in messages] if form == "messages" else [_from_sharegpt(m) for m in messages]


def _checked(message: Message) -> Message:
    message = {key: value for key, value in message.items() if value is not None}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        raise BadPrompt(f"unknown role {role!r}")
    if isinstance(content, list):
        if not content or not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
            raise BadPrompt("content that is not text")
        if not all(isinstance(part.get("text"), str) for part in content):
            raise BadPrompt("a text part without text")
        # Many templates know strings only; some of them would print the list as Python does.
        message["content"] = content = "".join(part["text"] for part in content)
    elif not isinstance(content, str) and role != "assistant":
        raise BadPrompt(f"a {role} message without content")
    if role == "user" and not str(content).strip():
        raise BadPrompt("an empty user message")
    return message


def _from_sharegpt(message: Message) -> Message:
    speaker, text = str(message.get("from")), message.get("value")
    if speaker in _SHAREGPT_ANSWERS:
        return {"role": "assistant", "content": text}
    if speaker not in _SHAREGPT_QUESTIONS:
        raise BadPrompt(f"unknown speaker {speaker!r}")
    return _checked({"role": _SHAREGPT_QUESTIONS[speaker], "content": text})


def _split_turns(messages: list[Message]) -> list[list[Message]]:
    """The new messages of each turn; a turn ends with the user or tool message that the target answers."""
    kept = [
        message
        for message, following in zip(messages, [*messages[1:], None], strict=True)
        if message["role"] != "assistant" or (following is not None and following["role"] == "tool")
    ]
    turns: list[list[Message]] = [[]]
    for message, following in zip(kept, [*kept, None][1:], strict=True):
        turns[-1].append(message)
        answered_later = following is not None and following["role"] in ("assistant", "tool")
        if message["role"] in ("user", "tool") and not answered_later:
            turns.append([])
    if turns[-1]:  # system messages behind the last question
        turns.pop()
    turns = [turn for turn in turns if turn]
    if not turns:
        raise BadPrompt("no user message to answer")
    return turns
