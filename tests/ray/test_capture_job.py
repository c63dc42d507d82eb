"""The capture job on a cluster, with a real model in miniature: what it stores, what it refuses, what a kill costs."""

import json
import os
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import LlamaForCausalLM

from eagle3_ray import capture, corpus
from eagle3_ray.capturer import Capturer
from eagle3_ray.config import load
from eagle3_ray.runs import FingerprintMismatch, RunDir, RunError
from eagle3_ray.states_cache import StatesCache
from eagle3_ray.target.files import resolve
from tests.forks import Job
from tests.jobs import Jobs, Result, assert_times_add_up, left_by_killed_writers, processes_of, wait_until
from tests.writing_model import HIDDEN, make_tiny_model, make_tiny_run

LAYERS = (2, 4, 5)  # of 8: 2, N//2, N-3


def words(run: Path, model: Path) -> list[str]:
    return [
        f"run.dir={run}",
        f"target.model={model}",
        "generate.temperature=0",
        "capture.storage=fp32",
        "capture.shard_tokens=200",
        "capture.batch_tokens=128",
        "capture.cpus_per_target=0.5",
    ]


def shard_files(run: Path) -> list[Path]:
    return sorted((run / "capture" / "shards").glob("*.parquet"))


@torch.inference_mode()
def assert_states_are_the_models(run: Path, folder: Path, rows: int) -> None:
    """Every sequence is in the cache once, and its states are those of transformers' own list of hidden states."""
    sequences = corpus.make(RunDir(run))
    cache = StatesCache(run / "capture" / "shards", HIDDEN, "fp32")
    assert cache.rows == list(range(rows))
    stored = [row for file in shard_files(run) for row in _rows_of(file)]
    assert sorted(stored) == list(range(rows))
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for row in range(0, rows, 7):
        ids = torch.from_numpy(sequences.ids(row).astype("int64"))
        hidden = model.model(ids[None], output_hidden_states=True).hidden_states
        expected = torch.cat([*(hidden[layer][0] for layer in LAYERS), hidden[-1][0]], dim=1)
        states, likeliest = cache.read(row, sequences.token_sha(row))
        torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)
        prompt = int(sequences.prompt_tokens[row])
        chosen = model.lm_head(hidden[-1][0]).argmax(-1)
        assert likeliest[prompt - 1 : -1].equal(chosen[prompt - 1 : -1])


def _rows_of(file: Path) -> list[int]:
    return list(json.loads(pq.read_metadata(file).metadata[b"eagle3_ray.shard"])["rows"])


@pytest.fixture(scope="module")
def whole(
    cluster: Jobs, model: Path, sequences: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Result]:
    """A capture that nothing interrupts."""
    run = make_tiny_run(tmp_path_factory.mktemp("whole") / "run", model, sequences)
    result = cluster.run(*words(run, model), job="capture")
    assert result.code == 0, result.stderr
    return run, result


def test_states_of_every_sequence_are_stored_and_a_second_run_does_nothing(
    cluster: Jobs, whole: tuple[Path, Result], model: Path, sequences: list[dict[str, Any]]
) -> None:
    run, result = whole
    summary = result.summary
    assert_times_add_up(summary)
    assert (summary["expected"], summary["rows"], summary["quarantined"], summary["missing"]) == (60, 60, 0, 0)
    assert summary["tokens"] == sum(len(row["prompt_ids"]) + len(row["output_ids"]) for row in sequences)
    assert summary["bytes_per_token"] == 16 * HIDDEN + 4
    assert summary["on_policy_difference"]["max"] < 1e-3
    assert summary["prefill_share"] > 0
    assert "of bare prefill)" in result.stderr
    assert_states_are_the_models(run, model, 60)
    written = [file.stat().st_mtime_ns for file in shard_files(run)]
    again = cluster.run(*words(run, model), job="capture")
    assert again.summary == summary
    assert [file.stat().st_mtime_ns for file in shard_files(run)] == written


def test_a_sequence_that_the_target_did_not_say_is_set_aside_with_its_reason(
    cluster: Jobs, model: Path, sequences: list[dict[str, Any]], tmp_path: Path
) -> None:
    changed = [dict(row) for row in sequences[:20]]
    changed[4] = _with_answer_of(changed[4], changed[5])
    run = make_tiny_run(tmp_path / "run", model, changed)
    other = "generate.temperature=0.9"  # what counts is the temperature that the answers were drawn with
    result = cluster.run(*words(run, model), other, job="capture")
    assert (result.code, result.summary["rows"], result.summary["quarantined"]) == (0, 19, 1), result.stderr
    scores = [row for file in (run / "capture" / "scores").glob("*.parquet") for row in pq.read_table(file).to_pylist()]
    assert len(scores) == 20
    [(named, reason)] = [(row["sequence_id"], row["reason"]) for row in scores if row["reason"]]
    assert named == changed[4]["sequence_id"]
    assert reason.endswith(f"limit {result.summary['limit']['mean_difference']:g}")
    assert result.summary["quarantined_by_reason"] == {re.sub(r"[0-9]+(\.[0-9]+)?", "N", reason): 1}
    log = [json.loads(line) for line in (run / "logs" / "capture.jsonl").read_text().splitlines()]
    assert [line["event"] for line in log] == ["job started", "sequence set aside", "job complete"]
    assert (log[1]["sequence_id"], log[1]["reason"], log[1]["level"]) == (named, reason, "WARNING")


