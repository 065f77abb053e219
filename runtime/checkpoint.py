"""Checkpoints: written atomically, checked and loaded without executing pickled code, found and pruned by name.

A checkpoint is one file of plain numbers, tensors and dicts: a zip archive with a CRC-32 of each part, all of which are
compared when it is loaded. Its name carries its age, which must be that of its content:
`checkpoint_{sgd_steps:09}_{env_steps:011}.pt`, so that names sort by time. Beside it lie `best.pt` with its score (from
the evaluator it has no optimizer), `milestone_...pt`, the opponents for self-play, `snapshot_...pt`, and for a moment
`given.pt`, which the user gave. Written by `training_state.py` and
`evaluator.py`, read by `plan.py` (resume) and `policy.py`.
"""

import contextlib
import math
import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runtime.files import replacing
from runtime.user_error import UserError

BEST, GIVEN = "best.pt", "given.pt"
FORMAT = 2  # of the files
NAME = re.compile(r"(checkpoint|milestone|snapshot)_\d{9,}_\d{11,}\.pt")


class DamagedCheckpoint(UserError):
    """The bytes of a checkpoint are not those that were written."""


def policy_dir(run_dir: Path, policy: int = 0) -> Path:
    """Return the folder of a policy's checkpoints."""
    return run_dir / "checkpoints" / f"policy_{policy:02}"


def checkpoint_name(prefix: str, state: dict[str, Any]) -> str:
    return f"{prefix}_{state['sgd_steps']:09}_{state['env_steps']:011}.pt"


