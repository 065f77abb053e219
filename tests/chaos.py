"""Random faults, done to real runs at random moments. Each must be overcome; none may hang or leave anything behind.

    python -m tests.chaos --faults 300

Every run plays `checked.py`: an environment whose numbers say where they come from, and an algorithm that checks all
that it learns from. A fault is overcome when the log blames the right component, or nobody, and the run learns on; or,
where the fault ends the run, when the exit status is right, no process, shared memory or temporary file is left, and
the run is resumed. The folder of a run that failed stays.
"""

import argparse
import contextlib
import os
import random
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from signal import SIG_DFL, SIGABRT, SIGHUP, SIGINT, SIGKILL, SIGSEGV, SIGSTOP, SIGTERM, default_int_handler, signal

import psutil

from runtime.checkpoint import holds_run, list_checkpoints, policy_dir
from tests.running import CHECKED, DEADLINE_SEC, ROOT, STALL_SEC, TELLING, Run, wait_until

ENDING_SHARE = 0.15  # of the faults
MAX_GROWTH = (4, 2, 30)  # of the main process: descriptors, threads, megabytes
MODES = {
    "feed-forward": (*CHECKED, "--async_rl"),
    "recurrent": (*CHECKED, "--async_rl", "--use_rnn", "--rnn_size=16"),
    "synchronous": (*CHECKED, "--async_rl=False", "--num_batches_per_epoch=1"),
    "in turns": (*CHECKED, "--async_rl=False"),
    "population": (*CHECKED, "--num_policies=2", "--with_pbt", "--pbt_period_env_steps=5000",
                   "--pbt_start_mutation=5000"),
    "replay": ("--algo=APEX", "--replay_size=20000", "--replay_warmup=1024")}


class Victim(Run):
    """A start to which faults are done."""

    def __init__(self, folder: Path, mode: str, rng: random.Random) -> None:
        self.rng, self.num_components, log = rng, 0, folder / "run" / "log.txt"
        (folder / "fault").unlink(missing_ok=True)
        if log.exists():  # this start shall have its own
            log.rename(folder / f"log_{time.time():.0f}.txt")
        seed = [] if holds_run(folder / "run") else [f"--seed={rng.randrange(2**31)}"]
        super().__init__(folder, *TELLING, *MODES[mode], *seed)

    def components(self) -> dict[str, psutil.Process]:
        """Return them, and remember how many there may be."""
        found = super().components()
        self.num_components = max(self.num_components, len(found))
        return found

    def usage(self) -> tuple[int, int, int]:
        return self.process.num_fds(), self.process.num_threads(), self.process.memory_info().rss >> 20


# ---- faults that a run must survive: each returns whom the log should blame ------------------------------------------


def hit_component(run: Victim, *signals: int) -> str:
    """Kill a component, or stop it for ever."""
    name, process = run.rng.choice(sorted(run.components().items()))
    process.send_signal(run.rng.choice(signals or (SIGKILL, SIGKILL, SIGSEGV, SIGABRT, SIGSTOP)))
    return name


def break_environment(run: Victim, *faults: str) -> str:
    """Write down a fault for the first environment that is reset, in whichever process; wait until it is done."""
    components = {process.pid: name for name, process in run.components().items()}
    fault = run.rng.choice(faults or ("raise", "hang", "leave", "crash", "hold the interpreter's lock"))
    (run.folder / "new").write_text(fault)
    (run.folder / "new").rename(run.folder / "fault")
    run.until(lambda: list(run.folder.glob("fault.*")))
    taken = [components.get(int(path.suffix[1:])) for path in run.folder.glob("fault.*")]
    for path in run.folder.glob("fault*"):
        path.unlink()
    return taken[0] if taken else "an environment"


def freeze(run: Victim) -> str:
    """Stop one component for a moment, or all for longer than it takes to call one hung."""
    one, everybody = run.rng.choice([*run.components().values()]), run.members()
    members, seconds = run.rng.choice([([one], STALL_SEC / 2), (everybody, STALL_SEC + 1)])
    for member in members:
        member.suspend()
    time.sleep(seconds)
    for member in members:
        member.resume()
    return ""


def hit_server(run: Victim) -> str:
    """Kill the server that components are forked from, with which all die, or stop it before one of them dies."""
    server = run.server()
    if run.rng.random() < 0.5:
        server.kill()
        return "*"
    server.suspend()
    return hit_component(run, SIGKILL)


def fill_disk(run: Victim) -> str:
    """Make all files stop growing for a while."""
    members = run.members()
    for size in (run.rng.choice([0, 100, 5000]), psutil.RLIM_INFINITY):
        for member in members:
            with contextlib.suppress(psutil.Error):
                member.rlimit(psutil.RLIMIT_FSIZE, (size, psutil.RLIM_INFINITY))
        time.sleep(run.rng.uniform(0.5, 3))
    return ""


def remove_folder(run: Victim) -> str:
    """Remove the run's folder."""
    shutil.rmtree(run.run_dir, ignore_errors=True)
    return ""


WEIGHTS = {hit_component: 11, break_environment: 4, freeze: 3, hit_server: 2, fill_disk: 1, remove_folder: 1}


