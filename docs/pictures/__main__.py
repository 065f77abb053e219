"""Draw the pictures of the documentation: `python -m docs.pictures`.

The pictures of real runs beside them were drawn by tools/timeline.py and tools/plot.py; pong.gif was put together of
films of evaluate.py at checkpoints of one run.
"""

from pathlib import Path

from docs.pictures.drawings import DRAWINGS

FOLDER = Path(__file__).parent

if __name__ == "__main__":
    for drawing in DRAWINGS:
        drawing().save(FOLDER / f"{drawing.__name__}.svg")
