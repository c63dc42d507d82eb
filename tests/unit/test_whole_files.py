"""What killed writers leave goes when a stage starts and when it is complete; what else is there stays."""

from collections.abc import Callable
from pathlib import Path

import pytest

from eagle3_ray.runs import RunDir
from eagle3_ray.states_cache import ShardWriter
from eagle3_ray.whole_files import temporary
from tests.jobs import left_by_killed_writers


def _shard(stage: Path) -> None:
    ShardWriter(stage / "shards" / "0000000000-abcd.parquet", {})


def _folder(stage: Path) -> None:
    temporary(stage / "checkpoints" / "00000004").mkdir(parents=True)
    (next((stage / "checkpoints").iterdir()) / "state.pt").write_bytes(b"half")


def _link(stage: Path) -> None:
    temporary(stage / "best").symlink_to("nowhere")


def _text(stage: Path) -> None:
    temporary(stage / "corpus.json").write_text("{")


@pytest.mark.parametrize("when", ["start", "completion"])
@pytest.mark.parametrize("leave", [_shard, _folder, _link, _text])
def test_a_killed_writers_files_go(tmp_path: Path, leave: Callable[[Path], None], when: str) -> None:
    run = RunDir(tmp_path)
    others = [run.stage("capture") / name for name in (".hidden", "shards/a.parquet", f"ray/{'0' * 32}")]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    leave(run.stage("capture"))
    assert len(left_by_killed_writers(tmp_path)) == 1
    if when == "start":
        run.claim("capture", {}, {})
    else:
        run.succeed("capture", "plan")
    assert left_by_killed_writers(tmp_path) == []
    assert all(path.exists() for path in others)
