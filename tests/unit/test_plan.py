"""The plan: which prompts, in which order, how many rows. Held against a selection in plain Python.

Parts are written by the same `Render` that Ray runs; `choose` is the task that Ray runs behind it.
"""

import hashlib
import json
import random
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from eagle3_ray import plan, plan_units
from eagle3_ray.plan import PartitionPlan, Plan, PlanSettings, Render, TargetTokens, _read_source, later_turns
from eagle3_ray.plan_units import choose
from eagle3_ray.prompts import PromptSourceError, Source, find
from eagle3_ray.records import SEQUENCE_SCHEMA
from eagle3_ray.runs import RunError
from tests.tiny_target import VOCAB_SIZE

Rows = dict[str, list[Any]]
"""Rows of each file; a file `B1/x` is of partition `B1`."""


@dataclass
class Made:
    """A plan as it was written."""

    counts: dict[str, dict[str, Any]]
    units: list[dict[str, Any]]
    folder: Path

    @property
    def chosen(self) -> list[dict[str, Any]]:
        return [unit for unit in self.units if unit["reason"] is None]

    @property
    def bad(self) -> list[dict[str, Any]]:
        return [unit for unit in self.units if unit["reason"] is not None]

    @property
    def names(self) -> set[tuple[str, str]]:
        return {(unit["partition"], unit["prompt_id"]) for unit in self.chosen}


def _settings(folder: Path | str = "/no/tokenizer", **changes: Any) -> PlanSettings:
    return replace(PlanSettings([], str(folder), {}, VOCAB_SIZE), **changes)


def _raw(row: Any) -> bytes:
    return row if isinstance(row, bytes) else json.dumps(row).encode()


def _make(folder: Path, files: Rows, settings: PlanSettings | None = None, rows_folder: Path | None = None) -> Made:
    settings = settings or _settings()
    folder.mkdir()
    (folder / "parts").mkdir()
    render = Render(settings)
    for number, (file, rows) in enumerate(files.items()):
        raw = [
            {"partition": file.split("/")[0], "file": file, "line": line, "raw": _raw(row)}
            for line, row in enumerate(rows, start=1)
        ]
        schema = pa.schema(
            [("partition", pa.string()), ("file", pa.string()), ("line", pa.int64()), ("raw", pa.binary())]
        )
        rendered = render(pa.Table.from_pylist(raw, schema=schema))
        pq.write_table(rendered, folder / "parts" / f"{number}.parquet")
    answered = sorted(map(str, (rows_folder or folder / "rows").glob("*/*.parquet")))
    counts = choose(folder, answered, **settings.choice())
    units = [unit for path in sorted((folder / "units").iterdir()) for unit in pq.read_table(path).to_pylist()]
    return Made({count["partition"]: count for count in counts}, units, folder)


def test_a_choice_that_was_killed_is_made_again(tmp_path: Path) -> None:
    made = _make(tmp_path / "plan", {"B1/x": [{"id": "q", "input_ids": [1, 2]}]})
    counts = choose(made.folder, [], **_settings().choice())  # as Ray does with the task of a worker that died
    assert counts == list(made.counts.values())
    assert [path.name for path in (made.folder / "units").iterdir()] == ["000000.parquet"]


def _random_rows(seed: int) -> Rows:
    """Three partitions with duplicates, ids that stand twice, missing ids and bad rows."""
    rng = random.Random(seed)
    files: Rows = {}
    for file in ("B1/x", "B1/y", "B2/x", "B3/x"):
        files[file] = []
        for _ in range(rng.randrange(30, 60)):
            kind = rng.random()
            row: dict[str, Any] = {"id": f"q{rng.randrange(80)}"} if rng.random() < 0.9 else {}
            if kind < 0.1:
                files[file].append({**row, "input_ids": [VOCAB_SIZE]})
            elif kind < 0.3:
                files[file].append({**row, "input_ids": [7, rng.randrange(5)]})
            else:
                files[file].append(
                    {**row, "input_ids": [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 9))]}
                )
    return files


