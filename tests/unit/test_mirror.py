"""A run's copy in another place: what is there at any moment, and what becomes of it elsewhere."""

import itertools
import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from eagle3_ray import mirror as mirror_module
from eagle3_ray import mirror_index as index
from eagle3_ray.cli import main
from eagle3_ray.mirror import Mirror, mirrored
from eagle3_ray.object_store import ObjectStore
from eagle3_ray.runs import RunBusy, RunDir, RunError, WriterLock, write_json
from tests.buckets import s3_bucket

COMPLETE = {"status": "complete", "stopped_by": None, "warnings": []}
Tree = dict[str, bytes | str]


@pytest.fixture(autouse=True)
def _only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No copies but those that a test asks for, and the one at the end."""
    monkeypatch.setattr(mirror_module, "EVERY_S", 1e6)


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as monkeypatch, s3_bucket(monkeypatch) as uri:
        yield uri


@pytest.fixture(params=["folder", "s3"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty place for a mirror."""
    if request.param == "folder":
        return str(tmp_path / "mirror")
    uri: str = request.getfixturevalue("bucket")
    return uri.format(tmp_path.name)


def tree(run: Path) -> Tree:
    """All of a run but its hidden files: a file's content, a link's target."""
    found: Tree = {}
    for path in sorted(run.rglob("*")):
        name = path.relative_to(run)
        if any(part.startswith(".") for part in name.parts):
            continue
        if path.is_symlink():
            found[str(name)] = f"link to {os.readlink(path)}"
        elif path.is_file():
            found[str(name)] = path.read_bytes()
    return found


def write(path: Path, content: str | bytes) -> None:
    """As the stages do: whole, by a rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_bytes(content if isinstance(content, bytes) else content.encode())
    os.replace(new, path)


def append(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def begun(run: Path) -> Path:
    """A run in the middle of its work."""
    write(run / "manifest.json", '{"generate": {"fingerprint": {}}}')
    write(run / "generate" / "plan" / "plan.json", "{}")
    write(run / "generate" / "rows" / "sequences" / "w_0-0.parquet", b"rows 0" * 100)
    write(run / "generate" / "checkpoint" / "w_0.parquet", b"units 0")
    append(run / "generate" / "journal" / "a.jsonl", "one\n" * 50)
    append(run / "logs" / "generate.jsonl", '{"event": "job started"}\n')
    write(run / "train" / "checkpoints" / "00000050" / "state.pt", b"50" * 1000)
    (run / "train" / "checkpoints" / "best").symlink_to("00000050")
    write(run / "empty", "")
    return run


def gone_on(run: Path) -> None:
    """More work on it: files come, change, grow and vanish."""
    write(run / "manifest.json", '{"generate": {"fingerprint": {}}, "train": {"fingerprint": {}}}')
    write(run / "generate" / "rows" / "sequences" / "w_1-0.parquet", b"rows 1" * 100)
    write(run / "generate" / "checkpoint" / "w_1.parquet", b"units 1")
    append(run / "logs" / "generate.jsonl", '{"event": "job complete"}\n')
    (run / "generate" / "journal" / "a.jsonl").unlink()
    write(run / "generate" / "_SUCCESS", '{"plan": "p"}')
    write(run / "train" / "checkpoints" / "00000100" / "state.pt", b"100" * 1000)
    shutil.rmtree(run / "train" / "checkpoints" / "00000050")
    (run / "train" / "checkpoints" / "best").unlink()
    (run / "train" / "checkpoints" / "best").symlink_to("00000100")


def fetched(place: str, to: Path) -> Tree:
    """What a machine without anything would go on from; the mirror is only read."""
    to.mkdir(parents=True)
    index.fetch(ObjectStore(place), to)
    return tree(to)


def copied(run: Path, place: str) -> dict[str, Any]:
    """Mirrors a run that does nothing."""
    return mirrored(lambda: dict(COMPLETE), str(run), place)


def nobody() -> None:
    raise AssertionError("the job was stopped")


def test_a_run_comes_back_as_it_was_but_for_what_belongs_to_the_machine(place: str, tmp_path: Path) -> None:
    run = begun(tmp_path / "run")
    write(run / "train" / "ray" / "start-1" / "snapshot.json", "{}")
    (run / "generate" / ".corpus").mkdir()
    (run / "generate" / ".corpus" / "ids.bin").write_text("half")
    summary = copied(run, place)
    assert summary["mirror"]["complete"] is True
    assert summary["mirror"]["place"] == place.partition("?")[0]
    assert summary["warnings"] == []
    there = tree(run)
    del there["train/ray/start-1/snapshot.json"]
    other = tmp_path / "other"
    told = []
    mirrored(lambda: told.append(tree(other)) or dict(COMPLETE), str(other), place)  # type: ignore[func-returns-value]
    assert told == [there]
    for path in there:
        if not (other / path).is_symlink():
            assert (other / path).stat().st_mtime_ns == (run / path).stat().st_mtime_ns
    assert {path.name for path in other.iterdir() if path.name.startswith(".")} == {".lock", ".mirror"}


def test_after_each_single_request_the_mirror_holds_one_whole_moment(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a kill may come: behind every object, index and deletion of a copy."""
    run = begun(tmp_path / "run")
    first = tree(run)
    found: list[Tree] = []
    numbers = itertools.count()

    def looked_at(method: Callable[..., Any]) -> Callable[..., Any]:
        def with_a_look(*arguments: Any) -> Any:
            found.append(fetched(place, tmp_path / f"elsewhere-{next(numbers)}"))
            return method(*arguments)

        return with_a_look

    with Mirror(run, place, nobody) as mirror:
        mirror.copy()
        gone_on(run)
        second = tree(run)
        with monkeypatch.context() as patch:
            patch.setattr(index, "_STREAMS", 1)
            for name in ("writing", "replace", "delete"):
                patch.setattr(ObjectStore, name, looked_at(getattr(ObjectStore, name)))
            mirror.copy()
        found.append(fetched(place, tmp_path / "elsewhere"))
    assert [state in (first, second) for state in found] == [True] * len(found)
    turn = found.index(second)
    assert found == [first] * turn + [second] * (len(found) - turn)
    assert turn > 6  # seven objects before the index
    assert len(found) - turn > 4  # four of the objects before are deleted behind it
    assert index.objects(index.read(ObjectStore(place))) == ObjectStore(place).names(index.FILES)


