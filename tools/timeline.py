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
from runtime.recorder import STEP, WAIT, Span
from runtime.user_error import UserError, exit_status
from tools.figures import COLORS, LIGHT_GRAY, drawing

Spans = list[tuple[str, float, float]]  # name, begin, duration (ms)
WAITING = {"facecolor": LIGHT_GRAY, "edgecolor": "none"}
OTHER = {"facecolor": "white", "edgecolor": "#b0b0b0", "hatch": "//////", "linewidth": 0}
# as different from each other as so many can be
PALETTE = (*COLORS, "#7b6fe0", "#f0e442", "#86d8ac", "#00c8e0", "#8fb300", "#e884b8", "#4a2f00", "#b4cff8")


def write_trace(path: Path, spans: dict[str, Iterable[Span]], begin: int, end: int) -> None:
    """Write the spans of each process that lie in [begin, end] ns as a Chrome trace."""
    events = []
    for pid, (process, recorded) in enumerate(spans.items()):
        inside = [span for span in recorded if span.end >= begin and span.begin <= end]
        tids = {thread: tid for tid, thread in enumerate(dict.fromkeys(span.thread for span in inside))}
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": process}})
        for thread, tid in tids.items():
            events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": thread}})
        for span in inside:
            first, last = max(span.begin, begin), min(span.end, end)
            label = process if span.thread == "MainThread" else f"{process}, {span.thread}"
            events.append({"ph": "X", "pid": pid, "tid": tids[span.thread], "name": span.name, "cat": label,
                           "ts": (first - begin) / 1e3, "dur": (last - first) / 1e3})  # us
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
    rows = {label: [span for span in shorten(spans) if sum(span[1:]) > begin] for label, spans in rows.items()}
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


def shorten(spans: Spans) -> Spans:
    """Call all waits alike, and number the splits of each worker from 1."""
    splits = sorted({name for name, *_ in spans if name.startswith(STEP)}, key=lambda name: (len(name), name))
    names = {name: f"step, split {number}" for number, name in enumerate(splits, 1)}
    return [(WAIT if name.startswith(WAIT) else names.get(name, name), *when) for name, *when in spans]


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


def write_run(run_dir: Path, spans: dict[str, Iterable[Span]], begin: int, end: int) -> str:
    """Write the trace of a run and the picture of its last moments into its folder; say where they are."""
    path, picture = run_dir / "trace.json", run_dir / "timeline.png"
    write_trace(path, spans, begin, end)
    try:
        draw_last(path, picture, seconds=0.5)
    except UserError as error:
        picture = f"{error}; then python -m tools.timeline {run_dir}"
    return f"{path}: open it in https://ui.perfetto.dev; {picture}"


@exit_status
def main(argv: list[str]) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("run", type=Path, help="a run's folder, which holds trace.json")
    parser.add_argument("--seconds", type=float, default=0.5, help="draw the last so many seconds [0.5]")
    args = parser.parse_args(argv)
    draw_last(args.run / "trace.json", args.run / "timeline.png", args.seconds)
    print(args.run / "timeline.png")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
