"""Learning on a GPU: as on a CPU, without a wait within a dataset, and with few launches."""

import contextlib
import copy
import itertools
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from one_policy import CPU
from test_learner import CONTINUOUS, DISCRETE, OBS_SPACE, Rig
from torch import Tensor, nn

from appo import APPO
from config import Config, algorithm_class, make_config
from envs.vector_env import EnvInfo
from feed import Batch
from learner import Learner
from reducer import Hogwild, Reducer, SharedTraining
from replay_feed import Dataset
from runtime.user_error import UserError
from shared_buffers import SharedBuffers
from tools.pretend_gpu import DEVICE, Counts, PretendGPU
from vtrace import backward_scan, backward_sum, vtrace

GPU = torch.device("privateuseone", 0)  # DEVICE, once it is registered


@pytest.fixture
def gpu() -> Iterator[PretendGPU]:
    with PretendGPU() as device:
        yield device


# ---- the sum over time -----------------------------------------------------------------------------------------------


def plain_sum(deltas: list[float], traces: list[float]) -> list[float]:
    """x_t = d_t + a_t x_{t+1} for t = 0 ... T, in Python's numbers."""
    sums = [0.0]
    for delta, trace in zip(reversed(deltas), reversed(traces), strict=True):
        sums.append(delta + trace * sums[-1])
    return sums[::-1]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 64, 100, 257])
def test_the_scan_is_the_sum_of_a_plain_loop(length: int) -> None:
    rng = torch.Generator().manual_seed(length)
    deltas, traces = torch.randn(2, length, 7, generator=rng, dtype=torch.float64)
    traces = (0.9 + 0.1 * traces.abs()).clamp(max=1.0) * (torch.rand(length, 7, generator=rng) > 0.05)
    expected = [plain_sum(*pair) for pair in zip(deltas.T.tolist(), traces.T.tolist(), strict=True)]
    for function in (backward_scan, backward_sum):
        torch.testing.assert_close(function(deltas, traces), torch.tensor(expected, dtype=torch.float64).T,
                                   rtol=1e-12, atol=1e-12)


def test_a_cut_trace_lets_nothing_through_the_scan() -> None:
    deltas, traces = torch.ones(9, 1), torch.ones(9, 1)
    deltas[5:] = 1e30
    traces[4] = 0.0
    assert backward_scan(deltas, traces)[:5, 0].tolist() == [5.0, 4.0, 3.0, 2.0, 1.0]


@pytest.mark.parametrize(("c_bar", "launches"), [(1.0, 6 + 3), (2.0, 64 + 1)])
def test_traces_above_1_are_added_in_a_loop_since_their_products_could_overflow(gpu: PretendGPU, c_bar: float,
                                                                                launches: int) -> None:
    rng = torch.Generator().manual_seed(0)
    case = [torch.randn(64, 3, generator=rng) for _ in range(2)] + [torch.randn(65, 3, generator=rng)] + [
        torch.rand(64, 3, generator=rng) < 0.1 for _ in range(2)]
    on_gpu = [tensor.to(DEVICE) for tensor in case]
    gpu.take_counts()
    backward_sum(*on_gpu[:2], largest_trace=c_bar)
    assert gpu.take_counts() == Counts(launches=launches)
    settings = 0.99, 0.95, 1.0, c_bar
    for ours, theirs in zip(vtrace(*on_gpu, *settings), vtrace(*case, *settings), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-5)


# ---- a dataset -------------------------------------------------------------------------------------------------------


def shared_buffers(cfg: Config, action_space: spaces.Space, model: nn.Module) -> tuple[SharedBuffers, list[tuple]]:
    """Allocate what a learner on the GPU shares; and a list for its reports."""
    info = EnvInfo(["agent"], [0], [(OBS_SPACE, action_space)], None)
    return SharedBuffers(cfg, info, [0], [model], [GPU], None), []


