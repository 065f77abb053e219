"""Runs that earlier versions have left (`tests/kept_runs`) are resumed, evaluated and loaded.

They were made at commit 2f4547e, in serial mode.
"""

import json
import shutil
from pathlib import Path

import pytest

from evaluate import main as evaluate
from runtime.checkpoint import find_checkpoint, load_checkpoint
from train import main as train
from trainer import load

KEPT = Path(__file__).parent / "kept_runs"
RUNS = ["appo_lstm", "pbt", "apex", "pql", "impala"]
MORE = 300  # env_steps


@pytest.fixture(params=RUNS)
def run_dir(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return Path(shutil.copytree(KEPT / request.param, tmp_path / request.param))


def where(run_dir: Path) -> list[str]:
    saved = json.loads((run_dir / "config.json").read_text())
    return [f"--env={saved['env']}", f"--train_dir={run_dir.parent}", f"--experiment={run_dir.name}", "--device=cpu"]


def test_a_kept_run_is_evaluated_and_loaded(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate([*where(run_dir), "--episodes=1"]) == 0
    assert "1 episode: return" in capsys.readouterr().out
    for path in (run_dir, find_checkpoint(run_dir)):
        policy = load(path)
        env = policy.make_env()
        action, _ = policy.predict(env.reset(seed=0)[0], deterministic=True)
        assert env.action_space.contains(action)
        env.close()


def test_a_kept_run_goes_on(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    num_policies = json.loads((run_dir / "config.json").read_text())["num_policies"]
    before = [load_checkpoint(find_checkpoint(run_dir, policy=policy)) for policy in range(num_policies)]
    goal = before[0]["env_steps"] + MORE
    argv = [*where(run_dir), f"--algo={before[0]['algo']}", "--serial_mode", f"--train_for_env_steps={goal}"]
    assert train(argv) == 0
    printed = capsys.readouterr().out
    assert "this version does not have" in printed
    assert "resumed at env_steps=" in printed
    after = [load_checkpoint(find_checkpoint(run_dir, policy=policy)) for policy in range(num_policies)]
    for name in ("env_steps", "sgd_steps", "env_steps_trained"):
        assert all(new[name] >= old[name] for new, old in zip(after, before, strict=True)), name
        assert sum(new[name] for new in after) > sum(old[name] for old in before), name
    assert [new["model"].keys() for new in after] == [old["model"].keys() for old in before]
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row["env_steps"] for row in rows]
    assert steps == sorted(steps)
    assert steps[-1] > before[0]["env_steps"]
    assert json.loads((run_dir / "summary.json").read_text())["env_steps"] >= goal
    assert train([*argv[:-1], f"--train_for_env_steps={goal + MORE}"]) == 0
    assert "this version does not have" not in capsys.readouterr().out, "config.json and the checkpoints are new"
