"""Matplotlib figures as inline SVG that belongs to the page: real text in the page's font, colours of its theme.

A figure is drawn in placeholder colours; each becomes a CSS variable here, so that light, dark and print are the page's
business. Text is kept as text: it scales, is found by a search and is read aloud.
"""

import io
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, GRID, PAPER = "#010101", "#010102", "#010103", "#010104"
SERIES = ("#010111", "#010112", "#010113", "#010114", "#010115", "#010116", "#010117", "#010118")
_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", PAPER: "--paper"} | {
    colour: f"--s{number}" for number, colour in enumerate(SERIES, start=1)
}

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "eagle3_ray",  # the same input gives the same bytes
    "text.parse_math": False,  # a name may hold a dollar sign
    "font.size": 10.5,
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "ytick.major.size": 0,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "legend.fontsize": 10,
    "legend.labelcolor": MUTED,
    "figure.facecolor": "none",
}
_WIDTH, _HEIGHT = 5.2, 3.0  # inches, as wide as a column of the page or a phone: text keeps its size
_NAMESPACES = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'


def legend_above(axes: Axes, columns: int = 4) -> None:
    """A legend over the plot, where it covers no data."""
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, borderaxespad=0.2, handlelength=1.2, columnspacing=1.2
    )


def draw(name: str, alt: str, paint: Callable[[list[Axes]], None], rows: int = 1, height: float = _HEIGHT) -> Markup:
    """What `paint` draws on `rows` axes above each other, which share their x axis, as an `<svg>` element.

    `name` keeps its ids apart from those of other figures on the page; `alt` says in words what is to be seen.
    """
    buffer = io.StringIO()
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # matplotlib's own font only measures the text; the browser has others for other scripts
        warnings.filterwarnings("ignore", "Glyph .* missing from font", UserWarning)
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        paint(list(figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]))
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    view = re.search(r'viewBox="[^"]+"', text)
    assert view is not None
    body = text[text.index(">", text.index("<svg")) + 1 :]
    for colour, variable in _VARIABLES.items():
        body = body.replace(colour, f"var({variable})")
    body = re.sub(r'(font: (?:\w+ )*[\d.]+px) [^;"]+', r"\1 var(--font)", body)
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = re.sub(r'(href="#|url\(#)', rf"\g<1>{name}-", body)
    return Markup(f'<svg role="img" aria-label="{escape(alt)}" {view[0]} {_NAMESPACES}>{body}')


def colours(count: int) -> Sequence[str]:
    """A colour for each of `count` series; they repeat behind the eighth."""
    return [SERIES[i % len(SERIES)] for i in range(count)]
