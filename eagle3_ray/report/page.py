"""The page: report.html made of report.json and its plots. One file, no script, nothing loaded from elsewhere."""

import re
from collections.abc import Sequence
from typing import Any

import jinja2
from markupsafe import Markup, escape

from eagle3_ray.report import plots


def render(report: dict[str, Any]) -> str:
    """The whole page. Everything that comes out of a run is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("eagle3_ray.report", "."),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"n": _number, "share": _share, "size": _size, "marked": _marked}
    return environment.get_template("page.html.jinja").render(r=report, plots=_plots(report), most=plots.MOST_ROWS)


def _plots(report: dict[str, Any]) -> dict[str, Markup]:
    """The plots that this run has data for."""
    drawn: dict[str, Markup] = {}
    if generate := report["generate"]:
        if generate["lengths"]:
            drawn["lengths"] = plots.lengths(generate["lengths"])
            drawn["ends"] = plots.ends(generate["lengths"])
        if generate["latency_s"]:
            found = generate["latency_s"]["histogram"]
            drawn["latency"] = plots.histogram("latency", found, "seconds until the whole answer", "answers")
        if generate["speed"]["over_time"]:
            best = generate["speed"]["servers_best_tokens_per_second"]
            drawn["speed"] = plots.speed_over_time(generate["speed"]["over_time"], best)
    if (capture := report["capture"]) and (scores := capture["scores"]):
        limit = capture["limit"] or {}
        if scores["mean_difference"]:
            drawn["mean_difference"] = plots.histogram(
                "mean_difference",
                scores["mean_difference"],
                "mean difference, nats a token",
                "sequences",
                limit=limit.get("mean_difference"),
                rare=True,
                log=True,
            )
        if scores["argmax_agreement"]:
            label = "share of tokens that are the target's first choice"
            drawn["argmax_agreement"] = plots.histogram(
                "argmax_agreement", scores["argmax_agreement"], label, "sequences", rare=True
            )
    if train := report["train"]:
        if train["curves"]:
            drawn["loss"] = plots.loss(train)
            drawn["accuracies"] = plots.accuracies(train["curves"])
            drawn["training_speed"] = plots.training_speed(train["curves"])
        if train["validations"]:
            drawn["chain"] = plots.chain_acceptance(train["validations"])
    if evaluate := report["evaluate"]:
        drafters = [drafter for drafter in evaluate["drafters"] if drafter["datasets"]]
        if drafters:
            drawn["acceptance"] = plots.acceptance(drafters, evaluate["datasets"])
            drawn["drafts"] = plots.accepted_drafts(drafters[-1], evaluate["datasets"])
        if any(drafter["speed"] for drafter in evaluate["drafters"]):
            drawn["serving_speed"] = plots.serving_speed(evaluate["drafters"])
    return drawn


def _number(value: float | int | None, decimals: int | None = None) -> str:
    """A number for people: 1,234 or 12.3 or 0.0123; a dash where there is none."""
    if value is None:
        return "–"
    if decimals is not None:
        return f"{value:,.{decimals}f}"
    return f"{value:,.0f}" if isinstance(value, int) or abs(value) >= 1000 else f"{value:,.3g}"


def _share(value: float | None, decimals: int = 1) -> str:
    return "–" if value is None else f"{value:.{decimals}%}"


def _size(count: int | None) -> str:
    """Bytes for people."""
    if count is None:
        return "–"
    size, units = float(count), ["bytes", "kB", "MB", "GB", "TB", "PB"]
    while size >= 1000 and len(units) > 1:
        size, units = size / 1000, units[1:]
    return f"{size:,.3g} {units[0]}"


def _marked(text: str, special_tokens: Sequence[str]) -> Markup:
    """Text with its special tokens marked."""
    if not special_tokens:
        return escape(text)
    pattern = "|".join(re.escape(token) for token in sorted(special_tokens, key=len, reverse=True))
    parts = re.split(f"({pattern})", text)  # the odd ones are special tokens
    return Markup("").join(
        Markup("<mark>{}</mark>").format(part) if i % 2 else escape(part) for i, part in enumerate(parts)
    )
