"""Figures are grouped by dataset and category, and shown one engine a line."""

from pathlib import Path

from eagle3_ray.acceptance.engine import Served
from eagle3_ray.acceptance.questions import EvalPrompt
from eagle3_ray.acceptance.serving import Serving
from eagle3_ray.acceptance.table import by_group, table
from eagle3_ray.acceptance.tally import PLAIN, of_answer
from eagle3_ray.drafter.export import speculative_arguments


def served(dataset: str, category: str, accepted: list[int], ids: list[int]) -> Served:
    prompt = EvalPrompt(dataset, category, "x", 0, (1,))
    return Served(prompt, tuple(ids), "length", of_answer(1 + sum(n + 1 for n in accepted), accepted))


def test_groups_are_datasets_their_categories_and_the_answers_that_do_not_loop() -> None:
    groups = by_group(
        [
            served("mt", "math", [0, 0], list(range(9))),
            served("mt", "code", [2, 2], [7] * 80),
            served("gsm", "", [1], list(range(9))),
        ]
    )
    assert {name: counts.length for name, counts in groups.items()} == {
        "all": 10 / 5,
        "without loops": 4 / 3,
        "mt": 8 / 4,
        "mt/math": 1.0,
        "mt/code": 3.0,
        "gsm": 2.0,
    }


def test_an_engine_without_counts_has_no_length() -> None:
    plain = Served(EvalPrompt("mt", "", "x", 0, (1,)), (1, 2), "length", None)
    assert by_group([plain])["all"].length is None


def test_the_table_has_a_line_for_each_engine_beside_none() -> None:
    drafted = {
        "acceptance": {"all": {"acceptance_length": 1.754}, "mt": {"acceptance_length": 1.6}, "mt/math": {}},
        "speed": {"1": 15.0, "8": 40.0},
        "speedup": {"1": 1.5, "8": 0.8},
        "lossless": {"equal": 159, "answers": 160},
    }
    text = table({"none": {"speed": {"1": 10.0, "8": 50.0}}, "runs/a/drafter": drafted})
    assert text.splitlines() == [
        "drafter         all   mt    tok/s @1      tok/s @8      equal to plain",
        "none            -     -     10.0          50.0          -",
        "runs/a/drafter  1.75  1.60  15.0 (1.50x)  40.0 (0.80x)  159/160",
    ]


def test_an_engine_that_runs_already_is_used_and_none_is_started() -> None:
    serving = Serving("/m", 5, "false", endpoints=((PLAIN, "http://a"), ("/d", "http://b")))
    with serving.engine(PLAIN) as plain, serving.engine("/d") as drafted:
        assert (plain, drafted) == ("http://a", "http://b")


def test_a_chain_of_four_drafts_needs_five_draft_tokens() -> None:
    words = speculative_arguments(Path("/d"), 4)
    assert dict(zip(words[::2], words[1::2], strict=True)) == {
        "--speculative-algorithm": "EAGLE3",
        "--speculative-draft-model-path": "/d",
        "--speculative-num-steps": "4",
        "--speculative-eagle-topk": "1",
        "--speculative-num-draft-tokens": "5",
    }
