"""Says in one line, with the cure, that the memory of a GPU is full. Used by `crew.py` and `supervisor.py`.

What a run takes is checked before it starts (`device_memory.py`); but another program may take memory meanwhile, and
the check knows some things only about.
"""

import contextlib
from collections.abc import Iterator

import torch

from runtime.user_error import UserError

CURES = {"learner": "lower --batch_size", "evaluator": "lower --eval_episodes",
         "policy_worker": "lower --num_envs_per_worker or --policy_workers_per_policy"}
TEXTS = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")


@contextlib.contextmanager
def explaining_full_memory(name: str, role: str) -> Iterator[None]:
    """Raise `UserError` where the memory of a GPU is full; name, role: of the component that runs meanwhile."""
    try:
        yield
    except RuntimeError as error:
        text = " ".join(str(error).split())
        if not isinstance(error, torch.OutOfMemoryError) and not any(part in text for part in TEXTS):
            raise
        text = text.partition(" Including non-PyTorch memory")[0].rstrip(".")  # then comes advice for another program
        cure = CURES.get(role, "lower --num_policies or use a smaller network")
        raise UserError(f"{name}: the memory of the GPU is full ({text}); {cure}, or end what else uses it") from error