def _rank(partition: str, prompt_id: str) -> int:
    return int.from_bytes(hashlib.md5(f"{partition}\0{prompt_id}".encode()).digest()[8:], "little")


def _select_in_python(files: Rows, settings: PlanSettings) -> dict[str, Counter[str]]:
    """What becomes of the rows, one after the other; and under `NAMES` who was chosen."""
    fates: dict[str, Counter[str]] = {}
    seen: set[tuple[int, ...]] = set()
    ids: set[tuple[str, str]] = set()
    candidates: dict[str, list[tuple[int, str, list[int]]]] = {}
    for file in sorted(files):
        partition = file.split("/")[0]
        fate = fates.setdefault(partition, Counter())
        for line, row in enumerate(files[file], start=1):
            fate["read"] += 1
            prompt_id = row.get("id", f"{file}:{line}")
            tokens = row["input_ids"]
            if max(tokens) >= settings.vocab_size:
                fate["bad"] += 1
            elif settings.dedupe and tuple(tokens) in seen:
                fate["duplicates"] += 1
            elif (partition, prompt_id) in ids:
                fate["bad"] += 1
                seen.add(tuple(tokens))
            else:
                seen.add(tuple(tokens))
                ids.add((partition, prompt_id))
                candidates.setdefault(partition, []).append((_rank(partition, prompt_id), prompt_id, tokens))
    for partition, rows in candidates.items():
        budget = settings.max_tokens_total
        used = 0
        for place, (_, prompt_id, tokens) in enumerate(sorted(rows), start=1):
            used += len(tokens)
            fits = place <= (settings.limit or place) and (budget is None or used <= budget)
            fates[partition]["prompts" if fits else "over_cap"] += 1
            if fits:
                fates[partition][f"id {prompt_id}"] += 1
    return fates


# --- selection


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "changes",
    [{}, {"dedupe": False}, {"limit": 9}, {"max_tokens_total": 60}, {"limit": 12, "max_tokens_total": 40}],
    ids=lambda changes: " ".join(changes) or "all",
)
def test_the_selection_is_that_of_plain_python(tmp_path: Path, seed: int, changes: dict[str, Any]) -> None:
    files, settings = _random_rows(seed), _settings(**changes)
    made = _make(tmp_path / "plan", files, settings)
    expected = _select_in_python(files, settings)
    assert set(made.counts) == set(expected)
    for partition, fate in expected.items():
        count = made.counts[partition]
        assert {name: count[name] for name in ("read", "duplicates", "over_cap", "bad", "prompts")} == {
            name: fate[name] for name in ("read", "duplicates", "over_cap", "bad", "prompts")
        }
        assert {prompt_id for p, prompt_id in made.names if p == partition} == {
            name[3:] for name in fate if name.startswith("id ")
        }
        assert count["read"] == count["prompts"] + count["duplicates"] + count["over_cap"] + count["bad"]
        assert count["expected"] == count["prompts"] + count["bad"]
        mine = [unit for unit in made.chosen if unit["partition"] == partition]
        assert count["prompt_tokens"] == sum(len(unit["prompt_ids"]) for unit in mine)
        assert count["longest_prompt"] == max((len(unit["prompt_ids"]) for unit in mine), default=0)
    assert len(made.units) == sum(count["expected"] for count in made.counts.values())


def test_a_prompt_is_taken_once_within_and_across_partitions_the_first_one_stays(tmp_path: Path) -> None:
    files: Rows = {
        "B2/x": [{"id": "c", "input_ids": [1, 2]}, {"id": "d", "input_ids": [1]}],
        "B1/x": [{"id": "a", "input_ids": [1, 2]}, {"id": "b", "input_ids": [1, 2]}],
    }
    made = _make(tmp_path / "plan", files)
    assert made.names == {("B1", "a"), ("B2", "d")}
    assert (made.counts["B1"]["duplicates"], made.counts["B2"]["duplicates"]) == (1, 1)
    assert _make(tmp_path / "again", files, _settings(dedupe=False)).names == {
        ("B1", "a"),
        ("B1", "b"),
        ("B2", "c"),
        ("B2", "d"),
    }


