"""A white page of 830 pixels, the width of a README, on which boxes, arrows and words are placed by pixel.

x goes to the right, y goes down; sizes of letters are in pixels too. A role has the same color in every drawing, most
of them of Okabe and Ito ("Color Universal Design", 2008), which the color-blind can tell apart; gray is waiting. The
page becomes an SVG with letters as paths, which looks the same everywhere; the same drawing gives the same bytes.
"""

from pathlib import Path

import matplotlib as mpl
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch
from matplotlib.path import Path as Line

ROLLOUT, POLICY, LEARNER, MEMORY = "#0072b2", "#e69f00", "#009e73", "#aa4499"  # memory: also the trainer's color
WAIT, INK, SOFT, WARN = "#e2e2e2", "#1f2933", "#66727f", "#d55e00"  # soft: what is said in passing; warn: lost, wrong
WIDTH = 830
PIXEL = 72 / 96  # points
DASHED = (0, (4, 3))
Point = tuple[float, float]


def tint(color: str, strength: float) -> tuple[float, ...]:
    """Mix a color with white; strength 1 leaves it as it is."""
    return tuple(1 - strength * (1 - part) for part in to_rgb(color))


class Canvas:
    """Draws one picture."""

    def __init__(self, height: float) -> None:
        """Begin an empty page of this height."""
        self.figure = Figure(figsize=(WIDTH / 96, height / 96), dpi=96)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, WIDTH), ylim=(height, 0))
        self.axes.axis("off")

    def words(self, x: float, y: float, text: str, *, size: float = 12, color: str = INK, bold: bool = False,
              at: str = "center") -> None:
        """Write text whose middle is at height y; at x it is in the center, begins (`left`) or ends (`right`)."""
        self.axes.text(x, y, text, fontsize=size * PIXEL, color="#9a6700" if color == POLICY else color, ha=at,
                       va="center_baseline" if "\n" not in text else "center", linespacing=1.3, zorder=5,
                       fontweight="bold" if bold else "normal", multialignment=at)

    def title(self, x: float, y: float, text: str) -> None:
        """Write a heading."""
        self.words(x, y, text, size=14, bold=True, at="left")

    def box(self, x: float, y: float, width: float, height: float, color: str = SOFT, text: str = "", *,
            strength: float = 0.15, size: float = 12, bold: bool = False, dashed: bool = False) -> None:
        """Draw a box with its upper left corner at (x, y), filled with a tint of its color, or dashed and empty."""
        self.axes.add_patch(FancyBboxPatch(
            (x + 4, y + 4), width - 8, height - 8, boxstyle="round,pad=4", edgecolor=color, linewidth=1.2 * PIXEL,
            facecolor="none" if dashed else tint(color, strength), linestyle=DASHED if dashed else "solid", zorder=2))
        self.words(x + width / 2, y + height / 2, text, size=size, bold=bold)

    def titled(self, x: float, y: float, width: float, height: float, color: str, title: str, text: str, *,
               copies: int = 1) -> None:
        """Draw a box with a heading and lines below it; copies: so many boxes behind one another."""
        for copy in reversed(range(copies)):
            self.box(x + 6 * copy, y + 6 * copy, width, height, color)
        self.words(x + width / 2, y + 26, title, size=14, bold=True, color=color)
        self.words(x + width / 2, y + 16 + height / 2, text)

    def bar(self, x: float, y: float, width: float, color: str, text: str = "") -> None:
        """Draw a full rectangle of the height of a lane, for time on it."""
        self.axes.bar(x, 24, width, y, align="edge", color=color, zorder=2)
        self.words(x + width / 2, y + 12, text, size=11, color=INK if color in (WAIT, POLICY) else "white")

    def arrow(self, *points: Point, color: str = INK, line: float = 1.6, both: bool = False) -> None:
        """Draw an arrow along points."""
        self.axes.add_patch(FancyArrowPatch(
            path=Line(points), arrowstyle="<|-|>" if both else "-|>", mutation_scale=7 + line, color=color,
            linewidth=line * PIXEL, joinstyle="miter", capstyle="butt", zorder=1.5))

    def line(self, *points: Point, color: str = SOFT, line: float = 1.0, dashed: bool = False) -> None:
        """Draw a line along points."""
        self.axes.plot(*zip(*points, strict=True), color=color, linewidth=line * PIXEL, zorder=1,
                       linestyle=DASHED if dashed else "solid")

    def circle(self, x: float, y: float, radius: float, color: str, text: str = "", *, strength: float = 1.0) -> None:
        """Draw a disc with a few letters in it."""
        self.axes.add_patch(Circle((x, y), radius, facecolor=tint(color, strength), edgecolor=color, zorder=4,
                                   linewidth=1.5 * PIXEL))
        self.words(x, y, text, bold=True, color="white" if strength == 1 and color != POLICY else INK)

    def time(self, left: float, right: float, y: float) -> None:
        """Draw an axis of time."""
        self.arrow((left, y), (right, y), color=SOFT, line=1.2)
        self.words(right - 4, y + 13, "time", color=SOFT, at="right", size=11)

    def save(self, path: Path) -> None:
        """Write the page as SVG."""
        with mpl.rc_context({"svg.hashsalt": "nano-sample-factory"}):
            self.figure.savefig(path, metadata={"Date": None, "Creator": None})
