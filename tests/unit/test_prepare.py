"""Prompt partitions out of files and public sets: what is dropped, what is set aside, and what is refused."""

import errno
import json
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from eagle3_ray import instruction_sets, prepare
from eagle3_ray.commands.prepare import main
from eagle3_ray.config import ConfigError
from eagle3_ray.instruction_sets import PUBLIC_SETS
from eagle3_ray.prompts import PromptSourceError, find, parse, read
from eagle3_ray.rendering import Renderer
from eagle3_ray.runs import FingerprintMismatch, RunBusy, RunDir, RunError, WriterLock
from tests.runs import make_run, sequence
from tests.tiny_target import IM_END

REPOSITORY = Path(__file__).resolve().parents[2]
DUCKS = "Janet’s ducks lay 16 eggs per day. She eats three for breakfast every morning and bakes muffins."


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _write(path: Path, rows: Sequence[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def _prompts(path: Path, texts: Sequence[str]) -> str:
    """A --source for a file of these prompts, named by the file."""
    return f"{path.name.removesuffix('.jsonl')}={_write(path, [{'prompt': text} for text in texts])}"


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _questions(out: Path, name: str) -> list[str]:
    return [row["messages"][0]["content"] for row in _lines(out / f"{name}.jsonl")]


def _balanced(counts: dict[str, int]) -> bool:
    return counts["read"] == sum(counts[fate] for fate in ("duplicates", "contaminated", "bad", "over_limit", "kept"))


# --- questions by the target


def test_questions_that_the_target_ended_become_a_partition(tmp_path: Path, target: Path) -> None:
    def said(name: str, text: str, reason: str = "stop") -> dict[str, Any]:
        ids = Renderer(target).encode(text)
        end = [IM_END] if reason == "stop" else []
        return {**sequence(name, [1, 2], [*ids, *end]), "finish_reason": reason}

    rows = [
        said("0", " Why is grass green?\n"),
        said("1", "why is grass  green?"),
        said("2", "Count to", "length"),
        said("3", "Ask.<|im_end|>\n<|im_start|>assistant\nNo."),
        said("4", "Who was Ada?"),
    ]
    run = make_run(tmp_path / "run", rows)
    manifest = run.manifest()
    manifest["generate"]["config"] = {"target": {"model": str(target), "trust_remote_code": False}}
    (run.path / "manifest.json").write_text(json.dumps(manifest))
    summary = prepare.run(str(tmp_path / "out"), [f"self=run://{run.path}"])
    assert summary["sources"]["self"] == {
        "read": 3, "duplicates": 1, "contaminated": 0, "bad": 0, "over_limit": 0, "kept": 2,
    }  # fmt: skip
    assert _questions(tmp_path / "out", "self") == ["Why is grass green?", "Who was Ada?"]
    with pytest.raises(PromptSourceError, match="no complete generate run is there"):
        prepare.run(str(tmp_path / "other"), [f"self=run://{tmp_path / 'nothing'}"])


# --- partitions


def test_every_row_read_is_kept_or_counted_under_the_reason_why_not(tmp_path: Path) -> None:
    rows = [
        {"id": "a", "prompt": "kept one"},
        {"id": "b", "prompt": "  Kept\n ONE "},
        {"id": "c", "prompt": f"Solve this. {DUCKS} How many are left?"},
        {"id": "d", "prompt": ""},
        "{broken",
        {"id": "e", "messages": [_user("kept two")]},
    ]
    _write(tmp_path / "mine.jsonl", rows)
    _write(tmp_path / "gsm.jsonl", [{"id": "test-0", "question": DUCKS}, {"id": "test-1", "question": "Why?"}])
    out = tmp_path / "out"
    summary = prepare.run(str(out), [f"mine={tmp_path / 'mine.jsonl'}"], [str(tmp_path / "gsm.jsonl")])
    assert summary == {
        "stage": "prepare",
        "status": "complete",
        "stopped_by": None,
        "out": str(out),
        "sources": {
            "mine": {"read": 6, "duplicates": 1, "contaminated": 1, "bad": 2, "over_limit": 0, "kept": 2},
        },
        "against": {"gsm": {"rows": 2, "contaminated": 1}},
        "ngram": 13,
        "limit": None,
        "warnings": ["mine: 2 of 6 rows cannot be used; the reasons are in _set_aside.jsonl."],
    }
    assert _lines(out / "mine.jsonl") == [
        {"id": "a", "messages": [_user("kept one")]},
        {"id": "e", "messages": [_user("kept two")]},
    ]
    contaminated, empty, broken = _lines(out / "_set_aside.jsonl")
    assert contaminated == {
        "source": "mine",
        "from": f"{tmp_path / 'mine.jsonl'}:3",
        "fate": "contaminated",
        "reason": "shares with gsm, test-0: janet s ducks lay 16 eggs per day she eats three for breakfast",
        "row": {"id": "c", "messages": [_user(f"Solve this. {DUCKS} How many are left?")]},
    }
    assert (empty["fate"], empty["reason"]) == ("bad", "prompt is not a text with content")
    assert (broken["from"], broken["row"]) == (f"{tmp_path / 'mine.jsonl'}:5", "{broken\n")


def test_of_two_copies_the_one_in_the_earlier_source_stays(tmp_path: Path) -> None:
    first, second = _prompts(tmp_path / "first.jsonl", ["x", "y"]), _prompts(tmp_path / "second.jsonl", ["Y", "z"])
    summary = prepare.run(str(tmp_path / "out"), [first, second])
    assert (_questions(tmp_path / "out", "first"), _questions(tmp_path / "out", "second")) == (["x", "y"], ["z"])
    assert summary["sources"]["second"]["duplicates"] == 1
    prepare.run(str(tmp_path / "turned"), [second, first])
    assert (_questions(tmp_path / "turned", "first"), _questions(tmp_path / "turned", "second")) == (["x"], ["Y", "z"])


def test_conversations_that_differ_in_a_turn_a_role_or_a_tool_are_not_duplicates(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    rows = [
        {"messages": [_user("a")]},
        {"messages": [_user("a"), _user("b")]},
        {"messages": [_user("a b")]},
        {"messages": [{"role": "system", "content": "s"}, _user("a")]},
        {"messages": [_user("a")], "tools": [tool]},
        {"messages": [_user("a")], "chat_template_kwargs": {"enable_thinking": True}},
    ]
    _write(tmp_path / "a.jsonl", [*rows, *rows])
    summary = prepare.run(str(tmp_path / "out"), [f"a={tmp_path / 'a.jsonl'}"])
    assert summary["sources"]["a"] == {
        "read": 12, "duplicates": 6, "contaminated": 0, "bad": 0, "over_limit": 0, "kept": 6
    }  # fmt: skip


def test_the_generate_job_reads_each_kept_row_as_it_would_have_read_the_source(tmp_path: Path) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    rows = [
        {
            "id": "t",
            "messages": [
                {"role": "system", "content": "s"},
                _user("Größe?\u2028世界"),
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "42", "tool_call_id": "1"},
                {"role": "assistant", "content": "dropped"},
                _user("next"),
                {"role": "assistant", "content": "dropped"},
            ],
            "tools": [{"type": "function", "function": {"name": "f"}}],
            "chat_template_kwargs": {"enable_thinking": False},
        },
        {"id": "parts", "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]},
    ]
    path = _write(tmp_path / "a.jsonl", rows)
    prepare.run(str(tmp_path / "out"), [f"tools={path}"], against=[_prompts(tmp_path / "e.jsonl", ["x"]).split("=")[1]])
    assert "世界" in (tmp_path / "out" / "tools.jsonl").read_text()  # people read these files
    (source,) = find(str(tmp_path / "out"))
    assert source.partition == "tools"
    assert [parse(raw, "") for _, raw in read(source)] == [parse(json.dumps(row).encode(), "") for row in rows]


def test_an_id_that_two_files_of_a_source_share_is_made_unique(tmp_path: Path) -> None:
    for name in ("a", "b"):
        _write(tmp_path / "set" / f"{name}.jsonl", [{"id": 0, "prompt": f"{name} first"}, {"prompt": f"{name} second"}])
    prepare.run(str(tmp_path / "out"), [f"set={tmp_path / 'set'}"])
    ids = [row["id"] for row in _lines(tmp_path / "out" / "set.jsonl")]
    assert ids[:2] == ["0", "a.jsonl:2"]
    assert ids[2].startswith("0-")
    assert ids[3] == "b.jsonl:2"
    assert len(set(ids)) == 4


def test_half_of_a_surrogate_pair_is_a_bad_row(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.jsonl", ['{"prompt": "half \\ud83d"}', '{"prompt": "whole \\ud83d\\ude00"}'])
    prepare.run(str(tmp_path / "out"), [f"a={path}"])
    assert _questions(tmp_path / "out", "a") == ["whole 😀"]
    assert "not valid Unicode" in _lines(tmp_path / "out" / "_set_aside.jsonl")[0]["reason"]


def test_tools_nested_to_any_depth_end_as_kept_or_bad_rows(tmp_path: Path) -> None:
    nested = ['{"prompt": "a", "tools": ' + "[" * depth + "]" * depth + "}" for depth in range(1, 1200)]
    summary = prepare.run(str(tmp_path / "out"), [f"a={_write(tmp_path / 'a.jsonl', nested)}"])
    counts = summary["sources"]["a"]
    assert _balanced(counts)
    assert counts["kept"] > 500
    assert counts["bad"] > 100
    assert {row["reason"].split(":")[0] for row in _lines(tmp_path / "out" / "_set_aside.jsonl")} == {"not JSON"}


def test_a_usual_system_prompt_in_an_evaluation_set_marks_nothing(tmp_path: Path) -> None:
    system = {"role": "system", "content": DUCKS}
    evaluation = _write(tmp_path / "e.jsonl", [{"messages": [system, _user("a question")]}])
    path = _write(tmp_path / "a.jsonl", [{"messages": [system, _user("another question")]}])
    summary = prepare.run(str(tmp_path / "out"), [f"a={path}"], [str(evaluation)])
    assert summary["sources"]["a"]["kept"] == 1


# --- caps


def test_a_larger_cap_keeps_all_that_a_smaller_one_kept_in_any_order_of_the_file(tmp_path: Path) -> None:
    texts = [f"question {number}" for number in range(300)]
    source = _prompts(tmp_path / "a.jsonl", texts)
    backwards = _prompts(tmp_path / "b.jsonl", texts[::-1])
    kept = {}
    for limit in (1, 20, 100, 300, 1000):
        summary = prepare.run(str(tmp_path / f"out{limit}"), [source], limit=limit)
        kept[limit] = _questions(tmp_path / f"out{limit}", "a")
        assert summary["sources"]["a"]["over_limit"] == max(0, 300 - limit)
        assert _balanced(summary["sources"]["a"])
    assert [len(rows) for rows in kept.values()] == [1, 20, 100, 300, 300]
    assert set(kept[1]) < set(kept[20]) < set(kept[100]) < set(kept[300])
    assert kept[300] == texts
    assert kept[100] == [text for text in texts if text in set(kept[100])]  # the order of the file stays
    numbers = [int(text.split()[1]) for text in kept[100]]
    assert 110 < sum(numbers) / 100 < 190  # drawn from all of the file: 149.5 expected, 7.1 the standard error
    prepare.run(str(tmp_path / "backwards"), [backwards], limit=20)
    assert set(_questions(tmp_path / "backwards", "b")) == set(kept[20])


def test_a_cap_on_one_source_takes_nothing_from_another(tmp_path: Path) -> None:
    first = _prompts(tmp_path / "first.jsonl", [f"q {number}" for number in range(50)])
    second = _prompts(tmp_path / "second.jsonl", [f"q {number}" for number in range(40, 60)])
    prepare.run(str(tmp_path / "small"), [first, second], limit=5)
    prepare.run(str(tmp_path / "large"), [first, second], limit=10)
    for name in ("first", "second"):
        assert set(_questions(tmp_path / "small", name)) < set(_questions(tmp_path / "large", name))


# --- the folder


def test_the_same_command_again_changes_nothing_and_gives_the_same_summary(tmp_path: Path) -> None:
    source, out = _prompts(tmp_path / "a.jsonl", ["x", "y"]), tmp_path / "deep" / "out"
    first = prepare.run(str(out), [source])
    before = {file: file.stat().st_mtime_ns for file in [out, *out.iterdir()]}
    assert prepare.run(str(out), [source]) == first
    assert {file: file.stat().st_mtime_ns for file in [out, *out.iterdir()]} == before
    assert [path.name for path in out.parent.iterdir()] == ["out"]  # nothing left beside it


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda setting, path: setting.update(limit=1), "--limit was None and is now 1"),
        (lambda setting, path: setting.update(ngram=8), "--ngram was 13 and is now 8"),
        (lambda setting, path: setting.update(against=[str(path / "b.jsonl")]), "--against was None and is now 1 file"),
        (
            lambda setting, path: setting["sources"].append(f"b={path / 'b.jsonl'}"),
            "sources in order was a and is now a, b",
        ),
        (lambda setting, path: _prompts(path / "a.jsonl", ["x", "Y"]), "--source a was 1 file, sha256"),
    ],
)
def test_a_folder_made_from_other_settings_or_files_is_refused(
    tmp_path: Path, change: Callable[[dict[str, Any], Path], Any], said: str
) -> None:
    setting: dict[str, Any] = {"sources": [_prompts(tmp_path / "a.jsonl", ["x", "y"])]}
    _prompts(tmp_path / "b.jsonl", ["z"])
    prepare.run(str(tmp_path / "out"), **setting)
    before = (tmp_path / "out" / "a.jsonl").read_bytes()
    change(setting, tmp_path)
    with pytest.raises(FingerprintMismatch, match=said):
        prepare.run(str(tmp_path / "out"), **setting)
    assert (tmp_path / "out" / "a.jsonl").read_bytes() == before


def test_sources_that_moved_with_the_same_content_are_the_same(tmp_path: Path) -> None:
    source = _prompts(tmp_path / "a.jsonl", ["x"])
    first = prepare.run(str(tmp_path / "out"), [source])
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "a.jsonl").rename(tmp_path / "elsewhere" / "a.jsonl")
    assert prepare.run(str(tmp_path / "out"), [f"a={tmp_path / 'elsewhere' / 'a.jsonl'}"]) == first