def test_an_id_that_stands_twice_in_a_partition_is_a_bad_row_and_in_two_partitions_it_is_none(tmp_path: Path) -> None:
    files: Rows = {
        "B1/x": [{"id": "a", "input_ids": [1]}, {"id": "a", "input_ids": [2]}],
        "B1/y": [{"id": "a", "input_ids": [3]}],
        "B2/x": [{"id": "a", "input_ids": [4]}],
    }
    made = _make(tmp_path / "plan", files)
    assert made.names == {("B1", "a"), ("B2", "a")}
    assert {(unit["file"], unit["line"], unit["prompt_id"]) for unit in made.bad} == {
        ("B1/x", 2, "B1/x:2"),
        ("B1/y", 1, "B1/y:1"),
    }
    assert {unit["reason"] for unit in made.bad} == {"the id 'a' stands in this partition more than once"}


@pytest.mark.parametrize("seed", range(2))
def test_a_larger_cap_extends_a_smaller_one(tmp_path: Path, seed: int) -> None:
    files = _random_rows(seed)
    for cap, sizes in (("limit", (1, 7, 20, 1000)), ("max_tokens_total", (1, 33, 80, 5000))):
        smaller: set[int] = set()
        for size in sizes:
            made = _make(tmp_path / f"{cap}{size}", files, _settings(**{cap: size}))
            units = {unit["unit"] for unit in made.units}
            assert smaller <= units
            smaller = units
            for partition, count in made.counts.items():
                mine = [unit for unit in made.chosen if unit["partition"] == partition]
                tokens = sum(len(unit["prompt_ids"]) for unit in mine)
                assert count["prompts"] <= size if cap == "limit" else tokens <= size
        assert smaller == {unit["unit"] for unit in _make(tmp_path / f"{cap} none", files).units}


