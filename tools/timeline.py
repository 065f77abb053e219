"""What every process was doing, moment by moment: `train.py --trace_sec 10` records the last 10 seconds of training.

Each component lists the methods that matter in `SPANS`; `Recorder.attach` replaces them, on that one object, by
versions that write down when they began and ended. Without `--trace_sec` nothing is replaced, so that it costs nothing;
with it, about 1 us a call. The supervisor gathers the spans when the components leave, and writes `trace.json` into the
run's folder, for https://ui.perfetto.dev or chrome://tracing, and a picture of the last moments, `timeline.png`.

    python -m tools.timeline train_dir/PongNoFrameskip-v4 --seconds 0.5 --output timeline.png --until 6.5

On a GPU a span is what the process does: kernels that it has started may run on after its end.
"""

import itertools
import json
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from runtime.command_line import OneLineParser
from runtime.files import write_atomically
from runtime.recorder import STEP, WAIT, Span
from runtime.user_error import UserError
from tools import style

# ---- the trace ---------------------------------------------------------------------------------------------------


def write_trace(path: Path, spans: dict[str, Iterable[Span]], begin: int, end: int) -> None:
    """Write the spans of each process that lie in [begin, end] ns as a Chrome trace."""
    events: list[dict[str, Any]] = []
    for process, (name, recorded) in enumerate(spans.items()):
        events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": name}})
        events.append({"ph": "M", "pid": process, "name": "process_sort_index", "args": {"sort_index": process}})
        threads: dict[str, int] = {}
        for span in recorded:
            if span.end < begin or span.begin > end:
                continue
            if span.thread not in threads:
                threads[span.thread] = len(threads)
                events.append({"ph": "M", "pid": process, "tid": threads[span.thread], "name": "thread_name",
                               "args": {"name": span.thread}})
            first, last = max(span.begin, begin), min(span.end, end)
            events.append({"ph": "X", "pid": process, "tid": threads[span.thread], "name": span.name,
                           "ts": (first - begin) / 1e3, "dur": (last - first) / 1e3})  # us
    write_atomically(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def write_run(run_dir: Path, spans: dict[str, Iterable[Span]], begin: int, end: int) -> str:
    """Write the trace of a run and the picture of its last moments into its folder; say where they are."""
    path = run_dir / "trace.json"
    write_trace(path, spans, begin, end)
    picture = draw_last(path, path.with_name("timeline.png"), seconds=0.5)
    return f"{path}: open it in https://ui.perfetto.dev" + (f"; {picture}" if picture else "")


class Row(NamedTuple):
    """One thread of one process in the picture; spans as (name, begin, duration) in ms."""

    label: str
    spans: list[tuple[str, float, float]]


def read_trace(path: Path) -> list[Row]:
    """Read what `write_trace` wrote, one row for each thread. Raises `UserError` when it cannot be read."""
    try:
        events = json.loads(path.read_text())["traceEvents"]
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} is no trace ({error}); record one with train.py --trace_sec 10") from error
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    rows = {}
    for event in events:
        if event["name"] == "thread_name":
            process, thread = processes[event["pid"]], event["args"]["name"]
            label = process if thread == "MainThread" else f"{process}, {thread}"
            rows[event["pid"], event["tid"]] = Row(label, [])
    for event in events:
        if event["ph"] == "X":
            rows[event["pid"], event["tid"]].spans.append((event["name"], event["ts"] / 1e3, event["dur"] / 1e3))
    return [rows[key] for key in sorted(rows, key=lambda key: (key[0], rows[key].label))]


# ---- the picture -------------------------------------------------------------------------------------------------

# of what components do, clearly different from each other: the rollout worker's in blue, the policy worker's (and each
# forward pass) from yellow to brown, the learner's around green
COLORS = {
    "step": style.ROLLOUT, "step, split 1": style.ROLLOUT, "step, split 2": "#56b4e9", "store": "#10306b",
    "ask": "#7b6fe0", "copy weights": "#f0e442", "gather": "#8c6d1f", "forward": style.POLICY, "write": "#4a2f00",
    "SGD": "#86d8ac", "loss": style.WARN, "backward": "#009268", "optimizer step": "#005f56", "normalizers": "#8fb300",
    "publish": style.MEMORY, "batch": "#00c8e0", "save": "#000000", "evaluate": "#e884b8", "step, split 3": "#b4cff8"}
WAITING = {"facecolor": style.WAIT, "edgecolor": "none"}
OTHER = {"facecolor": "white", "edgecolor": "#b0b0b0", "hatch": "//////", "linewidth": 0}


