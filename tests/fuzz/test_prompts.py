"""Prompt files of any bytes are read, or are named; their rows are usable, or have a reason."""

import gzip
import io
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from eagle3_ray.acceptance.questions import _question
from eagle3_ray.plan import PlanSettings, Render
from eagle3_ray.prompts import BadPrompt, PromptSourceError, Source, parse, read
from tests.fuzz.bytes_of import damaged

_JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
_MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "tool", "developer", "king"]) | _JSON,
        "content": st.text(max_size=10) | _JSON,
        "from": st.sampled_from(["human", "gpt"]) | _JSON,
        "value": _JSON,
        "tool_calls": _JSON,
    },
)
_ROW = st.fixed_dictionaries(
    {},
    optional={
        "id": _JSON,
        "messages": st.lists(_MESSAGE, max_size=5) | _JSON,
        "conversations": st.lists(_MESSAGE, max_size=5) | _JSON,
        "turns": _JSON,
        "question": _JSON,
        "prompt": st.text(max_size=10) | _JSON,
        "input_ids": st.lists(st.integers(-5, 500), max_size=6) | _JSON,
        "tools": _JSON,
        "chat_template_kwargs": _JSON,
    },
)
_LINE = st.one_of(_ROW.map(lambda row: json.dumps(row).encode()), st.binary(max_size=60), st.just(b"[" * 100_000))


@given(_LINE)
def test_any_line_is_a_prompt_or_a_bad_row(line: bytes) -> None:
    for reader in (lambda: parse(line, "f:1"), lambda: _question(line, "set", 1)):
        with suppress(BadPrompt):
            reader()


@given(st.lists(_LINE, max_size=4))
def test_any_rows_become_rows_of_the_plan(tiny_target: Path, lines: list[bytes]) -> None:
    render = Render(PlanSettings([], str(tiny_target), {}, 400))
    rows = [{"partition": "p", "file": "f", "line": n, "raw": line} for n, line in enumerate(lines)]
    schema = pa.schema([("partition", pa.string()), ("file", pa.string()), ("line", pa.int64()), ("raw", pa.binary())])
    planned = render(pa.Table.from_pylist(rows, schema=schema)).to_pylist()
    assert len(planned) == len(rows)
    assert all((row["reason"] is None) == bool(row["prompt_ids"]) for row in planned)


def _parquet() -> bytes:
    sink = io.BytesIO()
    rows = [
        {"id": str(n), "prompt": "a question " * n, "input_ids": list(range(n)), "at": n * 10**15} for n in range(9)
    ]
    schema = pa.schema(
        [("id", pa.string()), ("prompt", pa.string()), ("input_ids", pa.list_(pa.int32())), ("at", pa.timestamp("us"))]
    )
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), sink)
    return sink.getvalue()


_LINES = b"".join(json.dumps({"id": n, "prompt": "why? " * n}).encode() + b"\n" for n in range(40))
_FILES = {
    "a.jsonl": _LINES,
    "a.jsonl.gz": gzip.compress(_LINES),
    "a.jsonl.zst": zstandard.compress(_LINES),
    "a.parquet": _parquet(),
}


@given(st.sampled_from(sorted(_FILES)), st.data())
def test_any_file_is_read_to_its_end_or_named(tmp_path: Path, name: str, data: st.DataObject) -> None:
    path = tmp_path / name
    path.write_bytes(data.draw(damaged(_FILES[name])))
    with suppress(PromptSourceError):
        for _, raw in read(Source("a", str(path))):
            assert len(raw) < 1 << 20
