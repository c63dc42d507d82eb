"""Prompts in an object store, against a server that speaks S3."""

from collections.abc import Iterator
from pathlib import PurePosixPath

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest

from eagle3_ray.prompts import find, parse, read
from tests.buckets import s3_bucket


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with s3_bucket(monkeypatch) as uri:
        yield uri


def test_partitions_are_found_and_read_in_an_object_store(bucket: str) -> None:
    filesystem, root = pafs.FileSystem.from_uri(bucket.format("run"))
    filesystem.create_dir(root, recursive=True)
    for name, text in {
        "B1/prompts.jsonl": '{"prompt": "one"}\n\n{"prompt": "two"}\n',
        "B2.jsonl": '{"prompt": "three"}',
    }.items():
        with filesystem.open_output_stream(f"{root}/{name}") as file:
            file.write(text.encode())
    with filesystem.open_output_stream(f"{root}/B3.parquet") as file:
        pq.write_table(pa.table({"prompt": ["four", "five"]}), file)
    sources = find(bucket.format("run"))
    assert [(s.partition, PurePosixPath(s.path.partition("?")[0]).name) for s in sources] == [
        ("B1", "prompts.jsonl"),
        ("B2", "B2.jsonl"),
        ("B3", "B3.parquet"),
    ]
    rows = [(line, parse(raw, "x").turns[0][0]["content"]) for source in sources for line, raw in read(source)]
    assert rows == [(1, "one"), (3, "two"), (1, "three"), (1, "four"), (2, "five")]
