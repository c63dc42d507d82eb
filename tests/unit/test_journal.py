"""Every answer that was appended is found by the next writer, whatever state the files were left in."""

import errno
import json
import random
import signal
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from eagle3_ray.journal import Journal
from eagle3_ray.records import sequence_id

WRITER = """
import sys
from pathlib import Path
from eagle3_ray.journal import Journal
from eagle3_ray.records import sequence_id
journal = Journal(Path(sys.argv[1]))
n = 0
while True:
    journal.append(sequence_id("p", "q", 0, n), {"n": n, "output_ids": [n] * 300})
    print(n, flush=True)
    n += 1
"""


def _name(number: int) -> str:
    return sequence_id("p", "q", 0, number)


def _answer(number: int) -> dict[str, Any]:
    return {"output_ids": list(range(number)), "endpoint": "http://ü:1\n", "output_logprobs": None}


def _line(number: int) -> bytes:
    text = json.dumps(_answer(number))
    return f"{_name(number)} {zlib.crc32((_name(number) + text).encode()):08x} {text}\n".encode()


def _file(folder: Path) -> Path:
    (path,) = (p for p in folder.glob("*.jsonl") if p.stat().st_size)
    return path


def test_a_later_writer_finds_the_answers_of_all_earlier_ones_and_no_other(tmp_path: Path) -> None:
    for start in (0, 10, 20):
        journal = Journal(tmp_path / "journal")
        for number in range(start, start + 10):
            journal.append(_name(number), _answer(number))
    later = Journal(tmp_path / "journal")
    assert [later.get(_name(number)) for number in range(30)] == [_answer(number) for number in range(30)]
    assert later.get(_name(30)) is None


def test_an_answer_is_on_disk_when_append_returns_without_any_close(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(_name(1), _answer(1))
    assert _file(tmp_path).read_bytes() == _line(1)


def test_writers_at_the_same_time_have_files_of_their_own(tmp_path: Path) -> None:
    journals = [Journal(tmp_path) for _ in range(3)]
    for number in range(30):
        journals[number % 3].append(_name(number), _answer(number))
    assert len(list(tmp_path.glob("*.jsonl"))) == 3
    later = Journal(tmp_path)
    assert all(later.get(_name(number)) == _answer(number) for number in range(30))


@pytest.mark.parametrize("seed", range(20))
def test_a_file_cut_anywhere_gives_the_whole_lines_before_the_cut(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    journal = Journal(tmp_path)
    ends = []
    for number in range(6):
        journal.append(_name(number), _answer(number * 7))
        ends.append(_file(tmp_path).stat().st_size)
    cut = rng.randrange(ends[-1])
    with _file(tmp_path).open("r+b") as file:
        file.truncate(cut)
    later = Journal(tmp_path)
    for number, end in enumerate(ends):
        assert later.get(_name(number)) == (_answer(number * 7) if end <= cut else None)
    later.append(_name(99), _answer(3))
    assert Journal(tmp_path).get(_name(99)) == _answer(3)


@pytest.mark.parametrize(
    "junk",
    [
        b"\n",
        b"\0" * 500 + b"\n",
        b"x" * 20 + b"\n",
        b"\xff" * 32 + b" {}\n",
        b"a" * 32 + b" {torn\n",
        b"a" * 40 + b"\n",
    ],
)
def test_a_damaged_line_costs_only_itself(tmp_path: Path, junk: bytes) -> None:
    good = [_line(number) for number in (1, 2)]
    (tmp_path / "old.jsonl").write_bytes(good[0] + junk + good[1])
    journal = Journal(tmp_path)
    assert (journal.get(_name(1)), journal.get(_name(2))) == (_answer(1), _answer(2))
    assert journal.get("a" * 32) is None


@pytest.mark.parametrize("seed", range(20))
def test_a_flipped_bit_anywhere_in_a_line_costs_that_answer_and_gives_no_other(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    lines = [_line(number) for number in (5, 6, 7)]
    damaged = bytearray(lines[1])
    damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    (tmp_path / "old.jsonl").write_bytes(lines[0] + bytes(damaged) + lines[2])
    journal = Journal(tmp_path)
    assert journal.get(_name(5)) == _answer(5)
    assert journal.get(_name(6)) is None
    assert journal.get(_name(7)) in (None, _answer(7))  # without its end, the line before takes this one with it


def test_a_repeated_answer_is_one_of_those_that_were_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.append(_name(1), _answer(1))
    journal.append(_name(1), _answer(2))
    assert Journal(tmp_path).get(_name(1)) in (_answer(1), _answer(2))


def test_other_files_in_the_folder_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert Journal(tmp_path).get(_name(1)) is None
    assert (tmp_path / "notes.txt").read_text() == "hello"


def test_a_killed_writer_loses_no_answer_that_it_reported(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        for _ in range(200):
            reported = int(writer.stdout.readline())
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    journal = Journal(tmp_path)
    for number in range(reported + 1):
        assert journal.get(_name(number)) == {"n": number, "output_ids": [number] * 300}


def test_a_full_disk_is_an_error_and_the_torn_line_is_skipped(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    (tmp_path / "device").mkdir()
    journal = Journal(tmp_path / "device")
    journal._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    with pytest.raises(OSError, match="No space left") as error:
        journal.append(_name(1), _answer(1))
    assert error.value.errno == errno.ENOSPC


def test_a_line_that_the_disk_takes_in_part_is_an_error_and_does_not_spoil_the_next_one(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    journal = Journal(tmp_path)
    journal.append(_name(1), _answer(1))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (_file(tmp_path).stat().st_size + 50, limits[1]))
        with pytest.raises(OSError):  # noqa: PT011 - either the short write or the write behind it
            journal.append(_name(2), _answer(100))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    journal.append(_name(3), _answer(3))
    later = Journal(tmp_path)
    assert (later.get(_name(1)), later.get(_name(2))) == (_answer(1), None)
    assert later.get(_name(3)) == _answer(3)
