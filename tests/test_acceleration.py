"""The options for a GPU: they change how fast it learns and not what, or say in one line why they cannot be used."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from parts import learners
from test_pretend_gpu import REPLAY, SMALL, weights
from torch import nn

from apex import APEX
from appo import APPO
from impala import IMPALA
from runtime.acceleration import Recorded
from runtime.user_error import UserError
from tools.pretend_gpu import Counts, PretendGPU
from trainer import Trainer


@pytest.fixture
def gpu() -> Iterator[PretendGPU]:
    with PretendGPU() as gpu:
        yield gpu


def learn(folder: Path, make: type[Trainer] = APPO, env: str = "CartPole-v1", steps: int = 320,
          look: Callable[[Trainer], None] = lambda trainer: None, **settings: Any) -> torch.Tensor:
    """Return all weights after a short run."""
    name = "_".join(map(str, settings))
    with make(env, train_dir=str(folder), experiment=name or "plain", **SMALL | {"device": "pretend"} | settings
              ) as trainer:
        trainer.train(steps)
        look(trainer)
        return weights(trainer)


# ---- graphs ----------------------------------------------------------------------------------------------------------


def test_a_recorded_function_runs_a_few_times_and_is_then_replayed_by_one_launch(gpu: PretendGPU) -> None:
    x, total, calls = torch.zeros(3, device="pretend"), torch.zeros(3, device="pretend"), []

    def add() -> torch.Tensor:
        calls.append(1)
        return total.add_(2 * x)

    recorded, seen = Recorded(add, torch.device("pretend", 0)), []
    for number in range(1, 7):
        x.fill_(number)
        gpu.take_counts()
        seen.append(recorded()[0].item())
        assert gpu.take_counts() == Counts(launches=2 if number <= Recorded.WARM_UPS else 1, down=1, waits=1)
    assert seen == [2.0, 6.0, 12.0, 20.0, 30.0, 42.0]
    assert len(calls) == Recorded.WARM_UPS + 1


def test_streams_and_graphs_are_those_of_the_device_that_was_given(gpu: PretendGPU) -> None:
    x, device = torch.zeros(3, device="pretend"), torch.device("pretend", 1)
    recorded = Recorded(lambda: x.add_(1), device)
    for _ in range(Recorded.WARM_UPS + 2):
        recorded()
    assert recorded.stream.device == recorded.graph.device == device
    assert x.tolist() == [Recorded.WARM_UPS + 2] * 3
    with pytest.raises(RuntimeError, match="of which device"):
        torch.get_device_module(device).current_stream()


def test_graphs_beside_each_other_take_the_memory_of_the_largest(gpu: PretendGPU) -> None:
    x, device, taken = torch.ones(1000, device="pretend"), torch.device("pretend", 0), []
    for shared in (False, True):
        graphs: list[Recorded] = []
        before = gpu.bytes
        for rows in (1000, 900, 800):
            graphs.append(Recorded(lambda rows=rows: (x[:rows] + 1).mul(2).add(3).sum(), device,
                                   graphs[0] if shared and graphs else None))
            for _ in range(Recorded.WARM_UPS):
                graphs[-1]()
        for _ in range(2):
            assert [graph().item() for graph in graphs] == [7000, 6300, 5600]
        taken.append(gpu.bytes - before)
    assert taken == [2 * 4 * (1000 + 900 + 800), 2 * 4 * 1000]  # two at once


def test_what_waits_cannot_be_recorded(gpu: PretendGPU) -> None:
    recorded = Recorded(lambda: torch.ones(3, device="pretend").sum().item(), torch.device("pretend", 0))
    for _ in range(Recorded.WARM_UPS):
        recorded()
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        recorded()


@pytest.mark.parametrize(("make", "settings"), [
    (APPO, {}), (APPO, {"with_vtrace": False, "lr_schedule": "linear_decay", "normalize_returns": False}), (IMPALA, {}),
    (APEX, REPLAY | {"target_every_sgd_steps": 3})], ids=str)
def test_graphs_learn_the_same(make: type[Trainer], settings: dict[str, Any], tmp_path: Path, gpu: PretendGPU) -> None:
    counted = []

    def count_a_step(trainer: Trainer) -> None:
        recorded = learners(trainer)[0].recorded
        gpu.take_counts()
        recorded(recorded.rows, 0.0)
        counted.append(gpu.take_counts())

    plain = learn(tmp_path, make, **settings)
    graphs = learn(tmp_path, make, look=count_a_step, cuda_graphs=True, **settings)
    assert torch.allclose(graphs, plain, rtol=1e-4, atol=1e-5)
    assert counted[0].launches <= 5
    assert counted[0].waits == 0


def test_a_graph_is_recorded_anew_after_the_settings_or_the_weights_were_changed(tmp_path: Path,
                                                                                 gpu: PretendGPU) -> None:
    ends = []
    for cuda_graphs in (False, True):
        with APPO("CartPole-v1", train_dir=str(tmp_path), experiment=str(cuda_graphs), device="pretend",
                  cuda_graphs=cuda_graphs, **SMALL) as trainer:
            trainer.train(160)
            trainer.change(learning_rate=0.01, exploration_loss_coeff=0.5)
            trainer.set_parameters(trainer.get_parameters(), reset_optimizer=True)
            trainer.train(160)
            ends.append(weights(trainer))
    assert torch.allclose(*ends, rtol=1e-4, atol=1e-5)


# ---- the others ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"use_rnn": True, "rnn_type": "lstm", "rnn_size": 8}], ids=["mlp", "lstm"])
def test_copies_in_half_precision_learn_nearly_the_same_with_fewer_launches(
        more: dict[str, Any], tmp_path: Path, gpu: PretendGPU) -> None:
    def count(trainer: Trainer) -> None:
        gpu.take_counts()

    settings = {"precision": "bfloat16", "encoder_mlp_layers": (16, 16, 16)} | more
    start = learn(tmp_path, steps=1, look=count, **settings | {"train_for_env_steps": 2})
    plain = learn(tmp_path, **settings)
    launches = gpu.take_counts().launches
    copies = learn(tmp_path, half_precision_copies=True, **settings)
    assert gpu.take_counts().launches < launches
    assert (copies - plain).norm() < 0.1 * (plain - start).norm()


def test_tf32_is_switched_on(tmp_path: Path, gpu: PretendGPU) -> None:
    libraries = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = [library.fp32_precision for library in libraries]
    try:
        for library in libraries:
            library.fp32_precision = "ieee"
        learn(tmp_path, steps=32, tf32=True)
        assert {library.fp32_precision for library in libraries} == {"tf32"}
    finally:
        for library, precision in zip(libraries, before, strict=True):
            library.fp32_precision = precision


def test_a_compiled_network_learns_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the compiler's first half; the second, which takes a minute, only makes machine code of it."""
    compiled, compile_module = [], nn.Module.compile

    def compile_fast(self: nn.Module) -> None:
        compiled.append(self)
        compile_module(self, backend="aot_eager")

    monkeypatch.setattr(nn.Module, "compile", compile_fast)
    plain = learn(tmp_path, device="cpu")
    assert not compiled
    assert torch.allclose(learn(tmp_path, device="cpu", torch_compile=True), plain, rtol=1e-3, atol=1e-5)
    assert len(compiled) == 2, "of the learner and the policy worker"


