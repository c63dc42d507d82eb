"""A run whose disk is lost with its machine, on a real Ray cluster and with a server that speaks S3."""

import collections
import shutil
from pathlib import Path

import pytest

from eagle3_ray import mirror_index
from eagle3_ray.object_store import ObjectStore
from tests.buckets import s3_bucket
from tests.forks import Job
from tests.jobs import (
    Jobs,
    assert_sound,
    fake_server,
    row_requests,
    rows,
    sequence_of,
    settings,
    wait_for_requests,
    wait_until,
    write_prompts,
)

PROMPTS = 600


def mirrored_answers(mirror: str, to: Path) -> set[str]:
    """The sequence ids of the answers that another machine would find in the mirror."""
    to.mkdir(parents=True)
    mirror_index.fetch(ObjectStore(mirror), to)
    journals = [path.read_bytes() for path in (to / "generate" / "journal").glob("*.jsonl")]
    lines = [line for journal in journals for line in journal.splitlines(keepends=True) if line.endswith(b"\n")]
    stored = {row["sequence_id"] for folder in ("sequences", "rejected") for row in rows(to, folder)}
    return stored | {line[:32].decode() for line in lines}


def wait_for_journals(mirror: str, job: Job) -> None:
    """Returns when the mirror holds answers that are in no Parquet file yet; fails when the job ends before."""

    def held() -> bool:
        return any(entry["size"] for path, entry in mirror_index.read(ObjectStore(mirror)).items() if "journal" in path)

    wait_until(held, job, within_s=120)


def test_a_killed_run_goes_on_from_its_mirror_in_a_directory_that_never_saw_it(
    cluster: Jobs, target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, lost, other = write_prompts(tmp_path / "p.jsonl", PROMPTS), tmp_path / "lost", tmp_path / "other"
    with s3_bucket(monkeypatch) as place, fake_server(target, base_latency_s=0.6, max_running=16) as server:
        mirror = place.format("runs/one")
        words = [f"run.mirror={mirror}", "generate.max_in_flight=16"]
        job = cluster.start(*settings(lost, target, prompts, server.url), *words)
        wait_for_requests(server, 60, job)
        wait_for_journals(mirror, job)
        job.kill()
        job.communicate()
        kept = mirrored_answers(mirror, tmp_path / "kept")
        shutil.rmtree(lost)
        server.set(base_latency_s=0.0)
        result = cluster.run(*settings(other, target, prompts, server.url), *words)
        asked = collections.Counter(sequence_of(request) for request in row_requests(server))
        mirrored_answers(mirror, tmp_path / "end")
    assert result.code == 0, result.stderr
    summary = result.summary
    assert (summary["expected"], summary["rows"] + summary["rejected"]) == (PROMPTS, PROMPTS)
    stored = rows(other, "sequences") + rows(other, "rejected")
    assert sorted(row["prompt_id"] for row in stored) == sorted(f"p{i}" for i in range(PROMPTS))
    assert_sound(other)
    assert 0 < len(kept) < PROMPTS
    assert {asked[sequence_id] for sequence_id in kept} == {1}
    assert set(asked) == {row["sequence_id"] for row in stored}
    assert summary["mirror"]["complete"] is True
    assert (tmp_path / "end" / "generate" / "_SUCCESS").read_text() == (other / "generate" / "_SUCCESS").read_text()
    assert rows(tmp_path / "end", "sequences") == rows(other, "sequences")
