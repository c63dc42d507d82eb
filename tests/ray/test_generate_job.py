"""The generate job on a real Ray cluster, against a server that can be made faulty."""

import collections
import gzip
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from eagle3_ray import generate
from eagle3_ray.config import load
from eagle3_ray.rendering import Renderer
from eagle3_ray.runs import FingerprintMismatch
from tests.jobs import (
    REPOSITORY,
    Jobs,
    assert_sound,
    assert_times_add_up,
    fake_server,
    row_requests,
    rows,
    sequence_of,
    settings,
    wait_for_requests,
    write_prompts,
)
from tests.tiny_target import END_THINK


def test_every_prompt_ends_as_a_sequence_or_as_a_rejected_row(cluster: Jobs, target: Path, tmp_path: Path) -> None:
    write_prompts(tmp_path / "in" / "good.jsonl", 90)
    bad = [
        "this is not JSON",
        json.dumps({"messages": []}),
        json.dumps({"messages": [{"role": "king", "content": "hi"}]}),
        json.dumps({"input_ids": [5, 400]}),
        json.dumps({"input_ids": [7] * 500}),
        json.dumps({"id": "fine", "input_ids": [7, 8, 9]}),
    ]
    (tmp_path / "in" / "mixed.jsonl").write_text("\n".join(bad))
    run = tmp_path / "run"
    with fake_server(target) as server:
        result = cluster.run(*settings(run, target, tmp_path / "in", server.url))
    assert result.code == 0, result.stderr
    summary = result.summary
    assert_times_add_up(summary)
    counts = [summary[key] for key in ("stage", "expected", "rows", "rejected", "failed", "run_dir")]
    assert counts == ["generate", 96, 91, 5, 0, str(run)]
    assert json.loads((run / "summaries" / "generate.json").read_text()) == summary
    assert_sound(run)
    stored = rows(run, "sequences")
    assert summary["output_tokens"] == sum(len(row["output_ids"]) for row in stored)
    for row in stored:
        ids = np.array([len(row["prompt_ids"]), *row["prompt_ids"], *row["output_ids"]], dtype="<i4")
        assert row["token_sha"] == hashlib.sha256(ids.tobytes()).hexdigest()
        assert len(row["output_logprobs"]) == len(row["output_ids"])
    reasons = {row["line"]: row["reason"] for row in rows(run, "rejected")}
    assert sorted(reasons) == [1, 2, 3, 4, 5]
    for line, words in {1: "not JSON", 2: "empty", 3: "king", 4: "400", 5: "500 tokens"}.items():
        assert words in reasons[line]
    manifest = json.loads((run / "manifest.json").read_text())
    for file in (run / "generate" / "rows" / "sequences").glob("*.parquet"):
        stored_fingerprint = json.loads(pq.read_schema(file).metadata[b"eagle3_ray.fingerprint"])
        assert stored_fingerprint == manifest["generate"]["fingerprint"]


def test_a_second_run_is_a_no_op_and_a_larger_limit_extends_it(cluster: Jobs, target: Path, tmp_path: Path) -> None:
    prompts, run = write_prompts(tmp_path / "p.jsonl", 120), tmp_path / "run"
    with fake_server(target) as server:
        words = settings(run, target, prompts, server.url)
        first = cluster.run(*words, "prompts.limit=50")
        before = {row["sequence_id"] for row in rows(run, "sequences")}
        sent = len(server.requests())
        again = cluster.run(*words, "prompts.limit=50")
        assert (first.code, again.code) == (0, 0), first.stderr + again.stderr
        assert again.summary == first.summary
        assert len(server.requests()) == sent
        assert cluster.run(*words, "prompts.limit=80", "--dry-run").code == 0  # plans more, and finishes nothing
        more = cluster.run(*words, "prompts.limit=80")
        asked = collections.Counter(sequence_of(request) for request in row_requests(server))
    assert (more.code, more.summary["rows"]) == (0, 80)
    after = {row["sequence_id"] for row in rows(run, "sequences")}
    assert before < after
    assert set(asked.values()) == {1}
    assert_sound(run)


