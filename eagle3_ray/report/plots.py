"""The report's plots, each from a part of report.json and nothing else."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator, PercentFormatter, StrMethodFormatter

from eagle3_ray.report.svg import INK, MUTED, SERIES, colours, draw, legend_above

MOST_ROWS = 12
"""Partitions or datasets in one plot; the tables hold all."""
_NAME = 24  # letters of a name beside bars

Numbers = Mapping[str, Any]


def lengths(found: Numbers) -> Markup:
    """Answer lengths, a small histogram for each partition, cut answers in another colour."""
    edges = np.asarray(found["edges"], float)
    partitions = _largest(found["partitions"])

    def paint(axes: list[Axes]) -> None:
        for (name, counts), axis in zip(partitions, axes, strict=True):
            _bars(axis, edges, counts["stopped"], SERIES[0])
            _bars(axis, edges, counts["cut"], SERIES[1], bottom=counts["stopped"])
            axis.set_yticks([])
            axis.grid(False)
            axis.set_title(_short(name, 3 * _NAME), loc="left", fontsize=10, color=INK, pad=4)
        axes[-1].set_xlabel("answer tokens")
        axes[-1].xaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))

    names = ", ".join(name for name, _ in partitions)
    return draw(
        "lengths", f"Histograms of answer lengths for {names}", paint, len(partitions), 0.55 + 0.78 * len(partitions)
    )


def ends(found: Numbers) -> Markup:
    """How answers ended, a bar for each partition."""
    partitions = _largest(found["partitions"])
    stopped = np.array([sum(counts["stopped"]) for _, counts in partitions], float)
    cut = np.array([sum(counts["cut"]) for _, counts in partitions], float)
    total = np.maximum(stopped + cut, 1)

    def paint(axes: list[Axes]) -> None:
        axis, places = axes[0], np.arange(len(partitions))
        axis.barh(places, stopped / total, color=SERIES[0], height=0.62, label="ended by itself")
        axis.barh(places, cut / total, left=stopped / total, color=SERIES[1], height=0.62, label="cut at the limit")
        for place, share in enumerate(cut / total):
            axis.text(1.01, place, f"{share:.0%} cut", va="center", color=MUTED, fontsize=9.5)
        _rows(axis, [name for name, _ in partitions])
        axis.set_xlim(0, 1.16)
        axis.set_xticks([0, 0.25, 0.5, 0.75, 1])
        axis.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        legend_above(axis)

    said = ", ".join(f"{name} {share:.0%}" for (name, _), share in zip(partitions, cut / total, strict=True))
    return draw(
        "ends", f"Share of answers that were cut at the length limit: {said}", paint, 1, 1.0 + 0.36 * len(partitions)
    )


def speed_over_time(over_time: Numbers, best: float | None) -> Markup:
    """Committed tokens/s by minute, with what the servers showed at their best."""

    def paint(axes: list[Axes]) -> None:
        axis = axes[0]
        axis.plot(over_time["minutes"], over_time["tokens_per_second"], color=SERIES[0], drawstyle="steps-pre")
        if best:
            axis.axhline(
                best, color=MUTED, linestyle=(0, (4, 3)), linewidth=1.2, label=f"the servers' best, {best:,.0f}"
            )
            legend_above(axis)
        axis.set_ylim(bottom=0)
        _labels(axis, "minutes since the first file", "answer tokens/s")

    return draw("speed", "Answer tokens per second over the time of generating", paint)


def histogram(
    name: str, found: Numbers, label: str, of: str, *, limit: float | None = None, rare: bool = False, log: bool = False
) -> Markup:
    """One distribution; dashed lines mark its median and the limit behind which values are set aside.

    `rare` has a logarithmic scale of counts, so that a single outlier shows; `log` has one of values.
    """

    def paint(axes: list[Axes]) -> None:
        axis = axes[0]
        _bars(axis, np.asarray(found["edges"], float), found["counts"], SERIES[0])
        if rare:
            axis.set_yscale("log")
            axis.set_ylim(0.7, 2.5 * max(found["counts"]))
            axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
            axis.yaxis.set_minor_locator(NullLocator())
        if log:
            axis.set_xscale("log")
            axis.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
            axis.xaxis.set_minor_locator(NullLocator())
        for value, colour, what in ((found["p50"], INK, "median"), (limit, SERIES[1], "limit")):
            if value is not None:
                axis.axvline(value, color=colour, linewidth=1.2, linestyle=(0, (4, 3)), label=f"{what} {value:.3g}")
        legend_above(axis)
        _labels(axis, label, of)

    said = f"median {found['p50']:.3g}, 99% at most {found['p99']:.3g}, largest {found['max']:.3g}"
    return draw(name, f"Histogram of {label} over {of}; {said}", paint)


def loss(train: Numbers) -> Markup:
    """Training loss by step, validated loss as points."""
    curves, checks = train["curves"], train["validations"]

    def paint(axes: list[Axes]) -> None:
        axis = axes[0]
        axis.plot(curves["step"], curves["loss"], color=SERIES[0], label="training, all drafted tokens")
        if checks:
            points = [check["loss"] for check in checks]
            axis.plot(
                [c["step"] for c in checks],
                points,
                "o-",
                color=SERIES[1],
                markersize=3.5,
                label="held out, first drafted token",
            )
        legend_above(axis, 2)
        _labels(axis, "step", "loss")

    return draw("loss", f"Loss by step, from {curves['loss'][0]:.3g} to {curves['loss'][-1]:.3g}", paint)


def accuracies(curves: Numbers) -> Markup:
    """Accuracy of each drafted token in training."""
    depth = curves["step_accuracies"]

    def paint(axes: list[Axes]) -> None:
        axis = axes[0]
        for place, (values, colour) in enumerate(zip(depth, colours(len(depth)), strict=True), start=1):
            known = [(step, value) for step, value in zip(curves["step"], values, strict=True) if value is not None]
            axis.plot(*zip(*known, strict=True), color=colour, label=f"{place}")
        legend_above(axis, 8)
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axis.set_ylim(bottom=0)
        _labels(axis, "step", "right drafts")

    last = ", ".join(f"token {k} {v[-1]:.0%}" for k, v in enumerate(depth, start=1) if v[-1] is not None)
    return draw("accuracies", f"Share of right drafts by step and place in the chain, at the end: {last}", paint)


def chain_acceptance(checks: Sequence[Numbers]) -> Markup:
    """Chain acceptance length of the held-out sequences by step, partitions as thin lines."""
    names = sorted({name for check in checks for name in check["partitions"]})[:MOST_ROWS]

    def paint(axes: list[Axes]) -> None:
        axis, steps = axes[0], [check["step"] for check in checks]
        for name, colour in zip(names if len(names) > 1 else [], colours(len(names) + 1)[1:], strict=False):
            known = [(c["step"], c["partitions"][name]) for c in checks if name in c["partitions"]]
            axis.plot(
                *zip(*known, strict=True),
                color=colour,
                linewidth=1.1,
                marker="o",
                markersize=2.5,
                label=_short(name, _NAME),
            )
        overall = [check["chain_acceptance_length"] for check in checks]
        axis.plot(steps, overall, "o-", color=SERIES[0], linewidth=2.4, markersize=4, label="all")
        legend_above(axis, 3)
        _labels(axis, "step", "tokens a target step")

    first, last = checks[0]["chain_acceptance_length"], checks[-1]["chain_acceptance_length"]
    return draw("chain", f"Chain acceptance length of held-out answers by step, from {first:.2f} to {last:.2f}", paint)


def training_speed(curves: Numbers) -> Markup:
    """Tokens/s of the training by step."""

    def paint(axes: list[Axes]) -> None:
        axes[0].plot(curves["step"], curves["tokens_per_second"], color=SERIES[2])
        axes[0].set_ylim(bottom=0)
        _labels(axes[0], "step", "tokens/s")

    return draw("training-speed", "Trained tokens per second by step", paint)


def acceptance(drafters: Sequence[Numbers], datasets: Sequence[str]) -> Markup:
    """Acceptance length by dataset, a bar for each drafter, from 1 on: what plain decoding gives."""
    rows, drawn = list(datasets)[:MOST_ROWS], list(drafters)[:6]
    height = 0.8 / len(drawn)

    def paint(axes: list[Axes]) -> None:
        axis = axes[0]
        for place, (drafter, colour) in enumerate(zip(drawn, _drafter_colours(drawn), strict=True)):
            values = [drafter["datasets"].get(name, {}).get("acceptance_length") for name in rows]
            at = np.arange(len(rows)) + (place - (len(drawn) - 1) / 2) * height
            axis.barh(
                at,
                [(value or 1) - 1 for value in values],
                left=1,
                height=height * 0.88,
                color=colour,
                label=_short(drafter["name"], _NAME),
            )
            for y, value in zip(at, values, strict=True):
                if value is not None:
                    axis.annotate(
                        f"{value:.2f}", (value, y), (4, 0), textcoords="offset points", va="center", fontsize=9.5
                    )
        _rows(axis, rows)
        axis.margins(x=0.12)
        axis.set_xlim(left=1)
        legend_above(axis, 2)
        axis.set_xlabel("tokens a target step (1 is plain decoding)")

    said = "; ".join(
        f"{name}: "
        + ", ".join(f"{d['name']} {d['datasets'][name]['acceptance_length']}" for d in drawn if name in d["datasets"])
        for name in rows
    )
    return draw(
        "acceptance", f"Acceptance length by dataset. {said}", paint, 1, 1.1 + (0.22 + 0.24 * len(drawn)) * len(rows)
    )


def accepted_drafts(drafter: Numbers, datasets: Sequence[str]) -> Markup:
    """For each dataset, the share of verify steps that accepted 0, 1, 2, ... drafts."""
    rows = [name for name in datasets if drafter["datasets"].get(name, {}).get("verify_steps")][:MOST_ROWS]

    def paint(axes: list[Axes]) -> None:
        for name, axis in zip(rows, axes, strict=True):
            histogram = drafter["datasets"][name]["histogram"]
            shares = np.array(histogram) / sum(histogram)
            axis.bar(range(len(shares)), shares, color=SERIES[0], width=0.72)
            for n, share in enumerate(shares):
                axis.text(n, share, f"{share:.0%}", ha="center", va="bottom", fontsize=9, color=MUTED)
            axis.set_title(_short(name, 3 * _NAME), loc="left", fontsize=10, color=INK, pad=4)
            axis.set_yticks([])
            axis.grid(False)
            axis.margins(y=0.25)
        axes[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
        axes[-1].set_xlabel("accepted drafts in a verify step")

    said = "; ".join(f"{name} {drafter['datasets'][name]['histogram']}" for name in rows)
    return draw(
        "drafts", f"Verify steps by number of accepted drafts: {said}", paint, len(rows), 0.6 + 1.05 * len(rows)
    )


def serving_speed(drafters: Sequence[Numbers]) -> Markup:
    """Tokens/s by concurrency with and without a drafter."""

    def paint(axes: list[Axes]) -> None:
        axis = axes[0]
        for drafter, colour in zip(drafters, _drafter_colours(drafters), strict=True):
            points = sorted((one["concurrency"], one["tokens_per_second"]) for one in drafter["speed"])
            if points:
                axis.plot(
                    *zip(*points, strict=True), "o-", color=colour, markersize=4, label=_short(drafter["name"], _NAME)
                )
        every = sorted({one["concurrency"] for drafter in drafters for one in drafter["speed"]})
        axis.set_xscale("log", base=2)
        axis.set_xticks(every, [str(n) for n in every])
        axis.minorticks_off()
        axis.set_ylim(bottom=0)
        legend_above(axis, 2)
        _labels(axis, "requests at once", "answer tokens/s")

    said = "; ".join(
        f"{drafter['name']}: "
        + ", ".join(f"{one['tokens_per_second']:,.0f} at {one['concurrency']}" for one in drafter["speed"])
        for drafter in drafters
    )
    return draw("serving-speed", f"Answer tokens per second by requests at once. {said}", paint)


def _largest(partitions: Mapping[str, Numbers]) -> list[tuple[str, Numbers]]:
    """The partitions with the most answers, in their own order."""
    kept = sorted(partitions, key=lambda name: -sum(partitions[name]["stopped"]) - sum(partitions[name]["cut"]))
    return [(name, counts) for name, counts in partitions.items() if name in kept[:MOST_ROWS]]


def _short(name: str, letters: int) -> str:
    return name if len(name) <= letters else f"{name[: letters // 2]}…{name[-(letters // 2 - 1) :]}"


def _drafter_colours(drafters: Sequence[Numbers]) -> list[str]:
    """The trained drafter has the page's first colour, the engine without a drafter is grey."""
    others = iter([SERIES[1], SERIES[2], SERIES[3], SERIES[4], SERIES[5], SERIES[6]] * (1 + len(drafters) // 6))
    by_role = {"trained": SERIES[0], "none": MUTED}
    return [by_role.get(drafter["role"]) or next(others) for drafter in drafters]


def _bars(
    axis: Axes, edges: np.ndarray[Any, Any], counts: Sequence[int], colour: str, bottom: Sequence[int] | None = None
) -> None:
    base = [0] * len(counts) if bottom is None else bottom
    axis.bar(edges[:-1], counts, np.diff(edges) * 0.92, bottom=base, align="edge", color=colour)


def _rows(axis: Axes, names: Sequence[str]) -> None:
    axis.set_yticks(range(len(names)), [_short(name, _NAME) for name in names])
    axis.tick_params(axis="y", labelcolor=INK)
    axis.invert_yaxis()
    axis.grid(False, axis="y")


def _labels(axis: Axes, x: str, y: str) -> None:
    axis.set_xlabel(x)
    axis.set_ylabel(y)
    for one, scale, limits in (
        (axis.xaxis, axis.get_xscale(), axis.get_xlim()),
        (axis.yaxis, axis.get_yscale(), axis.get_ylim()),
    ):
        if scale == "linear" and limits[1] >= 1000:
            one.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if axis.get_xscale() == "linear":
        axis.xaxis.set_major_locator(MaxNLocator(6, integer=x == "step"))
