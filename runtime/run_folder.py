"""The folder of a run: which settings it is continued with, who may write into it. Used by `supervisor.py`."""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import os
import shutil
import socket
import sys
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from algorithms import algorithm_class
from config import Config, canonical_algo, check_value, make_config, tunable, without_gone
from runtime import checkpoint
from runtime.by_name import check_not_imported, check_trusted
from runtime.command_line import as_typed
from runtime.files import load_saved, run_dir_of, write_atomically
from runtime.machine import defaults
from runtime.ranks import MAX_STARTS
from runtime.user_error import UserError

# How one start runs, not what is learned: as given, or as the machine has it now, never as the run had it before. The
# number and grouping of environments, their trajectories and batches shape what is learned, so these stay.
MODES = ("restart_behavior", "trust_run", "device", "serial_mode", "policy_workers_per_policy",
         "set_workers_cpu_affinity", "learner_threads", "trace_sec", "tf32", "torch_compile")
PLACE = ("env", "train_dir", "experiment")  # where the run is, and what it is looked for by
# what a run is of: with others its weights and its scores would mean something else; another seed is another run
KIND = ("env", "env_kwargs", "algo", "nonlinearity", "squash_actions", "adaptive_stddev", "obs_subtract_mean",
        "obs_scale", "normalize_input_keys", "normalize_returns", "seed")
ANOTHER = "use another --experiment NAME, or --restart_behavior=restart"


def configure(given: Mapping[str, Any]) -> Config:
    """Complete the settings that were given: from the run that is resumed (but for `MODES`), or else from the profile.

    Raises `UserError` for impossible settings, an unknown environment, or a folder with a run of another kind.
    """
    check_not_imported()
    for field in dataclasses.fields(Config):
        if field.name in given:
            check_value(field, given[field.name])  # what follows computes with them
    # in full: an environment may change the working folder
    given = {**given, "train_dir": os.path.abspath(given.get("train_dir", Config.train_dir))}
    place = {name: given.get(name, getattr(Config, name)) for name in PLACE}
    env_profile = defaults(place["env"], given)  # also finds out whether the environment exists
    run_dir = run_dir_of(place["train_dir"], place["experiment"], place["env"])
    if given.get("restart_behavior", "resume") != "resume" or not checkpoint.holds_run(run_dir):
        return make_config(algorithm_class(given.get("algo", Config.algo)).Settings, env_profile, given)
    saved = load_saved(run_dir / "config.json")
    check_kind(saved, place | given, run_dir)
    check_trusted(saved, given, run_dir)
    settings = algorithm_class(saved.get("algo", Config.algo)).Settings
    kept = {name: value for name, value in without_gone(saved, settings).items() if name not in MODES}
    cfg = make_config(settings, kept, place, given)
    of_machine = defaults(cfg.env, vars(cfg))
    return make_config(settings, vars(cfg), {name: of_machine[name] for name in MODES if name in of_machine}, given)


def check_kind(saved: Mapping[str, Any], given: Mapping[str, Any], run_dir: Path) -> None:
    """Raise `UserError` when a folder holds another run: of another environment, algorithm, network, seed, population.

    Only a population that population-based training tends may grow or shrink: it would soon replace a bad beginner.
    Networks with weights of other shapes are refused when the weights are loaded.
    """
    if "algo" in given:
        given = {**given, "algo": canonical_algo(given["algo"])}
    for name in (*KIND, *(() if saved.get("with_pbt") else ("num_policies",))):
        old = saved.get(name, getattr(Config, name))  # the oldest runs do not name all
        if as_typed(given.get(name, old)) != as_typed(old):
            raise UserError(f"{run_dir} holds a run of --{name}={as_typed(old)}, not of {as_typed(given[name])}; "
                            f"{ANOTHER}")


def changes(cfg: Config) -> dict[str, str]:
    """Say of each setting of a resumed run that is no longer the saved one what it was and is; before it is saved."""
    saved = load_saved(cfg.run_dir / "config.json")
    both = {name: (as_typed(saved.get(name, value)), as_typed(value)) for name, value in vars(cfg).items()
            if name not in (*PLACE, "restart_behavior", "trust_run")}
    return {name: f"{name} {old} -> {new}" for name, (old, new) in both.items() if old != new}


def describe_resume(cfg: Config, given: Mapping[str, Any]) -> str:
    """Say which settings of a resumed run have changed, and which of those not given a new run would not have."""
    changed = changes(cfg)
    tuned = changed.keys() & tunable(cfg) if cfg.with_pbt and "with_pbt" not in changed else set()
    new = vars(type(cfg)()) | defaults(cfg.env, {"algo": cfg.algo} | given)
    kept = [f"{name}={as_typed(value)}" for name, value in vars(cfg).items()
            if name not in {*PLACE, *MODES, *given} and as_typed(value) != as_typed(new[name])]
    kept += [f"{name} (by population-based training)" for name in sorted(tuned)]
    parts = (("changed: ", [text for name, text in changed.items() if name not in tuned]), ("kept: ", kept))
    return "".join(textwrap.fill(begin + ", ".join(texts), 100, subsequent_indent="  ", max_lines=3,
                                 placeholder=" ... (config.json has all)") + "\n" for begin, texts in parts if texts)


