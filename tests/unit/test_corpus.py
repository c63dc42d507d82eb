"""The corpus holds every generated sequence once, exactly, and says which it could not take."""

import pickle
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from eagle3_ray import corpus
from eagle3_ray.errors import explain
from eagle3_ray.ledger import Ledger
from eagle3_ray.runs import RunDir, RunError
from tests.runs import make_run, sequence

ROWS = [
    sequence(f"q{i}", range(i % 5 + 2), range(100, 103 + i % 7), [-0.1 * k for k in range(3 + i % 7)], f"part{i % 2}")
    for i in range(50)
]


def test_every_sequence_is_there_with_its_ids_boundary_and_logprobs(tmp_path: Path) -> None:
    made = corpus.make(make_run(tmp_path / "run", ROWS))
    assert len(made) == 50
    by_id = {row["sequence_id"]: row for row in ROWS}
    for i in range(50):
        row = by_id.pop(made.sequence_id(i))
        assert made.ids(i).tolist() == row["prompt_ids"] + row["output_ids"]
        assert made.prompt_tokens[i] == len(row["prompt_ids"])
        assert made.tokens[i] == len(row["prompt_ids"]) + len(row["output_ids"])
        assert made.logprobs(i) == pytest.approx(row["output_logprobs"], abs=1e-6)
        assert made.token_sha(i) == row["token_sha"]
    assert not by_id


def test_equal_rows_in_other_files_give_an_equal_order(tmp_path: Path) -> None:
    one = corpus.make(make_run(tmp_path / "a", ROWS))
    two = corpus.make(make_run(tmp_path / "b", ROWS[::-1]))
    assert [one.sequence_id(i) for i in range(50)] == [two.sequence_id(i) for i in range(50)]


def test_a_row_whose_ids_were_changed_is_left_out_and_named(tmp_path: Path) -> None:
    rows = [dict(row) for row in ROWS]
    rows[7]["output_ids"] = [*rows[7]["output_ids"][:-1], 55]
    made = corpus.make(make_run(tmp_path / "run", rows))
    assert len(made) == 49
    assert corpus.damaged(made) == [rows[7]["sequence_id"]]


@pytest.mark.parametrize(
    "change",
    [
        {"partition": "part2"},
        {"prompt_id": "q8"},
        {"sample_index": 1},
        {"turn": None},
        {"sequence_id": "0" * 32},
        {"output_logprobs": [-0.5]},
        {"output_ids": None},
    ],
)
def test_a_row_under_another_name_or_without_all_its_logprobs_is_left_out_and_named(
    tmp_path: Path, change: dict[str, Any]
) -> None:
    rows = [dict(row) for row in ROWS]
    rows[7] |= change
    made = corpus.make(make_run(tmp_path / "run", rows))
    assert len(made) == 49
    assert corpus.damaged(made) == [rows[7]["sequence_id"]]


def test_a_damaged_row_file_is_named_with_the_remedy(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ROWS)
    file = run.stage("generate") / "rows" / "sequences" / "0.parquet"
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(RunError, match=r"sequences/0\.parquet is damaged .* --quarantine generate"):
        corpus.make(run)


