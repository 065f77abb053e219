"""Gradients in two kinds of arithmetic: those of one minibatch are nearly equal, those of two minibatches are not."""

import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run(*flags: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "docs.precision", *flags], cwd=ROOT, check=False, capture_output=True,
                          text=True, timeout=240)


def test_gradients_of_one_minibatch_are_nearly_equal() -> None:
    result = run("--env", "CartPole-v1", "--train_for_env_steps", "20000")
    assert result.returncode == 0, result.stderr
    rows = [[float(word.replace(",", "")) for word in line.split()] for line in result.stdout.splitlines()[3:]]
    assert len(rows) > 1, result.stdout
    same, other = ([value for row in rows for value in row[start::2]] for start in (1, 2))
    assert statistics.median(same) > 0.99
    assert statistics.median(same) > statistics.median(other)
