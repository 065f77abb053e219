"""What every process was doing, moment by moment: `train.py --trace_sec 10` records the last 10 seconds of training.

Each component lists the methods that matter in `SPANS`; `runtime/recorder.py` writes down when their calls begin and
end. Without `--trace_sec` nothing is recorded, so it costs nothing; with it, about 1 us a call. At the end `trace.json`
is written into the run's folder, for https://ui.perfetto.dev or chrome://tracing, and a picture of the last moments,
`timeline.png`, where matplotlib is there. Later:

    python -m tools.timeline train_dir/PongNoFrameskip-v4 --seconds 0.5

On a GPU a span is what the process does: kernels that it has started may run on after its end.
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from runtime.files import write_atomically
from runtime.recorder import WAIT, Span
from runtime.user_error import exit_status
from tools.figures import COLORS, LIGHT_GRAY, drawing

Spans = list[tuple[str, float, float]]  # name, begin, duration (ms)
WAITING = {"facecolor": LIGHT_GRAY, "edgecolor": "none"}
OTHER = {"facecolor": "white", "edgecolor": "#b0b0b0", "hatch": "//////", "linewidth": 0}
# as different from each other as so many can be
PALETTE = (*COLORS, "#7b6fe0", "#f0e442", "#86d8ac", "#00c8e0", "#8fb300", "#e884b8", "#4a2f00", "#b4cff8")


def write_trace(path: Path, spans: dict[str, Iterable[Span]], begin: int, end: int) -> None:
    """Write the spans of each process that lie in [begin, end] ns as a Chrome trace, one row for each thread."""
    events, pids = [], {}
    for process, recorded in spans.items():
        for span in recorded:
            first, last = max(span.begin, begin), min(span.end, end)
            if first > last:
                continue
            label = process if span.thread == "MainThread" else f"{process}, {span.thread}"
            pid = pids.setdefault(label, len(pids))
            events.append({"ph": "X", "pid": pid, "tid": 0, "name": span.name, "cat": label,
                           "ts": (first - begin) / 1e3, "dur": (last - first) / 1e3})  # us
    events += [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": label}} for label, pid in pids.items()]
    write_atomically(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def read_trace(path: Path) -> dict[str, Spans]:
    """Read the spans of each thread."""
    rows: dict[str, Spans] = {}
    for event in json.loads(path.read_text())["traceEvents"]:
        if event["ph"] == "X":
            rows.setdefault(event["cat"], []).append((event["name"], event["ts"] / 1e3, event["dur"] / 1e3))
    return rows


def draw_last(path: Path, output: Path, seconds: float) -> None:
    """Draw the last seconds of a trace, one bar for each thread; inner spans lie on outer ones.

    Between the spans of a main thread is other work; other threads only wait there.
    """
    rows = read_trace(path)
    end = max((begin + length for spans in rows.values() for _, begin, length in spans), default=1.0)
    begin = max(end - seconds * 1e3, 0.0)
    rows = {label: [(WAIT if name.startswith(WAIT) else name, *when) for name, *when in spans if sum(when) > begin]
            for label, spans in rows.items()}
    names = sorted({name for spans in rows.values() for name, *_ in spans})
    colors = dict(zip(names, itertools.cycle(PALETTE), strict=False)) | {WAIT: LIGHT_GRAY}
    with drawing(output, 1.15 + 0.32 * len(rows)) as figure:
        axes, handles = figure.subplots(), {}
        for y, (label, spans) in enumerate(rows.items()):
            axes.broken_barh([(0, end - begin)], (y - 0.4, 0.8), **(OTHER if label.isidentifier() else WAITING))
            for depth, level in enumerate(by_depth(spans)):
                for name in dict.fromkeys(name for name, *_ in level):
                    bars = [(first - begin, length) for other, first, length in level if other == name]
                    handles[name] = axes.broken_barh(bars, (y - 0.4, 0.8 / 2**depth), facecolor=colors[name])
        axes.set(xlabel="ms", xlim=(0, end - begin), yticks=range(len(rows)), yticklabels=rows)
        axes.invert_yaxis()
        axes.grid(visible=False)
        figure.legend([handles[name] for name in names], names, loc="outside upper center", ncols=5,
                      title="hatched: other work, or no free core; half as high: a part of the bar behind it")


def by_depth(spans: Spans) -> list[Spans]:
    """Sort the spans of one thread into outer ones, those inside them, and so on."""
    levels: list[Spans] = []
    ends: list[float] = []  # of the spans that are open, the outermost first
    for span in sorted(spans, key=lambda span: (span[1], -span[2])):
        while ends and ends[-1] <= span[1]:
            ends.pop()
        if len(ends) == len(levels):
            levels.append([])
        levels[len(ends)].append(span)
        ends.append(span[1] + span[2])
    return levels


@exit_status
def main(argv: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run's folder, which holds trace.json")
    parser.add_argument("--seconds", type=float, default=0.5, help="draw the last so many seconds [0.5]")
    args = parser.parse_args(argv)
    draw_last(args.run / "trace.json", args.run / "timeline.png", args.seconds)
    print(args.run / "timeline.png")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