def test_a_folder_of_something_else_a_damaged_one_and_a_changed_one_are_refused(tmp_path: Path) -> None:
    source, out = _prompts(tmp_path / "a.jsonl", ["x"]), tmp_path / "out"
    prepare.run(str(out), [source])
    (out / "a.jsonl").write_text("")
    with pytest.raises(RunError, match=r"a\.jsonl is gone or was changed"):
        prepare.run(str(out), [source])
    for damage in ("{", "[]", "{}"):
        (out / "prepared.json").write_text(damage)
        with pytest.raises(RunError, match=r"prepared\.json is damaged .*Move .* aside"):
            prepare.run(str(out), [source])
    (out / "prepared.json").unlink()
    with pytest.raises(RunError, match="not made by the prepare job"):
        prepare.run(str(out), [source])
    with pytest.raises(RunError, match="not made by the prepare job"):
        prepare.run(str(tmp_path / "a.jsonl"), [source])


def test_an_empty_folder_is_filled_and_what_a_killed_job_left_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    _write(tmp_path / ".out.preparing" / "data" / "a.jsonl", ["half"])
    _write(tmp_path / ".out.preparing" / "data" / "other.jsonl", ["half"])
    prepare.run(str(tmp_path / "out"), [_prompts(tmp_path / "a.jsonl", ["x"])])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "_set_aside.jsonl",
        "a.jsonl",
        "prepared.json",
    ]
    assert not (tmp_path / ".out.preparing").exists()


