"""The folder of a run, and the checkpoints in it: whole or not there, checked, loaded without executing code.

A checkpoint is one file of plain numbers, tensors and dicts: a zip archive with a CRC-32 of each part, all of which are
compared when it is loaded. Its name carries its age, which must be that of its content:
`checkpoint_{sgd_steps:09}_{env_steps:011}.pt`, so that names sort by time. Beside it lie `best.pt` with its score (from
the evaluator it has no optimizer), `milestone_...pt`, and for a moment `given.pt`, which the user gave.

One process at a time writes into a folder. Paths, dicts and tensors: nothing here knows an algorithm.
"""

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from runtime.utils import NO_MODULE, UserError, Values, say

BEST, GIVEN = "best.pt", "given.pt"
FORMAT = 2  # of the files
NAME = re.compile(r"(checkpoint|milestone)_\d{9,}_\d{11,}\.pt")

# ---- files that are always whole ---------------------------------------------------------------------------------


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[IO[bytes]]:
    """Give a file to write to that takes this name when it is whole and on the disk, and else leaves nothing."""
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open("xb") as file:  # never through a link of this name
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def remove_unfinished(folder: Path) -> None:
    """Remove what `replacing` had begun to write when its process was killed."""
    with contextlib.suppress(OSError):
        for unfinished in folder.rglob("*.tmp"):
            unfinished.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that it is always whole, also after a crash. Raises `OSError`."""
    with replacing(path) as file:
        file.write(text.encode())


def add_line(path: Path, line: str) -> None:
    """Add a line to a file. Raises `OSError`."""
    with path.open("a", errors="backslashreplace") as file:  # an error may name any file
        file.write(f"{line}\n")


def read_lines(path: Path) -> list[Values]:
    """Read a file of one JSON object per line, but not lines that are damaged; none where there is no file."""
    rows = []
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return [row for row in rows if isinstance(row, dict)]


def finite(settings: Values) -> Values:
    """Write infinity, which JSON does not have, as "inf"."""
    return {name: "inf" if value == math.inf else value for name, value in settings.items()}


def save_settings(path: Path, settings: Values) -> None:
    """Write settings as JSON. Raises `OSError`."""
    write_atomically(path, json.dumps(finite(settings), indent=2) + "\n")


def load_saved(path: Path) -> Values:
    """Read settings that `save_settings` wrote. Raises `UserError` when the file is damaged."""
    try:
        return {name: math.inf if value == "inf" else value for name, value in json.loads(path.read_text()).items()}
    except (ValueError, OSError, AttributeError) as error:
        raise UserError(f"{path} cannot be read ({error}); use --restart_behavior=restart to begin anew") from error


# ---- checkpoints -------------------------------------------------------------------------------------------------


class DamagedCheckpoint(UserError):
    """The bytes of a checkpoint are not those that were written."""


def policy_dir(run_dir: Path, policy: int = 0) -> Path:
    """Return the folder of a policy's checkpoints."""
    return run_dir / "checkpoints" / f"policy_{policy:02}"


def checkpoint_name(prefix: str, state: Values) -> str:
    return f"{prefix}_{state['sgd_steps']:09}_{state['env_steps']:011}.pt"


def list_checkpoints(folder: Path, prefix: str = "checkpoint") -> list[Path]:
    """List the checkpoints of a policy with names of this prefix, the newest first; other files are not ours."""
    return sorted((path for path in folder.glob(f"{prefix}_*.pt") if NAME.fullmatch(path.name) and path.is_file()),
                  reverse=True)


def list_resumable(folder: Path) -> list[Path]:
    """List what a run of the policy can go on with: its checkpoints, then milestones, each the newest first; the best.

    Milestones and the best are older than checkpoints, but may be all that is left.
    """
    best = [folder / BEST] if (folder / BEST).is_file() else []  # a glob would pass over a folder without rights
    return [*list_checkpoints(folder), *list_checkpoints(folder, "milestone"), *best]


def holds_run(run_dir: Path) -> bool:
    """Return whether there is anything that a run can go on with."""
    return any(list_resumable(folder) for folder in run_dir.glob("checkpoints/policy_*"))


def prune_checkpoints(folder: Path, keep: int) -> None:
    """Delete all periodic checkpoints but the newest `keep`."""
    for path in list_checkpoints(folder)[keep:]:
        path.unlink()