def test_a_copy_that_was_killed_is_made_up_for_and_leaves_nothing_behind(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = begun(tmp_path / "run")
    copied(run, place)
    first = tree(run)
    gone_on(run)
    second = tree(run)

    def killed(*_: Any) -> None:
        raise OSError("killed before the index")

    with monkeypatch.context() as patch:
        patch.setattr(index, "write", killed)
        assert copied(run, place)["mirror"]["complete"] is False
    assert fetched(place, tmp_path / "before") == first
    assert len(ObjectStore(place).names(index.FILES)) > len(index.objects(index.read(ObjectStore(place))))
    assert copied(run, place)["mirror"]["complete"] is True
    assert fetched(place, tmp_path / "after") == second
    assert index.objects(index.read(ObjectStore(place))) == ObjectStore(place).names(index.FILES)


def test_what_a_journal_gains_is_uploaded_and_not_all_of_it_again(tmp_path: Path) -> None:
    run, place = tmp_path / "run", str(tmp_path / "mirror")
    journal = run / "generate" / "journal" / "a.jsonl"
    uploaded = 0
    with Mirror(run, place, nobody) as mirror:
        for number in range(64):
            append(journal, f"{number:099}\n")
            before = index.objects(index.read(ObjectStore(place)))
            mirror.copy()
            uploaded += sum(
                part[1]
                for entry in index.read(ObjectStore(place)).values()
                for part in entry["parts"]
                if part[0] not in before
            )
    entry = index.read(ObjectStore(place))["generate/journal/a.jsonl"]
    assert len(entry["parts"]) <= 7  # log2 of 64, and 1
    assert uploaded <= 6_400 * 7  # and not 100 * 64 * 65 / 2 = 208,000
    assert fetched(place, tmp_path / "b") == {"generate/journal/a.jsonl": journal.read_bytes()}


def test_a_job_that_goes_on_where_it_was_uploads_only_what_is_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = str(tmp_path / "mirror")
    run, other = begun(tmp_path / "run"), tmp_path / "other"
    copied(run, place)
    written = []
    writing = ObjectStore.writing
    monkeypatch.setattr(ObjectStore, "writing", lambda store, name: written.append(name) or writing(store, name))  # type: ignore[func-returns-value]
    copied(run, place)
    copied(other, place)
    uploads = [name for name in written if name.startswith(index.FILES)]
    assert uploads == []
    append(other / "logs" / "generate.jsonl", "more\n")
    copied(other, place)
    [upload] = [name for name in written if name.startswith(index.FILES)]
    assert upload.startswith("files/logs/generate.jsonl~")


def commits(run: Path, blocks: int) -> Iterator[None]:
    """A job that commits as Ray Data does, a step at a time: pending units, rows, a rename; behind that it counts."""
    rows, units = run / "generate" / "rows" / "sequences", run / "generate" / "checkpoint"
    rows.mkdir(parents=True)
    units.mkdir()
    for block in range(blocks):
        pending = units / f"w_{block:04}.pending.parquet"
        pending.write_bytes(b"u" * 100)
        yield
        with (rows / f"w_{block:04}-0.parquet").open("wb") as file:
            for _ in range(3):
                file.write(b"r" * 100)
                file.flush()
                yield
        pending.rename(units / f"w_{block:04}.parquet")
        yield
        write(run / "manifest.json", f"{block + 1:04}")
        yield


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_in_no_index_without_their_commit_and_no_commit_without_its_rows(
    seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job goes a step further at any moment of a copy: amid a look, and before an upload."""
    run, place, blocks = tmp_path / "run", str(tmp_path / "mirror"), 25
    job, dice = commits(run, blocks), random.Random(seed)
    look, upload = index._look, Mirror._upload

    def goes_on() -> None:
        if dice.random() < 0.01:
            for _ in range(dice.randint(1, 7)):
                next(job, None)

    def with_a_job(folder: Path, prefix: str) -> Iterator[Any]:
        for found in look(folder, prefix):
            yield found
            goes_on()

    monkeypatch.setattr(index, "_STREAMS", 1)
    monkeypatch.setattr(index, "_look", with_a_job)
    monkeypatch.setattr(Mirror, "_upload", lambda mirror, *file: (goes_on(), upload(mirror, *file))[1])
    counts = []
    with Mirror(run, place, nobody) as mirror:
        while not counts or counts[-1] < blocks:
            for _ in range(dice.randint(1, 7)):
                next(job, None)
            with suppress(OSError):  # it did not stand still for two looks
                mirror.copy()
            files = index.read(ObjectStore(place))
            committed = {Path(path).stem for path in files if path.startswith("generate/checkpoint/")}
            rows = {
                Path(path).stem.removesuffix("-0"): entry["size"] for path, entry in files.items() if "rows" in path
            }
            assert rows == dict.fromkeys(committed, 300)
            [counted] = [entry["parts"][0][0] for path, entry in files.items() if path == "manifest.json"] or [None]
            count = int((tmp_path / "mirror" / "files" / counted).read_text()) if counted else 0
            assert count in (len(committed) - 1, len(committed))
            counts.append(len(committed))
    assert counts == sorted(counts)
    assert len(set(counts)) > 4


def test_what_is_set_aside_or_removed_is_so_in_the_mirror(tmp_path: Path) -> None:
    place = str(tmp_path / "mirror")
    run = begun(tmp_path / "run")
    copied(run, place)
    RunDir(run).quarantine("generate")
    (run / "empty").unlink()
    copied(run, place)
    there = fetched(place, tmp_path / "other")
    assert there == tree(run)
    assert there["quarantine/generate-1/generate/rows/sequences/w_0-0.parquet"] == b"rows 0" * 100
    assert not [path for path in there if path.startswith("generate/") or path == "empty"]


def test_the_mirror_of_another_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    place = str(tmp_path / "mirror")
    one, other = begun(tmp_path / "one"), begun(tmp_path / "other")
    copied(one, place)
    before = ObjectStore(place).names()
    with pytest.raises(RunError) as refused:
        copied(other, place)
    said = str(refused.value)
    assert f"run.mirror={place} holds another run than {other}, or went on without it" in said
    assert f"in {one} was the last to write there. Give an empty run.dir to go on from the mirror" in said
    assert ObjectStore(place).names() == before
    assert copied(one, place)["mirror"]["complete"] is True


def test_a_place_with_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    place = str(tmp_path / "mirror")
    with ObjectStore(place).writing("precious.txt") as stream:
        stream.write(b"years of work")
    with pytest.raises(RunError, match=r"holds files that are no mirror. Give an empty place"):
        copied(begun(tmp_path / "run"), place)
    assert ObjectStore(place).names() == {"precious.txt"}


def test_a_store_that_cannot_be_reached_is_refused_before_the_work(tmp_path: Path) -> None:
    place = "s3://bucket/run?scheme=http&endpoint_override=127.0.0.1:1&region=us-east-1"
    with pytest.raises(RunError, match=r"run.mirror=s3://bucket/run cannot be used: OSError: .*[Cc]onnect"):
        mirrored(nobody, str(tmp_path / "run"), place)  # type: ignore[arg-type]
    assert tree(tmp_path / "run") == {}


def test_a_bucket_that_is_not_there_is_refused(bucket: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"run.mirror=s3://none/run cannot be used: .*bucket"):
        copied(begun(tmp_path / "run"), bucket.format("run").replace("s3://bucket/", "s3://none/"))


def test_a_run_that_another_job_writes_to_is_not_mirrored_twice(tmp_path: Path) -> None:
    run = RunDir(begun(tmp_path / "run"))
    with WriterLock(run), pytest.raises(RunBusy):
        copied(run.path, str(tmp_path / "mirror"))
    assert not (tmp_path / "mirror").exists()


def test_a_second_machine_takes_the_run_over_and_stops_the_first(place: str, tmp_path: Path) -> None:
    first, second = begun(tmp_path / "first"), tmp_path / "second"
    stopped = []
    with Mirror(first, place, lambda: stopped.append("first")) as one:
        one.copy()
        with Mirror(second, place, nobody) as other:
            write(second / "generate" / "rows" / "sequences" / "w_2-0.parquet", b"the second's")
            other.copy()
            write(first / "generate" / "rows" / "sequences" / "w_3-0.parquet", b"the first's")
            one._try()
            one._try()
    assert stopped == ["first"]
    told = one.told(dict(COMPLETE) | {"stopped_by": "SIGTERM"})
    assert told["mirror"]["complete"] is False
    assert told["stopped_by"].startswith("the run went on elsewhere, by the job of 20")
    assert told["stopped_by"].endswith(f"in {second}")
    assert other.told(dict(COMPLETE))["mirror"]["complete"] is True
    assert fetched(place, tmp_path / "third") == tree(second)
    with pytest.raises(RunError, match="went on without it"):
        copied(first, place)
    assert index.objects(index.read(ObjectStore(place))) == ObjectStore(place).names(index.FILES)


def test_a_command_whose_run_went_on_elsewhere_ends_and_says_where(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, place, second = begun(tmp_path / "run"), tmp_path / "mirror", tmp_path / "second"
    monkeypatch.setattr(mirror_module, "EVERY_S", 0.05)

    def work(_: Any) -> dict[str, Any]:
        copied(second, str(place))
        try:
            threading.Event().wait()
        except SystemExit:
            return COMPLETE | {"status": "stopped", "stopped_by": "SIGTERM"}
        raise AssertionError

    assert main("", work, lambda _: "", words(run, place)) == 1
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["status"], summary["mirror"]["complete"]) == ("stopped", False)
    assert summary["stopped_by"].startswith("the run went on elsewhere, by the job of 20")
    assert summary["stopped_by"].endswith(f"in {second}")


def test_a_store_that_goes_away_does_not_stop_the_job_and_the_summary_says_how_far_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, place = begun(tmp_path / "run"), tmp_path / "mirror"
    copied(run, str(place))

    def work() -> dict[str, Any]:
        append(run / "logs" / "generate.jsonl", "more\n")
        place.rename(tmp_path / "unplugged")
        return dict(COMPLETE)

    summary = mirrored(work, str(run), str(place))
    assert (summary["status"], summary["mirror"]["complete"]) == ("complete", False)
    assert summary["warnings"] == [
        f"run.mirror={place} lacks all that this job wrote: FileNotFoundError: owner.json is gone"
    ]
    assert capsys.readouterr().err.count("is behind: FileNotFoundError") == 1
    (tmp_path / "unplugged").rename(place)
    assert copied(run, str(place))["mirror"]["complete"] is True
    assert fetched(str(place), tmp_path / "other") == tree(run)


def test_a_job_that_is_stopped_waits_for_its_last_copy_only_as_long_as_ray_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, place = begun(tmp_path / "run"), str(tmp_path / "mirror")
    monkeypatch.setenv("RAY_JOB_STOP_WAIT_TIME_S", "0.2")
    reached, free = threading.Event(), threading.Event()
    copy = Mirror.copy

    def slow(mirror: Mirror) -> None:
        reached.set()
        free.wait()
        copy(mirror)

    monkeypatch.setattr(Mirror, "copy", slow)
    summary = mirrored(lambda: COMPLETE | {"status": "stopped", "stopped_by": "generate: SIGTERM"}, str(run), place)
    free.set()
    assert reached.is_set()
    assert summary["mirror"] == {"place": place, "copied": None, "complete": False}
    assert summary["warnings"][0].endswith("lacks all that this job wrote: the end of the job left no time for it")


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), RunError("refused")])
def test_the_last_copy_is_made_where_the_work_fails(error: Exception, tmp_path: Path) -> None:
    run, place = begun(tmp_path / "run"), str(tmp_path / "mirror")

    def work() -> dict[str, Any]:
        gone_on(run)
        raise error

    with pytest.raises(type(error)):
        mirrored(work, str(run), place)
    assert fetched(place, tmp_path / "other") == tree(run)


def test_a_fetch_that_was_killed_goes_on_and_is_no_run_before_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, other, place = begun(tmp_path / "run"), tmp_path / "other", str(tmp_path / "mirror")
    copied(run, place)
    read: list[str] = []
    reading = ObjectStore.reading

    def dying(store: ObjectStore, name: str) -> Any:
        if name.startswith(index.FILES):
            if len(read) == 4:
                raise OSError("killed")
            read.append(name)
        return reading(store, name)

    monkeypatch.setattr(index, "_STREAMS", 1)
    with monkeypatch.context() as patch:
        patch.setattr(ObjectStore, "reading", dying)
        with pytest.raises(RunError, match="killed"):
            copied(other, place)
    assert tree(other) == {}
    before = fetched(place, tmp_path / "third")
    again: list[str] = []

    def noted(store: ObjectStore, name: str) -> Any:
        again.append(name)
        return reading(store, name)

    monkeypatch.setattr(ObjectStore, "reading", noted)
    copied(other, place)
    assert tree(other) == before
    assert len(read) == 4
    assert not set(read) & set(again)


def test_a_run_that_was_fetched_but_not_put_in_place_is_put_in_place(tmp_path: Path) -> None:
    run, other, place = begun(tmp_path / "run"), tmp_path / "other", str(tmp_path / "mirror")
    copied(run, place)
    copied(other, place)
    whole = tree(other)
    (other / ".fetched").mkdir()
    (other / "train").rename(other / ".fetched" / "train")
    assert copied(other, place)["mirror"]["complete"] is True
    assert tree(other) == whole
    assert fetched(place, tmp_path / "third") == whole


@pytest.mark.parametrize(
    ("path", "entry"),
    [
        ("../outside", {"size": 0, "mtime": 0, "parts": []}),
        ("/tmp/outside", {"size": 0, "mtime": 0, "parts": []}),
        ("train/best", {"link": "../../outside"}),
        ("train/best", {"link": "/etc"}),
        ("train/best", {"link": ".."}),
    ],
)
def test_an_index_cannot_lead_out_of_the_run(path: str, entry: dict[str, Any], tmp_path: Path) -> None:
    place = ObjectStore(str(tmp_path / "mirror"))
    index.write(place, {path: entry})
    with pytest.raises(RunError, match="is not what was written there"):
        fetched(str(tmp_path / "mirror"), tmp_path / "deep" / "run")
    assert not list(tmp_path.rglob("outside"))
    assert not list((tmp_path / "deep").rglob("best"))


def test_damage_in_the_mirror_is_named_and_nothing_of_it_becomes_a_run(tmp_path: Path) -> None:
    run, mirror = begun(tmp_path / "run"), tmp_path / "mirror"
    copied(run, str(mirror))
    whole = (mirror / "index.json").read_text()
    [rows] = (mirror / "files" / "generate" / "rows" / "sequences").iterdir()
    rows.write_bytes(rows.read_bytes().replace(b"0", b"1", 1))
    with pytest.raises(RunError, match=r"files/generate/rows/sequences/w_0-0.parquet~.* is not what was written there"):
        copied(tmp_path / "other", str(mirror))
    for text in (whole.replace("manifest.json", "manifest.jsan"), whole[: len(whole) // 2], "[]"):
        (mirror / "index.json").write_text(text)
        with pytest.raises(RunError, match=r"index.json is not what was written there"):
            copied(tmp_path / "other", str(mirror))
    assert tree(tmp_path / "other") == {}


def words(run: Path, mirror: Path) -> list[str]:
    return ["smollm2-cpu", f"run.dir={run}", f"run.mirror={mirror}", "target.model=m", "prompts.path=p"]


def test_a_command_mirrors_its_run_and_its_dry_run_only_says_what_would_be_fetched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, mirror, other = begun(tmp_path / "run"), tmp_path / "mirror", tmp_path / "other"
    plans: list[str] = []

    def dry_run(_: Any) -> str:
        plans.append("planned")
        return "the plan"

    assert main("", lambda _: dict(COMPLETE), dry_run, words(run, mirror)) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["mirror"]["complete"] is True
    owner = (mirror / "owner.json").read_text()
    assert main("", lambda _: dict(COMPLETE), dry_run, [*words(other, mirror), "--dry-run"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == f"{other} is empty: the job fetches 9 files from run.mirror={mirror} and goes on from there"
    assert plans == []
    assert main("", lambda _: dict(COMPLETE), dry_run, [*words(run, mirror), "--dry-run"]) == 0
    assert plans == ["planned"]
    assert (mirror / "owner.json").read_text() == owner  # a dry run takes nothing over
    assert not other.exists()


def test_a_command_whose_mirror_is_of_another_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_json(tmp_path / "mirror" / "owner.json", {"token": "of another"})
    run = begun(tmp_path / "run")
    assert main("", lambda _: nobody(), lambda _: "", words(run, tmp_path / "mirror")) == 2  # type: ignore[func-returns-value,arg-type]
    out = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert out["status"] == "refused"
    assert "holds another run than" in out["stopped_by"]


def test_what_lies_on_another_disk_is_mirrored_too_and_comes_back_as_a_folder(tmp_path: Path, place: str) -> None:
    run, other = begun(tmp_path / "run"), tmp_path / "other"
    write(tmp_path / "nvme" / "shards" / "0.parquet", b"states")
    write(tmp_path / "nvme" / "about.json", b"{}")
    (run / "capture").symlink_to(tmp_path / "nvme")
    (run / "notes.txt").symlink_to(tmp_path / "nvme" / "about.json")
    whole = tree(run) | {"capture/shards/0.parquet": b"states", "capture/about.json": b"{}", "notes.txt": b"{}"}
    del whole["capture"]
    assert mirrored(lambda: dict(COMPLETE), str(run), place)["mirror"]["complete"]
    shutil.rmtree(tmp_path / "nvme")
    mirrored(lambda: dict(COMPLETE), str(other), place)
    assert tree(other) == whole


def test_a_link_to_what_it_is_in_and_a_name_that_is_no_text_are_said_and_do_not_end_the_mirror(tmp_path: Path) -> None:
    run, place = begun(tmp_path / "run"), str(tmp_path / "mirror")
    for odd in (run / "generate" / "round", Path(os.fsdecode(bytes(run) + b"/\xff"))):
        if odd.name == "round":
            odd.symlink_to(run)
        else:
            odd.write_bytes(b"x")
        told = mirrored(lambda: dict(COMPLETE), str(run), place)
        assert not told["mirror"]["complete"]
        [warning] = told["warnings"]
        assert "is a link to what it is in" in warning or "surrogates not allowed" in warning
        odd.unlink()
        assert mirrored(lambda: dict(COMPLETE), str(run), place)["mirror"]["complete"]
