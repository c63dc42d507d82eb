"""How far two captures of the same sequences are apart: by state, and in what the target would say next.

    python benchmarks/agreement.py RUN OTHER_RUN

Both runs hold the same generated rows (copy RUN/manifest.json and RUN/generate before anything is captured) and were
captured with `capture.storage=fp32`, by other backends or in other dtypes. The relative error is |a - b| / |b| of one
token's state, b being OTHER_RUN's; of each state the median and the largest over all tokens but a sequence's first,
whose states are a sink's. Agreement is the share of answer tokens after whose predecessor both have the same likeliest
token. Prints one JSON line.
"""

import argparse
import json
from pathlib import Path

import pyarrow.parquet as pq
import torch

from eagle3_ray import corpus
from eagle3_ray.runs import RunDir
from eagle3_ray.states_cache import STATES, StatesCache

NAMES = ("low", "middle", "high", "last")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("other", type=Path)
    arguments = parser.parse_args()
    print(json.dumps(compare(arguments.run, arguments.other)))


def compare(run: Path, other: Path) -> dict[str, object]:
    """The figures of two captured runs. Raises SystemExit where they do not hold the same sequences."""
    corpora = [corpus.make(RunDir(path)) for path in (run, other)]
    caches = [cache(path) for path in (run, other)]
    rows = sorted(set(caches[0].rows) & set(caches[1].rows))
    if not rows or any(corpora[0].token_sha(row) != corpora[1].token_sha(row) for row in rows):
        raise SystemExit(f"{run} and {other} hold different sequences: copy the generate stage of one for the other.")
    errors, equal, choices, tokens = [], 0, 0, 0
    for row in rows:
        (a, chosen), (b, others) = (
            found.read(row, made.token_sha(row)) for found, made in zip(caches, corpora, strict=True)
        )
        a, b = (states.view(len(states), STATES, -1)[1:] for states in (a, b))
        errors.append((a - b).norm(dim=-1) / b.norm(dim=-1))
        asked = others >= 0
        equal += int((chosen == others)[asked].sum())
        choices += int(asked.sum())
        tokens += len(chosen)
    by_state = torch.cat(errors)
    return {
        "sequences": len(rows),
        "tokens": tokens,
        "median_error": dict(zip(NAMES, by_state.median(dim=0).values.tolist(), strict=True)),
        "largest_error": dict(zip(NAMES, by_state.amax(dim=0).tolist(), strict=True)),
        "agreement": equal / choices,
        "choices": choices,
    }


def cache(run: Path) -> StatesCache:
    folder = run / "capture" / "shards"
    with pq.ParquetFile(next(folder.glob("*.parquet"))) as file:
        first = file.read_row_group(0).slice(0, 1).to_pydict()
    hidden = len(first["states"][0]) // len(first["likeliest"][0]) // STATES  # 4 bytes a number, 4 a token
    return StatesCache(folder, hidden, "fp32")


if __name__ == "__main__":
    main()
