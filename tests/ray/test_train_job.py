"""The train job on a cluster, with a real model in miniature: what it leaves, and that no interruption changes it."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from eagle3_ray import checkpoints, corpus, train
from eagle3_ray.batches import steps
from eagle3_ray.config import ConfigError, load
from eagle3_ray.drafter.export import validate
from eagle3_ray.runs import FingerprintMismatch, RunDir, RunError
from eagle3_ray.target.files import resolve
from eagle3_ray.train_log import read_log
from tests.forks import Job
from tests.jobs import Jobs, Result, assert_times_add_up, left_by_killed_writers, processes_of, wait_until
from tests.runs import sequence
from tests.writing_model import make_tiny_run


def words(run: Path, model: Path) -> list[str]:
    return [
        f"run.dir={run}",
        f"target.model={model}",
        "generate.temperature=0",
        "capture.cpus_per_target=0.5",
        "train.feed=stream",
        "train.cpus_per_worker=1",
        "train.batch_tokens=128",
        "train.step_tokens=256",
        "train.epochs=6",
        "train.ttt_steps=3",
        "train.learning_rate=2e-3",
        "train.heldout=0.15",
        "train.validate_every=10",
        "train.checkpoint_every=3",
    ]


def curve(run: Path) -> list[tuple[int, float, list[float]]]:
    """Step, loss and losses by TTT step, of every step."""
    lines = [line for line in read_log(run / "train" / "steps.jsonl") if "loss" in line]
    return [(line["step"], line["loss"], line["step_losses"]) for line in lines]


@pytest.fixture(scope="module")
def whole(
    cluster: Jobs, model: Path, sequences: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Result]:
    """A training that nothing interrupts."""
    run = make_tiny_run(tmp_path_factory.mktemp("whole") / "run", model, sequences)
    result = cluster.run(*words(run, model), job="train")
    assert result.code == 0, result.stderr
    return run, result


def test_training_lowers_the_loss_and_leaves_a_drafter_that_engines_load(
    whole: tuple[Path, Result], model: Path
) -> None:
    run, result = whole
    losses = [first for _, _, (first, *_) in curve(run)]  # of the TTT step that is there from the beginning
    assert [step for step, _, _ in curve(run)] == list(range(1, result.summary["expected"] + 1))
    assert sum(losses[-3:]) < 0.985 * sum(losses[:3])  # a model of random weights teaches little
    assert result.summary["steps"] == result.summary["expected"]
    assert_times_add_up(result.summary)
    target_config = json.loads((model / "config.json").read_text())
    assert validate(run / "train" / "drafter", target_config).aux_layers == (2, 4, 5)
    drafter, initial = (load_file(run / "train" / name / "model.safetensors") for name in ("drafter", "initial"))
    assert set(drafter) == set(initial)
    assert not drafter["fc.weight"].equal(initial["fc.weight"])
    assert "--speculative-algorithm EAGLE3" in result.summary["launch"]
    log = [json.loads(line) for line in (run / "logs" / "train.jsonl").read_text().splitlines()]
    events = [(line["event"], line.get("step")) for line in log]
    total = result.summary["expected"]
    due = sorted({*range(3, total, 3), *range(10, total, 10), total})  # checkpoint_every, validate_every, the end
    written = [("checkpoint written", step) for step in due]
    assert events == [("job started", None), ("training started", 0), *written, ("job complete", None)]


def test_every_supervised_token_of_an_epoch_is_trained_on_once(
    whole: tuple[Path, Result], sequences: list[dict[str, Any]]
) -> None:
    run, result = whole
    log = [line for line in read_log(run / "train" / "steps.jsonl") if "loss" in line]
    epochs = [sum(line["tokens"] for line in log if line["epoch"] == epoch) for epoch in range(6)]
    assert len(set(epochs)) == 1
    everything = sum(len(row["prompt_ids"]) + len(row["output_ids"]) for row in sequences)
    assert 0.7 * everything < epochs[0] < everything  # the rest is held out
    assert result.summary["tokens"] == 6 * epochs[0]


def test_a_finished_training_has_nothing_to_do(whole: tuple[Path, Result], model: Path) -> None:
    run, result = whole
    assert train.run(load("smollm2-cpu", words(run, model))) == result.summary


def test_three_kills_leave_a_loss_curve_that_is_equal_to_the_last_bit(
    cluster: Jobs, whole: tuple[Path, Result], model: Path, sequences: list[dict[str, Any]], tmp_path: Path
) -> None:
    run = make_tiny_run(tmp_path / "run", model, sequences)
    for after in (4, 10, 17):
        job = cluster.start(*words(run, model), job="train")
        _wait_for_step(run, after, job)
        job.send_signal(signal.SIGKILL)
        job.communicate()
    result = cluster.run(*words(run, model), job="train")
    assert result.code == 0, result.stderr
    assert curve(run) == curve(whole[0])
    assert left_by_killed_writers(run) == []


def test_sigterm_saves_the_step_in_hand_and_the_next_job_goes_on_from_it(
    cluster: Jobs, whole: tuple[Path, Result], model: Path, sequences: list[dict[str, Any]], tmp_path: Path
) -> None:
    run = make_tiny_run(tmp_path / "run", model, sequences)
    job = cluster.start(*words(run, model), "train.checkpoint_every=1000", job="train")
    _wait_for_step(run, 5, job)
    job.send_signal(signal.SIGTERM)
    stdout, stderr = job.communicate(timeout=60)
    summary = json.loads(stdout.splitlines()[-1])
    assert (job.returncode, summary["status"], summary["stopped_by"]) == (1, "stopped", "SIGTERM"), stderr
    assert summary["steps"] >= 5
    result = cluster.run(*words(run, model), "train.checkpoint_every=1000", job="train")
    assert result.code == 0, result.stderr
    assert curve(run) == curve(whole[0])


def test_a_killed_worker_is_replaced_within_the_job(
    cluster: Jobs, whole: tuple[Path, Result], model: Path, sequences: list[dict[str, Any]], tmp_path: Path
) -> None:
    run = make_tiny_run(tmp_path / "run", model, sequences)
    job = cluster.start(*words(run, model), job="train")
    _wait_for_step(run, 8, job)
    [worker] = processes_of("TrainWorker")
    os.kill(worker, signal.SIGKILL)
    _, stderr = job.communicate(timeout=200)
    assert job.returncode == 0, stderr
    assert curve(run) == curve(whole[0])
    assert left_by_killed_writers(run) == []


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_workers_learn_what_one_does(
    cluster: Jobs,
    whole: tuple[Path, Result],
    model: Path,
    sequences: list[dict[str, Any]],
    tmp_path: Path,
    strategy: str,
) -> None:
    run = make_tiny_run(tmp_path / "run", model, sequences)
    result = cluster.run(*words(run, model), "train.workers=2", f"train.strategy={strategy}", job="train")
    assert result.code == 0, result.stderr
    for (step, loss, losses), (same, expected, each) in zip(curve(run), curve(whole[0]), strict=True):
        assert step == same
        assert loss == pytest.approx(expected, rel=1e-3)
        assert losses == pytest.approx(each, rel=1e-3)


def test_a_training_from_the_cache_learns_what_one_from_the_stream_does(
    cluster: Jobs, whole: tuple[Path, Result], model: Path, sequences: list[dict[str, Any]], tmp_path: Path
) -> None:
    run = make_tiny_run(tmp_path / "run", model, sequences)
    with pytest.raises(RunError, match=r"Run jobs/capture\.py with this run\.dir first"):
        train.run(load("smollm2-cpu", [*words(run, model), "train.feed=cache"]))
    assert cluster.run(*words(run, model), job="capture").code == 0
    result = cluster.run(*words(run, model), "train.feed=cache", job="train")
    assert result.code == 0, result.stderr
    for (_, loss, _), (_, expected, _) in zip(curve(run), curve(whole[0]), strict=True):
        assert loss == pytest.approx(expected, rel=0.01)  # both in bf16, captured beside other sequences


def test_a_torn_checkpoint_is_passed_over_for_the_one_before(
    cluster: Jobs, whole: tuple[Path, Result], model: Path, sequences: list[dict[str, Any]], tmp_path: Path
) -> None:
    run = make_tiny_run(tmp_path / "run", model, sequences)
    job = cluster.start(*words(run, model), job="train")
    _wait_for_step(run, 11, job)
    job.send_signal(signal.SIGKILL)
    job.communicate()
    newest = sorted((run / "train" / "checkpoints").glob("[0-9]*"))[-1] / "state.pt"
    newest.write_bytes(newest.read_bytes()[:-1000])
    result = cluster.run(*words(run, model), job="train")
    assert result.code == 0, result.stderr
    assert curve(run) == curve(whole[0])


def test_a_training_that_was_killed_behind_its_last_checkpoint_is_finished(
    cluster: Jobs, whole: tuple[Path, Result], model: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(whole[0], tmp_path / "run", symlinks=True))
    for name in ("train/finished.json", "train/_SUCCESS", "summaries/train.json"):
        (run / name).unlink()
    shutil.rmtree(run / "train" / "drafter")
    result = cluster.run(*words(run, model), job="train")
    assert (result.code, result.summary["status"]) == (0, "complete"), result.stderr
    assert curve(run) == curve(whole[0])
    ours, theirs = (load_file(folder / "train" / "drafter" / "model.safetensors") for folder in (run, whole[0]))
    assert all(ours[name].equal(theirs[name]) for name in theirs)


def test_a_batch_of_which_all_was_set_aside_may_come_first(
    cluster: Jobs, model: Path, sequences: list[dict[str, Any]], tmp_path: Path
) -> None:
    settings = [*words(tmp_path / "run", model), "train.feed=cache", "train.batch_tokens=24", "train.epochs=1"]
    config = load("smollm2-cpu", settings)
    made = corpus.make(RunDir(make_tiny_run(tmp_path / "honest", model, sequences)))
    rows = np.flatnonzero(~made.heldout(config.train.heldout)).tolist()
    order = steps(made.tokens, rows, batch_tokens=24, step_tokens=config.train.step_tokens, epochs=1, seed=0)
    first = [made.sequence_id(row) for row in next(iter(order)).batches[0].rows]
    run = make_tiny_run(tmp_path / "run", model, with_wrong_answers(sequences, first))
    captured = cluster.run(*settings, job="capture")
    assert (captured.code, captured.summary["quarantined"]) == (0, len(first)), captured.stderr
    result = cluster.run(*settings, job="train")
    assert result.code == 0, result.stderr
    assert read_log(run / "train" / "steps.jsonl")[1]["set_aside"] == len(first)


def test_without_a_held_out_sequence_that_measures_the_last_step_is_the_best(
    cluster: Jobs, model: Path, sequences: list[dict[str, Any]], tmp_path: Path
) -> None:
    settings = [*words(tmp_path / "run", model), "train.feed=cache", "train.epochs=2"]
    settings += ["train.validate_every=2", "train.patience=1"]
    made = corpus.make(RunDir(make_tiny_run(tmp_path / "honest", model, sequences)))
    kept = made.heldout(load("smollm2-cpu", settings).train.heldout)
    wrong = [made.sequence_id(row) for row in np.flatnonzero(kept).tolist()]
    run = make_tiny_run(tmp_path / "run", model, with_wrong_answers(sequences, wrong))
    assert cluster.run(*settings, job="capture").summary["quarantined"] == len(wrong)
    result = cluster.run(*settings, job="train")
    assert result.code == 0, result.stderr
    assert (result.summary["steps"], result.summary["chain_acceptance_length"]) == (result.summary["expected"], None)
    plan = json.loads((run / "train" / "finished.json").read_text())["plan"]
    best = checkpoints.best(run / "train" / "checkpoints", plan)
    assert best is not None
    assert best.next_step == result.summary["expected"]


def test_a_setting_that_is_refused_can_be_corrected(
    cluster: Jobs, model: Path, sequences: list[dict[str, Any]], tmp_path: Path
) -> None:
    """Nothing was trained, so the run takes another value."""
    run = make_tiny_run(tmp_path / "run", model, sequences)
    result = cluster.run(*words(run, model), "train.draft_vocab_size=1", job="train")
    assert result.code == 2
    assert "do not fit draft_vocab_size 1: raise it" in result.stderr
    assert "train" not in RunDir(run).manifest()


def with_wrong_answers(sequences: list[dict[str, Any]], wrong: list[str]) -> list[dict[str, Any]]:
    """The rows, those answers turned around that are named: the target never said them."""
    return [
        sequence(row["prompt_id"], row["prompt_ids"], row["output_ids"][::-1], row["output_logprobs"], row["partition"])
        if row["sequence_id"] in wrong
        else row
        for row in sequences
    ]


def test_a_warm_start_that_reads_other_layers_is_refused(whole: tuple[Path, Result], model: Path) -> None:
    other = [*words(whole[0].with_name("other"), model), f"train.drafter={whole[0] / 'train' / 'drafter'}"]
    config = load("smollm2-cpu", [*other, "capture.layers=[1,3,5]"])
    with pytest.raises(ConfigError, match=r"reads the layers \[2, 4, 5\].*Set capture\.layers=\[2, 4, 5\]"):
        train._check_layers(Path(str(config.train.drafter)), config.capture, resolve(str(model), weights=True))


def test_other_settings_are_refused_with_their_name(whole: tuple[Path, Result], model: Path) -> None:
    with pytest.raises(FingerprintMismatch, match=r"train\.learning_rate was 0\.002 and is now 0\.0001"):
        train.run(load("smollm2-cpu", [*words(whole[0], model), "train.learning_rate=1e-4"]))


def _wait_for_step(run: Path, step: int, job: Job) -> None:
    def there() -> bool:
        return any(line["step"] >= step for line in read_log(run / "train" / "steps.jsonl"))

    wait_until(there, job, within_s=150)