def _with_answer_of(row: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The same prompt with another prompt's answer and its log-probabilities: sound in itself, and not on policy."""
    from tests.runs import sequence

    made = sequence(
        row["prompt_id"], row["prompt_ids"], other["output_ids"], other["output_logprobs"], row["partition"]
    )
    assert made["sequence_id"] == row["sequence_id"]
    return made


def test_a_sequence_that_the_target_cannot_read_is_set_aside_with_its_length(
    model: Path, sequences: list[dict[str, Any]], tmp_path: Path
) -> None:
    run_dir = RunDir(make_tiny_run(tmp_path / "run", model, sequences[:20]))
    made = corpus.make(run_dir)
    config = load("smollm2-cpu", words(run_dir.path, model))
    capturer = Capturer(capture.settings_of(run_dir, config, made, resolve(str(model), weights=True)))
    capturer._target.longest = limit = int(np.median(made.tokens))  # as an engine with a short context has one
    for captured in capturer.capture(range(len(made))):
        tokens = int(made.tokens[captured.row])
        said = f"{tokens} tokens, and the capturing server reads {limit}" if tokens > limit else None
        assert (captured.reason, captured.score is None) == (said, tokens > limit)
        assert captured.states.shape == (tokens, 4 * HIDDEN)
        assert bool(captured.states.any()) == (tokens <= limit)
    assert capturer.prefill_speed(range(len(made))) > 0  # of those that it reads
    capturer._target.longest = 1
    assert capturer.prefill_speed(range(len(made))) == float("inf")


def test_other_settings_than_those_of_the_cache_are_refused(whole: tuple[Path, Result], model: Path) -> None:
    with pytest.raises(FingerprintMismatch, match=r"capture\.layers was '\[2, 4, 5\]' and is now '\[1, 3, 5\]'"):
        capture.run(load("smollm2-cpu", [*words(whole[0], model), "capture.layers=[1,3,5]"]))


def test_a_target_with_other_weights_is_refused_before_anything_is_captured(
    model: Path, sequences: list[dict[str, Any]], tmp_path: Path
) -> None:
    run = make_tiny_run(tmp_path / "run", model, sequences[:10])
    other = make_tiny_model(tmp_path / "other")
    weights = LlamaForCausalLM.from_pretrained(other)
    with torch.no_grad():
        weights.model.layers[3].mlp.down_proj.weight.mul_(1.5)
    weights.save_pretrained(other)
    with pytest.raises(RunError, match=r"target\.weights was"):
        capture.run(load("smollm2-cpu", words(run, other)))
    assert shard_files(run) == []


def test_a_damaged_shard_and_no_other_is_captured_again(
    cluster: Jobs, whole: tuple[Path, Result], model: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(whole[0], tmp_path / "run"))
    torn, *others = shard_files(run)
    torn.write_bytes(torn.read_bytes()[:-50])
    written = [file.stat().st_mtime_ns for file in others]
    result = cluster.run(*words(run, model), job="capture")
    assert result.code == 0, result.stderr
    assert f"{torn} is damaged" in result.stderr
    assert [file.stat().st_mtime_ns for file in others] == written
    assert_states_are_the_models(run, model, 60)


@pytest.mark.parametrize("victim", ["driver", "target"])
def test_a_kill_loses_and_repeats_nothing(
    cluster: Jobs, model: Path, sequences: list[dict[str, Any]], tmp_path: Path, victim: str
) -> None:
    run = make_tiny_run(tmp_path / "run", model, sequences)
    job = cluster.start(*words(run, model), "capture.shard_tokens=60", job="capture")
    _wait_for_shards(run, 3, job)
    if victim == "driver":
        job.send_signal(signal.SIGKILL)
        job.communicate()
        result = cluster.run(*words(run, model), "capture.shard_tokens=60", job="capture")
        assert result.code == 0, result.stderr
    else:
        os.kill(_capturing_actor(), signal.SIGKILL)
        stdout, stderr = job.communicate(timeout=200)
        assert job.returncode == 0, stderr
        assert json.loads(stdout.splitlines()[-1])["rows"] == 60
    assert_states_are_the_models(run, model, 60)
    assert list((run / "capture" / "shards").glob(".*")) == []
    assert left_by_killed_writers(run) == []


def _wait_for_shards(run: Path, count: int, job: Job) -> None:
    wait_until(lambda: len(shard_files(run)) >= count, job, within_s=120)


def _capturing_actor() -> int:
    [found] = processes_of("ShardCapturer")
    return found