def save_checkpoint(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint so that the file under its name is always whole, from any device. Raises `OSError`."""
    state = on_cpu(state)
    with replacing(path) as file:
        try:
            torch.save(state | {"format": FORMAT}, file)
        except RuntimeError as error:  # torch still ends the archive, and that error hides what the file has said
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def on_cpu(value: Any) -> Any:
    """Copy all tensors in nested dicts and lists that are on a GPU: a file must load on a machine without one."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: on_cpu(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(on_cpu, value))
    return value


def list_checkpoints(folder: Path, prefix: str = "checkpoint") -> list[Path]:
    """List the checkpoints of a policy with names of this prefix, the newest first; other files are not ours."""
    return sorted((path for path in folder.glob(f"{prefix}_*.pt") if NAME.fullmatch(path.name) and path.is_file()),
                  reverse=True)


def list_resumable(folder: Path) -> list[list[Path]]:
    """List what a run of the policy can go on with: the checkpoints, the milestones, the best; each the newest first.

    Milestones and the best are older than checkpoints, but may be all that is left.
    """
    return [list_checkpoints(folder), list_checkpoints(folder, "milestone"),
            [path for path in [folder / BEST] if path.is_file()]]


def holds_run(run_dir: Path) -> bool:
    """Tell whether there is anything that a run can go on with."""
    return any(paths for folder in run_dir.glob("checkpoints/policy_*") for paths in list_resumable(folder))


def prune_checkpoints(folder: Path, keep: int, prefix: str = "checkpoint") -> None:
    """Delete all checkpoints with names of this prefix but the newest `keep`."""
    for path in list_checkpoints(folder, prefix)[keep:]:
        path.unlink()


def find_checkpoint(run_dir: Path, which: str = "latest", policy: int = 0) -> Path | None:
    """Find the newest checkpoint of a run's policy, or the best one; None when there is none."""
    if which == "latest":
        return next(iter(list_checkpoints(policy_dir(run_dir, policy))), None)
    best = policy_dir(run_dir, policy) / BEST
    return best if best.is_file() else None


def load_newest(run_dir: Path, policy: int = 0) -> tuple[Path | None, dict[str, Any] | None, list[Path]]:
    """Read the newest whole checkpoint, else the newer of a milestone and the best; return its path, what it holds, and
    those that are damaged.

    Without any checkpoint the first two are None. Raises `UserError` when all are damaged.
    """
    checkpoints, *others = list_resumable(policy_dir(run_dir, policy))
    damaged: list[Path] = []
    whole = load_first(checkpoints, damaged)
    for paths in others if whole is None else ():
        other = load_first(paths, damaged)
        if other is not None and (whole is None or other[1]["sgd_steps"] > whole[1]["sgd_steps"]):
            whole = other
    if whole is None and damaged:
        raise UserError(f"all its checkpoints are damaged ({', '.join(map(str, damaged))}); begin anew: train.py "
                        "--restart_behavior=restart")
    return *(whole or (None, None)), damaged


def load_first(paths: list[Path], damaged: list[Path]) -> tuple[Path, dict[str, Any]] | None:
    """Read the first whole one of some checkpoints; add the damaged ones before it to a list."""
    for path in paths:
        try:
            return path, load_checkpoint(path)
        except DamagedCheckpoint:
            damaged.append(path)
        except UserError:
            if path.exists():  # else it has just been deleted
                raise
    return None


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint.

    Raises `DamagedCheckpoint` when the file is damaged or is no checkpoint, `UserError` when it cannot be read.
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise UserError(f"checkpoint {path} cannot be read: {error.strerror}") from error
    try:
        with file, zipfile.ZipFile(file) as parts:
            if parts.testzip() is not None:  # torch.load does not compare the checksums that torch.save has written
                raise ValueError("a checksum is wrong")
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # a replay may be large
        if not {"model", "sgd_steps", "env_steps"} <= state.keys():
            raise ValueError("something is missing")
        if NAME.fullmatch(path.name) and checkpoint_name(path.name.split("_")[0], state) != path.name:
            raise ValueError("it is another one")
    except MemoryError:
        raise
    except Exception as error:  # whatever the damaged bytes lead to
        raise DamagedCheckpoint(f"checkpoint {path} is damaged; choose another") from error
    if state.get("format", 1) == 1:  # running means were kept in two float32 parts
        model = state["model"]
        for name in [name for name in model if name.endswith(".remainder")]:
            mean = name.removesuffix("remainder") + "mean"
            model[mean] = model[mean].double() + model.pop(name)
    elif state["format"] != FORMAT:
        raise UserError(f"checkpoint {path} has format {state['format']}, this program reads {FORMAT}; use the "
                        "program of its training")
    return state


def sort_of_score(*, is_objective: bool, is_evaluation: bool) -> int:
    """Number the sorts of scores: true objectives stand above returns, evaluations above training."""
    return 2 * is_objective + is_evaluation


def is_better(score: float, sort: int, best: float, best_sort: int) -> bool:
    """Tell whether a score beats the best one so far.

    A true objective is never compared with a return: it replaces one, whatever their sizes. An evaluation also replaces
    a score from training. Once evaluations are switched off, training must beat the score of the last one.
    """
    if sort // 2 != best_sort // 2 or sort > best_sort:
        return sort > best_sort or best == -math.inf
    return score > best


def best_score(run_dir: Path, policy: int = 0) -> tuple[float, int]:
    """Return the score of a policy's best checkpoint and its sort; -inf when there is none that can be read."""
    with contextlib.suppress(UserError, KeyError):
        state = load_checkpoint(policy_dir(run_dir, policy) / BEST)
        return float(state["score"]), int(state["sort_of_score"])
    return -math.inf, 0


def load_weights(model: nn.Module, state: dict[str, Any], path: Path, algo: str) -> None:
    """Load a checkpoint's weights. Raises `UserError` when they are those of another algorithm or architecture."""
    own = state.get("algo", algo)  # the oldest checkpoints do not name it
    if own != algo:
        raise UserError(f"checkpoint {path} is of --algo={own}, not of {algo}; choose another")
    try:
        model.load_state_dict(state["model"])
    except RuntimeError as error:
        raise UserError(f"checkpoint {path} is of another architecture; use the flags and the code of its training, or "
                        f"another --experiment, or --restart_behavior=restart: {str(error)[:300]}") from error