def test_a_cap_takes_a_fair_sample_not_the_head_of_the_file(tmp_path: Path) -> None:
    files: Rows = {"B1/x": [{"id": f"q{n}", "input_ids": [n % VOCAB_SIZE, n // VOCAB_SIZE]} for n in range(1000)]}
    lines = [unit["line"] for unit in _make(tmp_path / "plan", files, _settings(limit=200)).chosen]
    assert len(lines) == 200
    assert 400 < sum(lines) / 200 < 600
    assert 60 < sum(line <= 500 for line in lines) < 140


def test_samples_are_units_of_their_own(tmp_path: Path) -> None:
    files: Rows = {"B1/x": [{"id": f"q{n}", "input_ids": [n]} for n in range(5)] + [{"input_ids": []}]}
    one = _make(tmp_path / "one", files)
    three = _make(tmp_path / "three", files, _settings(samples_per_prompt=3))
    assert Counter((u["prompt_id"], u["sample_index"]) for u in three.chosen) == {
        (f"q{n}", sample): 1 for n in range(5) for sample in range(3)
    }
    assert len(three.bad) == 1  # a bad row is one row, whatever is asked for
    assert three.counts["B1"]["expected"] == 5 * 3 + 1
    assert three.counts["B1"]["prompt_tokens"] == 15
    assert {u["unit"] for u in one.units} <= {u["unit"] for u in three.units}  # more samples extend a run


def test_expected_rows_are_turns_times_samples(tmp_path: Path, target: Path) -> None:
    conversation = {"id": "c", "messages": [{"role": "user", "content": f"turn {n}"} for n in range(3)]}
    files: Rows = {"B1/x": [conversation, {"id": "s", "prompt": "single"}, b"junk"]}
    made = _make(tmp_path / "plan", files, _settings(target, samples_per_prompt=2))
    assert made.counts["B1"]["expected"] == (3 + 1) * 2 + 1
    assert sum(unit["turns"] for unit in made.units) == (3 + 1) * 2 + 1


# --- units


def test_units_are_unique_and_the_same_however_the_rows_were_split_into_parts(tmp_path: Path) -> None:
    files = _random_rows(1)
    made = _make(tmp_path / "plan", files, _settings(samples_per_prompt=2))
    again = _make(tmp_path / "again", dict(reversed(files.items())), _settings(samples_per_prompt=2))
    assert made.units == again.units
    units = [unit["unit"] for unit in made.units]
    assert len(set(units)) == len(units)
    assert all(0 <= unit < 2**63 for unit in units)


def test_a_unit_is_another_one_where_the_prompt_changed_and_the_same_where_its_line_changed(tmp_path: Path) -> None:
    def unit(name: str, rows: list[Any]) -> int:
        made = _make(tmp_path / name, {"B1/x": rows})
        return int(next(u["unit"] for u in made.chosen if u["prompt_id"] == "a"))

    row = {"id": "a", "input_ids": [1, 2]}
    assert unit("1", [row]) == unit("2", [{"id": "z", "input_ids": [9]}, row])
    assert unit("3", [row]) != unit("4", [{"id": "a", "input_ids": [1, 3]}])


def test_partitions_are_mixed_and_samples_of_a_prompt_are_neighbours(tmp_path: Path) -> None:
    files: Rows = {f"B{p}/x": [{"id": f"q{n}", "input_ids": [p, n]} for n in range(200)] for p in range(3)}
    units = _make(tmp_path / "plan", files, _settings(samples_per_prompt=2)).units
    for start in range(0, len(units), 200):
        share = Counter(unit["partition"] for unit in units[start : start + 200])
        assert min(share[f"B{p}"] for p in range(3)) > 30
    for first, second in zip(units[::2], units[1::2], strict=True):
        assert (first["prompt_id"], first["sample_index"] + 1) == (second["prompt_id"], second["sample_index"])


def test_many_units_are_written_as_several_files_in_one_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_units, "_ROWS_PER_FILE", 2048)  # what DuckDB hands over at once
    files: Rows = {"B1/x": [{"id": f"q{n}", "input_ids": [n % VOCAB_SIZE, n // VOCAB_SIZE]} for n in range(5000)]}
    many = _make(tmp_path / "many", files)
    paths = sorted((many.folder / "units").iterdir())
    assert len(paths) == 3
    ranks = [_rank(u["partition"], u["prompt_id"]) for path in paths for u in pq.read_table(path).to_pylist()]
    assert len(ranks) == 5000
    assert ranks == sorted(ranks)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b"junk", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        ({}, "none of messages, conversations, prompt, input_ids is there"),
        ({"id": "x", "messages": []}, "messages is empty"),
        ({"id": "x", "messages": [{"role": "robot", "content": "x"}]}, "unknown role 'robot'"),
        ({"id": "x", "messages": [{"role": ["user"], "content": "x"}]}, "unknown role"),
        ({"id": "x", "prompt": ""}, "prompt is not a text with content"),
        ({"id": "x", "input_ids": [VOCAB_SIZE]}, f"token id {VOCAB_SIZE} is outside the vocabulary of {VOCAB_SIZE}"),
        ({"id": "x", "input_ids": [3, -1]}, "token id -1 is outside the vocabulary"),
        ({"id": "x", "input_ids": [10**30]}, "is outside the vocabulary"),
        ({"id": "\ud800", "input_ids": [1]}, "is not valid Unicode"),
        ({"id": "x", "messages": [{"role": "tool", "content": "x"}]}, "a tool result without a call"),
        ({"id": "x", "prompt": "\ud800"}, "the chat template refuses it"),
        ({"id": "x", "prompt": "q", "chat_template_kwargs": {"truncation": True}}, "no variable of a template"),
        (b'{"prompt": "q", "tools": [' + b'{"a":' * 800 + b"1" + b"}" * 800 + b"]}", ""),
    ],
)
def test_a_bad_row_keeps_file_and_line_and_the_rest_goes_on(
    tmp_path: Path, target: Path, row: Any, reason: str
) -> None:
    files: Rows = {"B1/x": [{"id": "a", "prompt": "good"}, row, {"id": "b", "input_ids": [1]}]}
    made = _make(tmp_path / "plan", files, _settings(target))
    assert made.names == {("B1", "a"), ("B1", "b")}
    (bad,) = made.bad
    assert (bad["partition"], bad["file"], bad["line"], bad["turns"]) == ("B1", "B1/x", 2, 1)
    assert reason in bad["reason"]
    assert made.counts["B1"]["bad"] == 1


def test_a_reason_that_utf8_cannot_hold_is_stored_with_escapes(tmp_path: Path, target: Path) -> None:
    refusing = tmp_path / "refusing"
    refusing.mkdir()
    for file in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        (refusing / file).write_bytes((target / file).read_bytes())
    (refusing / "chat_template.jinja").write_text("{{ raise_exception('refused: ' + messages[0].content) }}")
    made = _make(tmp_path / "plan", {"B1/x": [{"prompt": "\ud800!"}]}, _settings(refusing))
    assert made.bad[0]["reason"] == "the chat template refuses it: refused: \\ud800!"


def test_odd_ids_are_only_names(tmp_path: Path) -> None:
    ids = ["'", '"', "a\0b", "a", "", " ", "ü😀", "$1", "--", "x" * 10_000, "a/b", "\n"]
    files: Rows = {"B1/x": [{"id": name, "input_ids": [number]} for number, name in enumerate(ids)]}
    made = _make(tmp_path / "plan", files)
    assert {unit["prompt_id"] for unit in made.chosen} == set(ids)
    assert made.counts["B1"]["prompts"] == len(ids)


def test_prompts_are_rendered_to_the_ids_of_the_first_turn(tmp_path: Path, target: Path) -> None:
    rows = [{"id": "a", "prompt": "Why?", "chat_template_kwargs": {"enable_thinking": True}}]
    (unit,) = _make(tmp_path / "plan", {"B1/x": rows}, _settings(target)).units
    text = "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n<think>"
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    assert unit["prompt_ids"] == tokenizer.encode(text, add_special_tokens=False).ids
    assert unit["conversation"] is None


def test_the_messages_of_a_conversation_come_back_for_its_later_turns(tmp_path: Path, target: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    row = {
        "id": "c",
        "messages": [{"role": "system", "content": "S ü"}, *({"role": "user", "content": n} for n in "12")],
        "tools": tools,
        "chat_template_kwargs": {"enable_thinking": True},
    }
    (unit,) = _make(tmp_path / "plan", {"B1/x": [row]}, _settings(target)).units
    prompt = later_turns("c", unit["conversation"])
    assert prompt.turns == [row["messages"][:2], row["messages"][2:]]
    assert (prompt.prompt_id, prompt.input_ids) == ("c", None)
    assert (prompt.tools, prompt.chat_template_kwargs) == (tools, {"enable_thinking": True})
    renderer = plan.make_renderer(_settings(target))
    assert renderer.prompt_ids(prompt) == unit["prompt_ids"]


def test_the_tools_of_a_single_turn_are_kept_so_that_the_audit_knows_of_them(tmp_path: Path, target: Path) -> None:
    rows = [{"id": "a", "prompt": "q", "tools": [{"name": "f"}]}, {"id": "b", "prompt": "q", "tools": []}]
    made = _make(tmp_path / "plan", {"B1/x": rows}, _settings(target))
    kept = {unit["prompt_id"]: unit["conversation"] for unit in made.units}
    assert later_turns("a", kept["a"]).tools == [{"name": "f"}]
    assert kept["b"] is None


def test_conversations_are_duplicates_only_where_every_turn_is_the_same(tmp_path: Path, target: Path) -> None:
    def row(*texts: str) -> dict[str, Any]:
        return {"id": "-".join(texts) + str(len(seen)), "messages": [{"role": "user", "content": t} for t in texts]}

    seen: list[Any] = []
    for texts in (("a",), ("a", "b"), ("a", "c"), ("a", "b"), ("a",)):
        seen.append(row(*texts))
    made = _make(tmp_path / "plan", {"B1/x": seen}, _settings(target))
    assert {unit["line"] for unit in made.units} == {1, 2, 3}
    assert made.counts["B1"]["duplicates"] == 2


def test_a_text_and_ready_ids_that_are_the_same_prompt_are_duplicates(tmp_path: Path, target: Path) -> None:
    tokenizer = Tokenizer.from_file(str(target / "tokenizer.json"))
    text = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    files: Rows = {"B1/x": [{"id": "a", "prompt": "q"}, {"id": "b", "input_ids": ids}]}
    assert _make(tmp_path / "plan", files, _settings(target)).names == {("B1", "a")}


# --- nothing to do


@pytest.mark.parametrize("files", [{}, {"B1/x": []}], ids=["no part", "no row"])
def test_no_rows_at_all_are_an_empty_plan(tmp_path: Path, files: Rows) -> None:
    made = _make(tmp_path / "plan", files)
    assert (made.counts, made.units) == ({}, [])


def test_a_token_cap_that_is_smaller_than_every_prompt_chooses_none(tmp_path: Path) -> None:
    made = _make(tmp_path / "plan", {"B1/x": [{"input_ids": [1, 2]}]}, _settings(max_tokens_total=1))
    assert made.units == []
    assert (made.counts["B1"]["over_cap"], made.counts["B1"]["expected"]) == (1, 0)


# --- a plan over data that is there already


def _answered(folder: Path, units: list[dict[str, Any]]) -> Path:
    (folder / "sequences").mkdir(parents=True)
    rows = [{"unit": u["unit"], "partition": u["partition"], "prompt_id": u["prompt_id"]} for u in units]
    pq.write_table(pa.Table.from_pylist(rows, schema=SEQUENCE_SCHEMA), folder / "sequences" / "0.parquet")
    return folder


def test_a_plan_that_extends_what_was_answered_is_welcome(tmp_path: Path) -> None:
    files = _random_rows(4)
    answered = _answered(tmp_path / "rows", _make(tmp_path / "small", files, _settings(limit=5)).units)
    larger = _make(tmp_path / "large", files, _settings(limit=20, samples_per_prompt=2), answered)
    assert len(larger.units) > len(pq.read_table(answered))
    files["B4/x"] = [{"id": "new", "input_ids": [9, 9, 9, 9]}]
    _make(tmp_path / "more", files, _settings(limit=20), answered)


@pytest.mark.parametrize("how", ["smaller cap", "changed prompt", "partition left out"])
def test_a_plan_that_drops_what_was_answered_is_refused_with_an_example(tmp_path: Path, how: str) -> None:
    files: Rows = {f"B{p}/x": [{"id": f"q{n}", "input_ids": [p, n]} for n in range(9)] for p in range(2)}
    answered = _answered(tmp_path / "rows", _make(tmp_path / "before", files).units)
    settings = _settings(limit=8) if how == "smaller cap" else _settings()
    if how == "changed prompt":
        files["B1/x"][3] = {"id": "q3", "input_ids": [77]}
    if how == "partition left out":
        del files["B1/x"]
    with pytest.raises(RunError, match=r"has answers to prompts .*B[01]/q\d.*use another run.dir"):
        _make(tmp_path / "after", files, settings, answered)


# --- settings and files


def test_the_key_changes_with_every_setting_and_with_the_files(tmp_path: Path) -> None:
    path = tmp_path / "B1.jsonl"
    path.write_text("{}\n")
    base = _settings(sources=[Source("B1", str(path))])
    changes: dict[str, Any] = {
        "sources": [Source("B2", str(path))],
        "tokenizer_folder": "/elsewhere",
        "tokenizer": {"target.chat_template": "ab"},
        "vocab_size": 5,
        "trust_remote_code": True,
        "boundary_ids": [4],
        "limit": 1,
        "max_tokens_total": 1,
        "dedupe": False,
        "samples_per_prompt": 2,
    }
    assert set(changes) == set(asdict(base))
    variants = [base] + [replace(base, **{name: value}) for name, value in changes.items()]
    assert len({settings.key() for settings in variants}) == len(variants)
    before = base.key()
    assert before == replace(base).key()
    path.write_text('{"a": 1}\n')
    assert base.key() != before


def test_a_plan_that_stands_is_used_again_without_ray(tmp_path: Path) -> None:
    settings = _settings()
    count = PartitionPlan("B1", 9, 1, 2, 3, 3, 6, 30, 12)
    tokens = TargetTokens([1, 2], "text", [3], [4, 5])
    plan.save(tmp_path / "plan", Plan(tmp_path / "plan", [count], tokens), settings.key())
    known = plan.make(tmp_path / "plan", settings, tmp_path / "rows")
    assert known == Plan(tmp_path / "plan", [count], tokens)
    assert (known.expected, known.answers, known.prompt_tokens) == (6, 3, 30)
    assert known.units == str(tmp_path / "plan" / "units")
    assert plan.load(tmp_path / "plan") == (known, settings.key())
    assert plan.load(tmp_path / "none") is None


def test_sources_are_read_in_blocks_that_hold_every_row_once_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "B1.jsonl"
    path.write_text("".join(f'{{"n": {n}}}\n' + "\n" * (n % 3 == 0) for n in range(4500)))
    batch = pa.Table.from_pylist([{"partition": "B1", "path": str(path)}])
    blocks = list(_read_source(batch))
    rows = [row for block in blocks for row in block.to_pylist()]
    assert max(block.num_rows for block in blocks) <= 2000
    lines = path.read_text().splitlines()
    assert [json.loads(row["raw"])["n"] for row in rows] == list(range(4500))
    assert all(json.loads(lines[row["line"] - 1]) == json.loads(row["raw"]) for row in rows)
    assert {(row["partition"], row["file"]) for row in rows} == {("B1", str(path))}


def test_a_file_that_breaks_off_stops_the_read(tmp_path: Path) -> None:
    (tmp_path / "B1.jsonl.gz").write_bytes(b"\x1f\x8b")
    batch = pa.Table.from_pylist([{"partition": "B1", "path": str(tmp_path / "B1.jsonl.gz")}])
    with pytest.raises(PromptSourceError, match="cannot be read to its end"):
        list(_read_source(batch))


def test_real_prompts_are_planned_without_a_loss(tmp_path: Path, target: Path, shared_data: Path) -> None:
    files: Rows = {}
    for source in find(str(shared_data / "prompts")):
        lines = Path(source.path).read_bytes().splitlines()[:200]
        files[f"{source.partition}/x"] = list(lines)
    made = _make(tmp_path / "plan", files, _settings(target, limit=100))
    assert set(made.counts) == {"B1_gsm8k", "B2_codegen", "B3_seed_tasks"}
    for file, lines in files.items():
        count = made.counts[file.split("/")[0]]
        different = len({json.dumps(json.loads(line)["messages"]) for line in lines})
        assert (count["read"], count["bad"], count["prompts"]) == (len(lines), 0, 100)
        assert count["duplicates"] == len(lines) - different