def test_a_job_that_fails_half_way_leaves_no_folder(tmp_path: Path) -> None:
    good = _prompts(tmp_path / "a.jsonl", ["x"])
    (tmp_path / "b.jsonl.gz").write_bytes(b"\x1f\x8b broken")
    with pytest.raises(PromptSourceError, match=r"b\.jsonl\.gz cannot be read"):
        prepare.run(str(tmp_path / "out"), [good, f"b={tmp_path / 'b.jsonl.gz'}"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl.gz"]


def test_two_jobs_do_not_write_the_same_folder(tmp_path: Path) -> None:
    source = _prompts(tmp_path / "a.jsonl", ["x"])
    with WriterLock(RunDir(tmp_path / ".out.preparing")), pytest.raises(RunBusy):
        prepare.run(str(tmp_path / "out"), [source])


def test_a_job_that_waited_while_another_made_the_folder_takes_what_that_one_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, out, enter = _prompts(tmp_path / "a.jsonl", ["x"]), str(tmp_path / "out"), WriterLock.__enter__
    made: list[Any] = []

    def let_another_go_first(lock: WriterLock) -> WriterLock:
        monkeypatch.setattr(WriterLock, "__enter__", enter)
        made.append(prepare.run(out, [source]))
        return enter(lock)

    monkeypatch.setattr(WriterLock, "__enter__", let_another_go_first)
    assert prepare.run(out, [source]) == made[0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "out"]


# --- what is refused before anything is written


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"sources": []}, ConfigError, "--source is missing"),
        ({"sources": ["ultrachatt"]}, ConfigError, "--source ultrachatt is not a known public set .*ultrachat"),
        ({"sources": ["_a={a}"]}, ConfigError, "name '_a' has to consist of"),
        ({"sources": ["../a={a}"]}, ConfigError, "has to consist of"),
        ({"sources": ["a="]}, ConfigError, "nothing behind the '='"),
        ({"sources": ["a={a}", "a={b}"]}, ConfigError, "a is given twice"),
        ({"limit": 0}, ConfigError, "--limit 0 has to be at least 1"),
        ({"ngram": 0}, ConfigError, "--ngram 0 has to be at least 1"),
        ({"out": "s3://bucket/x"}, ConfigError, "has to be a local folder"),
        ({"sources": ["a={gone}"]}, PromptSourceError, "does not exist"),
        ({"against": ["{gone}"]}, PromptSourceError, "does not exist"),
        ({"sources": ["a={empty}"]}, PromptSourceError, "--source a holds no rows"),
        ({"against": ["{empty}"]}, PromptSourceError, "empty.jsonl holds no rows"),
        ({"sources": ["a={bad}"]}, PromptSourceError, "none of its 1 rows can be used.*bad.jsonl:1: none of messages"),
        ({"against": ["{bad}"]}, PromptSourceError, "bad.jsonl, row 1: none of .* has to be usable"),
    ],
)
def test_a_setting_that_cannot_work_is_named_with_its_remedy(
    tmp_path: Path, change: dict[str, Any], error: type[Exception], said: str
) -> None:
    paths = {name: str(tmp_path / f"{name}.jsonl") for name in ("a", "b", "gone", "empty", "bad")}
    for name in ("a", "b"):
        _prompts(Path(paths[name]), [name])
    _write(Path(paths["empty"]), [])
    _write(Path(paths["bad"]), [{"text": "no question"}])
    setting: dict[str, Any] = {"out": str(tmp_path / "out"), "sources": [f"a={paths['a']}"], **change}
    for field in ("sources", "against"):
        setting[field] = [text.format(**paths) for text in setting.get(field, [])]
    with pytest.raises(error, match=said):
        prepare.run(**setting)
    assert not (tmp_path / "out").exists()