class Pair:
    """The same learner on a CPU and on the GPU, and datasets for both."""

    def __init__(self, action_space: spaces.Space = DISCRETE, **settings: Any) -> None:
        self.rig = Rig(action_space, **{"num_epochs": 2, "num_batches_per_epoch": 2} | settings)
        self.cfg = self.rig.cfg
        self.buffers, self.reports = shared_buffers(self.cfg, action_space, copy.deepcopy(self.rig.learner.model))
        self.learner = Learner(self.cfg, self.buffers, 0, 0, GPU, None, self.reports.append)
        self.learners = self.rig.learner, self.learner

    def batches(self, seed: int = 0) -> tuple[Batch, Batch]:
        """Return a dataset for each learner."""
        on_cpu = self.rig.batch(seed)
        for_gpu = Batch(self.buffers.specs[0], self.cfg.trajectories_per_dataset, pinned=True)
        for name, tensor in for_gpu.tensors.items():
            tensor.copy_(on_cpu.tensors[name])
        return on_cpu, for_gpu

    def train(self, seed: int = 0) -> None:
        """Train both on the same dataset."""
        for learner, batch in zip(self.learners, self.batches(seed), strict=True):
            assert learner.run_sgd(batch)

    def assert_same(self) -> None:
        """Compare all weights, moments and running statistics, and the reported numbers."""
        on_cpu, on_gpu = (learner.state.state_dict() for learner in self.learners)
        for name, tensor in on_cpu["model"].items():
            torch.testing.assert_close(on_gpu["model"][name].cpu(), tensor, rtol=1e-4, atol=2e-6, msg=name)
        assert on_gpu["learning_rate"] == pytest.approx(on_cpu["learning_rate"])
        assert all(isinstance(group["lr"], float) for group in on_gpu["optimizer"]["param_groups"])
        expected, reported = self.rig.trained(), self.reports[-1][2]
        assert reported.keys() == expected.keys()
        for name, value in expected.items():
            assert reported[name] == pytest.approx(value, rel=2e-3, abs=2e-4), name


CASES = [{}, {"lr_schedule": "kl_adaptive", "lr_schedule_kl_threshold": 1e-4}, {"with_vtrace": False},
         {"action_space": CONTINUOUS, "kl_loss_coeff": 0.5}, {"algo": "impala", "max_grad_norm": 0.1},
         {"algo": "impala", "optimizer": "adam", "lr_schedule": "kl_adaptive"},
         {"algo": "impala", "lr_schedule": "kl_adaptive"},
         {"algo": "a3c", "max_policy_lag": 3, "reward_scale": 0.1}]


@pytest.mark.parametrize("settings", CASES, ids=str)
def test_a_dataset_is_read_once_and_gives_the_weights_of_a_cpu(gpu: PretendGPU, settings: dict[str, Any]) -> None:
    pair = Pair(**settings)
    pair.train(0)
    on_cpu, for_gpu = pair.batches(10)
    assert pair.rig.learner.run_sgd(on_cpu)
    gpu.take_counts()
    assert pair.learner.run_sgd(for_gpu)
    counts = gpu.take_counts()
    # up: the columns, the places of the minibatches and of the normalizer's rows
    assert (counts.waits, counts.up, counts.down) == (1, len(for_gpu.tensors) + 2, 1)
    pair.assert_same()


def counts_of_step(gpu: PretendGPU, **settings: Any) -> Counts:
    """Count what an SGD step takes; each of a dataset takes the same."""
    pair, found = Pair(num_batches_per_epoch=1, **settings), []
    batch = pair.batches()[1]
    pair.learner.run_sgd(batch)  # the optimizer makes its state
    step = pair.learner.sgd_step

    def counted(data: dict[str, Tensor]) -> dict[str, Tensor]:
        gpu.take_counts()
        stats = step(data)
        found.append(gpu.take_counts())
        return stats

    pair.learner.sgd_step = counted
    pair.learner.run_sgd(batch)
    assert found == [found[0]] * 2
    return found[0]


FROM_PROFILES = {"ppo_clip_value": 0.0}


@pytest.mark.parametrize(("settings", "launches"), [
    (FROM_PROFILES, 136), (FROM_PROFILES | {"with_vtrace": False}, 115), ({"algo": "impala"}, 132)], ids=str)
def test_the_launches_of_a_step_are_at_most_150_and_grow_by_one_when_the_rollout_doubles(
        gpu: PretendGPU, settings: dict[str, Any], launches: int) -> None:
    of_scan = settings.get("with_vtrace", True)
    for length, more in ((64, 0), (16, -2 * of_scan), (128, of_scan)):
        counts = counts_of_step(gpu, rollout=length, batch_size=4 * length, **settings)
        assert counts == Counts(launches=launches + more)


