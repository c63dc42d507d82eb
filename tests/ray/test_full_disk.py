"""A disk that is full ends a job in one sentence and loses nothing; a folder that cannot be written ends it at once."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.jobs import Jobs, assert_sound, fake_server, rows, settings, write_prompts

PROMPTS = 1500


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MB in memory."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a file system cannot be mounted here: {mounted.stderr}")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_stops_the_job_in_one_sentence_and_room_lets_it_go_on(
    cluster: Jobs, target: Path, tmp_path: Path, small_disk: Path
) -> None:
    prompts, run = write_prompts(tmp_path / "p.jsonl", PROMPTS), small_disk / "run"
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(3_300_000))
    with fake_server(target) as server:
        words = settings(run, target, prompts, server.url)
        full = cluster.run(*words)
        assert full.code == 1, full.stderr
        assert "The disk is full" in full.stderr
        assert "Traceback" not in full.stderr
        ballast.unlink()
        done = cluster.run(*words)
    assert (done.code, done.summary["rows"] + done.summary["rejected"]) == (0, PROMPTS), done.stderr
    assert len(rows(run, "sequences")) == done.summary["rows"]
    assert_sound(run)


def test_a_run_directory_that_is_a_file_stops_the_job_before_anything_is_sent(
    cluster: Jobs, target: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.write_text("not a folder")
    with fake_server(target) as server:
        result = cluster.run(*settings(run, target, write_prompts(tmp_path / "p.jsonl", 3), server.url))
        assert server.requests() == []
    assert result.code == 2
    assert f"run.dir {run}" in result.stderr
