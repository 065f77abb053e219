"""The folder of a run: which settings it is continued with, who may write into it. Used by `supervisor.py`."""

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from config import Config, canonical_algo, make_config, run_dir_of
from envs.families import profile
from runtime import checkpoint
from runtime.by_name import check_not_imported, check_trusted
from runtime.files import load_saved, write_atomically
from runtime.ranks import MAX_STARTS
from runtime.user_error import UserError


def configure(given: Mapping[str, Any]) -> Config:
    """Complete the settings that were given: from the run that is resumed, or else from the family's profile.

    Raises `UserError` for impossible settings, an unknown environment, or a folder with a run of another one.
    """
    check_not_imported()
    here = {name: given.get(name, getattr(Config, name))
            for name in ("env", "train_dir", "experiment", "restart_behavior")}
    env_profile = profile(here["env"], given)  # also finds out whether the environment exists
    run_dir = run_dir_of(here["train_dir"], here["experiment"], here["env"])
    if here["restart_behavior"] != "resume" or not checkpoint.holds_run(run_dir):
        return make_config(env_profile, given)
    saved = load_saved(run_dir / "config.json")
    if saved["env"] != here["env"]:
        raise UserError(f"{run_dir} holds a run of {saved['env']}; use another --experiment, or "
                        "--restart_behavior=restart")
    check_trusted(saved, given, run_dir)
    saved_algo = saved.get("algo", Config.algo)
    algo = canonical_algo(given.get("algo", saved_algo))
    if algo != saved_algo:
        raise UserError(f"{run_dir} holds a run of --algo={saved_algo}, not of {algo}; use another --experiment, or "
                        "--restart_behavior=restart")
    return make_config(saved, here, given)


def prepare_run_dir(cfg: Config) -> tuple[int, str]:
    """Make the run's folder and save the settings; return the open folder, locked for this process, and what to tell.

    Raises `UserError` when the folder cannot be written, or another process trains in it.
    """
    run_dir, news = cfg.run_dir, ""
    with refusing_files(cfg):
        if run_dir.exists() and cfg.restart_behavior == "resume" and not checkpoint.holds_run(run_dir):
            metrics = run_dir / "metrics.jsonl"
            if metrics.is_file() and metrics.stat().st_size > 0:
                os.close(lock_folder(run_dir))
                old = run_dir.rename(unused_name(run_dir))
                news = f"nothing to resume in {run_dir}, which is called {old.name} now\n"
        elif run_dir.exists() and cfg.restart_behavior != "resume":
            os.close(lock_folder(run_dir))  # refuse to take a folder away from a running process
            if not (run_dir / "config.json").exists():
                raise UserError(f"{run_dir} holds no run; move it away or use another --experiment")
            if cfg.restart_behavior == "overwrite":
                shutil.rmtree(run_dir)
            else:
                run_dir.rename(unused_name(run_dir))
        make_folders(cfg)
        lock = lock_folder(run_dir)
        cfg.save(run_dir / "config.json")
        (run_dir / "metrics.jsonl").open("a").close()  # later, what cannot be written ends nothing
    return lock, news


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


def lock_folder(folder: Path) -> int:
    """Open a folder and lock it until it is closed or the process ends. Raises `UserError` when it is locked."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise UserError(f"another process trains in {folder}; stop it, or use another --experiment") from error
    return descriptor


def unused_name(path: Path) -> Path:
    """Return path_old, or path_old2, ... whichever does not exist yet."""
    number, old = 1, path.with_name(f"{path.name}_old")
    while old.exists():
        number += 1
        old = path.with_name(f"{path.name}_old{number}")
    return old
