"""The benchmark: its arithmetic, its commands on a small environment. No test depends on how fast anything is."""

import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from appo import APPO
from config import Config
from policy_worker import PolicyWorker
from runtime.run_folder import configure
from runtime.user_error import UserError
from tools import benchmark, components, report
from tools.benchmark import RandomSampler, Sampler, Throughput, measure_throughput, modes, run_other
from tools.components import Costs

SMALL = {"env": "CartPole-v1", "num_workers": 2, "num_envs_per_worker": 4, "batch_size": 64, "num_batches_per_epoch": 1}
FLAGS = [f"--{name}={value}" for name, value in SMALL.items()]


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "WARM_UP_SEC", 0.1)
    monkeypatch.setattr(benchmark, "GRACE_SEC", 0.5)


def config(tmp_path: Path, **settings: Any) -> Config:
    return configure({**SMALL, "train_dir": str(tmp_path), **settings})


def test_the_bound_on_a_cpu_shares_all_cores_between_all_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(components, "cpu_cores", lambda: 4)
    costs = Costs(simulation=200.0, inference=100.0, training=50.0)
    cfg = config(tmp_path, num_epochs=2, device="cpu")
    assert costs.bound(cfg) == (pytest.approx(4 / 400e-6), "4 cores / (200.0 + 100.0 + 2 x 50.0) us")
    assert costs.bound(cfg, sampler_only=True)[0] == pytest.approx(4 / 300e-6)


@pytest.mark.parametrize(("inference", "training", "expected", "formula"), [
    (10.0, 20.0, 4 / 200e-6,
     "the least of 4 cores / 200.0 us, 2 policy worker(s) / 10.0 us, 1 learner(s) / (2 x 20.0) us"),
    (150.0, 20.0, 2 / 150e-6, ""), (10.0, 200.0, 1 / 400e-6, "")])