@mpl.rc_context(style.SETTINGS)
def draw(rows: list[Row], output: Path, begin_ms: float, end_ms: float) -> None:
    """Draw the spans within [begin_ms, end_ms] of a trace, one bar for each thread; inner spans lie on outer ones.

    Between the spans of a main thread is other work; other threads only wait there.
    """
    has_splits = any(len({name for name, _, _ in row.spans if name.startswith(STEP)}) > 1 for row in rows)
    rows = [Row(row.label, simplify(row.spans, has_splits)) for row in rows]
    colors = choose_colors({name for row in rows for name, _, _ in row.spans})
    figure = Figure(figsize=(style.WIDTH, 1.15 + 0.32 * len(rows)), layout="constrained")
    axes = figure.subplots()
    shown = set()
    for y, row in enumerate(rows):
        between = OTHER if row.label.isidentifier() else WAITING
        axes.broken_barh([(0, end_ms - begin_ms)], (y - 0.4, 0.8), **between)
        for depth, spans in enumerate(by_depth(row.spans)):
            inside = [(name, first - begin_ms, length) for name, first, length in spans
                      if first < end_ms and first + length > begin_ms]
            axes.broken_barh([(first, length) for _, first, length in inside], (y - 0.4, 0.8 / 2**depth),
                             facecolors=[colors[name] for name, _, _ in inside], edgecolor="none")
            shown.update(name for name, _, _ in inside)
    axes.set_yticks(range(len(rows)), [row.label for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, end_ms - begin_ms)
    axes.set_xlabel("ms")
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)
    axes.grid(visible=False)
    patches = [Patch(color=colors[name], label=name) for name in colors if name in shown - {"waiting"}]
    patches += [Patch(**WAITING, label="waiting"), Patch(**OTHER, label="other work, or no free core")]
    figure.legend(handles=patches, loc="outside upper center", ncols=5, columnspacing=1.4, handlelength=1.6)
    figure.savefig(output, dpi=style.DPI)


def simplify(spans: list[tuple[str, float, float]], has_splits: bool) -> list[tuple[str, float, float]]:
    """Call all waits alike, and number the splits of each worker from 1."""
    splits = sorted({name for name, _, _ in spans if name.startswith(STEP)}, key=lambda name: (len(name), name))
    names = {name: f"step, split {number}" if has_splits else "step" for number, name in enumerate(splits, 1)}
    return [(names.get(name, "waiting" if name.startswith(WAIT) else name), *when) for name, *when in spans]


def choose_colors(names: set[str]) -> dict[str, str]:
    """Choose a color for each name: the same in every picture, but for names that only an algorithm of yours has."""
    colors = {name: color for name, color in COLORS.items() if name in names}
    free = itertools.cycle([color for color in COLORS.values() if color not in colors.values()] or COLORS.values())
    return colors | {name: next(free) for name in sorted(names - colors.keys())} | {"waiting": WAITING["facecolor"]}


def by_depth(spans: list[tuple[str, float, float]]) -> list[list[tuple[str, float, float]]]:
    """Sort the spans of one thread into outer ones, those inside them, and so on."""
    levels: list[list[tuple[str, float, float]]] = []
    ends: list[float] = []  # of the spans that are open, the outermost first
    for span in sorted(spans, key=lambda span: (span[1], -span[2])):
        while ends and ends[-1] <= span[1]:
            ends.pop()
        if len(ends) == len(levels):
            levels.append([])
        levels[len(ends)].append(span)
        ends.append(span[1] + span[2])
    return levels


def draw_last(path: Path, output: Path, seconds: float, until_sec: float = math.inf) -> Path | None:
    """Draw the last seconds of a trace, or those until a moment; return the picture, None when there is no span."""
    rows = read_trace(path)
    end = max((first + length for row in rows for _, first, length in row.spans), default=0.0)
    end = min(end, until_sec * 1e3)
    if not end:
        return None
    draw(rows, output, max(end - seconds * 1e3, 0.0), end)
    return output


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    parser = OneLineParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("run", type=Path, help="a run's folder, or a trace file")
    parser.add_argument("--seconds", type=float, default=0.5, help="draw the last so many seconds [0.5]")
    parser.add_argument("--until", type=float, default=math.inf, metavar="SECONDS",
                        help="draw those before this moment of the trace instead [its end]")
    parser.add_argument("--output", type=Path, help="picture file [timeline.png beside the trace]")
    try:
        args = parser.parse(argv)
        if not min(args.seconds, args.until) > 0:
            raise UserError(f"--seconds={args.seconds} and --until={args.until} must be greater than 0")
        path = args.run / "trace.json" if args.run.is_dir() else args.run
        output = args.output or path.with_name("timeline.png")
        if draw_last(path, output, args.seconds, args.until) is None:
            raise UserError(f"{path} holds no spans: the training ended before any was recorded")
    except UserError as error:
        print(f"timeline.py: {error}", file=sys.stderr)
        return 2
    except (OSError, ValueError) as error:  # matplotlib knows no such format, or the folder is not there
        print(f"timeline.py: {output} cannot be written: {error}", file=sys.stderr)
        return 2
    print(output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
