"""Draw what every process was doing, moment by moment: `python -m tools.timeline train_dir/CartPole-v1`.

`train.py --trace_sec 10` writes the last 10 seconds of training into the run's `trace.json`, also for
https://ui.perfetto.dev or chrome://tracing. This tool draws the end of it into `timeline.png` beside it: one bar for
each thread; what a call does within another covers a part of it. Between the bars of a main thread is other work, or
it waits for a core; other threads wait there.

On a GPU a span is what the process does: kernels that it has started may run on after its end.
"""

import json
from itertools import cycle
from pathlib import Path

from matplotlib.patches import Patch

from runtime.command_line import OneLineParser
from runtime.processes import WAIT
from runtime.utils import UserError, exit_status, run_command
from tools.plot import COLORS, drawing

Span = tuple[str, float, float]  # name, begin, duration (ms)
WAITING = "#e2e2e2"


def read_trace(path: Path) -> dict[str, list[Span]]:
    """Read the spans of each thread. Raises `UserError` where there is no trace."""
    if not path.is_file():
        raise UserError(f"there is no {path}: train with --trace_sec 5")
    rows: dict[str, list[Span]] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X":
            name = WAIT if event["name"].startswith(WAIT) else event["name"]
            rows.setdefault(event["cat"], []).append((name, event["ts"] / 1e3, event["dur"] / 1e3))
    return rows


def draw_last(path: Path, output: Path, seconds: float) -> None:
    """Draw the last seconds of a trace."""
    rows = read_trace(path)
    end = max(begin + length for spans in rows.values() for _, begin, length in spans)
    begin = max(end - seconds * 1e3, 0.0)
    names = sorted({name for spans in rows.values() for name, *_ in spans})
    colors = dict(zip(names, cycle(COLORS), strict=False)) | {WAIT: WAITING}
    with drawing(output, 1.15 + 0.32 * len(rows)) as figure:
        axes = figure.subplots()
        for y, spans in enumerate(rows.values()):
            shown = [span for span in spans if span[1] + span[2] > begin]
            shown.sort(key=lambda span: (span[1], -span[2]))  # what lies within another comes after it
            bars = [(first - begin, length) for _, first, length in shown]
            axes.broken_barh(bars, (y - 0.4, 0.8), facecolors=[colors[name] for name, *_ in shown])
        axes.set(xlabel="ms", xlim=(0, end - begin), yticks=range(len(rows)), yticklabels=rows)
        axes.invert_yaxis()
        figure.legend(handles=[Patch(color=colors[name], label=name) for name in names],
                      loc="outside upper center", ncols=5)


@exit_status
def main(argv: list[str]) -> None:
    """Run the command."""
    parser = OneLineParser(__doc__)
    parser.add_argument("run", type=Path, help="a run's folder, which holds trace.json")
    parser.add_argument("--seconds", type=float, default=0.5, help="draw the last so many seconds [0.5]")
    args = parser.parse(argv)
    output = args.run / "timeline.png"
    draw_last(args.run / "trace.json", output, args.seconds)
    print(output)


if __name__ == "__main__":
    run_command(main)
