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

# (exercise, what of its solution is replaced, by what, what the check says then)
MISTAKES = [
    (1, "0.0 if terminated else potential(obs)", "potential(obs)", r"straight up, step 3 \(terminated\)"),
    (1, "0.0 if terminated else potential(obs)", "0.0 if terminated or truncated else potential(obs)", "truncated"),
    (1, "self.gamma * self.potential - before", "self.potential - before", r"expected reward \+ gamma"),
    (1, "obs.argmax() / (len(obs) - 1)", "0.0", "nothing shows the way"),
    (1, "reward + self.gamma * self.potential - before", "reward", "nothing shows the way|straight up"),
    (2, "nn.Sequential(nn.Linear(num_features, 64), nn.ReLU())", "[nn.Linear(num_features, 64)]",
     "joined: layers in a plain list"),
    (2, "nn.ReLU(), nn.Conv2d(16", "nn.BatchNorm2d(16), nn.Conv2d(16", "must not depend on the others of the batch"),
    (2, "return self.joined(torch.cat([picture,", "return self.joined(torch.cat([picture.detach(),", "no gradient"),
    (3, ".masked_fill(is_over, 0.0)", "", "Where the episode ends"),
    (3, 'data["terminated"] | data["truncated"]', 'data["terminated"]', "Where the episode ends"),
    (3, "mean(now.kl(following).masked_fill(is_over, 0.0))", "now.kl(following).masked_fill(is_over, 0.0).mean()",
     "`mean` divides by the valid rows"),
    (3, "now.kl(following)", "following.kl(now)", "in this order"),
    (3, "model.distribution(outputs[0][1:])", "model.distribution(outputs[0][1:].detach())", "flows into both"),
    (3, "loss.total + self", "loss.total - self", "no end of an episode"),
    (4, "discounts[t] * c[t]", "discounts[t] * c[min(t + 1, len(c) - 1)]", "it holds c_s and not c_t"),
    (4, "discounts[t] * c[t]", "discounts[t] * rho[t]", r"min\(c_bar"),
    (4, "discounts[t] * c[t]", "discounts[s] * c[t]", "each with its own t"),
    (5, "~(terminated[t] | truncated[t])", "~terminated[t]", "truncated at step 1"),
    (5, "masked_fill(terminated[t], 0.0)", "masked_fill(terminated[t] & ~truncated[t], 0.0)", "It has terminated"),
    (6, "rnn_states.masked_fill(new_episode[:, t, None], 0.0)", "rnn_states.masked_fill(new_episode[:, :1], 0.0)",
     "step by step"),
    (6, "rnn_states.masked_fill(new_episode[:, t, None], 0.0)", "rnn_states", "row 1 begins an episode"),
    (6, "rnn_states.masked_fill(new_episode[:, t, None], 0.0)", "rnn_states * (not new_episode[:, t].any())",
     "the other rows keep theirs|row 0 by itself"),
    (6, "outputs.append(rnn_states)", "outputs.append(rnn_states)\n            rnn_states = rnn_states.detach()",
     "no gradient reaches the first step"),
    (6, "for t in range(features.shape[1]):",
     "for t in range(features.shape[1]):\n            features = features.masked_fill(new_episode[..., None], 0.0)",
     "not the step itself"),
    (6, "for t in range(features.shape[1]):",
     "new_episode = new_episode & (new_episode.cumsum(1) < 2)\n        for t in range(features.shape[1]):",
     "in the middle of a sequence too"),
    (7, "rng.integers(1, num_policies)", "rng.integers(1, max(num_policies - 1, 2))", "meet exploiter"),
    (7, "[0, exploiter] if rng.random() < 0.5 else [exploiter, 0]", "[0, exploiter]", "draw the seat too"),
    (7, "rng.random() < 0.5:", "np.random.default_rng().random() < 0.5:", "Draw with the rng"),
    (8, 'data["truncated"], self', 'data["terminated"], self', "advantages"),
    (8, "model.returns.denormalize(outputs[1])", "outputs[1]", "in units of the rewards"),
    (8, 'model.returns.normalize_targets(data["targets"])', 'data["targets"]', "units of the value head"),
    (8, 'mean.std(data["advantages"])', 'data["advantages"].std()', "the deviation is that of the valid rows"),
    (8, ".clamp(max=self.cfg.largest_weight)", "", "largest_weight"),
    (8, "square())\n", "square().masked_fill(data['terminated'], 0.0))\n", "averaged over the valid rows"),
]


def path_of(folder: str, number: int) -> Path:
    return FOLDER / folder / f"{check.NAMES[number]}.py"


@pytest.mark.parametrize("number", check.NAMES)
def test_the_check_refuses_the_start_and_accepts_the_solution(number: int) -> None:
    assert check.judge(number, path_of("start", number))[0] == check.NOT_YET
    status, text = check.judge(number, path_of("solutions", number))
    assert status == check.SOLVED, text


@pytest.mark.parametrize(("number", "right", "wrong", "message"), MISTAKES)
def test_a_plausible_mistake_is_refused_by_a_message_that_names_it(number: int, right: str, wrong: str, message: str,
                                                                   tmp_path: Path) -> None:
    source = path_of("solutions", number).read_text()
    assert right in source
    mistaken = tmp_path / "mistaken.py"
    mistaken.write_text(source.replace(right, wrong))
    status, text = check.judge(number, mistaken)
    assert status == check.NOT_YET, text
    assert re.search(message, text), text


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


def test_the_command_tells_what_is_missing_and_shows_errors_of_the_students_file_alone(
        tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("def gae(*columns):\n    return columns[9]\n")
    assert check.main(["5", str(broken)]) == 1
    out = capsys.readouterr().out
    assert out.count("File ") == 1
    assert f'"{broken}", line 2' in out
    broken.write_text("def gae(*columns):\n    return 3\n")
    assert check.main(["5", str(broken)]) == 1
    assert "expected a tensor of shape" in capsys.readouterr().out
    broken.write_text("def gae(:\n")
    assert check.main(["5", str(broken)]) == 1
    assert "SyntaxError" in capsys.readouterr().out
    broken.write_text("")
    assert check.main(["5", str(broken)]) == 1
    assert "has no gae" in capsys.readouterr().out
    assert check.main(["5", str(path_of("solutions", 5))]) == 0
    assert re.fullmatch("exercise 5, solved: .*\n", capsys.readouterr().out)
    for arguments in (["9"], ["x"], ["5", "no_such_file.py"], ["5", "a.py", "b.py"]):
        assert check.main(arguments) == 2
        assert re.fullmatch("check: there is no .*\n", capsys.readouterr().err)


def test_the_table_of_the_starts_has_a_line_for_each_exercise(capsys: pytest.CaptureFixture) -> None:
    assert check.main([]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [str(number) for number in check.NAMES]
    assert last == "0 of 8 solved"