def test_prompts_that_come_while_a_job_runs_are_the_next_jobs(cluster: Jobs, target: Path, tmp_path: Path) -> None:
    prompts, run = write_prompts(tmp_path / "p.jsonl", 40), tmp_path / "run"
    later = write_prompts(tmp_path / "later.jsonl", 10, start=40).read_text()
    with fake_server(target, base_latency_s=0.5, max_running=8) as server:
        words = settings(run, target, prompts, server.url)
        job = cluster.start(*words)
        wait_for_requests(server, 5, job)
        with prompts.open("a") as file:
            file.write(later)
        _, stderr = job.communicate(timeout=120)
        assert job.returncode == 0, stderr
        again = cluster.run(*words)
    assert again.code == 0, again.stderr
    stored = rows(run, "sequences") + rows(run, "rejected")
    assert sorted(row["prompt_id"] for row in stored) == sorted(f"p{i}" for i in range(50))


def test_data_of_other_settings_is_refused_until_it_is_set_aside(cluster: Jobs, target: Path, tmp_path: Path) -> None:
    prompts, run = write_prompts(tmp_path / "p.jsonl", 20), tmp_path / "run"
    with fake_server(target) as server:
        words = settings(run, target, prompts, server.url)
        assert cluster.run(*words).code == 0
        with pytest.raises(FingerprintMismatch, match=r"generate\.top_p was 1\.0 and is now 0\.5"):
            generate.run(load("smollm2-cpu", [*words, "generate.top_p=0.5"]))
        write_prompts(prompts, 25)
        with fake_server(target, model_seed=5) as other:
            stranger = cluster.run(*settings(run, target, prompts, other.url))
        assert stranger.code == 2
        assert "serves another model than the one that began" in stranger.stderr
        doctor = [sys.executable, "jobs/doctor.py", str(run)]
        environment = cluster.environment()
        report = subprocess.run(doctor, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=True)
        assert "generate: not complete, 20 sequences + 0 rejected of 25 rows" in report.stdout
        assert "<|im_end|>" in report.stdout
        subprocess.run([*doctor, "--quarantine", "generate"], cwd=REPOSITORY, env=environment, check=True)
        assert cluster.run(*words, "generate.top_p=0.5").summary["expected"] == 25
    [aside] = (run / "quarantine").iterdir()
    assert sum(pq.read_metadata(file).num_rows for file in aside.glob("generate/rows/sequences/*.parquet")) == 20
    assert prompts.exists()


RECOVERABLE = (
    "reset",
    "reset_midway",
    "http_500",
    "http_503",
    "http_429",
    "partial_json",
    "not_json",
    "abort",
    "abort_503",
)
WRONG = ("wrong_count", "wrong_prompt_tokens", "drop_token", "drop_eos", "invent_eos", "extra_bos", "swapped_answer")
ODD = ("id_out_of_range", "negative_id", "unknown_finish", "null_output", "empty_output")
REST = ("other_weight_version", "logprob_mismatch", "nan_logprob", "speculative", "alter_text_only")


def test_a_faulty_server_never_gets_a_wrong_row_stored(cluster: Jobs, target: Path, tmp_path: Path) -> None:
    """Of the faults, only those are left out that no single answer shows (see tests/unit/test_fleet.py)."""
    prompts, run = write_prompts(tmp_path / "p.jsonl", 400), tmp_path / "run"
    faults = dict.fromkeys((*RECOVERABLE, *WRONG, *ODD, *REST), 0.012)
    with fake_server(target, faults=faults, fault_seed=3) as server:
        words = [*settings(run, target, prompts, server.url), "generate.attempts=12"]
        result = cluster.run(*words)
        met = {request["outcome"] for request in row_requests(server) if request["outcome"].startswith("fault:")}
    assert result.code == 0, result.stderr
    assert result.summary["rows"] + result.summary["rejected"] == 400
    assert result.summary["rows"] >= 395  # the stand-in gives an empty answer now and then
    assert len(met) >= 20
    assert_sound(run)
    assert sum(sum(causes.values()) for causes in result.summary["retries"].values()) > 50


def test_rows_that_fail_are_left_for_the_next_run(cluster: Jobs, target: Path, tmp_path: Path) -> None:
    prompts, run = write_prompts(tmp_path / "p.jsonl", 100), tmp_path / "run"
    with fake_server(target, faults={"wrong_count": 0.5}) as server:
        words = [*settings(run, target, prompts, server.url), "generate.attempts=1"]
        first = cluster.run(*words)
        assert first.code == 1
        assert first.summary["rows"] + first.summary["failed"] == 100
        assert first.summary["failed"] > 20
        assert "completion_tokens" in first.summary["last_failure"]
        server.set(faults={})
        second = cluster.run(*words)
    assert (second.code, second.summary["rows"], second.summary["failed"]) == (0, 100, 0)
    assert_sound(run)


