"""The benchmark: its figures are those of the run that it watches. No test depends on how fast anything is."""

from pathlib import Path

import pytest

from tools import benchmark
from tools.benchmark import Speed, measure

# says that 10 s have passed whenever it has taken 50 ms of CPU time
TRAIN = """
import json, sys, time
from pathlib import Path

flags = dict(word.removeprefix("--").split("=") for word in sys.argv[1:])
run = Path(flags["train_dir"], flags["experiment"])
run.mkdir()
(run / "config.json").write_text('{"env_frameskip": 4}')
for number in range(10**6):
    begin = time.process_time()
    while time.process_time() < begin + 0.05:
        pass
    row = {"env_steps": int(flags["speed"]) * number, "wall_sec": 10.0 * number, "sgd_steps": number // 3}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\\n")
"""


def test_the_figures_are_those_of_the_time_after_the_warm_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "WARM_UP_SEC", 1.0)
    (tmp_path / "train.py").write_text(TRAIN)
    speed = measure(["--speed=1000"], 1.0, tmp_path)
    assert (speed.env_steps, speed.frames) == pytest.approx((100, 400))
    assert speed.cpu_us == pytest.approx(50, rel=0.3)


def test_two_checkouts_are_compared_in_turns_by_the_median_of_their_pairs(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    speeds, seen = iter([100.0, 90.0, 120.0, 60.0, 50.0, 25.0]), []

    def record(flags: list[str], seconds: float, checkout: Path) -> Speed:
        seen.append((flags, checkout))
        return Speed(next(speeds), 0.0, 7.0)

    monkeypatch.setattr(benchmark, "measure", record)
    base, new = (["--env=a"], tmp_path / "before"), (["--env=a", "--num_epochs", "2"], tmp_path)
    assert benchmark.main(["compare", "--env=a", "--pairs=3", f"--base={base[1]}",
                           f"--new={tmp_path} --num_epochs 2"]) == 0
    assert seen == [base, new, new, base, base, new]
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == ("pair 3: ratio 0.500; medians so far 60 -> 90 env_steps/s, ratio 0.900 (0.500 to 2.000)")


def test_what_a_run_refuses_is_its_own_line(capfd: pytest.CaptureFixture) -> None:
    assert benchmark.main(["throughput", "--env=CartPole-v1", "--num_wokers=2"]) == 2
    said, ended = capfd.readouterr().err.splitlines()
    assert said.startswith("train.py: unknown argument --num_wokers")
    assert ended == "benchmark.py: train.py has ended"
