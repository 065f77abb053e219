"""The exercises: each check refuses its starting point and plausible mistakes, and accepts the solution."""

import json
import re
import shlex
from pathlib import Path

import pytest

from docs.exercises import check
from train import main as train

FOLDER = Path(check.__file__).parent
QUICK = ["--serial_mode", "--train_for_env_steps=200", "--num_workers=1", "--num_envs_per_worker=4", "--rollout=8",
         "--batch_size=32", "--num_batches_per_epoch=1", "--num_epochs=1"]

# (exercise, what of its solution is replaced, by what)
MISTAKES = [
    (1, "0.0 if terminated else potential(obs)", "potential(obs)"),
    (1, "self.gamma * self.potential - before", "self.potential - before"),
    (2, "nn.Sequential(nn.Linear(num_features, 64), nn.ReLU())", "[nn.Linear(num_features, 64)]"),
    (2, "nn.ReLU(), nn.Conv2d(16", "nn.BatchNorm2d(16), nn.Conv2d(16"),
    (3, "mean(now.kl(following).masked_fill(is_over, 0.0))", "now.kl(following).masked_fill(is_over, 0.0).mean()"),
    (3, "loss.total + self", "loss.total - self"),
    (4, "discounts[t] * c[t]", "discounts[t] * c[min(t + 1, len(c) - 1)]"),
    (5, "~(terminated[t] | truncated[t])", "~terminated[t]"),
    (6, "rnn_states.masked_fill(new_episode[:, t, None], 0.0)", "rnn_states.masked_fill(new_episode[:, :1], 0.0)"),
    (6, "rnn_states.masked_fill(new_episode[:, t, None], 0.0)", "rnn_states"),
    (7, "rng.integers(1, num_policies)", "rng.integers(1, max(num_policies - 1, 2))"),
    (7, "[0, exploiter] if rng.random() < 0.5 else [exploiter, 0]", "[0, exploiter]"),
    (8, "model.returns.denormalize(outputs[1])", "outputs[1]"), (8, ".clamp(max=self.cfg.largest_weight)", "")]


def path_of(folder: str, number: int) -> Path:
    return FOLDER / folder / f"{check.NAMES[number]}.py"


@pytest.mark.parametrize("number", check.NAMES)
def test_the_check_refuses_the_start_and_accepts_the_solution(number: int) -> None:
    assert check.judge(number, path_of("start", number))[0] == check.NOT_YET
    status, text = check.judge(number, path_of("solutions", number))
    assert status == check.SOLVED, text


@pytest.mark.parametrize(("number", "right", "wrong"), MISTAKES)
def test_a_plausible_mistake_is_refused(number: int, right: str, wrong: str, tmp_path: Path) -> None:
    source = path_of("solutions", number).read_text()
    assert right in source
    mistaken = tmp_path / "mistaken.py"
    mistaken.write_text(source.replace(right, wrong))
    status, text = check.judge(number, mistaken)
    assert status == check.NOT_YET, text


def commands() -> list[list[str]]:
    """Return the arguments of the page's training commands."""
    blocks = re.findall(r"```bash\n(python train\.py .*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)
    return [shlex.split(block.replace("\\\n", ""))[2:] for block in blocks]


@pytest.mark.filterwarnings("ignore:The old environment creation API:DeprecationWarning")  # of PettingZoo
@pytest.mark.parametrize("typed", commands(), ids=" ".join)
@pytest.mark.parametrize("folder", ["start", "solutions"])
def test_a_command_of_the_page_trains_with_the_start_and_with_the_solution(folder: str, typed: list[str],
                                                                           tmp_path: Path) -> None:
    if any(argument.startswith("pettingzoo:") for argument in typed):
        pytest.importorskip("pettingzoo")
    named = [argument.replace(".start.", f".{folder}.") for argument in typed]
    assert train([*named, *QUICK, f"--train_dir={tmp_path}"]) == 0
    assert json.loads(next(tmp_path.glob("*/summary.json")).read_text())["sgd_steps"] > 0
