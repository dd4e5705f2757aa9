"""The loss curve of a run, as SVG to stand inside a page: its colours are the page's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from io import StringIO
from itertools import islice

Points = Sequence[tuple[int, float]]  # (step, loss); a loss may be nan

WIDE, NARROW = (10.2, 4.4), (4.7, 3.3)  # inches; for a page as wide as a desk's screen, or a phone's
MOST_POINTS = 800  # more cannot be told apart at the width of a page
# Stand-ins that matplotlib accepts, and the page's own colours, which follow its light or dark scheme.
_COLOURS = {
    "#010101": "var(--ink-soft)",
    "#020202": "var(--line)",
    "#030303": "var(--training)",
    "#040404": "var(--validation)",
}
_INK, _LINE, _TRAINING, _VALIDATION = _COLOURS


def loss_curve(training: Points, validation: Points, unit: str, size: tuple[float, float]) -> str:
    """An `<svg>` element: training loss by step as a line, validation loss as points; the same bytes every time.

    unit: of the loss. size: (width, height) in inches, WIDE or NARROW; drawings of different sizes may stand in
    the same page. Points beyond MOST_POINTS are means over equal runs of steps (see `points_per_mark`).
    """
    import matplotlib as mpl  # imported here: half a second that nothing else needs
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    with mpl.rc_context():
        mpl.rcdefaults()  # whatever the reader's own matplotlibrc says
        mpl.rcParams.update({"svg.hashsalt": f"fourfold {size}", "svg.fonttype": "none", "font.size": 10.5})
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasSVG(figure)
        figure.patch.set_alpha(0)
        axes = figure.add_subplot()
        axes.patch.set_alpha(0)
        marks = _thinned(training)
        axes.plot(
            [step for step, _ in marks],
            [loss for _, loss in marks],
            color=_TRAINING,
            lw=1.6,
            label="training",
        )
        if len(marks) == 1:
            axes.lines[0].set_marker("o")
        if validation:
            steps, losses = [step for step, _ in validation], [loss for _, loss in validation]
            axes.plot(steps, losses, "o--", color=_VALIDATION, ms=6, lw=1.0, label="validation")
        axes.set_xlabel("optimizer step")
        axes.set_ylabel(f"loss ({unit})")
        axes.xaxis.label.set_color(_INK)
        axes.yaxis.label.set_color(_INK)
        axes.xaxis.set_major_locator(MaxNLocator(int(size[0]), steps=[1, 2, 5, 10], integer=True))
        axes.grid(color=_LINE, lw=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(color=_LINE, labelcolor=_INK)
        axes.spines[["top", "right"]].set_visible(False)
        axes.spines[["left", "bottom"]].set_color(_LINE)
        axes.legend(frameon=False, labelcolor=_INK)
        drawing = StringIO()
        figure.savefig(drawing, format="svg")
    return _for_a_page(drawing.getvalue())


def points_per_mark(points: int) -> int:
    """How many neighbouring points one drawn point is the mean of."""
    return max(1, -(-points // MOST_POINTS))


def _thinned(points: Points) -> list[tuple[float, float]]:
    size = points_per_mark(len(points))
    rest = iter(points)
    marks: list[tuple[float, float]] = []
    while part := list(islice(rest, size)):
        marks.append((sum(step for step, _ in part) / len(part), sum(loss for _, loss in part) / len(part)))
    return marks


def _for_a_page(svg: str) -> str:
    """Only the element: no XML head, no metadata, and no size, fonts, names or rules of its own."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<(metadata|style)\b.*?</\1>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg)  # HTML knows them
    svg = re.sub(r"font-family: [^;\"]*; ", "", svg)
    svg = re.sub(r' id="(?![mp][0-9a-f]{10}")[^"]*"', "", svg)  # all but what the drawing itself refers to
    for stand_in, colour in _COLOURS.items():
        svg = svg.replace(stand_in, colour)
    return svg.strip()
