"""Recovery: components that die or hang are replaced, the rest of the run goes on, nothing is put together wrongly."""

import itertools
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checked
import parts
import psutil
import pytest
from test_train import SMALL, TRAIN_PY, Outcome, newest_state, read_summary, run_train, wait_until

from rollout_worker import RolloutWorker
from runtime.utils import ComponentError
from services.records import Records
from trainer import Trainer

COMPONENTS = ["rollout_worker_0", "rollout_worker_1", "learner", "evaluator", "policy_worker_0", "policy_worker_1"]
CHECKED = ["--env=my_checked:Telling", "--algo=my_checked:Checked", "--experiment=first", "--num_workers=2",
           "--policy_workers_per_policy=2", "--num_envs_per_worker=8", "--rollout=16", "--batch_size=256",
           "--encoder_mlp_layers=16", "--device=cpu", "--report_interval_sec=0.2", "--normalize_input=False",
           "--eval_every_env_steps=3000", "--eval_episodes=2", "--stall_timeout_sec=3"]


def find(process: subprocess.Popen) -> dict[str, int]:
    """Return the process ids of the components by their names."""
    children = [child for child in psutil.Process(process.pid).children(recursive=True)
                if child.ppid() != process.pid and child.status() != psutil.STATUS_ZOMBIE]
    names = {name.replace("_worker", ""): name for name in COMPONENTS}
    found = {child.pid: Path(f"/proc/{child.pid}/comm").read_text().strip() for child in children}
    return {names[name]: pid for pid, name in found.items() if name in names}


def wait_for_more(folder: Path, process: subprocess.Popen) -> None:
    """Wait until a run has learned more than it has now."""
    steps = read_summary(folder / "first")["sgd_steps"]
    wait_until(lambda: read_summary(folder / "first")["sgd_steps"] > steps + 50 or process.poll() is not None,
               "it does not go on")


def run_checked(folder: Path, disturb: Callable[[subprocess.Popen], None], *flags: str) -> Outcome:
    (folder / "my_checked.py").write_text(
        f"import sys\nsys.path.append({os.path.dirname(checked.__file__)!r})\nfrom checked import Checked, Telling\n")

    def disturb_and_stop(process: subprocess.Popen) -> None:
        disturb(process)
        wait_for_more(folder, process)
        process.send_signal(signal.SIGTERM)

    return run_train(folder, *CHECKED, "--train_for_env_steps=1e9", *flags, disturb=disturb_and_stop)


@pytest.mark.parametrize(("number", "what", "turns"), [
    (signal.SIGKILL, "was killed by SIGKILL", [[name] for name in COMPONENTS]),
    (signal.SIGSTOP, "hangs", [["rollout_worker_0", "rollout_worker_1", "evaluator"], ["learner"],
                               ["policy_worker_0"], ["policy_worker_1"]])], ids=["killed", "stopped"])
def test_every_component_is_replaced(tmp_path: Path, number: int, what: str, turns: list[list[str]]) -> None:
    """It takes --stall_timeout_sec to notice those that are stopped, so some are stopped at once."""
    def disturb(process: subprocess.Popen) -> None:
        done = 0
        for names in turns:
            wait_until(lambda names=names: find(process).keys() >= set(names), f"{names} are not there")
            found = find(process)
            for name in names:
                os.kill(found[name], number)
            done += len(names)
            wait_until(lambda done=done: read_summary(tmp_path / "first").get("num_replaced", 0) >= done
                       or process.poll() is not None, f"{names} are not replaced")
            wait_for_more(tmp_path, process)  # who has not begun yet has more time

    outcome = run_checked(tmp_path, disturb)
    assert (outcome.status, outcome.err) == (0, ""), outcome
    log = (tmp_path / "first" / "log.txt").read_text()
    assert [name for name in COMPONENTS if f"{name} {what}" in log] == COMPONENTS
    assert newest_state(tmp_path / "first")["sgd_steps"] == read_summary(tmp_path / "first")["sgd_steps"]


