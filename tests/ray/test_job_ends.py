"""How jobs end before their work begins, and what their logs say, on a real Ray cluster."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.jobs import REPOSITORY, Jobs, fake_server, row_requests, rows, settings, wait_until, write_prompts


def log_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "logs" / "generate.jsonl").read_text().splitlines()]


def doctor(cluster: Jobs, run: Path) -> list[str]:
    command = [sys.executable, "jobs/doctor.py", str(run)]
    ran = subprocess.run(command, cwd=REPOSITORY, env=cluster.environment(), capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()


def test_the_log_names_rejected_rows_and_says_nothing_of_others(cluster: Jobs, target: Path, tmp_path: Path) -> None:
    prompts, run = write_prompts(tmp_path / "p.jsonl", 40), tmp_path / "run"
    with prompts.open("a") as file:
        file.write(json.dumps({"id": "bad", "input_ids": [5, 400]}) + "\n")
    with fake_server(target) as server:
        result = cluster.run(*settings(run, target, prompts, server.url))
    assert result.code == 0, result.stderr
    rejected = rows(run, "rejected")
    lines = log_of(run)
    assert [line["event"] for line in lines] == ["job started", *["row rejected"] * len(rejected), "job complete"]
    named = {line["sequence_id"]: line["reason"] for line in lines[1:-1]}
    assert named == {row["sequence_id"]: row["reason"] for row in rejected}
    assert "token id 400 is outside the vocabulary of 400" in named.values()
    assert {(line["run"], line["stage"], line["partition"]) for line in lines[1:-1]} == {(str(run), "generate", "p")}


def test_a_job_that_is_stopped_while_it_prepares_says_so_on_its_last_line(
    cluster: Jobs, target: Path, tmp_path: Path
) -> None:
    prompts, run = write_prompts(tmp_path / "p.jsonl", 30), tmp_path / "run"
    with fake_server(target) as server:
        job = cluster.start(*settings(run, target, prompts, server.url))
        wait_until((run / "last_job.json").exists, job, within_s=300)
        job.send_signal(signal.SIGTERM)
        stdout, stderr = job.communicate(timeout=300)
        assert row_requests(server) == []
        assert job.returncode == 1, stderr
        said = json.loads(stdout.splitlines()[-1])
        assert (said["stage"], said["status"], said["stopped_by"]) == ("generate", "stopped", "SIGTERM")
        assert "PROBLEM: the last job (generate, " in doctor(cluster, run)[1]
        assert doctor(cluster, run)[1].endswith("stopped: SIGTERM")
        assert cluster.run(*settings(run, target, prompts, server.url)).code == 0
    assert not any("the last job" in line for line in doctor(cluster, run))


def test_a_refused_setup_is_the_first_thing_that_the_doctor_says(cluster: Jobs, target: Path, tmp_path: Path) -> None:
    prompts, run = write_prompts(tmp_path / "p.jsonl", 5), tmp_path / "run"
    result = cluster.run(*settings(run, target, prompts, "http://127.0.0.1:1"))
    assert (result.code, result.summary["status"]) == (2, "refused"), result.stderr
    assert result.summary["stopped_by"].startswith("Unfit: ")
    assert doctor(cluster, run)[1].endswith(f"refused: {result.summary['stopped_by']}")
    assert log_of(run)[-1]["cause"] == result.summary["stopped_by"]
