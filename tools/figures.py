"""Pictures of the tools. Only who draws one needs matplotlib, so it is imported here, when a figure is begun."""

import contextlib
import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtime.user_error import UserError

# of Okabe and Ito ("Color Universal Design", 2008), which the color-blind can tell apart
COLORS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#8c6d1f", "#1f2933")
LIGHT_GRAY = "#e2e2e2"
WIDTH, DPI = 8.6, 200  # inches, dots an inch
SETTINGS = {"axes.grid": True, "axes.spines.right": False, "axes.spines.top": False, "axes.titlesize": 10,
            "font.size": 9, "grid.alpha": 0.3, "legend.frameon": False}


@contextlib.contextmanager
def drawing(output: Path, height: float) -> Iterator[Any]:
    """Yield a figure of this height (inches), then save it. Raises `UserError` where matplotlib is missing."""
    try:
        matplotlib = importlib.import_module("matplotlib")
        figures = importlib.import_module("matplotlib.figure")
    except ImportError as error:
        raise UserError(f"{output.name} is drawn with matplotlib: pip install matplotlib") from error
    with matplotlib.rc_context(SETTINGS):
        figure = figures.Figure(figsize=(WIDTH, height), layout="constrained")
        yield figure
        figure.savefig(output, dpi=DPI)
