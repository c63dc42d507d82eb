"""Results of engines on disk, so that an evaluation that was stopped goes on with the next engine."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_ray.acceptance.engine import Measured, Served
from eagle3_ray.acceptance.questions import EvalPrompt
from eagle3_ray.run_log import say
from eagle3_ray.runs import read_json, write_json


@dataclass(frozen=True)
class Kept:
    """A folder with a JSON file of each result."""

    folder: Path

    def get(self, name: str, key: str, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The result under `key`, measured now unless it is there. Raises RunError: what is there is damaged."""
        path = self.folder / f"{key}.json"
        if path.exists():
            say(f"{name}: measured by an earlier job")
        else:
            write_json(path, measure())
        return read_json(path, "Remove it; the next job measures that engine again.")

    def forget(self, key: str) -> None:
        """Leaves it to the next job to measure that again."""
        (self.folder / f"{key}.json").unlink(missing_ok=True)


def answers_of(stored: Mapping[str, Any]) -> Measured:
    """The answers of an engine without a drafter, from what `asdict` made of them."""
    served = (
        Served(
            EvalPrompt(**one["prompt"] | {"prompt_ids": tuple(one["prompt"]["prompt_ids"])}),
            tuple(one["output_ids"]),
            one["finish_reason"],
            None,
        )
        for one in stored["served"]
    )
    return Measured(tuple(served), stored["concurrency"], stored["wall_s"])