def test_each_turn_of_a_conversation_is_a_row_with_the_prompt_that_the_server_saw(
    cluster: Jobs, target: Path, tmp_path: Path
) -> None:
    conversations = [[f"Add {i} and 3.", f"And add {i} to that.", "Say it again."] for i in range(12)]
    lines = [
        json.dumps({"id": f"c{i}", "messages": [{"role": "user", "content": text} for text in texts]})
        for i, texts in enumerate(conversations)
    ]
    lines.append(
        json.dumps(
            {"id": "long", "messages": [{"role": "user", "content": text} for text in ("Hi.", "x" * 3000, "Bye.")]}
        )
    )
    prompts, run = tmp_path / "talk.jsonl", tmp_path / "run"
    prompts.write_text("\n".join(lines))
    with fake_server(target) as server, fake_server(target) as other:
        result = cluster.run(*settings(run, target, prompts, server.url, other.url))
    assert (result.code, result.summary["rows"], result.summary["rejected"]) == (0, 37, 2), result.stderr
    assert_sound(run)
    renderer = Renderer(target)
    stored = {(row["prompt_id"], row["turn"]): row for row in rows(run, "sequences")}
    for i, texts in enumerate(conversations):
        messages = []
        for turn, text in enumerate(texts):
            messages.append({"role": "user", "content": text})
            row = stored[f"c{i}", turn]
            ids = renderer._tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            assert row["prompt_ids"] == ids
            spoken = renderer._tokenizer.decode(row["output_ids"], skip_special_tokens=True)
            messages.append({"role": "assistant", "content": spoken})
    asked = [{stored[f"c{i}", turn]["endpoint"] for turn in range(3)} for i in range(12)]
    assert set().union(*asked) == {server.url, other.url}
    assert all(len(urls) == 1 for urls in asked)  # where the beginning is in the cache already
    reasons = {row["turn"]: row["reason"] for row in rows(run, "rejected")}
    assert "tokens, where the servers take" in reasons[1]
    assert reasons[2].startswith("an earlier turn was rejected")


def test_samples_of_a_prompt_are_rows_of_their_own(cluster: Jobs, target: Path, tmp_path: Path) -> None:
    prompts, run = write_prompts(tmp_path / "p.jsonl", 10), tmp_path / "run"
    with fake_server(target) as server:
        words = settings(run, target, prompts, server.url)
        result = cluster.run(*words, "generate.samples_per_prompt=3", "generate.temperature=1")
    assert (result.code, result.summary["rows"]) == (0, 30)
    stored = rows(run, "sequences")
    assert {(row["prompt_id"], row["sample_index"]) for row in stored} == {
        (f"p{i}", k) for i in range(10) for k in range(3)
    }
    assert len({row["sequence_id"] for row in stored}) == 30


def test_a_partition_without_its_answer_boundary_stops_the_job_early(
    cluster: Jobs, target: Path, tmp_path: Path
) -> None:
    prompts, run = write_prompts(tmp_path / "think.jsonl", 3000), tmp_path / "run"
    with fake_server(target, base_latency_s=0.05, max_running=64) as server:
        words = [f"audit.boundary_ids=[{END_THINK}]", "audit.evidence_rows=100"]
        result = cluster.run(*settings(run, target, prompts, server.url), *words)
        sent = len(row_requests(server))
    assert result.code == 1
    assert f"holds a boundary token [{END_THINK}]" in result.summary["stopped_by"]
    assert "think" in result.summary["stopped_by"]
    assert sent < 1500
    assert not (run / "generate" / "_SUCCESS").exists()


def test_an_unfit_server_stops_the_job_before_the_first_row(cluster: Jobs, target: Path, tmp_path: Path) -> None:
    """One that filters a special token; tests/unit/test_probe.py has every way to be unfit."""
    prompts, run = write_prompts(tmp_path / "p.jsonl", 5), tmp_path / "run"
    with fake_server(target, faults={"strip_token": 1.0}, strip_ids=[END_THINK], faults_hit_probe=True) as server:
        result = cluster.run(*settings(run, target, prompts, server.url))
        assert row_requests(server) == []
        assert server.running
    assert result.code == 2, result.stderr
    assert "Unfit" in result.stderr
    assert f"token {END_THINK} was forced" in result.stderr
    assert "Traceback" not in result.stderr