@pytest.mark.slow
def test_random_faults_of_every_kind_are_overcome(tmp_path: Path) -> None:
    """At small scale; thousands are in docs/reliability.md."""
    done = subprocess.run([sys.executable, "-m", "tests.chaos", "--faults=20", f"--folder={tmp_path}"],
                          cwd=TRAIN_PY.parent, capture_output=True, text=True, check=False, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("20 of 20 faults overcome\n")
    assert not list(tmp_path.iterdir()), "the folder of a run that failed stays"


FAILING = """
import time
from gymnasium.envs.classic_control import CartPoleEnv

class Breaks(CartPoleEnv):
    steps = 0

    def step(self, action):
        self.steps += 1
        self.misbehave()
        return super().step(action)

    def misbehave(self):
        if self.steps == 250:
            raise ValueError("the wheel came off")

class Hangs(Breaks):
    def misbehave(self):
        time.sleep(10_000 * (self.steps > 1))  # the first one is looked at before the run begins
"""


def test_too_many_failures_save_and_end_with_the_first_traceback(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    outcome = run_train(tmp_path, *SMALL[1:], "--env=failing:Breaks", "--max_restarts=2")
    assert outcome.status == 1, outcome
    first, *traceback, line = outcome.err.rstrip().splitlines()
    assert first == "train.py: rollout_worker_0 failed"
    assert any(each.startswith(f'  File "{tmp_path / "failing.py"}", line ') for each in traceback)
    assert re.search(r": failing:Breaks, seed \d+, step \d+: step\(\) raised ValueError: the wheel came off$", line)
    log = (tmp_path / "first" / "log.txt").read_text()
    assert log.count("the wheel came off; it is replaced") == 2
    assert newest_state(tmp_path / "first")["sgd_steps"] > 0, "what was learned is saved"


def test_the_weights_of_a_learner_that_dies_too_often_are_saved(tmp_path: Path) -> None:
    def kill(process: subprocess.Popen) -> None:
        wait_until(lambda: read_summary(tmp_path / "first")["sgd_steps"] > 100, "it does not learn")
        os.kill(find(process)["learner"], signal.SIGKILL)

    outcome = run_train(tmp_path, *SMALL, "--train_for_env_steps=1e9", "--max_restarts=0", "--save_every_sec=1000",
                        disturb=kill)
    assert (outcome.status, outcome.err) == (1, "train.py: learner was killed by SIGKILL (out of memory?)\n")
    assert newest_state(tmp_path / "first")["sgd_steps"] >= read_summary(tmp_path / "first")["sgd_steps"] > 100


def test_an_environment_that_always_hangs_ends_the_run(tmp_path: Path) -> None:
    """However long it takes to notice it: the window counts the rest of the time."""
    (tmp_path / "failing.py").write_text(FAILING)
    outcome = run_train(tmp_path, *SMALL[1:], "--env=failing:Hangs", "--env_timeout_sec=1", "--max_restarts=2",
                        "--restart_window_sec=1.5")
    line = "rollout_worker_0 hangs: no sign of life for 1 s (--env_timeout_sec)"
    assert (outcome.status, outcome.err) == (1, f"train.py: {line}\n")
    assert (tmp_path / "first" / "log.txt").read_text().count(f"{line}; it is replaced") == 2


def test_ctrl_z_stops_all_and_fg_lets_them_go_on(tmp_path: Path) -> None:
    def disturb(process: subprocess.Popen) -> None:
        def states() -> set[str]:
            return {psutil.Process(pid).status() for pid in [process.pid, *find(process).values()]}

        process.send_signal(signal.SIGTSTP)
        wait_until(lambda: states() == {psutil.STATUS_STOPPED}, "somebody is not stopped")
        time.sleep(4)  # longer than --stall_timeout_sec
        process.send_signal(signal.SIGCONT)
        wait_until(lambda: psutil.STATUS_STOPPED not in states(), "somebody does not go on")

    assert run_checked(tmp_path, disturb).status == 0
    assert read_summary(tmp_path / "first").get("num_replaced", 0) == 0


class Hit(RolloutWorker):
    """Is killed with messages in hand, when it has taken some for the 20th time."""

    def run(self) -> None:
        get, calls = self.inbox.get, itertools.count(1)

        def count(*args: Any) -> Any:
            messages = get(*args)
            if next(calls) == 20:
                os.kill(os.getpid(), signal.SIGKILL)
            return messages

        self.inbox.get = count
        super().run()


def test_who_is_killed_with_messages_in_hand_is_replaced_and_the_run_does_not_wait_for_ever(tmp_path: Path) -> None:
    running = type("System", (Trainer,), {"rollout_worker_class": Hit})(
        "CartPole-v1", train_dir=str(tmp_path), **parts.SMALL | {"num_workers": 2, "max_restarts": 1})
    with pytest.raises(ComponentError, match="was killed by SIGKILL"):
        running.train(10**9)
    running.close()
    assert running.find(Records).num_replaced == 1, "the one that took its place was hit too"
    assert not multiprocessing.active_children()
