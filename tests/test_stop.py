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

import parts
import pytest
from gymnasium.envs.classic_control import CartPoleEnv
from running import CARTPOLE, ENDLESS, ROOT, SMALL, Run, newest_state
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

    with Run(tmp_path, *CARTPOLE, *ENDLESS) as run:
        assert run.until(lambda: handles_sigterm(run.process.pid)), "it does not watch"
        time.sleep(seconds)
        os.killpg(run.process.pid, signal.SIGINT)
    lines = run.err.splitlines()  # Python tells of what was interrupted where nothing can be raised
    assert run.status == 0
    assert "Traceback" not in run.err or "Exception ignored" in run.err
    assert not lines or lines[-1] == "train.py: ended before the training began"


def test_a_run_that_was_stopped_goes_on_with_its_last_episodes(tmp_path: Path) -> None:
    def make() -> APPO:
        return APPO(Reading, train_dir=str(tmp_path), experiment="run", serial_mode=True, **parts.SMALL)

    def stop(row: dict[str, Any]) -> None:
        if row["num_episodes"] > 120:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt), make() as appo:
        appo.train(10**9, stop)
    episodes = json.loads((tmp_path / "run" / "episodes.json").read_text())
    with make() as resumed:
        assert resumed.env_steps == newest_state(tmp_path / "run")["env_steps"] == episodes["env_steps"]
    assert json.loads((tmp_path / "run" / "episodes.json").read_text()) == episodes


def test_signals_are_raised_where_nobody_asks_and_wait_where_somebody_does() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    with pytest.raises(KeyboardInterrupt), STOP_SIGNAL.watching(deferring=False):
        signal.raise_signal(signal.SIGTERM)
    with STOP_SIGNAL.watching(deferring=False):
        with STOP_SIGNAL.watching(deferring=True) as is_outermost:
            assert not is_outermost
            assert not STOP_SIGNAL(), "that was another run"
            signal.raise_signal(signal.SIGTERM if before[2] is signal.SIG_IGN else signal.SIGHUP)  # nohup
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


class Prints(CartPoleEnv):
    def reset(self, **kwargs: Any) -> Any:
        print("another episode", flush=True)
        return super().reset(**kwargs)


@pytest.mark.parametrize(("mode", "redirect"), [("--async_rl", "| head -1"), ("--serial_mode", "> /dev/full")])
def test_an_output_that_nobody_takes_stops_nothing(tmp_path: Path, mode: str, redirect: str) -> None:
    line = " ".join([sys.executable, str(ROOT / "train.py"), f"--train_dir={tmp_path}", *SMALL,
                     "--env=test_stop:Prints", "--train_for_env_steps=1000", "--max_restarts=0", mode])
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {line} {redirect}"], capture_output=True, text=True,
                          check=False, timeout=120, env=os.environ | {"PYTHONPATH": str(ROOT / "tests")})
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["env_steps"] >= 1000
