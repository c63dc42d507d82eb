"""Where prompts come from: every form of a row, every format of a file, and what a bad one says."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from eagle3_ray import prompts
from eagle3_ray.prompts import BadPrompt, Prompt, PromptSourceError, Source, find, parse, read, stamp

LINES = [b'{"prompt": "one"}\n', b"\n", b'{"prompt": "two"}\n', b"not json\n", b"   \n", b'{"prompt": "last"}']
NUMBERED = [(1, LINES[0]), (3, LINES[2]), (4, LINES[3]), (6, LINES[5])]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _parse(row: Any) -> Prompt:
    return parse(json.dumps(row).encode(), "file:7")


def _write(path: Path, content: bytes = b'{"prompt": "q"}\n') -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


# --- rows


def test_a_row_of_messages_is_one_turn_with_its_id_tools_and_template_options() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    options = {"enable_thinking": True}
    row = {"id": "q-1", "messages": [_user("hello")], "tools": tools, "chat_template_kwargs": options, "other": 1}
    assert _parse(row) == Prompt("q-1", None, [[_user("hello")]], tools, options)


def test_a_prompt_text_is_one_user_message() -> None:
    assert _parse({"id": 5, "prompt": "hello"}) == Prompt("5", None, [[_user("hello")]], None, {})


def test_ready_ids_are_taken_as_they_are() -> None:
    row = {"id": "r", "input_ids": [3, 1, 3], "messages": [_user("not used")]}
    assert _parse(row) == Prompt("r", [3, 1, 3], [], None, {})


@pytest.mark.parametrize("row", [{"prompt": "q"}, {"id": None, "prompt": "q"}])
def test_a_row_without_id_is_named_by_its_place(row: Any) -> None:
    assert _parse(row).prompt_id == "file:7"


@pytest.mark.parametrize("answer", ["gpt", "assistant", "chatgpt", "bot", "model"])
def test_sharegpt_conversations_keep_the_questions_and_drop_the_answers(answer: str) -> None:
    said = [("system", "S"), ("human", "one"), (answer, "1"), ("user", "two"), (answer, "2")]
    row = {"conversations": [{"from": speaker, "value": text} for speaker, text in said]}
    assert _parse(row).turns == [[{"role": "system", "content": "S"}, _user("one")], [_user("two")]]


def test_answers_in_messages_are_dropped_too() -> None:
    answer = {"role": "assistant", "content": "old", "reasoning_content": "hm"}
    assert _parse({"messages": [_user("a"), answer, _user("b"), answer]}).turns == [[_user("a")], [_user("b")]]


def test_user_turns_in_a_row_are_turns_of_a_conversation() -> None:
    system, developer = {"role": "system", "content": "S"}, {"role": "developer", "content": "D"}
    turns = _parse({"messages": [system, developer, _user("1"), _user("2"), system, _user("3")]}).turns
    assert turns == [[system, developer, _user("1")], [_user("2")], [system, _user("3")]]


def test_a_call_of_a_tool_stays_with_its_result_and_the_target_answers_behind_the_result() -> None:
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}
    results = [{"role": "tool", "content": "r1"}, {"role": "tool", "content": "r2"}]
    final = {"role": "assistant", "content": "old"}
    turns = _parse({"messages": [_user("a"), call, *results, final, _user("b"), call, results[0]]}).turns
    assert turns == [[_user("a"), call, *results], [_user("b"), call, results[0]]]


def test_a_system_message_behind_the_last_question_is_no_turn() -> None:
    assert _parse({"messages": [_user("a"), {"role": "system", "content": "S"}]}).turns == [[_user("a")]]


def test_text_parts_are_the_text_that_they_are() -> None:
    parts = [{"type": "text", "text": "What is "}, {"type": "text", "text": "this?"}]
    assert _parse({"messages": [{"role": "user", "content": parts}]}).turns == [[_user("What is this?")]]


def test_odd_unicode_is_kept() -> None:
    text = "\u0000\u200b\ufeff\u2028 e\u0301 👩‍👩‍👧 \U0010ffff" + "x" * 300_000
    assert _parse({"id": "ü\u2028", "prompt": text}) == Prompt("ü\u2028", None, [[_user(text)]], None, {})
    assert parse(b"\xef\xbb\xbf" + json.dumps({"prompt": "ä"}, ensure_ascii=False).encode(), "x").turns == [
        [_user("ä")]
    ]


BAD_ROWS: list[tuple[str, Any, str]] = [
    ("array", [1], "not a JSON object but list"),
    ("null", None, "not a JSON object but NoneType"),
    ("nothing", {}, "none of messages, conversations, prompt, input_ids is there"),
    ("all null", {"messages": None, "prompt": None}, "none of messages"),
    ("no messages", {"messages": []}, "messages is empty or not a list"),
    ("messages text", {"messages": "hi"}, "messages is empty or not a list"),
    ("no conversations", {"conversations": []}, "conversations is empty"),
    ("message text", {"messages": ["hi"]}, "something that is not an object"),
    ("unknown role", {"messages": [{"role": "human", "content": "x"}]}, "unknown role 'human'"),
    ("no role", {"messages": [{"content": "x"}]}, "unknown role None"),
    ("role list", {"messages": [{"role": ["user"], "content": "x"}]}, r"unknown role \['user'\]"),
    ("role object", {"messages": [{"role": {}, "content": "x"}]}, "unknown role {}"),
    ("unknown speaker", {"conversations": [{"from": "narrator", "value": "x"}]}, "unknown speaker 'narrator'"),
    ("speaker list", {"conversations": [{"from": ["human"], "value": "x"}]}, "unknown speaker"),
    ("no content", {"messages": [{"role": "user"}]}, "a user message without content"),
    ("content number", {"messages": [{"role": "system", "content": 5}]}, "a system message without content"),
    ("sharegpt no value", {"conversations": [{"from": "human"}]}, "a user message without content"),
    ("empty content", {"messages": [_user("")]}, "an empty user message"),
    ("blank content", {"messages": [_user(" \n")]}, "an empty user message"),
    (
        "empty part",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}]}]},
        "an empty user message",
    ),
    ("no parts", {"messages": [{"role": "user", "content": []}]}, "content that is not text"),
    ("image", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "content that is not text"),
    ("type list", {"messages": [{"role": "user", "content": [{"type": ["text"]}]}]}, "content that is not text"),
    ("part string", {"messages": [{"role": "user", "content": ["x"]}]}, "content that is not text"),
    ("part no text", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "a text part without text"),
    ("no user", {"messages": [{"role": "system", "content": "S"}]}, "no user message to answer"),
    ("only answer", {"messages": [{"role": "assistant", "content": "S"}]}, "no user message to answer"),
    ("empty prompt", {"prompt": "  "}, "prompt is not a text with content"),
    ("prompt number", {"prompt": 5}, "prompt is not a text with content"),
    ("tools object", {"prompt": "x", "tools": {"a": 1}}, "tools is not a list"),
    ("options list", {"prompt": "x", "chat_template_kwargs": [1]}, "chat_template_kwargs is not an object"),
    ("no ids", {"input_ids": []}, "input_ids is not a list of whole numbers"),
    ("id text", {"input_ids": ["1"]}, "input_ids is not a list of whole numbers"),
    ("id float", {"input_ids": [1.0]}, "input_ids is not a list of whole numbers"),
    ("id bool", {"input_ids": [True]}, "input_ids is not a list of whole numbers"),
    ("ids number", {"input_ids": 5}, "input_ids is not a list of whole numbers"),
    ("surrogate id", {"id": "\ud800", "prompt": "x"}, r"the id '\\ud800' is not valid Unicode"),
]


@pytest.mark.parametrize(("row", "reason"), [bad[1:] for bad in BAD_ROWS], ids=[bad[0] for bad in BAD_ROWS])
def test_a_bad_row_is_refused_with_its_reason(row: Any, reason: str) -> None:
    with pytest.raises(BadPrompt, match=reason):
        _parse(row)


@pytest.mark.parametrize(
    "raw",
    [
        b"hello",
        b"{",
        b'{"prompt": "x"} tail',
        b"\xff\xfe\xfd",
        b"\x80abc",
        b"[" * 200_000,
        b'{"id": ' + b"9" * 9999 + b"}",
    ],
    ids=["text", "torn", "tail", "binary", "latin1", "nested", "huge number"],
)
def test_what_is_not_json_is_a_bad_row(raw: bytes) -> None:
    with pytest.raises(BadPrompt, match="not JSON"):
        parse(raw, "x")


# --- files


@pytest.mark.parametrize("ending", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_json_lines_are_read_with_their_line_numbers_blank_lines_counted(tmp_path: Path, ending: str) -> None:
    packers = {".jsonl": bytes, ".jsonl.gz": gzip.compress, ".jsonl.zst": zstandard.compress}
    path = _write(tmp_path / f"a{ending}", packers[ending](b"".join(LINES)))
    assert list(read(Source("a", str(path)))) == NUMBERED


@pytest.mark.parametrize(("ending", "pack"), [(".jsonl.gz", gzip.compress), (".jsonl.zst", zstandard.compress)])
def test_a_compressed_file_that_was_appended_to_is_read_to_its_end(tmp_path: Path, ending: str, pack: Any) -> None:
    path = _write(tmp_path / f"a{ending}", pack(b"".join(LINES[:3])) + pack(b"".join(LINES[3:])))
    assert list(read(Source("a", str(path)))) == NUMBERED


def test_a_parquet_file_gives_its_rows_in_order(tmp_path: Path) -> None:
    rows = [{"id": str(n), "prompt": f"question {n} ü"} for n in range(2500)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=700)
    got = list(read(Source("a", str(tmp_path / "a.parquet"))))
    assert [number for number, _ in got] == list(range(1, 2501))
    assert [json.loads(raw) for _, raw in got] == rows


def test_fields_that_only_other_rows_of_a_parquet_file_have_are_absent(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": [_user("a")], "tools": None, "chat_template_kwargs": {"enable_thinking": True}},
        {
            "messages": [
                _user("b"),
                {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]},
                {"role": "tool", "content": "r", "tool_call_id": "c"},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}, {"type": "x"}],
            "chat_template_kwargs": {"effort": "low"},
        },
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    first, second = (parse(raw, "x") for _, raw in read(Source("a", str(tmp_path / "a.parquet"))))
    assert first == Prompt("x", None, [[_user("a")]], None, {"enable_thinking": True})
    call = {"role": "assistant", "tool_calls": [{"name": "f"}]}
    result = {"role": "tool", "content": "r", "tool_call_id": "c"}
    assert second == Prompt("x", None, [[_user("b"), call, result]], rows[1]["tools"], {"effort": "low"})


def test_a_null_template_option_is_no_option() -> None:
    assert _parse({"prompt": "q", "chat_template_kwargs": {"enable_thinking": None}}).chat_template_kwargs == {}


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.jsonl.gz"):
        assert list(read(Source("a", str(_write(tmp_path / name, b""))))) == []


def test_a_file_is_read_line_by_line_not_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path / "a.jsonl.gz", gzip.compress(b'{"prompt": "q"}\n' * 500_000))
    consumed = []
    monkeypatch.setattr(prompts.io, "BufferedReader", lambda raw, size: _Counting(raw, size, consumed))
    rows = read(Source("a", str(path)))
    assert next(rows) == (1, b'{"prompt": "q"}\n')
    assert 0 < sum(consumed) <= 2 << 20  # of 8 MB


class _Counting(io.BufferedReader):
    """Notes how much was taken from the file below."""

    def __init__(self, raw: Any, size: int, consumed: list[int]) -> None:
        super().__init__(_CountingRaw(raw, consumed), size)


class _CountingRaw(io.RawIOBase):
    def __init__(self, raw: Any, consumed: list[int]) -> None:
        self._raw, self._consumed = raw, consumed

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._raw.read(len(buffer))
        buffer[: len(data)] = data
        self._consumed.append(len(data))
        return len(data)


def _parquet(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("torn.jsonl.gz", gzip.compress(b"".join(LINES) * 500)[:-20]),
        ("checksum.jsonl.gz", gzip.compress(b"".join(LINES) * 500)[:-4]),
        ("torn.jsonl.zst", zstandard.compress(b"".join(LINES) * 500)[:-3]),
        ("plain.jsonl.gz", b'{"prompt": "q"}\n'),
        ("plain.jsonl.zst", b'{"prompt": "q"}\n'),
        ("plain.parquet", b'{"prompt": "q"}\n'),
        ("short.parquet", b"PAR1"),
        ("year_300000.parquet", _parquet(pa.table({"at": pa.array([9 * 10**18], pa.timestamp("us"))}))),
        ("no_text.parquet", _parquet(pa.table({"prompt": pa.array([b"\xff\xfe"]).cast(pa.string(), safe=False)}))),
    ],
)
def test_a_file_that_breaks_off_or_is_of_another_format_is_an_error_that_names_it(
    tmp_path: Path, name: str, content: bytes
) -> None:
    path = _write(tmp_path / name, content)
    with pytest.raises(PromptSourceError, match=r"cannot be read to its end.*Repair or remove the file") as error:
        list(read(Source("a", str(path))))
    assert str(path) in str(error.value)


def test_a_file_that_vanished_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(PromptSourceError, match=r"gone\.jsonl cannot be read"):
        list(read(Source("a", str(tmp_path / "gone.jsonl"))))


def test_a_line_without_end_is_an_error_that_names_the_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "_LONGEST_LINE", 1 << 20)
    path = _write(tmp_path / "a.jsonl", LINES[0] + b"x" * (2 << 20))
    with pytest.raises(PromptSourceError, match=r"a\.jsonl, line 2: longer than 1 MiB"):
        list(read(Source("a", str(path))))


# --- places


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    for name in (
        "B1_glaive/prompts.jsonl",
        "B2.jsonl",
        "B3/part-0.jsonl.gz",
        "B3/part-1.jsonl.gz",
        "B3/deeper/part-2.parquet",
        "kimi-k2.5.jsonl.zst",
        "README.md",
        "notes.json",
        "_SUCCESS",
        ".hidden/prompts.jsonl",
        "_old/prompts.jsonl",
        "B1_glaive/.prompts.jsonl.swp.jsonl",
    ):
        _write(root / name)
    return root


def _found(path: Any, partitions: list[str] | None = None) -> list[tuple[str, str]]:
    return [(source.partition, Path(source.path).name) for source in find(str(path), partitions)]


ALL = [
    ("B1_glaive", "prompts.jsonl"),
    ("B2", "B2.jsonl"),
    ("B3", "part-2.parquet"),
    ("B3", "part-0.jsonl.gz"),
    ("B3", "part-1.jsonl.gz"),
    ("kimi-k2.5", "kimi-k2.5.jsonl.zst"),
]


def test_a_folder_holds_partitions_as_files_and_as_folders(folder: Path) -> None:
    assert _found(folder) == ALL
    assert _found(f"{folder}/") == ALL


def test_partitions_are_chosen_by_name(folder: Path) -> None:
    assert _found(folder, ["B2", "B1_glaive"]) == ALL[:2]


def test_a_missing_partition_is_an_error_that_lists_those_that_are_there(folder: Path) -> None:
    with pytest.raises(PromptSourceError, match=r"'B9', but .* has only B1_glaive, B2, B3, kimi-k2\.5\."):
        find(str(folder), ["B2", "B9"])


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("B2*", [("B2", "B2.jsonl")]),
        ("*/prompts.jsonl", [("B1_glaive", "prompts.jsonl")]),
        ("B[12]*", [("B2", "B2.jsonl")]),
        ("*.jsonl*", [("B2", "B2.jsonl"), ("kimi-k2.5", "kimi-k2.5.jsonl.zst")]),
        ("B3/part-?.jsonl.gz", [("part-0", "part-0.jsonl.gz"), ("part-1", "part-1.jsonl.gz")]),
    ],
)
def test_a_glob_chooses_files(folder: Path, pattern: str, expected: list[tuple[str, str]]) -> None:
    assert _found(folder / pattern) == expected


def test_a_single_file_is_a_partition_of_its_own_name(folder: Path) -> None:
    assert _found(folder / "B2.jsonl") == [("B2", "B2.jsonl")]
    assert _found(folder / "kimi-k2.5.jsonl.zst") == [("kimi-k2.5", "kimi-k2.5.jsonl.zst")]


def test_a_relative_path_and_a_uri_find_what_the_absolute_path_finds(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder.parent)
    assert find("data") == find(str(folder))
    assert _found(f"file://{folder}") == ALL
    assert _found(f"file://{folder}/*.jsonl") == [("B2", "B2.jsonl")]
    for source in find(f"file://{folder}", ["B2"]):
        assert list(read(source)) == [(1, b'{"prompt": "q"}\n')]


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("gone", "does not exist"),
        ("gone/*.jsonl", "does not exist"),
        ("notes.json", "holds no prompts; expected files ending in .jsonl"),
        ("*.txt", "holds no prompts"),
    ],
)
def test_a_place_without_prompts_is_an_error_that_names_it(folder: Path, path: str, said: str) -> None:
    with pytest.raises(PromptSourceError, match=said) as error:
        find(str(folder / path))
    assert f"prompts.path={folder / path}" in str(error.value)


def test_an_unknown_kind_of_storage_is_an_error() -> None:
    with pytest.raises(PromptSourceError, match=r"prompts\.path=ftp://host/x cannot be opened"):
        find("ftp://host/x")


def test_a_stamp_changes_with_the_file_and_is_the_same_by_path_and_by_uri(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl")
    before = stamp(Source("a", str(path)))
    assert before == (16, path.stat().st_mtime_ns)
    assert stamp(Source("a", f"file://{path}")) == before
    _write(path, b'{"prompt": "qq"}\n')
    assert stamp(Source("a", str(path))) != before
    assert stamp(Source("a", str(tmp_path / "gone"))) is None


# --- Hugging Face datasets


@pytest.fixture
def dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    datasets = pytest.importorskip("datasets", reason="the optional extra `datasets` is not installed")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    root = tmp_path / "my_set"
    rows = [{"id": "1", "messages": [_user("a")]}, {"id": "2", "messages": [_user("b"), _user("c")]}]
    _write(root / "train.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())
    _write(root / "test.jsonl", b'{"id": "3", "messages": [{"role": "user", "content": "d"}]}\n')
    return root


@pytest.mark.parametrize(("split", "ids"), [("", ["1", "2"]), (":train", ["1", "2"]), (":test", ["3"])])
def test_a_dataset_is_one_partition_with_the_rows_of_its_split(dataset: Path, split: str, ids: list[str]) -> None:
    (source,) = find(f"hf://{dataset}{split}")
    assert source == Source("my_set", f"hf://{dataset}{split}")
    rows = list(read(source))
    assert [number for number, _ in rows] == list(range(1, len(ids) + 1))
    assert [parse(raw, "x").prompt_id for _, raw in rows] == ids
    assert stamp(source) is None


def test_a_dataset_or_split_that_is_not_there_is_an_error_that_names_it(dataset: Path) -> None:
    with pytest.raises(PromptSourceError, match=r"my_set:dev cannot be opened: .*train"):
        list(read(Source("my_set", f"hf://{dataset}:dev")))
    with pytest.raises(PromptSourceError, match="gone cannot be read"):
        list(read(Source("gone", f"hf://{dataset}/gone")))


def test_a_dataset_without_the_extra_is_an_error_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(PromptSourceError, match=r"pip install 'eagle3_ray\[datasets\]'"):
        list(read(Source("x", "hf://org/x")))


# --- the real prompts


def test_every_real_prompt_is_usable_and_each_id_stands_once(shared_data: Path) -> None:
    sources = find(str(shared_data / "prompts"))
    assert [source.partition for source in sources] == ["B1_gsm8k", "B2_codegen", "B3_seed_tasks"]
    for source in sources:
        lines = Path(source.path).read_text().splitlines()
        parsed = [parse(raw, str(number)) for number, raw in read(source)]
        assert [prompt.prompt_id for prompt in parsed] == [json.loads(line)["id"] for line in lines]
        assert len({prompt.prompt_id for prompt in parsed}) == len(lines)


def test_mt_bench_rows_are_conversations_of_two_turns(shared_data: Path) -> None:
    (source,) = find(str(shared_data / "eval/mt_bench.jsonl"))
    turns = [parse(raw, "x").turns for _, raw in read(source)]
    assert len(turns) == 80
    assert all([len(messages) for messages in conversation] == [1, 1] for conversation in turns)


def test_a_glob_over_folders_keeps_their_names_as_partitions(tmp_path: Path) -> None:
    for name in ("B1", "B2"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part-0.jsonl").write_text('{"prompt": "Hi"}\n')
    assert [source.partition for source in find(f"{tmp_path}/*/part-0.jsonl")] == ["B1", "B2"]
