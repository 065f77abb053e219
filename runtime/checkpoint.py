"""Checkpoints: written atomically, loaded without executing pickled code, found and pruned by name.

A checkpoint is one file of plain numbers, tensors and dicts. Its name carries its age,
`checkpoint_{sgd_steps:09}_{env_steps:011}.pt`, so that names sort by time. Beside it lie `best.pt` with its score (from
the evaluator it has no optimizer), `milestone_...pt`, the opponents for self-play, `snapshot_...pt`, and `donor.pt`,
which another policy copies. Written by `training_state.py` and `evaluator.py`, read by `plan.py` (resume) and
`evaluate.py`.
"""

import contextlib
import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runtime.user_error import UserError

BEST, DONOR = "best.pt", "donor.pt"


def policy_dir(run_dir: Path, policy: int = 0) -> Path:
    """Return the folder of a policy's checkpoints."""
    return run_dir / "checkpoints" / f"policy_{policy:02}"


def checkpoint_name(prefix: str, state: dict[str, Any]) -> str:
    return f"{prefix}_{state['sgd_steps']:09}_{state['env_steps']:011}.pt"


def save_checkpoint(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint so that the file under its name is always whole: to a temporary name, then rename."""
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def prune_checkpoints(folder: Path, keep: int, prefix: str = "checkpoint") -> None:
    """Delete all checkpoints with names of this prefix but the newest `keep`."""
    for path in sorted(folder.glob(f"{prefix}_*.pt"), reverse=True)[keep:]:
        path.unlink()


def find_checkpoint(run_dir: Path, which: str = "latest", policy: int = 0) -> Path | None:
    """Find the newest checkpoint of a run's policy, or the best one; None when there is none."""
    pattern = "checkpoint_*.pt" if which == "latest" else BEST
    return max(policy_dir(run_dir, policy).glob(pattern), default=None)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint. Raises `UserError` when the file is damaged or is no checkpoint."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # a replay may be large
        assert {"model", "sgd_steps", "env_steps"} <= state.keys()
    except Exception as error:  # torch raises whatever the damaged bytes lead to
        raise UserError(f"checkpoint {path} is damaged; move it away to continue from the one before") from error
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
        detail = str(error).splitlines()[1].strip() if "\n" in str(error) else str(error)
        raise UserError(f"checkpoint {path} is of another architecture ({detail[:150]}); use the flags and "
                        "the code of its training, or another --experiment, or --restart_behavior=restart") from error