# --- public sets


def test_a_public_set_is_streamed_from_its_configuration_and_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    class Datasets:
        @staticmethod
        def load_dataset(*arguments: Any, **options: Any) -> list[Any]:
            asked.append((arguments, options))
            return [{"question": "How many?", "answer": "42"}, {"question": "How  MANY?", "answer": "43"}]

    monkeypatch.setitem(sys.modules, "datasets", Datasets)
    summary = prepare.run(str(tmp_path / "out"), ["gsm8k"])
    assert asked == [(("openai/gsm8k", "main"), {"split": "train", "streaming": True})]
    assert _lines(tmp_path / "out" / "gsm8k.jsonl") == [{"id": "openai/gsm8k:1", "messages": [_user("How many?")]}]
    assert summary["sources"]["gsm8k"]["duplicates"] == 1
    assert prepare.run(str(tmp_path / "out"), ["gsm8k"]) == summary
    assert len(asked) == 1  # the second time nothing is downloaded


def test_a_dataset_by_name_is_a_source_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="the optional extra `datasets` is not installed")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    _write(tmp_path / "set" / "train.jsonl", [{"instruction": "Name", "input": "a colour"}])
    prepare.run(str(tmp_path / "out"), [f"colours=hf://{tmp_path / 'set'}:train"])
    assert _questions(tmp_path / "out", "colours") == ["Name\n\na colour"]


