"""Files of a run and of strangers, of any bytes: read as they were written, or named."""

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from eagle3_ray import checkpoints, plan
from eagle3_ray.acceptance.folder import inspect_folder
from eagle3_ray.drafter.checkpoints import CheckpointError, load_drafter
from eagle3_ray.drafter.config import DrafterConfigError
from eagle3_ray.journal import Journal
from eagle3_ray.runs import RunError
from eagle3_ray.states_cache import DamagedShard, ShardWriter, StatesCache
from eagle3_ray.target.files import TargetError, resolve
from eagle3_ray.target.parts import load_parts
from eagle3_ray.torch_files import UnreadableTorchFile, load_plain
from eagle3_ray.train_log import read_log
from tests.fuzz.bytes_of import damaged
from tests.whole_run import WholeRun

NAMED = (CheckpointError, DamagedShard, DrafterConfigError, RunError, TargetError, UnreadableTorchFile)
LARGEST = 200_000  # bytes of a file that is fuzzed


def _journal(folder: Path) -> None:
    journal = Journal(folder)
    for name in list(journal._places):
        answer = journal.get(name)
        assert answer is None or isinstance(answer["output_ids"], list)


def _shard(folder: Path) -> None:
    cache = StatesCache(folder, 8, "fp8")
    for row in cache.rows:
        states, likeliest = cache.read(row, f"sha{row}")
        assert states.shape == (len(likeliest), 32)


KINDS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "journal": ("a.jsonl", _journal),
    "shard": ("a.parquet", _shard),
    "torch file": ("a.pt", lambda folder: load_plain(folder / "a.pt")),
    "log of a training": ("a.jsonl", lambda folder: read_log(folder / "a.jsonl")),
    "plan.json": ("plan.json", plan.load),
    "about.json": ("00000003/about.json", lambda folder: checkpoints.latest(folder, "p")),
}


@pytest.fixture(scope="module")
def good(whole_run: WholeRun, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each kind, with its good file."""
    root, run = tmp_path_factory.mktemp("good"), whole_run.run.path
    folders = {kind: root / str(number) for number, kind in enumerate(KINDS)}
    for folder in folders.values():
        folder.mkdir()
    shutil.copy(next((run / "generate" / "journal").glob("*.jsonl")), folders["journal"] / "a.jsonl")
    writer = ShardWriter(folders["shard"] / "a.parquet", {"fingerprint": {}})
    for row in range(3):
        writer.add(row, f"sha{row}", torch.randn(40 + row, 32), torch.arange(40 + row), "fp8")
    writer.commit()
    torch.save({"model": {"a": torch.ones(3, 3)}, "best": 1.5}, folders["torch file"] / "a.pt")
    shutil.copy(run / "train" / "steps.jsonl", folders["log of a training"] / "a.jsonl")
    shutil.copy(run / "generate" / "plan" / "plan.json", folders["plan.json"])
    checkpoints.save(folders["about.json"], 3, "p", {"a": torch.ones(2)}, best=True)
    return folders


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_any_bytes_are_read_or_named(good: dict[str, Path], tmp_path: Path, kind: str, data: st.DataObject) -> None:
    name, read = KINDS[kind]
    folder = tmp_path / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(good[kind], folder, symlinks=True)
    (folder / name).write_bytes(data.draw(damaged((folder / name).read_bytes())))
    with suppress(*NAMED):
        read(folder)


_FIELDS = st.sampled_from(
    [0, -1, 1, 3, 7, 10**6, 10**9, 10**30, 1.5, float("inf"), None, True, "x", [], {}, [1], [1, 2, 3]]
)


@given(data=st.data())
def test_any_config_of_a_drafter_is_used_or_named(whole_run: WholeRun, tmp_path: Path, data: st.DataObject) -> None:
    source = whole_run.run.stage("train") / "drafter"
    config = json.loads((source / "config.json").read_text())
    for name in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3)):
        config[name] = data.draw(_FIELDS)
    folder = tmp_path / "drafter"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    shutil.copy(source / "model.safetensors", folder)
    with suppress(*NAMED):
        load_drafter(folder, whole_run.target_config)
    with suppress(*NAMED):
        inspect_folder(folder, whole_run.target_config)


@given(data=st.data())
def test_any_tensors_of_a_drafter_are_used_or_named(whole_run: WholeRun, tmp_path: Path, data: st.DataObject) -> None:
    """In a torch file, which may hold anything that is plain."""
    source = whole_run.run.stage("train") / "drafter"
    tensors: dict[Any, Any] = dict(load_file(source / "model.safetensors"))
    odd = [None, 3, [], {}, torch.empty(0), torch.tensor(1), torch.ones(2, 2), torch.ones(64).long() * 2**62]
    for name in data.draw(st.lists(st.sampled_from([*sorted(tensors), "extra", 7]), min_size=1, max_size=2)):
        tensors[name] = odd[data.draw(st.integers(0, len(odd) - 1))]
    folder = tmp_path / "drafter"
    folder.mkdir(exist_ok=True)
    shutil.copy(source / "config.json", folder)
    torch.save(tensors, folder / "pytorch_model.bin")
    with suppress(*NAMED):
        load_drafter(folder, whole_run.target_config)
    with suppress(*NAMED):
        inspect_folder(folder, whole_run.target_config)


@given(data=st.data())
def test_any_bytes_of_a_drafter_or_a_target_are_used_or_named(
    whole_run: WholeRun, tmp_path: Path, data: st.DataObject
) -> None:
    folder = tmp_path / "files"
    shutil.rmtree(folder, ignore_errors=True)
    drafter, target = folder / "drafter", folder / "target"
    shutil.copytree(whole_run.run.stage("train") / "drafter", drafter)
    shutil.copytree(whole_run.model, target)
    files = [drafter / "config.json", drafter / "model.safetensors", target / "config.json"]
    files += [target / "generation_config.json", target / "model.safetensors"]
    path = data.draw(st.sampled_from(files))
    head = path.read_bytes()
    path.write_bytes(data.draw(damaged(head[:4000])) + head[4000:])  # the end of a file of weights is only numbers
    for read in (
        lambda: load_drafter(drafter, whole_run.target_config),
        lambda: load_parts(target, torch.float32),
        lambda: (resolve(str(target)).stop_ids(), resolve(str(target)).vocab_size),
    ):
        with suppress(*NAMED):
            read()
