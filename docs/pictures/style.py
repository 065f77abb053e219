"""The looks of all drawings: one color for each role, one font, the same lines everywhere.

Most colors are those of Okabe and Ito ("Color Universal Design", 2008), which the color-blind can tell apart. A role
has the same color in every drawing; gray is waiting.
"""

from typing import Any

ROLLOUT, POLICY, LEARNER, MEMORY = "#0072b2", "#e69f00", "#009e73", "#aa4499"  # memory: also the supervisor's color
WAIT, INK, SOFT, WARN = "#e2e2e2", "#1f2933", "#66727f", "#d55e00"  # soft: what is said in passing; warn: lost, wrong
LINES = (ROLLOUT, POLICY, LEARNER, "#cc79a7", WARN, "#56b4e9", "#8c6d1f", INK)  # of curves, in this order

SETTINGS: dict[str, Any] = {
    "axes.edgecolor": SOFT, "axes.grid": True, "axes.spines.right": False, "axes.spines.top": False, "grid.alpha": 0.3,
    "lines.solid_capstyle": "round", "svg.hashsalt": "nano-sample-factory", "xtick.color": SOFT,
    "xtick.labelcolor": INK, "ytick.color": SOFT, "ytick.labelcolor": INK}


def tint(color: str, strength: float = 0.15) -> str:
    """Mix a color, #rrggbb, with white; strength 1 leaves it as it is."""
    parts = (int(color[place : place + 2], 16) for place in (1, 3, 5))
    return "#" + "".join(f"{round(255 - strength * (255 - part)):02x}" for part in parts)