@pytest.mark.parametrize(("settings", "line"), [
    ({"device": "cpu", "tf32": True}, "--tf32 is arithmetic of a GPU, not of a CPU; leave it off"),
    ({"device": "cpu", "cuda_graphs": True}, "--cuda_graphs needs a GPU; leave it off"),
    ({"cuda_graphs": True, "use_rnn": True}, "--cuda_graphs cannot record the SGD step of a policy with a memory: it "
     "reads where episodes begin; leave it off"),
    ({"cuda_graphs": True, "exploration_loss_decay_env_steps": 1000}, "--cuda_graphs would keep the weight of the "
     "exploration loss as it is recorded; use --exploration_loss_decay_env_steps=0; leave it off"),
    ({"algo": "apex", "half_precision_copies": True, "precision": "bfloat16"} | REPLAY,
     "--half_precision_copies is for the networks of appo, impala and a3c; leave it off"),
    ({"half_precision_copies": True}, "--half_precision_copies needs --precision=bfloat16; leave it off"),
    ({"torch_compile": True}, "--torch_compile cannot compile for the device pretend; leave it off"),
    ({"device": "cpu", "torch_compile": True, "serial_mode": False, "learner_threads": 2},
     "--torch_compile needs --learner_threads=1; leave it off")], ids=str)
def test_an_option_that_cannot_be_used_says_why(settings: dict[str, Any], line: str, tmp_path: Path,
                                                gpu: PretendGPU) -> None:
    with pytest.raises(UserError) as refused:
        learn(tmp_path, **settings)
    assert str(refused.value) == line
    assert not list(tmp_path.iterdir())
