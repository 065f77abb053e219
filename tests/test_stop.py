"""Stops: by Ctrl-C at any moment, by SIGTERM and SIGHUP, of scripts; and consoles that fail, which stop nothing."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from test_train import ENDLESS, SMALL, TRAIN_PY, newest_state, read_summary, run_train, wait_until
from tiny_envs import Reading

from runtime.utils import AGAIN_SEC, STOP_SIGNAL
from trainer import APPO

# ---- signals -----------------------------------------------------------------------------------------------------


def handles_sigterm(process: int) -> bool:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    caught = next(int(line.split()[1], 16) for line in lines if line.startswith("SigCgt"))
    return bool(caught >> (signal.SIGTERM - 1) & 1)


@pytest.mark.parametrize("latest", [0.5, 4.0])
def test_an_early_ctrl_c_ends_the_program_in_one_line_at_every_moment(tmp_path: Path, latest: float) -> None:
    """Python itself needs some milliseconds before it runs the first line of train.py, until which nobody watches."""
    seconds = random.uniform(0.0, latest)
    print("after", seconds)

    def interrupt(process: subprocess.Popen) -> None:
        wait_until(lambda: handles_sigterm(process.pid), "it does not watch")
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)

    outcome = run_train(tmp_path, *SMALL, *ENDLESS, disturb=interrupt, at_once=True)
    lines = outcome.err.splitlines()  # Python tells of what was interrupted where nothing can be raised
    assert outcome.status == 0
    assert "Traceback" not in outcome.err or "Exception ignored" in outcome.err
    assert not lines or lines[-1] == "train.py: ended before the training began"


def test_a_run_that_was_stopped_goes_on_with_its_last_episodes(tmp_path: Path) -> None:
    def make() -> APPO:
        return APPO(Reading, train_dir=str(tmp_path), experiment="first", num_workers=1, num_envs_per_worker=4,
                    rollout=16, batch_size=64, encoder_mlp_layers=(16,), report_interval_sec=0.1, serial_mode=True)

    def stop(row: dict[str, Any]) -> None:
        if row["num_episodes"] > 120:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt), make() as appo:
        appo.train(10**9, stop)
    episodes = json.loads((tmp_path / "first" / "episodes.json").read_text())
    with make() as resumed:
        assert resumed.env_steps == newest_state(tmp_path / "first")["env_steps"] == episodes["env_steps"]
    assert json.loads((tmp_path / "first" / "episodes.json").read_text()) == episodes


def test_signals_are_raised_where_nobody_asks_and_wait_where_somebody_does() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with pytest.raises(KeyboardInterrupt), STOP_SIGNAL.watching(deferring=False):
        signal.raise_signal(signal.SIGTERM)
    with STOP_SIGNAL.watching(deferring=False):
        with STOP_SIGNAL.watching(deferring=True) as is_outermost:
            assert not is_outermost
            assert not STOP_SIGNAL(), "that was another run"
            signal.raise_signal(signal.SIGHUP)
            assert STOP_SIGNAL()
            signal.raise_signal(signal.SIGINT)  # too soon after the first one
        STOP_SIGNAL.came_at -= AGAIN_SEC
        with pytest.raises(KeyboardInterrupt), STOP_SIGNAL.watching(deferring=True):
            signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), STOP_SIGNAL.watching(deferring=True) as is_outermost:
        signal.raise_signal(signal.SIGINT)
        assert is_outermost
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]


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
    line = " ".join([sys.executable, str(TRAIN_PY), f"--train_dir={tmp_path}", *SMALL[1:], "--env=prints:Prints",
                     "--train_for_env_steps=1000", "--max_restarts=0"])
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {line} {redirect}"], capture_output=True, text=True,
                          check=False, timeout=120, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stderr) == (0, "")
    assert read_summary(tmp_path / "first")["env_steps"] >= 1000
