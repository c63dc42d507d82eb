"""A run directory: one writer, one fingerprint, and old data set aside whole."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from eagle3_ray.runs import SUCCESS, FingerprintMismatch, RunBusy, RunDir, RunError, WriterLock, command, write_json

FINGERPRINT: dict[str, Any] = {"generate.temperature": 0.7, "target.weights": "ab12", "generate.top_p": 1.0}

HOLDER = """
import sys
from eagle3_ray.runs import RunDir, WriterLock
with WriterLock(RunDir(sys.argv[1])) as lock:
    print(lock.token, flush=True)
    sys.stdin.read()
"""


def _tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_a_new_run_has_an_empty_manifest_no_summary_and_no_success(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    assert run.manifest() == {}
    assert run.summary("generate") is None
    assert not run.succeeded("generate")


def test_a_claim_keeps_the_fingerprint_and_counts_starts(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.claim("generate", FINGERPRINT, {"versions": {"ray": "1"}})
    run.claim("generate", FINGERPRINT, {"versions": {"ray": "2"}})
    entry = json.loads((tmp_path / "manifest.json").read_text())["generate"]
    assert entry["fingerprint"] == FINGERPRINT
    assert entry["starts"] == 2
    assert entry["versions"] == {"ray": "2"}
    assert entry["created"] <= entry["last_start"]


def test_claims_of_different_stages_stand_side_by_side(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.claim("generate", FINGERPRINT, {})
    run.claim("capture", {"layers": "2,4,6"}, {})
    assert run.manifest()["generate"]["fingerprint"] == FINGERPRINT
    assert run.manifest()["capture"]["fingerprint"] == {"layers": "2,4,6"}


def test_a_claim_that_led_to_no_data_gives_way_to_other_settings(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.claim("capture", FINGERPRINT, {})
    run.stage("capture").mkdir()
    changed = {**FINGERPRINT, "generate.temperature": 1.0}
    run.claim("capture", changed, {})
    assert run.manifest()["capture"]["fingerprint"] == changed


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"generate.temperature": 1.0}, ["generate.temperature was 0.7 and is now 1.0"]),
        (
            {"target.weights": "cd34", "generate.top_p": 0.9},
            ["target.weights was 'ab12' and is now 'cd34'", "generate.top_p was 1.0 and is now 0.9"],
        ),
        ({"engine.version": "0.5.23"}, ["engine.version was None and is now '0.5.23'"]),
        ({"target.weights": None}, ["target.weights was 'ab12' and is now None"]),
    ],
)
def test_another_fingerprint_is_refused_field_by_field_and_changes_nothing(
    tmp_path: Path, changed: dict[str, Any], said: list[str]
) -> None:
    run = RunDir(tmp_path)
    run.claim("generate", FINGERPRINT, {})
    write_json(run.stage("generate") / "data.json", {})
    before = _tree(tmp_path)
    with pytest.raises(FingerprintMismatch) as error:
        run.claim("generate", {**FINGERPRINT, **changed}, {})
    assert _tree(tmp_path) == before
    for part in [*said, "Use another run.dir", f"doctor.py {tmp_path} --quarantine generate"]:
        assert part in str(error.value)
    for field in FINGERPRINT.keys() - changed.keys():
        assert field not in str(error.value)


def test_a_damaged_manifest_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"generate": {')
    with pytest.raises(RunError, match=r"is damaged .* Move the run directory aside"):
        RunDir(tmp_path).manifest()


def test_a_summary_is_read_as_it_was_written_and_the_last_one_counts(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.write_summary("generate", {"rows": 1})
    run.write_summary("generate", {"rows": 2, "warnings": ["ü"]})
    assert run.summary("generate") == {"rows": 2, "warnings": ["ü"]}
    assert [p.name for p in (tmp_path / "summaries").iterdir()] == ["generate.json"]


def test_a_stage_succeeded_when_its_marker_stands_there(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    write_json(run.stage("generate") / SUCCESS, {})
    assert run.succeeded("generate")
    assert not run.succeeded("capture")


def test_quarantine_moves_all_of_one_stage_and_nothing_else(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for stage in ("generate", "capture"):
        run.claim(stage, FINGERPRINT, {})
        run.write_summary(stage, {"stage": stage})
        write_json(run.stage(stage) / SUCCESS, {})
        (run.stage(stage) / "rows").mkdir()
        (run.stage(stage) / "rows" / "0.parquet").write_bytes(stage.encode())
    before = _tree(tmp_path)
    aside = run.quarantine("generate")
    after = _tree(tmp_path)

    place = aside.relative_to(tmp_path)
    assert place.parts[0] == "quarantine"
    assert after[f"{place}/generate/rows/0.parquet"] == b"generate"
    assert f"{place}/generate/{SUCCESS}" in after
    assert json.loads(after[f"{place}/generate.json"]) == {"stage": "generate"}
    assert json.loads(after[f"{place}/manifest.json"])["generate"]["fingerprint"] == FINGERPRINT
    assert list(run.manifest()) == ["capture"]
    assert run.summary("generate") is None
    assert not run.succeeded("generate")
    assert {k: v for k, v in after.items() if k.startswith(("capture/", "summaries/"))} == {
        k: v for k, v in before.items() if k.startswith(("capture/", "summaries/capture"))
    }
    run.claim("generate", {**FINGERPRINT, "generate.temperature": 1.0}, {})  # other settings are welcome now


def test_quarantine_of_nothing_is_refused_and_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has no generate data"):
        RunDir(tmp_path).quarantine("generate")
    assert not (tmp_path / "quarantine").exists()


def test_a_second_writer_is_refused_while_the_first_holds_the_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "new" / "run")
    with WriterLock(run) as first:
        with pytest.raises(RunBusy, match="ray job stop"), WriterLock(run):
            pass
        with pytest.raises(RunBusy):
            run.quarantine("generate")
        assert WriterLock.is_current(str(run.path), first.token)
    with WriterLock(run) as second:
        assert second.token != first.token
        assert WriterLock.is_current(str(run.path), second.token)
        assert not WriterLock.is_current(str(run.path), first.token)


def test_the_lock_ends_with_a_killed_process(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        token = holder.stdout.readline().strip()
        assert WriterLock.is_current(str(tmp_path), token)
        with pytest.raises(RunBusy), WriterLock(RunDir(tmp_path)):
            pass
        holder.send_signal(signal.SIGKILL)
        holder.wait()
    with WriterLock(RunDir(tmp_path)):
        assert not WriterLock.is_current(str(tmp_path), token)


def test_a_run_dir_that_cannot_be_made_is_an_error_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"cannot be written: .*\. Choose another run\.dir\."):
        WriterLock(RunDir(tmp_path / "file" / "run")).__enter__()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["jobs/generate.py", "p.yaml", "run.dir=/a b"], "python jobs/generate.py p.yaml 'run.dir=/a b'"),
        (["/opt/venv/bin/eagle3-train", "p.yaml"], "eagle3-train p.yaml"),
    ],
)
def test_a_command_can_be_typed_again(argv: list[str], said: str) -> None:
    assert command(argv) == said


def test_a_reader_never_sees_a_part_of_a_json_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    values = [{"fill": letter * 200_000} for letter in "xy"]
    texts = [json.dumps(value, indent=1) + "\n" for value in values]
    write_json(path, values[0])
    done = threading.Event()
    seen = []

    def read() -> None:
        while not done.is_set():
            seen.append(path.read_text() in texts)

    reader = threading.Thread(target=read)
    reader.start()
    for i in range(60):
        write_json(path, values[i % 2])
    done.set()
    reader.join()
    assert seen
    assert all(seen)
    assert os.listdir(tmp_path) == ["a.json"]


def test_a_field_that_is_missing_now_is_a_difference_too(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.claim("generate", {**FINGERPRINT, "engine.version": "0.5.23"}, {})
    write_json(run.stage("generate") / "data.json", {})
    with pytest.raises(FingerprintMismatch, match=r"engine\.version was '0\.5\.23' and is now None"):
        run.claim("generate", FINGERPRINT, {})


def test_a_stage_can_be_set_aside_again_and_again(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    places = set()
    for _ in range(3):
        run.claim("generate", FINGERPRINT, {})
        places.add(run.quarantine("generate"))
    assert len(places) == 3
    (tmp_path / "quarantine" / "generate-1" / "manifest.json").unlink()
    (tmp_path / "quarantine" / "generate-1").rmdir()  # for room
    run.claim("generate", FINGERPRINT, {})
    assert run.quarantine("generate").name == "generate-4"