def test_counts_of_answer_tokens_are_never_those_of_damaged_ids(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ROWS)
    file = corpus.make(run).folder / "ids.bin"
    file.write_bytes(b"\xff\xff\xff\x7f" * (file.stat().st_size // 4))  # an array of that many counts is 16 GB
    with pytest.raises(RunError, match=r"ids\.bin is damaged"):
        corpus.make(run).answer_counts(range(50), 400)


def test_a_changed_byte_of_the_corpus_is_found_when_its_sequence_is_read(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ROWS)
    folder = corpus.make(run).folder
    ids = bytearray((folder / "ids.bin").read_bytes())
    ids[0] ^= 1
    (folder / "ids.bin").write_bytes(ids)
    made = corpus.make(run)
    with pytest.raises(RunError, match="Delete the folder"):
        made.ids(0)
    assert len(made.ids(1))


def test_an_answer_without_logprobs_has_none(tmp_path: Path) -> None:
    made = corpus.make(make_run(tmp_path / "run", [sequence("q", [1, 2], [3, 4])]))
    assert made.logprobs(0) is None


def test_a_corpus_is_made_again_for_other_rows_and_kept_for_the_same(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ROWS)
    first = corpus.make(run)
    written = (first.folder / "ids.bin").stat().st_mtime_ns
    assert corpus.make(run).key == first.key
    assert (first.folder / "ids.bin").stat().st_mtime_ns == written
    (run.stage("generate") / "rows" / "sequences" / "1.parquet").unlink()
    again = corpus.make(run)
    assert again.key != first.key
    assert len(again) == 25


def test_an_incomplete_generate_stage_gives_no_corpus(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ROWS)
    (run.stage("generate") / "_SUCCESS").unlink()
    with pytest.raises(RunError, match=r"jobs/generate\.py"):
        corpus.make(run)


def test_held_out_prompts_take_all_their_samples_along(tmp_path: Path) -> None:
    rows = [sequence(f"q{i}", [1, 2, i], [3, i], sample_index=k) for i in range(400) for k in range(2)]
    made = corpus.make(make_run(tmp_path / "run", rows))
    heldout = made.heldout(0.1)
    names = {row["sequence_id"]: row["prompt_id"] for row in rows}
    sides: dict[str, set[bool]] = {}
    for i in range(len(made)):
        sides.setdefault(names[made.sequence_id(i)], set()).add(bool(heldout[i]))
    assert all(len(side) == 1 for side in sides.values())
    assert 0.06 < heldout.mean() < 0.15  # 40 of 400 prompts, give or take three standard deviations


def test_conversations_with_one_first_turn_are_on_one_side_whatever_they_are_called(tmp_path: Path) -> None:
    rows = [
        sequence(f"{name}{i}", [i, 1], [2], partition=partition, turn=0)
        for i in range(200)
        for partition, name in (("chat", "a"), ("chat", "b"), ("code", "a"))
    ]
    rows += [
        sequence(f"{name}{i}", [i, 1, 2, ord(name)], [3], partition="chat", turn=1) for i in range(200) for name in "ab"
    ]
    made = corpus.make(make_run(tmp_path / "run", rows))
    heldout = made.heldout(0.3)
    sides: dict[int, list[bool]] = {}
    for row in range(len(made)):
        sides.setdefault(int(made.ids(row)[0]), []).append(bool(heldout[row]))
    assert {len(side) for side in sides.values()} == {5}
    assert {len(set(side)) for side in sides.values()} == {1}
    assert 0.2 < heldout.mean() < 0.4  # 60 of 200 first turns, give or take three standard deviations


def test_the_first_turn_that_is_left_decides_where_the_first_is_missing(tmp_path: Path) -> None:
    rows = [sequence("a", [1, 2, 3], [4], turn=2), sequence("a", [1, 2], [4], turn=1), sequence("b", [1, 2], [5])]
    made = corpus.make(make_run(tmp_path / "run", rows))
    assert len(set(made.column("prompt_hash").tolist())) == 1


def test_answer_tokens_are_counted_and_prompts_are_not(tmp_path: Path) -> None:
    made = corpus.make(make_run(tmp_path / "run", [sequence("a", [1, 2], [3, 3]), sequence("b", [3], [4])]))
    assert made.answer_counts([0, 1], 6).tolist() == [0, 0, 0, 2, 1, 0]


def test_a_corpus_travels_to_an_actor_as_its_folder(tmp_path: Path) -> None:
    made = corpus.make(make_run(tmp_path / "run", ROWS))
    assert made.ids(3) is not None
    there = pickle.loads(pickle.dumps(made))
    assert np.array_equal(there.ids(3), made.ids(3))
    assert len(pickle.dumps(made)) < 1000


@pytest.mark.parametrize("setting", [{"temp_directory": "/proc/none"}, {"max_temp_directory_size": "1MB"}])
def test_a_disk_without_room_to_sort_is_not_taken_for_damage(tmp_path: Path, setting: dict[str, str]) -> None:
    memory: dict[str, Any] = {"memory_limit": "20MB", "temp_directory": str(tmp_path / "spill"), **setting}
    ledger = Ledger(RunDir(tmp_path))
    with (
        pytest.raises(OSError, match=r"create|offload") as caught,
        ledger.asked("A file"),
        duckdb.connect(config=memory) as db,
    ):
        db.execute("SELECT * FROM range(20000000) t(i) ORDER BY hash(i) DESC, i LIMIT 5 OFFSET 19000000").fetchall()
    assert explain(caught.value).startswith(f"The disk is full ({tmp_path}). Free some space")
