"""Predictions: the schedule against times computed by hand, limits, made-up machines. Nothing here measures speed."""

from typing import Any

import pytest

from config import Config
from runtime.machine import Machine
from tools import benchmark, gpu_costs, predict
from tools.components import Parts, fit_line
from tools.gpu_costs import GPU, Counted, count_on_gpu, find_gpu, times_on_gpu
from tools.predict import list_limits, machine_of, settings_for, times_on_cpu
from tools.pretend_gpu import Counts
from tools.schedule import Cores, Place, Played, Schedule, Times

CARTPOLE = {"env": "CartPole-v1", "num_workers": 1, "num_envs_per_worker": 8, "worker_num_splits": 1, "rollout": 4,
            "batch_size": 32, "num_batches_per_epoch": 1, "num_epochs": 1, "learner_threads": 1}
NOTHING = Times(step=0.0, batch=0.0, row=0.0, refresh=0.0, copy=0.0, serial=0.0, parallel=0.0)
HERE = Machine(2, 0)
PARTS = Parts(simulation=50.0, step=100.0, batch=20.0, row=10.0, handing_batch=20.0, handing_row=1.0, refresh=0.0,
              copy=2.0, serial=320.0, parallel=640.0)


def config(machine: Machine = HERE, **settings: Any) -> Config:
    return settings_for({**CARTPOLE, **settings}, machine)


def play(times: Times, cores: int = 4, *, num_gpus: int = 0, **settings: Any) -> Played:
    return Schedule(config(**settings), 1, times, Place(cores, num_gpus, (0, 0))).play()


def test_one_split_steps_and_waits_for_its_actions_in_turn() -> None:
    played = play(NOTHING._replace(step=1e-3, batch=4e-3, row=5e-4, serial=1e-9))
    assert played.env_steps_per_sec == pytest.approx(8 / (8 * 1e-3 + 4e-3 + 8 * 5e-4), rel=0.02)
    assert played.rows == 8
    assert played.busy["rollout workers"] == pytest.approx(8 / 16, rel=0.02)


def test_of_two_splits_one_is_stepped_while_the_actions_of_the_other_are_computed() -> None:
    played = play(NOTHING._replace(step=1e-3, batch=1e-3, row=5e-4, serial=1e-9), worker_num_splits=2)
    assert played.env_steps_per_sec == pytest.approx(1 / 1e-3, rel=0.06), "4 ms of stepping hide 3 ms of acting"


def test_a_slow_learner_is_the_limit_and_its_data_waits_in_the_slots() -> None:
    played = play(NOTHING._replace(step=1e-6, batch=1e-6, serial=2e-3, parallel=8e-3), learner_threads=2,
                  num_epochs=2)
    assert played.env_steps_per_sec == pytest.approx(32 / (2 * (2e-3 + 8e-3 / 2)), rel=0.03)
    # acted when the last step on one dataset began, copied when that on the next one does, trained on after it
    assert played.lag == pytest.approx(1 + 2)
    assert play(NOTHING._replace(step=1e-3, batch=1e-6, serial=1e-9)).lag == pytest.approx(0, abs=0.5)


def test_one_core_is_shared_by_all_that_there_is_to_do() -> None:
    times = NOTHING._replace(step=1e-4, batch=8e-5, row=1e-5, copy=1e-6, serial=32 * 5e-5)
    played = play(times, cores=1)
    assert played.env_steps_per_sec == pytest.approx(1 / (1e-4 + 2e-5 + 1e-6 + 5e-5), rel=0.02)
    assert sum(played.busy.values()) == pytest.approx(1)


def test_busy_cores_are_shared_by_niceness_and_nobody_gets_more_than_its_threads() -> None:
    cores = Cores(2)
    for threads, niceness in ((2, 0), (1, 10), (1, 10)):
        cores.start("", 1.0, lambda: None, threads, niceness)
    learner, *others = cores.rates()
    assert learner == pytest.approx(2 * 2 / (2 + 2 * 1.25 ** -10))
    assert others == pytest.approx([2 - learner, 0])
    cores.tasks[0].threads, cores.tasks[0].weight = 1, 1.0
    assert cores.rates() == pytest.approx([1, 1, 0]), "of equal tasks the first runs until it is done"


def test_limits_are_the_formulas_that_stand_beside_them() -> None:
    limits = list_limits(config(learner_threads=2), 1, times_on_cpu(PARTS), Place(2, 0, (0, 0)), rows=10)
    by_name = {limit.name: limit.env_steps_per_sec for limit in limits}
    learn = (320 + 640) / 32
    assert by_name == pytest.approx({"cores": 2e6 / (100 + 12 + 2 + learn), "rollout workers": 1e6 / 100,
                                     "policy workers": 8e6 / (20 + 8 * 10), "learner": 1e6 / ((320 + 640 / 2) / 32)})
    assert limits[0].formula == "2 / (100.0 + 12.0 + 2.0 + 30.0) us: step, act, copy, learn"


@pytest.mark.parametrize(("changes", "cores", "limit"), [
    ({}, 1, "cores"), ({"step": 2000.0}, 8, "rollout workers"), ({"serial": 32e4}, 8, "learner"),
    ({"batch": 8000.0, "step": 1.0, "serial": 1.0, "parallel": 0.0}, 8, "policy workers"),
    ({"batch": 800.0, "serial": 1.0, "parallel": 0.0}, 8, "policy workers, and waiting for each other")])
def test_what_limits_is_named(changes: dict[str, float], cores: int, limit: str) -> None:
    found = predict.predict(config(), Machine(cores, 0), "", 1.0, PARTS._replace(**changes))
    assert found.limit == limit
    assert found.played.env_steps_per_sec <= 1.001 * min(limit.env_steps_per_sec for limit in found.limits)