def survive(run: Victim) -> tuple[str, list[str]]:
    """Do a fault that a run must survive; return its name, and what went wrong."""
    fault = run.rng.choices([*WEIGHTS], [*WEIGHTS.values()])[0]
    run.until(lambda: len(run.components()) >= run.num_components, 10)  # the one before may be about to be replaced
    mark = len(run.read("log.txt")) if fault is not remove_folder else 0
    expected = fault(run)
    goes_on = (not expected or run.until(lambda: run.blamed(mark))) and run.learns()
    blamed = run.blamed(mark)
    if not goes_on:
        return fault.__name__, ["hangs" if run.process.poll() is None else f"ended with {run.process.returncode}"]
    is_right = bool(blamed) if expected == "*" else blamed == {expected} - {""}
    return fault.__name__, [] if is_right else [f"blamed {sorted(blamed)}, not {expected or 'anybody'}"]


# ---- faults that end a run, and its resumption -----------------------------------------------------------------------


def end(run: Victim) -> tuple[str, list[str]]:
    """End a run with a signal to its main process, its group or all; return what was done, and what went wrong."""
    number = run.rng.choice([SIGTERM, SIGINT, SIGHUP, SIGKILL, SIGKILL])
    if is_stuck := number == SIGKILL and run.rng.random() < 0.5:  # a worker hangs in C
        break_environment(run, "hold the interpreter's lock")
    if number == SIGKILL and run.rng.random() < 0.3:
        run.kill()
    else:
        run.rng.choice([os.kill, os.killpg])(run.process.pid, number)
    status = None
    with contextlib.suppress(psutil.TimeoutExpired):
        status = run.process.wait(DEADLINE_SEC)
    wait_until(lambda: not run.left(), 10)
    wrong = [] if status == (-number if number == SIGKILL else 0) else [f"ended with {status}"]
    return f"{number.name}{' while a worker hangs in C' * is_stuck}", wrong + run.left()


def damage_checkpoint(run: Victim) -> Path | None:
    """Flip a bit of the newest checkpoint or cut off its end, if there is another one; return it."""
    newest, *others = list_checkpoints(policy_dir(run.run_dir)) or [None]
    if others:
        data = bytearray(newest.read_bytes())
        place = run.rng.randrange(len(data))
        data[place] ^= 1 << run.rng.randrange(8)
        newest.write_bytes(data[:place] if run.rng.random() < 0.5 else data)
    return newest if others else None


def resume(run: Victim, mode: str) -> tuple[Victim, list[str]]:
    """Start a run that has ended again, its newest checkpoint perhaps damaged; return it, and what went wrong."""
    has_saved, damaged = holds_run(run.run_dir), run.rng.random() < 0.5 and damage_checkpoint(run)
    resumed = Victim(run.folder, mode, run.rng)
    wrong = [] if resumed.learns() else ["does not learn"]
    log = resumed.read("log.txt")
    if ("resumed at env_steps=" in log) != has_saved:
        wrong.append("not resumed" if has_saved else "resumed from nothing")
    if "is damaged" in log and str(damaged) not in log:
        wrong.append("another checkpoint is called damaged")
    return resumed, wrong


def disturb(folder: Path, mode: str, rng: random.Random, num_faults: int) -> Iterator[tuple[str, list[str]]]:
    """Do faults to a run, of which the last one ends it; yield the name of each and what went wrong, and then stop."""
    run = Victim(folder, mode, rng)
    try:
        used = ()
        for number in reversed(range(num_faults)):
            if not run.learns():
                yield "none", ["does not learn"]
                return
            used = used or run.usage()
            time.sleep(rng.uniform(0, 0.5))
            if number > 0 and rng.random() > ENDING_SHARE:
                kind, wrong = survive(run)
            else:
                grown = [now > old + most for old, now, most in zip(used, run.usage(), MAX_GROWTH, strict=True)]
                kind, wrong = end(run)
                wrong += [f"held {used} at first, and more at last"] * any(grown)
                run.close()
                if number > 0 and not wrong:
                    (run, wrong), used = resume(run, mode), ()
            yield kind, wrong
            if wrong:
                return
    finally:
        run.close()


def main(argv: list[str]) -> int:
    """Run; return 1 when a fault was not overcome."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=300, help="how many [300]")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="the same faults in the same order")
    parser.add_argument("--folder", type=Path, default=ROOT / "chaos", help="for the runs [chaos]")
    args = parser.parse_args(argv)
    signal(SIGINT, default_int_handler)  # what a job in the background ignores, its children would, too
    signal(SIGHUP, SIG_DFL)
    signal(SIGTERM, lambda *_: sys.exit(1))
    rng, num_done, num_failed = random.Random(args.seed), 0, 0
    print(f"seed {args.seed}, runs in {args.folder}")
    while num_done < args.faults:
        folder, mode = args.folder.resolve() / f"{args.seed}_{num_done}", rng.choice(sorted(MODES))
        for kind, wrong in disturb(folder, mode, rng, min(rng.randint(6, 30), args.faults - num_done)):
            num_done += 1
            num_failed += bool(wrong)
            print(f"{num_done:5} {mode:12} {kind:35} {'; '.join(wrong) or 'overcome'}", flush=True)
        if not wrong:
            shutil.rmtree(folder)
    print(f"{num_done - num_failed} of {num_done} faults overcome")
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