def test_a_public_set_without_network_or_without_the_extra_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Offline:
        @staticmethod
        def load_dataset(*arguments: Any, **options: Any) -> list[Any]:
            raise ConnectionError("no network")

    monkeypatch.setitem(sys.modules, "datasets", Offline)
    with pytest.raises(PromptSourceError, match=r"ultrachat_200k.* cannot be read: no network. .*give a file"):
        prepare.run(str(tmp_path / "out"), ["ultrachat"])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(PromptSourceError, match=r"pip install 'eagle3_ray\[datasets\]'"):
        list(instruction_sets.public_rows(PUBLIC_SETS["ultrachat"]))


# --- the command


def test_the_command_ends_with_its_summary_and_the_exit_code_tells_setup_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def job(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["eagle3-prepare", *arguments])
        code = main()
        said = capsys.readouterr()
        return code, said.out, said.err

    first, second = _prompts(tmp_path / "a.jsonl", ["x", ""]), _prompts(tmp_path / "b.jsonl", ["y"])
    against = second.split("=")[1]
    code, out, err = job(str(tmp_path / "out"), "--source", first, second, "--limit", "5", "--against", against)
    assert code == 0, err
    summary = json.loads(out.splitlines()[-1])
    assert {name: counts["kept"] for name, counts in summary["sources"].items()} == {"a": 1, "b": 0}
    assert err.splitlines() == [
        "WARNING: a: 1 of 2 rows cannot be used; the reasons are in _set_aside.jsonl.",
        "WARNING: b: none of its 1 rows is kept.",
    ]
    code, out, err = job(str(tmp_path / "out"), "--source", first)
    assert (code, json.loads(out)["status"]) == (2, "refused")
    assert err.startswith("FingerprintMismatch: ")