def test_the_bound_with_a_gpu_is_that_of_the_scarcest_resource(
        inference: float, training: float, expected: float, formula: str, tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(components, "cpu_cores", lambda: 4)
    monkeypatch.setattr(components, "choose_device", lambda name: components.torch.device("cuda"))
    costs = Costs(simulation=200.0, inference=inference, training=training)
    bound, text = costs.bound(config(tmp_path, num_epochs=2, policy_workers_per_policy=2))
    assert bound == pytest.approx(expected)
    assert text.startswith(formula)
    assert "learner" not in costs.bound(config(tmp_path), sampler_only=True)[1]


def test_inference_is_that_of_a_whole_batch_each_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of its passes takes at least 20 ms here, and half of 2 x 4 environments wait for it."""
    forward = PolicyWorker.forward
    monkeypatch.setattr(PolicyWorker, "forward", lambda *args: (time.sleep(0.02), forward(*args))[1])
    cfg = configure({"env": "CartPole-v1", "train_dir": str(tmp_path), "num_workers": 2, "num_envs_per_worker": 4,
                     "worker_num_splits": 2, "rollout": 4, "batch_size": 16, "num_batches_per_epoch": 1})
    assert components.measure_components(cfg, 0.1).inference >= 20_000 / 4


@pytest.mark.parametrize("system", [APPO, Sampler, RandomSampler])
def test_every_system_is_measured(system: type[APPO]) -> None:
    result = measure_throughput(SMALL, 0.5, system)
    assert result.env_steps_per_sec > 0
    assert result.start_sec > 0
    assert result.peak_memory_bytes > 1e8
    assert (result.lag_mean > 0) == (system is APPO)
    assert set(result.cpu_us) == {"supervisor", "rollout_worker", "policy_worker", "learner"}
    assert result.cpu_us["rollout_worker"] > 0


def test_cpu_time_is_that_between_the_end_of_the_warm_up_and_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([{"learner": 1.0, "idle": 1.0}, {"learner": 3.0, "idle": 2.0}, {"learner": 8.0, "idle": 2.5}])
    monkeypatch.setattr(benchmark, "cpu_seconds", lambda appo: next(readings))
    result = measure_throughput(SMALL | {"eval_every_env_steps": 1000, "eval_episodes": 1}, 0.5)
    assert set(result.cpu_us) == {"learner"}
    assert result.idle > 0
    learner_share = result.cpu_us["learner"] * result.env_steps_per_sec / 1e6  # of one core
    assert learner_share == pytest.approx(result.idle * 5 / 0.5), "5 s of work while a core was idle for 0.5 s"


def test_the_modes_are_valid_and_synchronous_ones_hold_one_trajectory_of_each_environment(tmp_path: Path) -> None:
    for batch, num_envs in ((64, 4), (128, 4), (96, 4), (64, 3)):
        cfg = config(tmp_path, batch_size=batch, num_envs_per_worker=num_envs, worker_num_splits=1)
        rows = modes(cfg)
        assert len({name for name, _ in rows}) == 4
        for _, settings in rows:
            changed = config(tmp_path, **{"batch_size": batch} | settings)
            if not changed.async_rl:
                assert changed.trajectories_per_dataset == changed.num_workers * changed.num_envs_per_worker


@pytest.mark.parametrize(("command", "expected"), [
    (["components"], ["simulation, one core (4 environments)", "training pass", "bound without learning", "measured"]),
    (["throughput", "--modes", "--random_actions", "--repeats", "1"],
     ["synchronous, 1 split", "asynchronous, double-buffered", "of simulation", "CPU time of one sample",
      "cores idle"]),
    (["compare", "--other", "theirs", "echo fps 1000", "fps ([0-9]+)"], ["this system", "theirs"])])
def test_the_commands_run(command: list[str], expected: list[str], capsys: pytest.CaptureFixture) -> None:
    assert benchmark.main([*command, "--seconds", "0.3", *FLAGS]) == 0
    printed = capsys.readouterr()
    assert not printed.err
    for text in expected:
        assert text in printed.out


def test_scaling_changes_one_size_at_a_time_and_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                      capsys: pytest.CaptureFixture) -> None:
    seen = []

    def measure(settings: dict[str, Any], seconds: float) -> Throughput:
        seen.append(settings)
        configure(settings | {"train_dir": str(tmp_path)})
        return Throughput(1000.0 * len(seen), 1.0, 2, 3.0, 10**9, {"learner": 1.0}, 0.1)

    monkeypatch.setattr(benchmark, "measure_throughput", measure)
    picture = tmp_path / "scaling.png"
    assert benchmark.main(["scaling", *FLAGS, "--output", str(picture)]) == 0
    assert picture.stat().st_size > 1000
    base = {"num_workers": 2, "num_envs_per_worker": 4, "worker_num_splits": 1, "policy_workers_per_policy": 1}
    for settings in seen:
        assert sum(settings.get(name, value) != value for name, value in base.items()) <= 1
    assert "num_envs_per_worker=64" in capsys.readouterr().out


def test_another_program_is_measured_by_its_last_figure_and_ended_with_all_its_children(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    command = (f"sleep 600 & echo $! $$ > {pids}; trap '' INT; "
               "for i in 1 2 3 4 5 6 7 8 9; do echo noise; echo fps 1,00$i.5; sleep 0.2; done")
    assert 1001.5 < run_other("theirs", command, r"fps ([\d.,]+)", 0.5) <= 1009.5
    for pid in pids.read_text().split():
        deadline = time.monotonic() + 10
        while Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text():
            assert time.monotonic() < deadline, "it still runs"
            time.sleep(0.05)


@pytest.mark.parametrize("command", ["echo hello; echo fps 0", "echo fps 0; sleep 600"], ids=["ends", "hangs"])
def test_a_program_that_prints_no_figure_is_an_error(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "PATIENCE_SEC", 0.3)
    with pytest.raises(UserError, match="theirs"):
        run_other("theirs", command, "fps ([0-9]+)", 0.1)


@pytest.mark.parametrize("argv", [
    [], ["fly"], ["components"], ["components", "--env=CartPole-v1", "--seconds=0"], ["compare", "--env=CartPole-v1"],
    ["compare", "--env=CartPole-v1", "--other", "name"], ["compare", "--env=CartPole-v1", "--other", "name", "fast"],
    ["throughput", "--env=CartPole-v1", "--num_wokers=2"]])
def test_bad_input_is_one_line(argv: list[str], capsys: pytest.CaptureFixture) -> None:
    assert benchmark.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("benchmark.py: ")
    assert error.count("\n") == 1


def test_a_report_has_every_part_and_says_why_an_option_was_refused(tmp_path: Path,
                                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def measure(settings: dict[str, Any], seconds: float) -> Throughput:
        measured.append(settings)
        if "tf32" in settings:
            raise UserError("--tf32 is arithmetic of a GPU, not of a CPU; leave it off")
        return Throughput(300.0 if "cuda_graphs" in settings else 200.0, 0.0, 0, 1.0, 1, {}, 0.0)

    def fail() -> None:
        raise UserError("this cannot be predicted")

    monkeypatch.setattr(report, "measure_simulation", lambda cfg, seconds: 400.0)
    path = tmp_path / "report.md"
    args = Namespace(output=path, seconds=1.0, repeats=2, minutes=0.05, settings=SMALL,
                     command_line="benchmark.py report")
    report.write_report(config(tmp_path), args, "a machine", measure,
                        {"Components": lambda: print("a table"), "Predicted": fail})
    text = path.read_text()
    for part in ("# CartPole-v1 on a machine\n", "```\na table\n```", "this cannot be predicted", "| share | 50% |",
                 "| `--tf32` | - | - | --tf32 is arithmetic", "| `--cuda_graphs` | 200 | 300 | 1.50 (1.50 to 1.50) |",
                 "| `--torch_compile` | 200 | 200 | 1.00", "## Learning for 0.05 minutes"):
        assert part in text, part
    assert len(measured) == 2 + 2 * 2 * 3 + 2
    rows = text.partition("| minutes |")[2].splitlines()
    assert len([row for row in rows if row.startswith("| 0.")]) > 3
    args.output = tmp_path / "nowhere" / "report.md"
    with pytest.raises(UserError, match="there is no folder"):
        report.write_report(config(tmp_path), args, "a machine", measure, {})