def test_on_a_gpu_launches_copies_and_waits_take_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config(Machine(8, 1))
    counted = Counted(batch=Counts(10, 2, 1, 3), refresh=Counts(4, 0, 0, 1), sgd_step=Counts(100, 0, 0, 1),
                      dataset=Counts(50, 2, 0, 0), bytes_of_row=1e6, bytes_of_step=1e6, bytes_of_sample=0.0,
                      flops_of_row=15e6, sent_per_row=1000.0)
    gpu = GPU(memory_gb=1, memory_gb_per_sec=1000.0, bf16_tflops=0.0, fp32_tflops=100.0, bus_gb_per_sec=2.0)
    times = times_on_gpu(PARTS, counted, gpu, cfg, in_bf16=False)
    us = {name: value * 1e6 for name, value in times._asdict().items()}
    assert us == pytest.approx({
        "step": 100, "batch": 20 + 3 * 10 + 3 * 10, "row": 1 + 1, "refresh": 4 * 5 + 10, "copy": 2, "parallel": 0,
        "serial": 100 * 5 + 10 + (50 * 5 + 2 * 10) + 32 * 1, "launching": 50, "row_gpu": 1 + 1, "batch_gpu": 20,
        "step_gpu": 100 * 2})
    assert times.act(10) == pytest.approx((80 + 20 + 50) * 1e-6), "10 rows of 2 us take less than 50 us of launches"
    assert times.act(100) == pytest.approx((80 + 200 + 200) * 1e-6)
    monkeypatch.setattr(predict, "count_on_gpu", lambda cfg: counted)
    slow = counted._replace(bytes_of_row=1e10)
    assert predict.predict(cfg, Machine(8, 1), "H100", 1.0, PARTS).counted == counted
    monkeypatch.setattr(predict, "count_on_gpu", lambda cfg: slow)
    two = config(Machine(8, 1), policy_workers_per_policy=2, num_workers=4)
    assert "GPU" in predict.predict(two, Machine(8, 1), "H100", 1.0, PARTS).limit, "two policy workers share it"


def test_launches_are_counted_on_the_real_components() -> None:
    counted = count_on_gpu(config(precision="float32"))
    assert counted.batch.launches > 5
    assert counted.sgd_step.launches > counted.batch.launches
    assert min(counted.bytes_of_row, counted.bytes_of_sample, counted.flops_of_row) > 0
    assert counted.sent_per_row == 4 * 4 + 1  # CartPole: four numbers, and whether an episode begins


def test_a_line_goes_through_two_points_and_no_part_of_it_is_negative() -> None:
    assert fit_line((10, 30.0), (20, 50.0)) == pytest.approx((10, 2))
    assert fit_line((10, 30.0), (20, 20.0)) == pytest.approx((20, 0))
    assert fit_line((10, 10.0), (20, 40.0)) == pytest.approx((20, 1))


def test_machines_and_their_gpus_are_found() -> None:
    assert machine_of(16, "h100", 0) == (Machine(16, 1), "H100")
    assert machine_of(64, "RTX 4090", 4) == (Machine(64, 4), "RTX4090")
    assert machine_of(3, "", 0) == (Machine(3, 0), "")
    for name, gpu in gpu_costs.GPUS.items():
        assert find_gpu(name) == name
        assert gpu.bf16_tflops == 0 or gpu.bf16_tflops > gpu.fp32_tflops


@pytest.mark.parametrize(("flags", "said"), [
    (["--gpu=H10"], "H100, H200, A100"), (["--num_gpus=4"], "--gpu"), (["--cores=-1"], "--cores=-1"),
    (["--gpu=T4", "--num_gpus=-2"], "--num_gpus=-2"), (["--algo=pql", "--env=Pendulum-v1"], "appo, impala or a3c"),
    (["--async_rl=False"], "--async_rl=True"), (["--algo=apex"], "appo, impala or a3c")])
def test_bad_input_is_one_line(flags: list[str], said: str, capsys: pytest.CaptureFixture) -> None:
    assert benchmark.main(["predict", "--env=CartPole-v1", *flags]) == 2
    error = capsys.readouterr().err
    assert error.startswith("benchmark.py: ")
    assert error.count("\n") == 1
    assert said in error


@pytest.mark.parametrize(("given", "gpu"), [({}, ""), ({"num_policies": 2}, "H100")])
def test_what_is_predicted_is_printed_with_its_formulas(
        given: dict[str, Any], gpu: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(predict, "measure_parts", lambda cfg, seconds, *, learns: PARTS)
    flags = [f"--{name}={value}" for name, value in (CARTPOLE | given).items()]
    assert benchmark.main(["predict", *flags, "--cores=4", f"--gpu={gpu}"]) == 0
    printed = capsys.readouterr().out
    for text in ("rollout workers", "1 / 100.0 us", "of simulation", "limited by", "predicted"):
        assert text in printed
    assert ("counted on a pretended GPU" in printed) == bool(gpu)


def test_a_check_compares_with_what_nothing_else_would_have_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predict, "measure_parts", lambda cfg, seconds, *, learns: PARTS)
    monkeypatch.setattr(predict, "this_machine", lambda: Machine(2, 0))
    run = benchmark.Throughput(1000.0, 1.0, 2, 3.0, 10**9, {"learner": 600.0}, 0.2)  # 30 % of two cores, 20 % idle
    row, notes = predict.check("here", CARTPOLE, 1.0, 2, lambda given, seconds: run)
    assert row[2] == "2,000"
    assert len(notes) == 2
