"""The class for use from Python: budgets, parameters, predictions, callbacks, AsynRL's arguments."""

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import parts
import pytest
import torch
from diary import Diary

from runtime import checkpoint
from runtime.utils import ComponentError, UserError
from services.records import Records
from shared_buffers import WITH_WORKER
from trainer import A3C, APPO, PQL, Trainer, load

SMALL: dict[str, Any] = {"num_workers": 2, "num_envs_per_worker": 4, "rollout": 16, "batch_size": 64,
                         "num_batches_per_epoch": 2, "num_epochs": 2, "encoder_mlp_layers": (16,)}
NUM_ENVS = 8
SERIAL = SMALL | {"serial_mode": True}


def always(action: int) -> torch.Tensor:
    """Return a bias of CartPole's policy head that chooses one action."""
    return torch.tensor([1000.0, -1000.0] if action == 0 else [-1000.0, 1000.0])


# ---- budgets ---------------------------------------------------------------------------------------------------------


def test_eight_calls_take_exactly_what_they_were_asked_for_and_a_paused_system_rests(tmp_path: Path) -> None:
    diary = tmp_path / "diary"
    with APPO(Diary, env_kwargs={"path": str(diary)}, train_dir=str(tmp_path), **SMALL) as appo:
        probed, before = diary.stat().st_size, 0  # written when the environment was looked at
        for call in range(1, 9):
            trained = int(appo.buffers.decisions_trained[0])
            done = appo.train(500)
            written = diary.stat().st_size - probed
            assert 500 * call <= written == appo.env_steps < 500 * call + NUM_ENVS
            assert done["env_steps"] == written - before
            before = written
            assert (appo.buffers.slot_place == WITH_WORKER).all(), "all that was finished was taken"
            newly = int(appo.buffers.decisions_trained[0]) - trained
            assert abs(newly - 500) < 2 * 64 + NUM_ENVS * 16, "but for less than a dataset and the unfinished ones"
            assert done["sgd_steps"] >= 4 * (newly // (2 * 64))
        row = json.loads((appo.cfg.run_dir / "metrics.jsonl").read_text().splitlines()[-1])
        assert done["mean_return"] == row["mean_return"]
        time.sleep(0.5)
        assert appo.env_steps < 4000 + NUM_ENVS, "nobody samples meanwhile"


def test_a_budget_that_the_call_before_has_taken_takes_nothing(tmp_path: Path) -> None:
    with APPO("CartPole-v1", train_dir=str(tmp_path), **SERIAL) as appo:
        steps = [appo.train(0.5)["env_steps"] for _ in range(2 * NUM_ENVS)]
        assert sum(steps) == appo.env_steps == 2 * NUM_ENVS
        assert set(steps) == {0, NUM_ENVS}
        with pytest.raises(UserError, match="must be above 0"):
            appo.train(0)


def test_a_system_that_was_stopped_begins_its_next_budget_there_and_an_interrupt_then_loses_nothing(
        tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), APPO("CartPole-v1", train_dir=str(tmp_path), **SERIAL) as appo:
        appo.train(10_000, should_stop=lambda: appo.env_steps >= 200)
        stopped = appo.env_steps
        appo.train(300)
        assert stopped + 300 <= appo.env_steps < stopped + 300 + NUM_ENVS
        raise KeyboardInterrupt
    newest = checkpoint.load_newest(appo.cfg.run_dir)[1]
    assert newest["sgd_steps"] == sum(appo.versions) > 0


def test_a_closed_system_says_that_it_has_ended(tmp_path: Path) -> None:
    with APPO("CartPole-v1", train_dir=str(tmp_path), **SERIAL) as appo:
        appo.train(100)
    uses = (appo.train, appo.save, appo.change, appo.__enter__, lambda: appo.set_parameters(appo.get_parameters()))
    for use in uses:
        with pytest.raises(ComponentError, match="this system has ended; make a new one, it resumes the run"):
            use()


@pytest.mark.parametrize("given", [{"num_workers": "2"}, {"algo": 3}, {"learning_rat": 1e-3}], ids=str)
def test_what_cannot_be_a_setting_is_refused(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=next(iter(given))):
        APPO(**{"env": "CartPole-v1", "train_dir": str(tmp_path), **SERIAL} | given)


# ---- callbacks and settings that change ------------------------------------------------------------------------------


def test_a_callback_gets_each_report_changes_the_learning_rate_and_stops_the_training(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = []

    def callback(row: dict[str, Any]) -> bool | None:
        rows.append(row)
        if len(rows) == 2:
            appo.change(learning_rate=2e-4)
        return len(rows) < 5

    with APPO("CartPole-v1", train_dir=str(tmp_path), lr_schedule="constant", learning_rate=1e-3, **SERIAL) as appo:
        appo.train(100_000, callback)
        assert 5 <= len(rows) <= 6  # the last one is of what was trained on when it was stopped
        assert [row["learning_rate"] for row in rows[:2]] == [1e-3, 1e-3]
        assert rows[-1]["learning_rate"] == 2e-4
        written = [json.loads(line) for line in (appo.cfg.run_dir / "metrics.jsonl").read_text().splitlines()]
        assert rows == written
    assert json.loads((appo.cfg.run_dir / "config.json").read_text())["learning_rate"] == 2e-4


@pytest.mark.parametrize("name", ["callback", "should_stop"])
def test_an_error_in_a_callback_reaches_the_caller_and_the_system_goes_on(tmp_path: Path, name: str) -> None:
    with APPO("CartPole-v1", train_dir=str(tmp_path), **SERIAL) as appo:
        with pytest.raises(ZeroDivisionError):
            appo.train(100_000, **{name: lambda *row: 1 / 0})
        stopped = appo.env_steps
        assert stopped < 10_000
        appo.train(300)
        assert appo.env_steps >= stopped + 300


# ---- parameters ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("serial_mode", [False, True])
def test_parameters_that_were_set_choose_the_very_next_action(tmp_path: Path, *, serial_mode: bool) -> None:
    diary = tmp_path / "diary"
    with APPO(Diary, env_kwargs={"path": str(diary)}, train_dir=str(tmp_path), learning_rate=1e-7,
              **SMALL | {"serial_mode": serial_mode}) as appo:
        appo.train(300)
        assert set(diary.read_text()) == {"0", "1"}
        for action in (1, 0):
            parameters = appo.get_parameters()
            parameters[0]["policy_head.bias"] = always(action)
            appo.set_parameters(parameters[0])
            assert appo.predict(np.zeros(2, np.float32))[0] == action
            written = len(diary.read_text())
            appo.train(300)
            assert set(diary.read_text()[written:]) == {str(action)}
            assert torch.equal(appo.get_parameters()[0]["policy_head.bias"].sign(), always(action).sign())


def test_what_was_acted_with_other_parameters_is_not_learned_from(tmp_path: Path) -> None:
    with APPO("CartPole-v1", train_dir=str(tmp_path), **SERIAL) as appo:
        appo.train(8 * NUM_ENVS)  # half of each trajectory
        appo.set_parameters(appo.get_parameters())
        assert appo.train(8 * NUM_ENVS)["valid_fraction"] < 0.6


def test_a_checkpoint_brings_back_parameters_and_optimizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with APPO("CartPole-v1", train_dir=str(tmp_path), **SERIAL) as appo:
        appo.train(600)
        appo.save(tmp_path / "early.pt")
        early = appo.get_parameters()[0]
        appo.train(2000)
        assert not torch.equal(appo.get_parameters()[0]["policy_head.weight"], early["policy_head.weight"])
        appo.load(tmp_path / "early.pt")
        assert all(torch.equal(tensor, early[name]) for name, tensor in appo.get_parameters()[0].items())
        appo.save(tmp_path / "again.pt")
        first, second = (checkpoint.load_checkpoint(tmp_path / f"{name}.pt") for name in ("early", "again"))
        torch.testing.assert_close(first["optimizer"]["state"], second["optimizer"]["state"], rtol=0, atol=0)
        assert second["env_steps"] == appo.env_steps > first["env_steps"], "counters go on"
        appo.set_parameters(appo.cfg.run_dir)
        assert not list(tmp_path.rglob("given.pt"))
        monkeypatch.setenv("RANK", "1")
        appo.save(tmp_path / "other.pt")
        assert not (tmp_path / "other.pt").exists(), "of ranks the first one writes"


def test_there_may_be_many_processes(tmp_path: Path) -> None:
    """More than the 250 descriptors that can be handed to a process at its start."""
    with APPO("CartPole-v1", train_dir=str(tmp_path), **SMALL | {
            "num_workers": 150, "num_envs_per_worker": 2, "rollout": 8, "batch_size": 32,
            "num_batches_per_epoch": 1}) as system:
        system.train(5000)
        assert min(system.versions) > 0
        assert system.find(Records).num_replaced == 0


@pytest.mark.parametrize(("make", "env", "more"), [
    (A3C, "CartPole-v1", {"num_learners": 2}),
    (PQL, "Pendulum-v1", {"replay_size": 1000, "replay_warmup": 256, "replay_ratio": 2.0})])
def test_several_learners_take_parameters_over_together(tmp_path: Path, make: type[Trainer], env: str,
                                                        more: dict[str, Any]) -> None:
    """Hogwild's, and those with roles; with processes."""
    with make(env, train_dir=str(tmp_path), **parts.SMALL | more) as system:
        system.train(300)
        system.save(tmp_path / "saved.pt")
        saved = checkpoint.load_checkpoint(tmp_path / "saved.pt")
        assert saved["sgd_steps"] == sum(system.versions)
        for name, tensor in system.get_parameters()[0].items():
            assert torch.equal(tensor, saved["model"][name]), "what all learners have learned was published"
        given = {name: torch.full_like(tensor, 0.125) for name, tensor in system.get_parameters()[0].items()}
        system.set_parameters(given)
        assert all((tensor == 0.125).all() for tensor in system.get_parameters()[0].values())
        assert system.train(300)["sgd_steps"] > 0
        moved = [(each - 0.125).abs().max() for name, each in system.get_parameters()[0].items() if "weight" in name]
        assert 0 < max(moved) < 0.1, "learning goes on from there"


@pytest.mark.parametrize("change", [
    lambda state: state.pop("value_head.bias"), lambda state: state.update({"value_head.bias": torch.zeros(7)})])
def test_parameters_that_do_not_fit_are_refused_and_change_nothing(tmp_path: Path, change: Any) -> None:
    with APPO("CartPole-v1", train_dir=str(tmp_path), **SERIAL) as appo:
        before = appo.get_parameters()[0]
        given = appo.get_parameters()
        change(given[0])
        with pytest.raises(UserError, match=r"value_head\.bias"):
            appo.set_parameters(given)
        with pytest.raises(UserError, match="no policy 1; there are 0 to 0"):
            appo.set_parameters({1: before})
        with pytest.raises(UserError, match="cannot be read"):
            appo.load(tmp_path / "nothing.pt")
        assert all(torch.equal(tensor, before[name]) for name, tensor in appo.get_parameters()[0].items())
        assert not appo.commands.open


def test_each_policy_of_a_population_has_its_own(tmp_path: Path) -> None:
    with APPO("CartPole-v1", num_policies=2, train_dir=str(tmp_path), **SERIAL) as appo:
        for policy in range(2):
            parameters = appo.get_parameters()[policy] | {"policy_head.bias": always(policy)}
            appo.set_parameters({policy: parameters})
        assert [appo.predict(np.zeros(4), policy=policy)[0] for policy in range(2)] == [0, 1]
        with pytest.raises(UserError, match="there are 2 policies; name one"):
            appo.set_parameters(parameters)
        with pytest.raises(UserError, match="there is no policy 2; there are 0 to 1"):
            appo.predict(np.zeros(4), policy=2)
        appo.save(tmp_path / "second.pt", policy=1)
        appo.set_parameters(dict(zip((1, 0), appo.get_parameters().values(), strict=True)))
        appo.load(appo.cfg.run_dir, policy=1)
        assert [appo.predict(np.zeros(4), policy=policy)[0] for policy in range(2)] == [1, 1], "0 keeps what it has"
    assert load(tmp_path / "second.pt", policy=1).predict(np.zeros(4))[0] == 1


# ---- AsynRL's arguments ----------------------------------------------------------------------------------------------


def test_the_arguments_of_asynrl_work_as_documented(tmp_path: Path) -> None:
    model = APPO("CartPole-v1", "mlp", "mlp_mujoco", 2, 1, "cpu", {"rollout": 8, "batch_size": 16, "train_dir": str(
        tmp_path), "serial_mode": True})
    model.train(train_for_env_steps=100)
    assert (model.cfg.num_envs_per_worker, model.cfg.num_workers, model.cfg.rollout) == (2, 1, 8)
    model.close()
    model.close()


# ---- what dies meanwhile ---------------------------------------------------------------------------------------------


def test_who_dies_while_the_others_pause_or_finish_is_replaced_and_does_it(tmp_path: Path) -> None:
    with APPO("CartPole-v1", train_dir=str(tmp_path), **SMALL) as appo:
        def kill(role: str) -> bool:
            index = next(index for index, component in enumerate(appo.components) if component.role == role)
            appo.crew.processes[index].kill()
            return True

        for role in ("rollout_worker", "learner"):
            goal = appo.env_steps + 200
            appo.train(10_000, should_stop=lambda role=role, goal=goal: appo.env_steps >= goal and kill(role))
            assert appo.commands.are_paused()
            assert (appo.buffers.slot_place == WITH_WORKER).all()
        assert appo.find(Records).num_replaced == 2
        assert appo.train(500)["sgd_steps"] > 0


def test_without_services_it_trains_and_a_death_ends_the_run(tmp_path: Path) -> None:
    with (pytest.raises(ComponentError, match="rollout_worker_0 was killed by SIGKILL"),
          APPO("CartPole-v1", train_dir=str(tmp_path), services=[], **SMALL) as appo):
        assert appo.train(500)["sgd_steps"] > 0
        with pytest.raises(UserError, match="needs a Saving"):
            appo.save()
        appo.crew.processes[0].kill()
        appo.train(10_000)
    assert not list(tmp_path.rglob("*.pt"))
