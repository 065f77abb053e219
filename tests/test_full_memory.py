"""When the memory of a GPU is full, the run ends with one line that says what to lower."""

from pathlib import Path
from typing import Any

import pytest
import torch

import train
from appo import APPO
from learner import Learner
from policy_worker import PolicyWorker
from runtime.full_memory import explaining_full_memory
from runtime.user_error import UserError
from tools.pretend_gpu import PretendGPU


def test_a_full_memory_ends_the_run_with_one_line(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with PretendGPU() as gpu:
        take_step = Learner.sgd_step
        monkeypatch.setattr(Learner, "sgd_step",
                            lambda self, data: (setattr(gpu, "total_bytes", gpu.bytes), take_step(self, data))[1])
        status = train.main(["--env=CartPole-v1", "--device=pretend", "--serial_mode", "--num_workers=1",
                             f"--train_dir={tmp_path}"])
    assert status == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert "learner: the memory of the GPU is full (CUDA out of memory. Tried to allocate" in told[0]
    assert told[0].endswith("lower --batch_size, or end what else uses it")


class FullPolicyWorker(PolicyWorker):
    def act(self, *args: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. Including non-PyTorch memory, ")


class Full(APPO):
    policy_worker_class = FullPolicyWorker


def test_a_process_whose_gpu_is_full_ends_the_run_with_one_line(tmp_path: Path) -> None:
    with (pytest.raises(UserError, match=r"policy_worker_0: .*full.*2.00 GiB\); lower --num_envs_per_worker") as raised,
          Full("CartPole-v1", num_workers=1, train_dir=str(tmp_path)) as system):
        system.train(1000)
    assert "\n" not in str(raised.value)
    assert not [process for process in system.crew.processes if process.is_alive()]


@pytest.mark.parametrize(("text", "is_full"), [
    ("CUDA error: out of memory", True), ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`", True),
    ("CUDA error: device-side assert triggered", False), ("[enforce fail] can't allocate memory", False)])
def test_other_errors_stay_what_they_are(text: str, is_full: bool) -> None:
    with pytest.raises(UserError if is_full else RuntimeError) as raised, explaining_full_memory("learner", "learner"):
        raise RuntimeError(text)
    assert text in str(raised.value)