def test_servers_of_different_models_are_not_used_together(cluster: Jobs, target: Path, tmp_path: Path) -> None:
    prompts, run = write_prompts(tmp_path / "p.jsonl", 5), tmp_path / "run"
    with fake_server(target) as one, fake_server(target, model_seed=9) as other:
        result = cluster.run(*settings(run, target, prompts, one.url, other.url))
        assert row_requests(one, other) == []
    assert result.code == 2
    assert "do not serve the same model" in result.stderr


def test_a_job_whose_servers_all_vanish_stops_and_goes_on_later(cluster: Jobs, target: Path, tmp_path: Path) -> None:
    prompts, run = write_prompts(tmp_path / "p.jsonl", 400), tmp_path / "run"
    with fake_server(target, base_latency_s=0.3, max_running=16) as server:
        words = [*settings(run, target, prompts, server.url), "generate.outage_limit_s=3", "generate.max_in_flight=16"]
        process = cluster.start(*words)
        wait_for_requests(server, 60, process)
        server.kill()
        stdout, stderr = process.communicate(timeout=120)
        assert process.returncode == 1
        assert "No server has answered" in json.loads(stdout.splitlines()[-1])["stopped_by"], stderr
        server.start()
        result = cluster.run(*words)
        asked = collections.Counter(sequence_of(r) for r in row_requests(server) if r["outcome"] == "answered")
    assert (result.code, result.summary["rows"] + result.summary["rejected"]) == (0, 400)
    assert max(asked.values()) == 1
    assert_sound(run)


def test_a_dry_run_prints_the_plan_and_generates_nothing(cluster: Jobs, target: Path, tmp_path: Path) -> None:
    prompts, run = write_prompts(tmp_path / "p.jsonl", 30), tmp_path / "run"
    with fake_server(target) as server:
        result = cluster.run(*settings(run, target, prompts, server.url), "--dry-run")
        assert row_requests(server) == []
    assert result.code == 0, result.stderr
    assert "30 rows" in result.stdout
    assert f"at most {30 * 40:,} answer" in result.stdout
    assert "1 fit" in result.stdout
    assert rows(run, "sequences") == []
    words = [word for word in settings(run, target, prompts) if "endpoints" not in word]
    own = cluster.run(*words, "generate.servers=1", "--dry-run")
    assert own.code == 0, own.stderr
    assert "30 rows" in own.stdout
    assert "servers: the job starts them" in own.stdout


def test_a_job_is_submitted_and_stopped_with_ray_job(cluster: Jobs, target: Path, tmp_path: Path) -> None:
    prompts, run = write_prompts(tmp_path / "p.jsonl", 600), tmp_path / "run"
    ray_job = [str(Path(sys.executable).parent / "ray"), "job"]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    with fake_server(target, base_latency_s=0.3, max_running=16) as server:
        words = [*settings(run, target, prompts, server.url), "generate.max_in_flight=16"]
        entry = ["env", f"PYTHONPATH={REPOSITORY}", sys.executable, str(REPOSITORY / "jobs/generate.py"), "smollm2-cpu"]
        submit = [*ray_job, "submit", "--address", cluster.dashboard, "--submission-id", "stopped", "--no-wait", "--"]
        subprocess.run([*submit, *entry, *words], env=environment, check=True, capture_output=True)
        wait_for_requests(server, 60)
        stop = [*ray_job, "stop", "--address", cluster.dashboard, "stopped"]
        assert "was stopped" in subprocess.run(stop, env=environment, capture_output=True, text=True, check=True).stdout
        sent = len(row_requests(server))
        server.set(base_latency_s=0.0)
        result = cluster.run(*words)
        total = len(row_requests(server))
    assert (result.code, result.summary["rows"] + result.summary["rejected"]) == (0, 600)
    assert_sound(run)
    assert sent < 600
    assert total <= 600 + 16


def test_a_prompt_file_that_breaks_off_stops_the_job_with_its_name(cluster: Jobs, target: Path, tmp_path: Path) -> None:
    whole = gzip.compress(write_prompts(tmp_path / "p.jsonl", 500).read_bytes())
    torn = tmp_path / "torn.jsonl.gz"
    torn.write_bytes(whole[: len(whole) // 2])
    with fake_server(target) as server:
        result = cluster.run(*settings(tmp_path / "run", target, torn, server.url))
        assert server.requests() == []
    assert result.code == 2, result.stderr
    assert result.stderr.splitlines()[-1].startswith(f"PromptSourceError: {torn} cannot be read to its end")
    assert "Traceback" not in result.stderr
