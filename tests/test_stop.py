"""Stops: by Ctrl-C at any moment, by SIGTERM and SIGHUP, of scripts; and consoles that fail, which stop nothing."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from test_train import (
    ENDLESS,
    SMALL,
    TRAIN_PY,
    newest_state,
    read_rows,
    read_summary,
    run_train,
    wait_until,
)
from tiny_envs import Reading

from runtime.stop import AGAIN_SEC, STOP_SIGNAL
from trainer import APPO

ROOT = Path(__file__).parent.parent
SHORT = (*SMALL, "--train_for_env_steps=1000")


def command(train_dir: Path, *flags: str) -> list[str]:
    return [sys.executable, str(TRAIN_PY), f"--train_dir={train_dir}", *flags]


def watches(process: int) -> bool:
    """Tell whether a process handles SIGTERM."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
    return bool(caught >> (signal.SIGTERM - 1) & 1)


# ---- signals -----------------------------------------------------------------------------------------------------


def test_an_early_ctrl_c_ends_the_program_in_one_line_at_every_moment(tmp_path: Path) -> None:
    """Python itself needs some milliseconds before it runs the first line of train.py."""
    seed = random.randrange(2**32)
    print("seed", seed)
    rng = random.Random(seed)
    for attempt in range(3):
        seconds = rng.uniform(0.0, 4.0)

        def interrupt(process: subprocess.Popen, seconds: float = seconds) -> None:
            wait_until(lambda: watches(process.pid), "it does not watch")
            time.sleep(seconds)
            os.killpg(process.pid, signal.SIGINT)

        outcome = run_train(tmp_path / str(attempt), *SMALL, *ENDLESS, disturb=interrupt, at_once=True)
        assert outcome.status == 0, (seconds, outcome)
        lines = outcome.err.splitlines()  # Python tells of what was interrupted where nothing can be raised
        assert "Traceback" not in outcome.err or "Exception ignored" in outcome.err, (seconds, outcome)
        assert not lines or lines[-1] == "train.py: ended before the training began", (seconds, outcome)


def test_a_run_that_was_stopped_on_a_busy_machine_goes_on_with_its_last_episodes(tmp_path: Path) -> None:
    """There the workers go on for a while, until they hear of it: the checkpoints count more than the last report."""
    def make() -> APPO:
        return APPO(Reading, train_dir=str(tmp_path), experiment="first", num_workers=1, num_envs_per_worker=4,
                    rollout=16, batch_size=64, encoder_mlp_layers=(16,), num_policies=2, serial_mode=True)

    def stop() -> bool:
        if all(policy.num_episodes >= 120 for policy in appo.records.policies):
            signal.raise_signal(signal.SIGTERM)
        return False

    with pytest.raises(KeyboardInterrupt), make() as appo:
        appo.sampling.pause = lambda: None
        appo.train(100_000, should_stop=stop)
    ended_with = read_rows(tmp_path / "first" / "metrics.jsonl")[-1]["env_steps"]
    assert newest_state(tmp_path / "first")["env_steps"] > ended_with
    before = [list(policy.returns) for policy in appo.records.policies]
    with make() as resumed:
        after = [list(policy.returns) for policy in resumed.records.policies]
        assert ([len(returns) for returns in after], after) == ([100, 100], before)
    episodes = json.loads((tmp_path / "first" / "episodes.json").read_text())
    assert episodes["env_steps"] == resumed.env_steps


def test_signals_are_raised_where_nobody_asks_and_wait_where_somebody_does() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with pytest.raises(KeyboardInterrupt), STOP_SIGNAL.watching():
        signal.raise_signal(signal.SIGTERM)
    with STOP_SIGNAL.watching() as stop:
        with stop.deferred():
            assert not stop()
            signal.raise_signal(signal.SIGHUP)
            assert stop()
            signal.raise_signal(signal.SIGINT)  # too soon after the first one
        stop.requested_at -= AGAIN_SEC
        with pytest.raises(KeyboardInterrupt), stop.deferred():
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), STOP_SIGNAL.deferred() as stop:
        assert not stop(), "that was another run"
        signal.raise_signal(signal.SIGINT)
        assert stop.is_outermost
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


def test_handlers_of_others_stay_and_other_threads_have_none() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with STOP_SIGNAL.deferred() as stop:
            signal.raise_signal(signal.SIGTERM)
            assert not stop()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert heard == [signal.SIGTERM]

    def in_thread() -> None:
        with STOP_SIGNAL.deferred():
            heard.append(0)

    thread = threading.Thread(target=in_thread)
    thread.start()
    thread.join()
    assert heard[-1] == 0


# ---- consoles ----------------------------------------------------------------------------------------------------


PRINTS = """
from gymnasium.envs.classic_control import CartPoleEnv

class Prints(CartPoleEnv):
    def reset(self, **kwargs):
        print("another episode", flush=True)
        return super().reset(**kwargs)
"""


@pytest.mark.parametrize("redirect", ["| head -1", "> /dev/full"])
def test_an_output_that_nobody_takes_stops_nothing(tmp_path: Path, redirect: str) -> None:
    (tmp_path / "prints.py").write_text(PRINTS)
    line = " ".join(command(tmp_path, *SHORT[1:], "--env=prints:Prints", "--max_restarts=0"))
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {line} {redirect}"], capture_output=True, text=True,
                          check=False, timeout=120, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, "")
    assert read_summary(tmp_path / "first")["env_steps"] >= 1000
    assert "1,0" in (tmp_path / "first" / "log.txt").read_text().splitlines()[-2]
