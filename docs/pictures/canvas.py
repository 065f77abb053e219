"""A white page of 830 pixels, the width of a README, on which boxes, arrows and words are placed by pixel.

x goes to the right, y goes down. Sizes of letters are in pixels too; none is below 11. The page becomes an SVG with
letters as paths, which looks the same everywhere; the same drawing gives the same bytes.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch, Patch, Polygon
from matplotlib.path import Path as Line

from docs.pictures.style import INK, LEARNER, MEMORY, POLICY, ROLLOUT, SETTINGS, SOFT, WAIT, WARN, tint

WIDTH = 830
PIXEL = 72 / 96  # points
Point = tuple[float, float]
LETTERS = {POLICY: "#9a6700"}  # darker, where letters of a color are hard to read
DARK = {ROLLOUT, LEARNER, MEMORY, WARN, INK, SOFT}  # colors upon which letters are white


class Canvas:
    """Draws one picture."""

    def __init__(self, height: float) -> None:
        """Begin an empty page of this height."""
        self.figure = Figure(figsize=(WIDTH / 96, height / 96), dpi=96)
        self.axes = self.figure.add_axes((0, 0, 1, 1))
        self.axes.set(xlim=(0, WIDTH), ylim=(height, 0))
        self.axes.axis("off")
        self.axes.set_zorder(1)  # above axes of a plot

    def add(self, patch: Patch) -> None:
        """Put a shape on the page."""
        self.axes.add_patch(patch)
        patch.set_clip_on(False)

    def words(self, x: float, y: float, text: str, *, size: float = 12, color: str = INK, bold: bool = False,
              at: str = "center", turned: float = 0.0, spacing: float = 1.3) -> None:
        """Write text whose middle is at height y; at x it is in the center, begins (`left`) or ends (`right`)."""
        color = LETTERS.get(color, color)
        lines = text.split("\n")
        for number, line in enumerate(lines):
            below = 0.36 * size + size * spacing * (number - (len(lines) - 1) / 2)  # from the middle to the base line
            self.axes.text(x + below * np.sin(np.radians(turned)), y + below * np.cos(np.radians(turned)), line,
                           fontsize=size * PIXEL, color=color, fontweight="bold" if bold else "normal", ha=at,
                           va="baseline", rotation=turned, rotation_mode="anchor", zorder=5)

    def title(self, x: float, y: float, text: str, color: str = INK, at: str = "left") -> None:
        """Write a heading."""
        self.words(x, y, text, size=14, bold=True, color=color, at=at)

    def note(self, y: float, text: str, x: float = WIDTH / 2, at: str = "center") -> None:
        """Write what is said in passing."""
        self.words(x, y, text, color=SOFT, at=at)

    def box(self, x: float, y: float, width: float, height: float, color: str = SOFT, text: str = "", *,
            strength: float = 0.15, line: float = 1.5, size: float = 12, bold: bool = False, round_: float = 6,
            dashed: bool = False, text_color: str = INK, zorder: float = 2) -> None:
        """Draw a box with its upper left corner at (x, y), filled with a tint of its color; strength 0: white."""
        self.add(FancyBboxPatch(
            (x + round_, y + round_), width - 2 * round_, height - 2 * round_, boxstyle=f"round,pad={round_}",
            facecolor=tint(color, strength), edgecolor=color, linewidth=line * PIXEL, zorder=zorder,
            linestyle=(0, (4, 3)) if dashed else "solid"))
        if text:
            self.words(x + width / 2, y + height / 2, text, size=size, bold=bold, color=text_color)

    def titled(self, x: float, y: float, width: float, height: float, color: str, title: str, text: str = "", *,
               copies: int = 1) -> None:
        """Draw a box with a heading and lines below it; copies: so many boxes behind one another."""
        for copy in range(copies - 1, 0, -1):
            self.box(x + 6 * copy, y + 6 * copy, width, height, color)
        self.box(x, y, width, height, color)
        self.words(x + width / 2, y + 17, title, size=14, bold=True, color=color)
        if text:
            self.words(x + width / 2, y + 17 + (height - 17) / 2, text, size=12)

    def bar(self, x: float, y: float, width: float, height: float, color: str, text: str = "", *, size: float = 11,
            ) -> None:
        """Draw a full rectangle, for time on a lane."""
        self.box(x, y, width, height, color, text, strength=1, line=0, round_=2 if width > 8 else 0.1, size=size,
                 text_color="white" if color in DARK else INK)

    def waits(self, x: float, y: float, width: float, height: float, text: str = "") -> None:
        """Draw time in which nothing is done."""
        self.bar(x, y, width, height, WAIT, text)

    def arrow(self, *points: Point, color: str = INK, line: float = 1.6, both: bool = False, head: bool = True,
              dashed: bool = False, corner: float = 8, zorder: float = 3) -> None:
        """Draw an arrow along points, with rounded corners."""
        style = "-" if not head else f"{'<|' if both else ''}-|>,head_length={4 + line},head_width={1.6 + line / 2}"
        self.add(FancyArrowPatch(
            path=rounded(points, corner), arrowstyle=style, mutation_scale=PIXEL * 1.25, color=color,
            linewidth=line * PIXEL, linestyle=(0, (4, 3)) if dashed else "solid", joinstyle="miter", capstyle="butt",
            zorder=zorder))

    def line(self, *points: Point, color: str = SOFT, line: float = 1.0, dashed: bool = False, zorder: float = 1,
             ) -> None:
        """Draw a line along points."""
        self.axes.plot(*zip(*points, strict=True), color=color, linewidth=line * PIXEL, zorder=zorder,
                       linestyle=(0, (4, 3)) if dashed else "solid", solid_capstyle="butt", dash_capstyle="butt",
                       clip_on=False)

    def area(self, points: Sequence[Point], color: str, strength: float = 1.0, zorder: float = 1) -> None:
        """Fill a polygon."""
        self.add(Polygon(points, facecolor=tint(color, strength), edgecolor="none", zorder=zorder))

    def circle(self, x: float, y: float, radius: float, color: str, text: str = "", *, strength: float = 1.0,
               size: float = 12, line: float = 1.5) -> None:
        """Draw a disc with a few letters in it."""
        self.add(Circle((x, y), radius, facecolor=tint(color, strength), edgecolor=color, linewidth=line * PIXEL,
                        zorder=4))
        self.words(x, y, text, size=size, bold=True, color="white" if color in DARK and strength == 1 else INK)

    def bracket(self, left: float, right: float, y: float, text: str = "", *, up: bool = True, color: str = SOFT,
                size: float = 12) -> None:
        """Draw a brace over (up) or under a stretch, with words at its middle."""
        way = -6 if up else 6
        self.line((left, y), (left, y + way), (right, y + way), (right, y), color=color, line=1.2)
        if text:
            rows = text.count("\n") + 1
            self.words((left + right) / 2, y + way + np.sign(way) * (2 + 8 * rows), text, color=color, size=size)

    def cross(self, x: float, y: float, radius: float, color: str) -> None:
        """Strike a place out."""
        for sign in (-1, 1):
            self.axes.plot([x - radius, x + radius], [y - sign * radius, y + sign * radius], color=color,
                           linewidth=3.5 * PIXEL, zorder=6, solid_capstyle="round", clip_on=False)

    def time(self, left: float, right: float, y: float, text: str = "time") -> None:
        """Draw an axis of time."""
        self.arrow((left, y), (right, y), color=SOFT, line=1.2)
        self.words(right - 4, y + 13, text, color=SOFT, at="right", size=11)

    def save(self, path: Path) -> None:
        """Write the page as SVG."""
        with mpl.rc_context(SETTINGS):
            self.figure.savefig(path, metadata={"Date": None, "Creator": None})
        path.write_text(shorten(path.read_text()))


def rounded(points: Sequence[Point], corner: float) -> Line:
    """Return the line along points, its corners rounded by so many pixels at most."""
    places, codes = [points[0]], [Line.MOVETO]
    for before, here, after in zip(points, points[1:], points[2:], strict=False):
        ends = []
        for other in (before, after):
            way = np.subtract(other, here)
            ends.append(tuple(here + way * min(0.5, corner / np.hypot(*way))))
        places += [ends[0], here, ends[1]]
        codes += [Line.LINETO, Line.CURVE3, Line.CURVE3]
    return Line([*places, points[-1]], [*codes, Line.LINETO])


def shorten(svg: str) -> str:
    """Leave out what an SVG of matplotlib does not need: digits beyond hundredths, spaces, groups and their names."""
    svg = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<defs>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"scale\([^)]*\)|(\d\.\d\d)\d+", lambda found: found[1] or found[0], svg)
    svg = re.sub(r'<g id="\w+_\d+">', "<g>", svg)
    svg = re.sub(r"\s*\n\s*", "\n", svg)
    svg = re.sub(r"\n?([MLQCz])(?: (?=[-\d])|(?=[\n\"]))\n?", r"\1", svg)  # of a path
    svg = re.sub(r"<g>\n(<path[^>]*/>)\n</g>", r"\1", svg)
    svg = re.sub(r"DejaVuSans(?:-(\w))?\w*-(\w+)(?=\")", lambda found: f"{found[1] or ''}{found[2]}", svg)
    svg = re.sub(r'#(\w+)" transform="translate\(([-.\d]+) 0\)"/>', r'#\1" x="\2"/>', svg)  # a letter
    return svg.replace("xlink:href", "href").replace("; ", ";").replace(": ", ":")
