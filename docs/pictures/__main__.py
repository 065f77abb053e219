"""Draw the pictures of the documentation: `python -m docs.pictures`, or some, `python -m docs.pictures vtrace`.

The pictures of real runs beside them were drawn by tools/timeline.py and tools/plot.py; pong.gif was put together of
films of evaluate.py at checkpoints of one run.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from docs.pictures import lanes, learning, system
from docs.pictures.canvas import Canvas

FOLDER = Path(__file__).parent
DRAWINGS: dict[str, Callable[[], Canvas]] = {
    drawing.__name__: drawing for drawing in (
        system.architecture, system.journey, lanes.why_asynchronous, system.shared_memory, lanes.double_buffering,
        lanes.policy_lag, learning.vtrace, learning.ppo_clip, learning.time_limits, learning.recurrent,
        learning.normalization, lanes.population, learning.algorithms, system.death, lanes.speed)}


def place_of(name: str) -> Path:
    """Return the file of a drawing."""
    return FOLDER.parent / "architecture.svg" if name == "architecture" else FOLDER / f"{name}.svg"


def main(names: list[str]) -> int:
    """Draw those named, or all; return the exit status."""
    if unknown := set(names) - DRAWINGS.keys():
        print(f"pictures: there is no {min(unknown)}; there are {', '.join(DRAWINGS)}", file=sys.stderr)
        return 2
    for name in names or DRAWINGS:
        DRAWINGS[name]().save(place_of(name))
        print(place_of(name))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
