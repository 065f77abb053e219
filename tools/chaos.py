"""Chaos: faults of many kinds, done to real runs at random moments; what became of each is counted.

    python -m tools.chaos --hours 1

Every run plays `tests/checked.py`: an environment whose numbers tell where they come from, and an algorithm that checks
all that it learns from. A fault is overcome when the run blames the right component, or nobody, and goes on learning;
or, where it ends the run, when nothing is left behind and the run is resumed. `faults.jsonl` in the folder keeps what
became of each; the table tells of all of them, those of earlier calls included.
"""

import argparse
import json
import math
import random
import re
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from runtime.checkpoint import holds_run
from runtime.files import read_lines
from tools.faults import DEADLINE_SEC, ENDING, MODES, SURVIVED, Job, damage_checkpoint, kill_tree


class Chaos:
    """Runs jobs and keeps what becomes of the faults."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed, self.rng = folder, seed, random.Random(seed)
        folder.mkdir(parents=True, exist_ok=True)
        self.count = 0
        self.job: Job | None = None  # the newest

    def note(self, job: Job, mode: str, kind: str, **outcome: Any) -> None:
        """Keep what became of a fault: seconds to recover, env_steps lost, what was wrong and what is left."""
        self.count += 1
        outcome = {"ok": not (outcome.get("wrong") or outcome.get("leaks"))} | outcome
        row = {"seed": self.seed, "number": self.count, "mode": mode, "kind": kind, "folder": str(job.folder)} | outcome
        with (self.folder / "faults.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{self.count:5} {mode:12} {kind:50} " + ", ".join(f"{name} {value}" for name, value in outcome.items()),
              flush=True)

    def run(self, until: float, num_faults: float) -> None:
        """Do faults until so much of `time.monotonic`, or until there were so many."""
        number = 0
        while time.monotonic() < until and self.count < num_faults:
            mode, number = self.rng.choice(sorted(MODES)), number + 1
            folder = self.folder / f"{self.seed}-{number}"
            shutil.rmtree(folder, ignore_errors=True)
            goes_on = self.run_once(folder, mode, until, num_faults)
            self.clean_up()
            if goes_on:
                shutil.rmtree(folder)

    def start(self, folder: Path, mode: str) -> Job:
        self.job = Job(folder, mode, self.rng.randrange(2**31))
        return self.job

    def clean_up(self) -> None:
        """End the newest job, whatever its state."""
        if self.job is not None:
            kill_tree(self.job, self.rng)
            shutil.rmtree(self.job.temporary, ignore_errors=True)

    def run_once(self, folder: Path, mode: str, until: float, num_faults: float) -> bool:
        """Do some faults to one run, resuming it in between; tell whether all went well."""
        job = self.start(folder, mode)
        if not job.wait_for_learning():
            self.note(job, mode, "none: the start", seconds=DEADLINE_SEC, lost=None, wrong="does not learn")
            return False
        going = True
        for _ in range(self.rng.randint(2, 4)):
            before = job.usage()
            for _ in range(self.rng.randint(3, 12)):
                if going and time.monotonic() < until and self.count < num_faults:
                    going = self.disturb(job, mode)
            if not going:
                break
            after = job.usage()
            leaks = [f"{name} {old} to {new}" for name, old, new, more in zip(
                ("descriptors", "threads", "megabytes"), before, after, (4, 2, 30), strict=True) if new > old + more]
            job = self.end_and_resume(job, mode, leaks)
            going = job is not None
            if not going or time.monotonic() > until or self.count >= num_faults:
                break
        if going:
            job.process.send_signal(signal.SIGTERM)
            job.end()
            job.leaks([])
        return going

    def disturb(self, job: Job, mode: str) -> bool:
        """Do one fault to a run, which must go on; tell whether it does."""
        kinds = sorted(SURVIVED)
        kind = self.rng.choices(kinds, [SURVIVED[kind][1] for kind in kinds])[0]
        time.sleep(self.rng.uniform(0, 0.5))
        job.wait(lambda: len(job.components()) >= job.num_components, 10)
        job.num_components = max(job.num_components, len(job.components()))
        mark, (sampled, trained), begun = len(job.read_log()), job.env_steps(), time.monotonic()
        expected = SURVIVED[kind][0](job, self.rng)
        mark = 0 if kind == "run folder removed" else mark
        goes_on = (not expected or job.wait(lambda: job.blamed(mark))) and job.wait_for_learning()
        seconds, blamed = round(time.monotonic() - begun, 2), job.blamed(mark)
        right = bool(blamed) if expected == "*" else blamed == ({expected} if expected else set())
        now = job.env_steps()
        lost = (now[0] - now[1]) - (sampled - trained) if expected and mode != "replay" else None
        wrong = ""
        if not goes_on:
            wrong = "hangs" if job.process.poll() is None else f"ended with {job.process.returncode}"
        elif not right:
            wrong = f"blamed {sorted(blamed)}, not {expected or 'nobody'}"
        self.note(job, mode, kind, seconds=seconds, lost=lost, wrong=wrong)
        return goes_on

    def end_and_resume(self, job: Job, mode: str, leaks: list[str]) -> Job | None:
        """End a run, spoil its folder perhaps, and resume it; return the new job, None if it does not learn."""
        kind = self.rng.choice(sorted(ENDING))
        before, members = job.env_steps()[0], job.members()
        in_order = ENDING[kind](job, self.rng)
        job.end()
        status, wrong = job.process.returncode, []
        if status != (0 if in_order else -signal.SIGKILL):
            wrong.append("hangs" if status is None else f"ended with {status}")
        leaks = leaks + job.leaks(members)
        has_saved, damaged = holds_run(job.run_dir), None
        if self.rng.random() < 0.5 and (damaged := damage_checkpoint(job, self.rng)):
            kind += ", the newest checkpoint damaged"
        resumed = self.start(job.folder, mode)
        goes_on = resumed.wait_for_learning()
        text = resumed.read_new_log()
        found = re.search(r"resumed at env_steps=([\d,]+)", text)
        lost = max(0, before - int(found[1].replace(",", ""))) if found else None
        if damaged and "is damaged" in text and str(damaged) not in text:
            wrong.append("another checkpoint is called damaged")
        if not goes_on or bool(found) != has_saved:
            wrong.append("not resumed")
        self.note(resumed, mode, kind, seconds=round(time.monotonic() - resumed.begun, 2), lost=lost,
                  wrong="; ".join(wrong), leaks=leaks)
        return resumed if goes_on else None


def describe(rows: Sequence[dict[str, Any]]) -> str:
    """Draw the table of what became of the faults, in Markdown."""
    lines = ["| fault | times | overcome | hangs or ends | wrong blame | leaks | seconds, median (most) | "
             "env_steps lost, mean |", "|---|---|---|---|---|---|---|---|"]
    for kind in [*sorted({row["kind"] for row in rows}), None]:
        own = [row for row in rows if kind is None or row["kind"] == kind]
        wrong = [row["wrong"] for row in own]
        seconds = [row["seconds"] for row in own if row["ok"]] or [math.nan]
        lost = [row["lost"] for row in own if row["lost"] is not None]
        blames = sum("blamed" in words or "is called" in words for words in wrong)
        lines.append(f"| {kind or 'all'} | {len(own)} | {sum(row['ok'] for row in own)} | "
                     f"{sum(map(bool, wrong)) - blames} | {blames} | {sum(bool(row.get('leaks')) for row in own)} | "
                     f"{statistics.median(seconds):.1f} ({max(seconds):.1f}) | "
                     f"{f'{statistics.mean(lost):,.0f}' if lost else ''} |")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> int:
    """Run; return 1 when a fault was not overcome."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hours", type=float, default=1.0, help="how long; 0: only the table of what is in the folder")
    parser.add_argument("--faults", type=float, default=math.inf, help="end after so many")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="the same faults in the same order")
    parser.add_argument("--folder", type=Path, default=Path("chaos"))
    args = parser.parse_args(argv)
    chaos = Chaos(args.folder.resolve(), args.seed)
    print(f"seed {args.seed}, records in {args.folder}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job of the background would ignore them
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        chaos.run(time.monotonic() + args.hours * 3600, args.faults)
    finally:
        chaos.clean_up()
    rows = read_lines(args.folder / "faults.jsonl")
    print(describe(rows))
    return int(not all(row["ok"] for row in rows[len(rows) - chaos.count :]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
