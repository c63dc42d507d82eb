"""What happened in a run and what its drafter is worth: RUN/report.html for people, RUN/report.json for programs."""

from pathlib import Path

from eagle3_ray.report.collect import collect
from eagle3_ray.report.page import render
from eagle3_ray.runs import RunDir, write_json, write_text

__all__ = ["collect", "write_report"]


def write_report(run: RunDir) -> Path:
    """Writes RUN/report.json and RUN/report.html, whole or not at all, and returns the page's path.

    Raises:
        RunError: there is no run at that path, or its manifest is damaged.
    """
    report = collect(run)
    write_json(run.path / "report.json", report)
    page = run.path / "report.html"
    write_text(page, render(report))
    return page