def find_checkpoint(run_dir: Path, which: str = "latest", policy: int = 0) -> Path | None:
    """Find the newest checkpoint of a run's policy, or the best one; None when there is none."""
    folder = policy_dir(run_dir, policy)
    found = list_checkpoints(folder) if which == "latest" else [folder / BEST]
    return next((path for path in found if path.is_file()), None)


def save_checkpoint(state: Values, path: Path) -> None:
    """Write a checkpoint so that the file under its name is always whole. Raises `OSError`.

    It loads on a machine without a GPU.
    """
    on_cpu = tree_map_only(torch.Tensor, torch.Tensor.cpu, state)
    with replacing(path) as file:
        try:
            torch.save(on_cpu | {"format": FORMAT}, file)
        except RuntimeError as error:  # torch still ends the archive, and that error hides what the file has said
            raise (error.__context__ or error) from None


def load_checkpoint(path: Path) -> Values:
    """Read a checkpoint.

    Raises `DamagedCheckpoint` when the file is damaged or is no checkpoint, `UserError` when it cannot be read.
    """
    try:
        with zipfile.ZipFile(path) as parts:
            if parts.testzip() is not None:  # torch.load does not compare the checksums that torch.save has written
                raise ValueError("a checksum is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # a replay may be large
        if not {"model", "sgd_steps", "env_steps"} <= state.keys():
            raise ValueError("something is missing")
        if NAME.fullmatch(path.name) and checkpoint_name(path.name.split("_")[0], state) != path.name:
            raise ValueError("it is another one")
    except (FileNotFoundError, PermissionError) as error:
        raise UserError(f"checkpoint {path} cannot be read: {error.strerror}") from error
    except Exception as error:  # whatever the damaged bytes lead to
        raise DamagedCheckpoint(f"checkpoint {path} is damaged, or is none; choose another") from error
    if state.get("format", 1) == 1:  # running means were kept in two float32 parts
        model = state["model"]
        for name in [name for name in model if name.endswith(".remainder")]:
            mean = name.removesuffix("remainder") + "mean"
            model[mean] = model[mean].double() + model.pop(name)
    elif state["format"] != FORMAT:
        raise UserError(f"checkpoint {path} has format {state['format']}, this program reads {FORMAT}; use the "
                        "program of its training")
    return state


def load_newest(run_dir: Path, policy: int = 0) -> tuple[Path | None, Values | None, list[Path]]:
    """Read the first whole one of what a policy can go on with; return its path, what it holds, and the damaged ones.

    Where there is nothing at all the first two are None. Raises `UserError` when all are damaged.
    """
    damaged: list[Path] = []
    for path in list_resumable(policy_dir(run_dir, policy)):
        try:
            return path, load_checkpoint(path), damaged
        except DamagedCheckpoint:
            damaged.append(path)
        except UserError:
            if path.exists():  # else it has just been deleted
                raise
    if damaged:
        raise UserError(f"all its checkpoints are damaged ({', '.join(map(str, damaged))}); begin anew: train.py "
                        "--restart_behavior=restart")
    return None, None, []


def last_saved(run_dir: Path, policy: int, **counts: int) -> Values:
    """Return what a policy's newest checkpoint holds, if it has a whole one, with counts that are at least these."""
    saved: Values = {}
    with contextlib.suppress(UserError):  # all are damaged: the moments of the optimizer begin anew
        saved = load_newest(run_dir, policy)[1] or {}
    return saved | {name: max(count, saved.get(name, 0)) for name, count in counts.items()}


def load_weights(model: nn.Module, state: Values, path: Path, algo: str) -> None:
    """Load a checkpoint's weights. Raises `UserError` when they are those of another algorithm or architecture."""
    own = state.get("algo", algo)  # the oldest checkpoints do not name it
    if own != algo:
        raise UserError(f"checkpoint {path} is of --algo={own}, not of {algo}; choose another")
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise UserError(f"checkpoint {path} is of another architecture; use the flags and the code of its training, or "
                        f"another --experiment, or --restart_behavior=restart: {str(error)[:300]}") from error


# ---- scores ------------------------------------------------------------------------------------------------------


def sort_of_score(*, is_objective: bool, is_evaluation: bool) -> int:
    """Number the sorts of scores: true objectives stand above returns, evaluations above training."""
    return 2 * is_objective + is_evaluation


def is_better(score: float, sort: int, best: float, best_sort: int) -> bool:
    """Return whether a score beats the best one so far.

    A true objective is never compared with a return: it replaces one, whatever their sizes. An evaluation also replaces
    a score from training. Once evaluations are switched off, training must beat the score of the last one.
    """
    return best == -math.inf or sort > best_sort or (sort // 2 == best_sort // 2 and score > best)


def best_score(run_dir: Path, policy: int = 0) -> tuple[float, int]:
    """Return the score of a policy's best checkpoint and its sort; -inf when there is none that can be read."""
    with contextlib.suppress(UserError, KeyError):
        state = load_checkpoint(policy_dir(run_dir, policy) / BEST)
        return float(state["score"]), int(state["sort_of_score"])
    return -math.inf, 0


# ---- the folder of a run -----------------------------------------------------------------------------------------


def run_dir_of(train_dir: str, experiment: str, env: str) -> Path:
    """Return the folder of a run, named like its experiment or else its environment."""
    return Path(train_dir) / (experiment or re.sub(r"[/:]", "_", env.removeprefix(f"{NO_MODULE}:")))


def prepare_run_dir(run_dir: Path, settings: Values) -> contextlib.ExitStack:
    """Make a run's folder, as its settings say; return its lock, which is to be closed.

    Raises `UserError` when another process trains in it or, where nothing is resumed, it holds other things; `OSError`
    when it cannot be written.
    """
    if run_dir.exists():
        lock_folder(run_dir).close()  # never take a folder away from a running process
        metrics, resumes = run_dir / "metrics.jsonl", settings["restart_behavior"] == "resume"
        if resumes and not holds_run(run_dir) and metrics.is_file() and metrics.stat().st_size > 0:
            say(f"nothing to resume in {run_dir}, which is called {lay_aside(run_dir).name} now")
        elif not (resumes or holds_run(run_dir) or (run_dir / "config.json").exists()):
            raise UserError(f"{run_dir} holds no run; move it away or use another --experiment")
        elif settings["restart_behavior"] == "overwrite":
            shutil.rmtree(run_dir)
        elif not resumes:
            lay_aside(run_dir)
    fill_run_dir(run_dir, settings)
    (run_dir / "metrics.jsonl").open("a").close()  # later, what cannot be written ends nothing
    return lock_folder(run_dir)


def fill_run_dir(run_dir: Path, settings: Values, start: int | None = None) -> None:
    """Make what is missing of a run's folder, also while it runs: somebody may have removed it. Raises `OSError`.

    start: how often it was started before; None: that is not known yet.
    """
    for policy in range(settings["num_policies"]):
        policy_dir(run_dir, policy).mkdir(parents=True, exist_ok=True)
    if not (run_dir / "config.json").is_file():  # else it is saved when the training goes on
        save_settings(run_dir / "config.json", settings)
    if start is not None and not (run_dir / "starts.json").exists():
        write_atomically(run_dir / "starts.json", f"{start + 1}\n")


def lay_aside(path: Path) -> Path:
    """Rename a folder to path_old, or path_old2, ... whichever does not exist yet; return its new path."""
    number, old = 1, path.with_name(f"{path.name}_old")
    while old.exists():
        number += 1
        old = path.with_name(f"{path.name}_old{number}")
    return path.rename(old)


def count_start(run_dir: Path) -> int:
    """Return how often a run was started before, and write down that it was started once more.

    It is written before anything is sampled: whatever becomes of this start, the next one plays other episodes.
    """
    path = run_dir / "starts.json"
    start = int(path.read_text()) if path.exists() else 0
    write_atomically(path, f"{start + 1}\n")
    return start


def lock_folder(folder: Path) -> contextlib.ExitStack:
    """Lock a folder until this is closed or the process ends. Raises `UserError` when another process has it."""
    with contextlib.ExitStack() as lock:
        descriptor = os.open(folder, os.O_RDONLY)
        lock.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another process trains in {folder}; stop it, or use another --experiment") from error
        return lock.pop_all()


@contextlib.contextmanager
def refusing_files(train_dir: str) -> Iterator[None]:
    """Turn an error of the disk into a `UserError` that names the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"--train_dir={train_dir} cannot be written ({error.strerror}: {error.filename}); "
                        "choose another") from error