def prepare_run_dir(cfg: Config, given: Mapping[str, Any]) -> tuple[contextlib.ExitStack, str]:
    """Make the run's folder and save the settings; return its lock, which is to be closed, and what to tell.

    Raises `UserError` when the folder cannot be written, or another process trains in it.
    """
    run_dir, news = cfg.run_dir, ""
    with refusing_files(cfg):
        if cfg.restart_behavior == "resume" and run_dir.is_dir():
            lock_folder(run_dir).close()  # nobody trains in it
        if cfg.restart_behavior == "resume" and checkpoint.holds_run(run_dir):
            news = describe_resume(cfg, given)
        elif run_dir.exists() and cfg.restart_behavior == "resume":
            metrics = run_dir / "metrics.jsonl"
            if metrics.is_file() and metrics.stat().st_size > 0:
                old = run_dir.rename(unused_name(run_dir))
                news = f"nothing to resume in {run_dir}, which is called {old.name} now\n"
        elif run_dir.exists():
            lock_folder(run_dir).close()  # refuse to take a folder away from a running process
            if not (run_dir / "config.json").exists():
                raise UserError(f"{run_dir} holds no run; move it away or use another --experiment")
            if cfg.restart_behavior == "overwrite":
                shutil.rmtree(run_dir)
            else:
                run_dir.rename(unused_name(run_dir))
        make_folders(cfg)
        with lock_folder(run_dir) as lock:
            if not (run_dir / "config.json").is_file():  # else it is saved when the training goes on
                cfg.save(run_dir / "config.json")
            (run_dir / "metrics.jsonl").open("a").close()  # later, what cannot be written ends nothing
            return lock.pop_all(), news


@contextlib.contextmanager
def refusing_files(cfg: Config) -> Iterator[None]:
    """Turn an error of the disk into a `UserError` that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--train_dir={cfg.train_dir} cannot be written ({error.strerror}: {error.filename}); "
                        "choose another") from error


def make_folders(cfg: Config) -> None:
    """Make the folders of a run that are missing. Raises `OSError`."""
    for policy in range(cfg.num_policies):
        checkpoint.policy_dir(cfg.run_dir, policy).mkdir(parents=True, exist_ok=True)


def mend_run_dir(cfg: Config, start: int) -> None:
    """Make the folder of a run that goes on anew, or what has gone away of it, if that can be done."""
    with contextlib.suppress(OSError):
        make_folders(cfg)
        if not (cfg.run_dir / "config.json").exists():
            cfg.save(cfg.run_dir / "config.json")
        if not (cfg.run_dir / "starts.json").exists():
            write_atomically(cfg.run_dir / "starts.json", f"{start % MAX_STARTS + 1}\n")


def count_start(run_dir: Path) -> int:
    """Return how often a run was started before, and write down that it was started once more.

    It is written before anything is sampled: whatever becomes of this start, the next one plays other episodes.
    """
    path = run_dir / "starts.json"
    try:
        start = int(path.read_text())
        if not 0 <= start < MAX_STARTS:
            raise ValueError
    except FileNotFoundError:
        start = 0
    except ValueError as error:
        raise UserError(f"{path} is damaged; write into it how often the run was started, a number") from error
    write_atomically(path, f"{start + 1}\n")
    return start


def lock_folder(folder: Path) -> contextlib.ExitStack:
    """Lock a folder, and its name on this machine, until this is closed or the process ends.

    So the name stays locked when somebody removes or renames the folder. Raises `UserError` when one of them is locked.
    """
    # containers may share their network, where the names are, but not the inode and the device of /
    name = hashlib.sha256(f"{os.stat('/')[1:3]} {folder.resolve()}".encode(errors="surrogateescape")).digest()
    with contextlib.ExitStack() as locks:
        locks.callback(os.close, descriptor := os.open(folder, os.O_RDONLY))
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if sys.platform == "linux":  # others have no names without a file
                locks.enter_context(socket.socket(socket.AF_UNIX)).bind(b"\0" + name)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EADDRINUSE):
                raise
            raise UserError(f"another process trains in {folder}; stop it, or use another --experiment") from error
        return locks.pop_all()


def unused_name(path: Path) -> Path:
    """Return path_old, or path_old2, ... whichever does not exist yet."""
    number, old = 1, path.with_name(f"{path.name}_old")
    while old.exists():
        number += 1
        old = path.with_name(f"{path.name}_old{number}")
    return old