@pytest.mark.parametrize(("settings", "counts"), [
    ({"action_space": CONTINUOUS}, Counts(launches=160)),
    ({"action_space": CONTINUOUS, "kl_loss_coeff": 1.0}, Counts(launches=185)),
    # episodes begin in 45 of the 64 later steps
    ({"use_rnn": True, "rnn_type": "gru"}, Counts(launches=143 + 45 * 10, down=1, waits=1)),
    ({"use_rnn": True, "rnn_type": "lstm"}, Counts(launches=147 + 45 * 14, down=1, waits=1))], ids=str)
def test_what_other_policies_need_more(gpu: PretendGPU, settings: dict[str, Any], counts: Counts) -> None:
    """A memory is unrolled piece by piece between the moments at which episodes begin, and these are read."""
    assert counts_of_step(gpu, rollout=64, batch_size=256, **FROM_PROFILES, **settings) == counts


@pytest.mark.parametrize(("settings", "launches"), [
    ({"precision": "float32"}, 147), ({"precision": "bfloat16"}, 166),
    ({"precision": "bfloat16", "half_precision_copies": True}, 152)], ids=str)
def test_the_launches_of_a_step_on_pong(gpu: PretendGPU, settings: dict[str, Any], launches: int,
                                        tmp_path: Path) -> None:
    found = []

    class Counting(Learner):
        def sgd_step(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
            gpu.take_counts()
            stats = super().sgd_step(data)
            found.append(gpu.take_counts())
            return stats

    class System(APPO):
        learner_class = Counting

    with System("PongNoFrameskip-v4", train_dir=str(tmp_path), serial_mode=True, device=DEVICE, num_workers=1,
                num_envs_per_worker=2, rollout=64, batch_size=128, num_batches_per_epoch=1, num_epochs=3,
                encoder_conv_architecture="convnet_atari", **settings) as system:
        system.train(128)
    assert found[-1] == Counts(launches=launches)


# ---- gradients that are not finite -----------------------------------------------------------------------------------


def spoil(learner: Learner, number: int, factor: float = math.nan) -> list[dict[str, Tensor]]:
    """Multiply the gradient of one SGD step by nan or infinity; return the weights before each step."""
    seen, step = [], learner.sgd_step

    def spoiled(data: dict[str, Tensor]) -> dict[str, Tensor]:
        seen.append({name: tensor.cpu().clone() for name, tensor in learner.model.named_parameters()})
        spoils = len(seen) == number
        with contextlib.ExitStack() as hooks:
            for parameter in learner.model.parameters() if spoils else ():
                hooks.callback(parameter.register_hook(lambda gradient: gradient * factor).remove)
            return step(data)

    learner.sgd_step = spoiled
    return seen


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> bool:
    return any(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("device", [CPU, GPU], ids=["CPU", "GPU"])
@pytest.mark.parametrize(("algo", "factor"), [("appo", math.nan), ("appo", math.inf), ("impala", math.nan)])
def test_a_step_whose_gradient_is_not_finite_is_skipped_alone_and_counted(
        gpu: PretendGPU, device: torch.device, algo: str, factor: float) -> None:
    pair = Pair(algo=algo)
    on_gpu = device != CPU
    learner, reports = pair.learners[on_gpu], (pair.reports if on_gpu else pair.rig.reports)
    weights = spoil(learner, 3, factor)
    learner.run_sgd(pair.batches()[on_gpu])
    weights.append({name: tensor.cpu() for name, tensor in learner.model.named_parameters()})
    assert [moved(*two) for two in itertools.pairwise(weights)] == [True, True, False, True]
    assert all(tensor.isfinite().all() for tensor in weights[-1].values())
    summary = reports[-1][2]
    assert (summary["skipped_sgd_steps"], summary["sgd_steps"]) == (1, 4)
    assert all(math.isfinite(value) for value in summary.values())
    steps = {float(state["step"]) for state in learner.state.optimizer.state.values()}
    assert steps == {3.0 if algo == "appo" else 4.0}  # RMSProp takes one with a gradient of zeros


def test_a_dataset_of_nothing_but_nan_ends_the_run(gpu: PretendGPU) -> None:
    for learner, batch in zip((pair := Pair()).learners, pair.batches(), strict=True):
        batch.tensors["rewards"].fill_(math.nan)
        with pytest.raises(UserError, match="learning has diverged: gradients are non-finite"):
            learner.run_sgd(batch)


def test_clipping_in_the_kernel_is_clipping_before_it(gpu: PretendGPU) -> None:
    """The oracle: PyTorch's own function for clipping, and an Adam that is not fused."""
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    plain, on_gpu = copy.deepcopy(model), copy.deepcopy(model).to(DEVICE)
    expected = torch.optim.Adam(plain.parameters(), 0.01)
    optimizers = [torch.optim.Adam(module.parameters(), 0.01, fused=True) for module in (model, on_gpu)]
    for step in range(5):
        gradients = [torch.randn(3, 5) * 10 ** (step - 2), torch.randn(3)]
        for module in (model, plain, on_gpu):
            for parameter, gradient in zip(module.parameters(), gradients, strict=True):
                parameter.grad = gradient.clone().to(parameter.device)
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        expected.step()
        for module, optimizer in zip((model, on_gpu), optimizers, strict=True):
            found = Reducer().step(module, optimizer, 1.0)
            torch.testing.assert_close(found.cpu(), norm)
            for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-5, atol=1e-6)


# ---- other algorithms ------------------------------------------------------------------------------------------------


def rmsprop(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    parameters = list(parameters)
    return torch.optim.RMSprop(parameters, 0.01, capturable=parameters[0].device.type != "cpu")


def test_learners_that_share_weights_on_a_gpu_see_each_others_steps(gpu: PretendGPU) -> None:
    torch.manual_seed(0)
    start = nn.Linear(3, 2)
    shared = SharedTraining(start, rmsprop, 2, GPU)
    assert shared.flat.device.type == GPU.type
    assert shared.counts.device == CPU
    models, learners = [nn.Linear(3, 2).to(GPU) for _ in range(2)], [Hogwild(shared, number) for number in range(2)]
    optimizers = [learner.make_optimizer(model, rmsprop) for learner, model in zip(learners, models, strict=True)]
    alone = copy.deepcopy(start)
    optimizer = rmsprop(alone.parameters())
    gpu.take_counts()
    for step in range(6):
        turn = step % 2
        learners[turn].copy_weights()
        for parameter, other in zip(models[turn].parameters(), alone.parameters(), strict=True):
            other.grad = torch.randn_like(other)
            parameter.grad = other.grad.clone().to(GPU)
        gpu.take_counts()
        learners[turn].step(models[turn], optimizers[turn], 1.0)
        assert gpu.take_counts().waits == 0
        assert learners[turn].add_sgd_step(0) == step + 1
        Reducer().step(alone, optimizer, 1.0)
        for ours, theirs in zip(models[turn].parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.detach().cpu(), theirs.detach(), rtol=1e-5, atol=1e-6)
    saved = learners[0].read_between_steps(lambda: optimizers[0].state_dict()["state"])
    assert float(saved[0]["step"]) == 6


@pytest.mark.parametrize(("algo", "action_space"), [("apex", DISCRETE), ("pql", CONTINUOUS)])
def test_a_dataset_of_a_replay_is_read_once_priorities_included(gpu: PretendGPU, algo: str,
                                                                action_space: spaces.Space) -> None:
    settings = {"algo": algo, "replay_size": 200, "replay_warmup": 64, "replay_alpha": 0.5, "num_batches_per_epoch": 2}
    cfg = make_config({"env": "test", "device": "cpu", "num_workers": 1, "num_envs_per_worker": 4, "rollout": 8,
                       "worker_num_splits": 1, "batch_size": 32, "encoder_mlp_layers": (16,), "serial_mode": True},
                      settings)
    buffers, reports = shared_buffers(cfg, action_space, algorithm_class(algo)(cfg).make_model(OBS_SPACE, action_space))
    learner = Learner(cfg, buffers, 0, 0, GPU, None, reports.append)
    dataset = Dataset(learner.feed.row_specs, cfg.samples_per_dataset, pinned=True)
    for tensor in dataset.rows.values():
        tensor.copy_(torch.rand(tensor.shape) if tensor.is_floating_point() else torch.zeros_like(tensor))
    gpu.take_counts()
    assert learner.run_sgd(dataset)
    assert gpu.take_counts().waits == 1
    assert np.isfinite(dataset.priorities).all()
    assert reports[-1][2]["skipped_sgd_steps"] == 0
