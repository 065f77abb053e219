"""Recovery: components that die or hang are replaced, the rest of the run goes on, nothing is put together wrongly."""

import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from signal import SIGCONT, SIGINT, SIGKILL, SIGSTOP, SIGTERM, SIGTSTP

import parts
import psutil
import pytest
from running import CARTPOLE, CHECKED, ROOT, SMALL, STALL_SEC, TELLING, Run, check_saved, newest_state

from rollout_worker import RolloutWorker
from runtime.utils import ComponentError
from services.records import Records
from train import main as train
from trainer import Trainer

COMPONENTS = ["rollout_worker_0", "rollout_worker_1", "learner", "evaluator", "policy_worker_0", "policy_worker_1"]


def hit(run: Run, names: Sequence[str], number: int) -> None:
    """Send a signal to components; wait until they are replaced, and nobody else, and the run learns on."""
    assert run.until(lambda: run.components().keys() == set(COMPONENTS)), "somebody is missing"
    components, begin = run.components(), len(run.read("log.txt"))
    for name in names:
        components[name].send_signal(number)
    assert run.until(lambda: run.blamed(begin) >= set(names)), f"{names} are not replaced"
    assert run.learns(), f"it does not go on without {names}"
    assert run.blamed(begin) == set(names)


def test_who_is_killed_is_replaced_and_a_stopped_server_does_not_hold_up_the_end(tmp_path: Path) -> None:
    """Nobody can say how components end when the server that they are forked from is gone, or before it goes on."""
    with Run(tmp_path, *TELLING, *CHECKED) as run:
        assert run.learns()
        for name in COMPONENTS:
            hit(run, [name], SIGKILL)
            assert f"{name} was killed by SIGKILL" in run.read("log.txt")
        begin = len(run.read("log.txt"))
        run.server().kill()
        assert run.until(lambda: run.blamed(begin)), "nobody sees that the server is gone"
        assert run.learns(), "it does not go on with another server"
        run.server().suspend()
        assert run.learns(), "it does not go on while the server is stopped"
        run.process.send_signal(SIGTERM)
    check_saved(run)


def test_who_is_stopped_is_replaced_but_not_by_ctrl_z_and_ctrl_c_saves(tmp_path: Path) -> None:
    """It takes STALL_SEC to notice those that are stopped, so some are stopped at once."""
    with Run(tmp_path, *TELLING, *CHECKED) as run:
        assert run.learns()
        everybody = [run.process, *run.components().values()]
        run.process.send_signal(SIGTSTP)
        assert run.until(lambda: {each.status() for each in everybody} == {psutil.STATUS_STOPPED}), "somebody goes on"
        time.sleep(STALL_SEC + 1)
        run.process.send_signal(SIGCONT)
        assert run.learns(), "it does not go on"
        assert not run.blamed()
        for names in (["rollout_worker_0", "rollout_worker_1", "evaluator"], ["learner"], ["policy_worker_0"]):
            hit(run, names, SIGSTOP)
            assert all(f"{name} hangs" in run.read("log.txt") for name in names)
        os.killpg(run.process.pid, SIGINT)
    check_saved(run)


@pytest.mark.slow
def test_random_faults_of_every_kind_are_overcome(tmp_path: Path) -> None:
    """At small scale; thousands are in docs/reliability.md."""
    done = subprocess.run([sys.executable, "-m", "tests.chaos", "--faults=4", f"--folder={tmp_path}"],
                          cwd=ROOT, capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("4 of 4 faults overcome\n")
    assert not list(tmp_path.iterdir()), "the folder of a run that failed stays"


def test_too_many_failures_save_and_end_with_the_first_traceback(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert train([*SMALL, "--env=failing_envs:AlwaysRaises", "--max_restarts=2", "--train_for_seconds=60",
                  f"--train_dir={tmp_path}"]) == 1
    first, *traceback, line = capsys.readouterr().err.rstrip().splitlines()
    assert first == "train.py: rollout_worker_0 failed"
    assert any(re.match(r'  File ".*/failing_envs.py", line ', each) for each in traceback)
    assert re.search(r":AlwaysRaises, seed \d+, step \d+: step\(\) raised ValueError: the wheel came off$", line)
    assert (tmp_path / "run" / "log.txt").read_text().count("the wheel came off; it is replaced") == 2
    assert newest_state(tmp_path / "run")["sgd_steps"] > 0, "what was learned is saved"


def test_an_environment_that_always_hangs_ends_the_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """However long it takes to notice it: the window counts the rest of the time."""
    assert train([*SMALL, "--env=failing_envs:AlwaysHangs", "--env_timeout_sec=1", "--max_restarts=2",
                  "--restart_window_sec=1.5", "--train_for_seconds=60", f"--train_dir={tmp_path}"]) == 1
    line = "rollout_worker_0 hangs: no sign of life for 1 s (--env_timeout_sec)"
    assert capsys.readouterr().err == f"train.py: {line}\n"
    assert (tmp_path / "run" / "log.txt").read_text().count(f"{line}; it is replaced") == 2
    assert not multiprocessing.active_children()


def test_the_weights_of_a_learner_that_dies_too_often_are_saved(tmp_path: Path) -> None:
    with Run(tmp_path, *CARTPOLE, "--train_for_env_steps=1e9", "--max_restarts=0", "--save_every_sec=1000") as run:
        assert run.until(lambda: run.summary().get("sgd_steps", 0) > 100), "it does not learn"
        run.components()["learner"].kill()
    assert (run.status, run.err) == (1, "train.py: learner was killed by SIGKILL (out of memory?)\n")
    assert newest_state(run.run_dir)["sgd_steps"] >= run.summary()["sgd_steps"] > 100


class Hit(RolloutWorker):
    """Is killed with messages in hand, at the 20th one."""

    num_handled = 0

    def handle(self, kind: int, *indices: int) -> None:
        self.num_handled += 1
        if self.num_handled == 20:
            os.kill(os.getpid(), SIGKILL)
        super().handle(kind, *indices)


def test_who_is_killed_with_messages_in_hand_is_replaced_and_the_run_does_not_wait_for_ever(tmp_path: Path) -> None:
    system = type("System", (Trainer,), {"rollout_worker_class": Hit})(
        "CartPole-v1", train_dir=str(tmp_path), **parts.SMALL | {"num_workers": 2, "max_restarts": 1})
    with pytest.raises(ComponentError, match="was killed by SIGKILL"):
        system.train(10**9)
    system.close()
    assert system.find(Records).num_replaced == 1, "the one that took its place was hit too"
    assert not multiprocessing.active_children()
