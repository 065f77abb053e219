"""The exercises: each check refuses its starting point and plausible mistakes, and accepts the solution."""

from pathlib import Path

import pytest

from docs.exercises import check

FOLDER = Path(check.__file__).parent

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
