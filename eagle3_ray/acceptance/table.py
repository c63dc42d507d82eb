"""Figures for people: acceptance by dataset and category, and one line for each engine."""

from collections.abc import Mapping, Sequence
from typing import Any

from eagle3_ray.acceptance.engine import Served
from eagle3_ray.acceptance.tally import EVERYTHING, WITHOUT_LOOPS, Acceptance, pool
from eagle3_ray.audit import loop_length

_LOOP_TOKENS = 64  # as the audit's default: so long a loop at an answer's end inflates acceptance


def by_group(served: Sequence[Served]) -> dict[str, Acceptance]:
    """Pooled counts of `all`, of each dataset, of each `dataset/category`, and of all `without loops`.

    Answers of an engine without counters count as answers without verify steps.
    """
    groups: dict[str, list[Acceptance]] = {EVERYTHING: [], WITHOUT_LOOPS: []}
    for one in served:
        names = [EVERYTHING, one.prompt.dataset]
        if one.prompt.category:
            names.append(f"{one.prompt.dataset}/{one.prompt.category}")
        if loop_length(one.output_ids) < _LOOP_TOKENS:
            names.append(WITHOUT_LOOPS)
        for name in names:
            if one.acceptance is not None:
                groups.setdefault(name, []).append(one.acceptance)
    return {name: pool(parts) for name, parts in groups.items()}


def table(engines: Mapping[str, Mapping[str, Any]]) -> str:
    """One line for each engine: acceptance length of all and by dataset, tokens/s and gain, the lossless check."""
    drafted = [engine for engine in engines.values() if "acceptance" in engine]
    datasets = sorted({name for engine in drafted for name in engine["acceptance"] if "/" not in name} - {EVERYTHING})
    columns = [EVERYTHING, *datasets]
    speeds = list(dict.fromkeys(c for engine in engines.values() for c in engine["speed"]))
    head = ["drafter", *columns, *(f"tok/s @{c}" for c in speeds), "equal to plain"]
    rows = [head]
    for name, engine in engines.items():
        groups, gain, lossless = engine.get("acceptance", {}), engine.get("speedup", {}), engine.get("lossless")
        lengths = [groups.get(column, {}).get("acceptance_length") for column in columns]
        rows.append(
            [
                name if len(name) <= 40 else f"...{name[-37:]}",
                *("-" if length is None else f"{length:.2f}" for length in lengths),
                *(f"{engine['speed'].get(c, 0):.1f}" + (f" ({gain[c]:.2f}x)" if c in gain else "") for c in speeds),
                f"{lossless['equal']}/{lossless['answers']}" if lossless else "-",
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
