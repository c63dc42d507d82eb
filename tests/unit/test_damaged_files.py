"""Every kind of file that a run holds, damaged at random: what is read is what was written, or the damage is named.

A damaged file raises an error with its name before anything is trained or served with it, or what it holds is left out
and named, or what is read is what was written. EAGLE3_DAMAGES=1000 tries more of each kind.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from eagle3_ray import capture, capture_plan, checkpoints, corpus, drafting, plan, train
from eagle3_ray.capturer import Captured, Capturer
from eagle3_ray.commits import UnitsSource, committed_units, read_groups
from eagle3_ray.config import Capture, Config
from eagle3_ray.drafter.checkpoints import CheckpointError, load_drafter
from eagle3_ray.drafter.config import DrafterConfigError
from eagle3_ray.drafter.export import validate
from eagle3_ray.journal import Journal
from eagle3_ray.ledger import Ledger
from eagle3_ray.runs import RunDir, RunError, read_json, write_json
from eagle3_ray.states_cache import DamagedShard, StatesCache
from eagle3_ray.target.files import TargetError, resolve
from eagle3_ray.target.on_policy import OnPolicyLimits, on_policy
from eagle3_ray.target.parts import load_parts
from eagle3_ray.target.protocol import CaptureError, States, TargetParts, TokenSequence
from eagle3_ray.train_log import read_log
from tests.whole_run import TRAINING, WholeRun, make_whole_run
from tests.writing_model import HIDDEN, make_tiny_model, written_by

NAMED = (RunError, DamagedShard, CheckpointError, DrafterConfigError, TargetError)
ROUNDS = int(os.environ.get("EAGLE3_DAMAGES", "10"))


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeRun]:
    folder = tmp_path_factory.mktemp("clean")
    model = make_tiny_model(folder / "model")
    whole = make_whole_run(folder / "run", model, written_by(model, 16))
    held = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    yield whole
    assert [path for path, content in held.items() if path.read_bytes() != content] == [], "a test wrote into it"


@pytest.fixture(scope="module")
def as_written(clean: WholeRun, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """What is read of an undamaged run, by the kind of file."""

    @cache
    def as_written(kind: str) -> Any:
        pattern, read = STRICT[kind]
        return read(damaged(clean, tmp_path_factory.mktemp("whole"), pattern, _nothing, 0)[0])

    return as_written


@pytest.fixture(scope="module")
def states(clean: WholeRun) -> dict[str, Captured]:
    """What the target says of each sequence, by `sequence_id`."""
    sequences = corpus.make(clean.run)
    capturer = Capturer(clean.capture_settings(sequences))
    rows = range(len(sequences))
    return {sequences.sequence_id(row): one for row, one in zip(rows, capturer.capture(rows), strict=True)}


# ---- ways to damage a file


def flip_a_bit(content: bytearray, rng: random.Random) -> None:
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)


def cut(content: bytearray, rng: random.Random) -> None:
    del content[rng.randrange(len(content)) :]


def blank(content: bytearray, rng: random.Random) -> None:
    """A block that never reached the disk."""
    start = rng.randrange(len(content))
    content[start : start + 512] = bytes(len(content[start : start + 512]))


def put_rubbish(content: bytearray, rng: random.Random) -> None:
    content[:] = rng.randbytes(len(content))


def copy_a_block(content: bytearray, rng: random.Random) -> None:
    """A block stands where another one should."""
    size = min(64, len(content) // 3)
    source, place = rng.randrange(len(content) - size), rng.randrange(len(content) - size)
    content[place : place + size] = content[source : source + size]


DAMAGES = (flip_a_bit, cut, blank, put_rubbish, copy_a_block)


# ---- what is read of a run, as the stages read it


def rows_of(whole: WholeRun) -> dict[str, Any]:
    """The generated rows, as capture and training get them: by name, without those that are named as damaged."""
    shutil.rmtree(whole.run.stage("corpus"), ignore_errors=True)
    sequences = corpus.make(whole.run)
    for name in corpus.damaged(sequences):
        assert isinstance(name, str)
    return {sequences.sequence_id(row): _sequence(sequences, row) for row in range(len(sequences))}


def _sequence(sequences: corpus.Corpus, row: int) -> Any:
    logprobs = sequences.logprobs(row)
    prompt = int(sequences.prompt_tokens[row])
    return sequences.ids(row).tolist(), prompt, None if logprobs is None else logprobs.tolist()


def corpus_of(whole: WholeRun) -> Any:
    sequences = corpus.make(whole.run)
    counts = sequences.answer_counts(list(range(len(sequences))), 400).tolist()
    names = [sequences.sequence_id(row) for row in range(len(sequences))]
    columns = [sequences.column(name).tolist() for name in ("partition", "prompt_hash")]
    return names, [_sequence(sequences, row) for row in range(len(sequences))], counts, columns


def units_of(whole: WholeRun) -> Any:
    """The units, read as the read tasks that Ray runs read them."""
    folder = str(whole.run.stage("generate") / "plan" / "units")
    tasks = UnitsSource(folder, 1, None).get_read_tasks(1)
    [file] = map(str, Path(folder).iterdir())
    return [read_groups(file, [group]).to_pylist() for group in range(len(tasks))]


def journal_of(whole: WholeRun) -> Any:
    journal = Journal(whole.run.stage("generate") / "journal")
    return {row["sequence_id"]: journal.get(row["sequence_id"]) for row in whole.rows}


def shards_of(whole: WholeRun) -> Any:
    """All of the cache, once it counts as whole."""
    sequences = corpus.make(whole.run)
    settings = Capture(shard_tokens=200)
    lacking = capture_plan.Plan.make(whole.run, settings, sequences, resolve(str(whole.model), weights=True))
    if lacking.missing:
        raise RunError(f"{lacking.damaged[0]} is captured again")
    cache = StatesCache(whole.run.stage("capture") / "shards", HIDDEN, "bf16")
    read = [cache.read(row, sequences.token_sha(row)) for row in cache.rows]
    reasons = capture._scores(whole.run.stage("capture") / "scores", lacking.shards)
    return cache.rows, [(states.view(torch.int16).tolist(), likeliest.tolist()) for states, likeliest in read], reasons


def checkpoint_of(whole: WholeRun) -> Any:
    """Where training goes on, and what is exported."""
    folder = whole.run.stage("train") / "checkpoints"
    found = checkpoints.latest(folder, TRAINING)
    best = checkpoints.best(folder, TRAINING)
    assert found is not None
    told = [(one.next_step, sorted(one.load()["model"])) for one in (found, best) if one]
    assert all(one.next_step == int(one.folder.name) for one in (found, best) if one)
    return told


def drafter_of(whole: WholeRun) -> Any:
    folder = whole.run.stage("train") / "drafter"
    validate(folder, whole.target_config)
    drafter = load_drafter(folder, whole.target_config)
    return asdict(drafter.config), {name: tensor.tolist() for name, tensor in drafter.state_dict().items()}


def exported_of(whole: WholeRun) -> Any:
    """What training exports from its best checkpoint, with the sizes that `initial` tells."""
    folder = whole.run.stage("train")
    best = checkpoints.best(folder / "checkpoints", TRAINING)
    assert best is not None
    target = resolve(str(whole.model), weights=True)
    drafting.export_best(folder / "again", folder / "initial", best, target, {}, torch.float32)
    config = (folder / "again" / "config.json").read_text()
    return config, {name: t.tolist() for name, t in load_file(folder / "again" / "model.safetensors").items()}


def plan_of(whole: WholeRun) -> Any:
    known = plan.load(whole.run.stage("generate") / "plan")
    assert known is not None
    return [asdict(p) for p in known[0].partitions], asdict(known[0].tokens), known[1]


def manifest_of(whole: WholeRun) -> Any:
    manifest = whole.run.manifest()
    for stage, entry in CLEAN_FINGERPRINTS.items():
        whole.run.check(stage, entry if stage != "capture" else manifest["capture"]["fingerprint"])
    return {stage: manifest[stage]["fingerprint"] for stage in CLEAN_FINGERPRINTS if stage != "capture"}


CLEAN_FINGERPRINTS: dict[str, dict[str, Any]] = {"generate": {"generate.temperature": 0.0}, "train": {"train.seed": 0}}


def log_of(whole: WholeRun) -> Any:
    return [line["step"] for line in read_log(whole.run.stage("train") / "steps.jsonl")]


def summary_of(whole: WholeRun) -> Any:
    return whole.run.summary("generate"), whole.run.succeeded_with("generate", "plan")


def finished_of(whole: WholeRun) -> Any:
    return read_json(whole.run.stage("train") / "finished.json", "").get("plan") == TRAINING


def committed_of(whole: WholeRun) -> Any:
    return committed_units(Ledger(whole.run)).tolist()


def parts_of(whole: WholeRun) -> Any:
    parts = load_parts(whole.model, torch.float32)
    return list(parts.lm_head.shape), resolve(str(whole.model)).vocab_size


Reader = Callable[[WholeRun], Any]
STRICT: dict[str, tuple[str, Reader]] = {
    "ids of the corpus": ("corpus/ids.bin", corpus_of),
    "log-probabilities of the corpus": ("corpus/logprobs.bin", corpus_of),
    "index of the corpus": ("corpus/index.parquet", corpus_of),
    "corpus.json": ("corpus/corpus.json", corpus_of),
    "units of the plan": ("generate/plan/units/*.parquet", units_of),
    "plan.json": ("generate/plan/plan.json", plan_of),
    "a shard of states": ("capture/shards/*.parquet", shards_of),
    "scores of a shard": ("capture/scores/*.parquet", shards_of),
    "weights of the drafter": ("train/drafter/model.safetensors", drafter_of),
    "config.json of the drafter": ("train/drafter/config.json", drafter_of),
    "config.json of the first drafter": ("train/initial/config.json", exported_of),
}
"""Files of which every value counts: what is read is exactly what was written, or an error is raised."""


def damaged(clean: WholeRun, folder: Path, pattern: str, damage: Any, seed: int) -> tuple[WholeRun, Path]:
    """A copy of the run in which one file is damaged."""
    shutil.rmtree(folder, ignore_errors=True)
    # links, since a copy costs more than the test: what replaces a file or appends to one of its own leaves them alone
    shutil.copytree(clean.run.path, folder / "run", symlinks=True, copy_function=os.link)
    shutil.copytree(clean.model, folder / "model", copy_function=os.link)
    whole = replace(clean, run=RunDir(folder / "run"), model=folder / "model")
    rng = random.Random(f"{pattern} {damage.__name__} {seed}")
    place = folder if pattern.startswith("model/") else folder / "run"
    path = rng.choice([path for path in sorted(place.glob(pattern)) if path.stat().st_size])
    content = bytearray(path.read_bytes())
    damage(content, rng)
    path.unlink()
    path.write_bytes(content)
    return whole, path


def outcome(read: Reader, whole: WholeRun) -> tuple[Any, str | None]:
    """What is read, or the named error; any other error is a failure of the test."""
    try:
        return read(whole), None
    except NAMED as error:
        return None, str(error)


def seeds(damage: Any) -> range:
    return range(ROUNDS if damage is flip_a_bit else ROUNDS // 10)


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
@pytest.mark.parametrize("kind", STRICT)
def test_a_damaged_file_is_named_or_reads_as_it_was_written(
    clean: WholeRun, as_written: Callable[[str], Any], tmp_path: Path, kind: str, damage: Any
) -> None:
    pattern, read = STRICT[kind]
    caught = 0
    for seed in seeds(damage):
        whole, path = damaged(clean, tmp_path / "damaged", pattern, damage, seed)
        found, error = outcome(read, whole)
        caught += error is not None
        assert found == as_written(kind) or error, f"{path.name}, seed {seed}"
        assert error is None or path.stem in error or path.parent.name in error, error
    assert caught or kind == "corpus.json"  # which is made again


def _nothing(content: bytearray, rng: random.Random) -> None:
    pass


# ---- files whose damage is repaired, passed over, or costs no more than the row that it hit


MENDED: dict[str, tuple[str, Reader]] = {
    "journal": ("generate/journal/*.jsonl", journal_of),
    "state of a checkpoint": ("train/checkpoints/0*/state.pt", checkpoint_of),
    "about.json of a checkpoint": ("train/checkpoints/0*/about.json", checkpoint_of),
    "log of the training": ("train/steps.jsonl", log_of),
    "manifest.json": ("manifest.json", manifest_of),
    "summary of a stage": ("summaries/generate.json", summary_of),
    "mark of success": ("generate/_SUCCESS", summary_of),
    "mark of the finished training": ("train/finished.json", finished_of),
    "committed units": ("generate/checkpoint/0.parquet", committed_of),
    "config.json of the target": ("model/config.json", parts_of),
    "weights of the target": ("model/model.safetensors", parts_of),
}


@pytest.mark.parametrize("kind", [*STRICT, *MENDED])
def test_what_is_not_damaged_says_something(clean: WholeRun, kind: str) -> None:
    found, error = outcome((STRICT | MENDED)[kind][1], clean)
    assert error is None
    assert len(found) if hasattr(found, "__len__") else found is not None


@pytest.mark.parametrize("kind", MENDED)
def test_damage_elsewhere_raises_nothing_but_named_errors(clean: WholeRun, tmp_path: Path, kind: str) -> None:
    pattern, read = MENDED[kind]
    for damage in DAMAGES:
        for seed in seeds(damage):
            whole, path = damaged(clean, tmp_path / "damaged", pattern, damage, seed)
            _, error = outcome(read, whole)
            assert error is None or path.name in error or "holds" in error, error


@pytest.mark.parametrize("folder", ["shards", "scores"])
def test_a_cache_that_lacks_a_file_does_not_train(clean: WholeRun, tmp_path: Path, folder: str) -> None:
    """Its sequences would count as set aside, and nobody would know."""
    whole, _ = damaged(clean, tmp_path / "copy", "capture/_SUCCESS", _nothing, 0)
    config = Config.model_validate(
        {
            "run": {"dir": str(whole.run.path)},
            "target": {"model": str(whole.model)},
            "prompts": {"path": "p"},
            "capture": {"shard_tokens": 200},
            "train": {"feed": "cache"},
        }
    )
    sequences, target = corpus.make(whole.run), resolve(str(whole.model), weights=True)
    manifest = whole.run.manifest()
    manifest["capture"]["fingerprint"] = capture.fingerprint_of(whole.run, config.capture, sequences, target)
    write_json(whole.run.path / "manifest.json", manifest)
    train._check_cache(whole.run, config, sequences, target)
    lost = sorted((whole.run.stage("capture") / folder).glob("*.parquet"))[1]
    lost.unlink()
    with pytest.raises(RunError, match=rf"lacks 1 shards .* {lost.stem}.*jobs/capture\.py again"):
        train._check_cache(whole.run, config, sequences, target)


def test_an_answer_of_the_journal_is_the_one_that_was_written_or_none(clean: WholeRun, tmp_path: Path) -> None:
    written = journal_of(clean)
    lost = 0
    for damage in DAMAGES:
        for seed in seeds(damage):
            read = journal_of(damaged(clean, tmp_path / "damaged", "generate/journal/*.jsonl", damage, seed)[0])
            assert all(answer in (written[name], None) for name, answer in read.items())
            lost += list(read.values()).count(None)
    assert lost


@pytest.mark.parametrize("part", ["state.pt", "about.json"])
def test_a_damaged_checkpoint_is_passed_over_and_never_taken_for_another_step(
    clean: WholeRun, tmp_path: Path, part: str
) -> None:
    whole = checkpoint_of(clean)
    for damage in DAMAGES:
        for seed in seeds(damage):
            run, path = damaged(clean, tmp_path / "damaged", f"train/checkpoints/0*/{part}", damage, seed)
            told = checkpoint_of(run)
            if told != whole:
                assert [one for one in whole if one[0] != int(path.parent.name)] == [told[0]]


def test_a_generated_row_reads_as_it_was_written_or_is_left_out_or_set_aside_by_capture(
    clean: WholeRun, states: dict[str, Captured], tmp_path: Path
) -> None:
    """A changed log-probability is left to the on-policy check: it has to find it, or it is no more than rounding."""
    written = rows_of(damaged(clean, tmp_path / "whole", "corpus/ids.bin", _nothing, 0)[0])
    assert len(written) == len(clean.rows)
    parts = load_parts(clean.model, torch.float32)
    named = 0
    for damage in DAMAGES:
        for seed in seeds(damage):
            whole, path = damaged(clean, tmp_path / "damaged", "generate/rows/sequences/*.parquet", damage, seed)
            read, error = outcome(rows_of, whole)
            if error is not None:
                assert "sequences" in error
                named += 1
                continue
            left_out = corpus.damaged(corpus.make(whole.run))
            assert len(read) + len(left_out) == len(clean.rows), f"{path.name}, {damage.__name__} {seed}"
            for name, (ids, prompt, logprobs) in read.items():
                assert (ids, prompt) == written[name][:2]
                if logprobs != written[name][2]:
                    assert _is_set_aside(states[name], ids, prompt, logprobs, parts) or _is_rounding(
                        logprobs, written[name][2]
                    )
    assert named


def _is_set_aside(captured: Captured, ids: list[int], prompt: int, logprobs: list[float], parts: TargetParts) -> bool:
    found = States("row", captured.states[:, : 3 * HIDDEN], captured.states[:, 3 * HIDDEN :])
    sequence = TokenSequence("row", np.array(ids, np.int32), prompt)
    try:
        score = on_policy(found, sequence, logprobs, parts, temperature=0)
    except CaptureError:
        return True
    return OnPolicyLimits().reason(score) is not None


def _is_rounding(logprobs: list[float], recorded: list[float]) -> bool:
    return float((torch.tensor(logprobs) - torch.tensor(recorded)).abs().mean()) < 2e-3