def test_a_full_disk_stops_the_command_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: Any, **settings: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "out/a.jsonl")

    monkeypatch.setattr(prepare, "run", full)
    monkeypatch.setattr(sys, "argv", ["prepare.py", str(tmp_path / "out"), "--source", "a=b"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(REPOSITORY / "jobs" / "prepare.py"), run_name="__main__")
    assert end.value.code == 1
    assert capsys.readouterr().err.startswith("STOPPED: The disk is full (out/a.jsonl). Free some space")


# --- the real prompts


def test_of_the_real_training_prompts_none_holds_a_test_question_and_all_test_questions_hold_themselves(
    tmp_path: Path, shared_data: Path
) -> None:
    evaluation = [str(path) for path in sorted((shared_data / "eval").glob("*.jsonl"))]
    sources = [f"{path.stem}={path}" for path in sorted((shared_data / "prompts").glob("*.jsonl"))]
    summary = prepare.run(str(tmp_path / "out"), sources, evaluation)
    assert {name: counts["kept"] for name, counts in summary["sources"].items()} == {
        "B1_gsm8k": 2000, "B2_codegen": 2000, "B3_seed_tasks": 175
    }  # fmt: skip
    itself = prepare.run(str(tmp_path / "itself"), [f"test={path}" for path in evaluation[:1]], evaluation)
    assert itself["against"] == {
        "gsm8k_test": {"rows": 80, "contaminated": 80},
        "mt_bench": {"rows": 80, "contaminated": 0},
    }
