"""The experiments of the walkthrough, shortened: what they print, and the claims that hold for runs of any length."""

import importlib
import math
import re
import sys
from collections.abc import Callable

import pytest
from pages import ROOT, form, outputs

from docs.experiments import chain

PAGE = ROOT / "docs" / "walkthrough.md"
NUMBER = r" +-?[\d.,]+%?"
Table = Callable[..., list[list[float]]]


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Table:
    """Run an experiment; compare its lines with patterns, in which "#" is a number; return the numbers of each."""

    def run(name: str, *patterns: str, env_steps: int | None = None) -> list[list[float]]:
        module = importlib.import_module(f"docs.experiments.{name}")
        assert f"? `python -m docs.experiments.{name}`" in module.__doc__.splitlines()[0]
        monkeypatch.setattr(sys, "argv", [name] if env_steps is None else [name, "--env_steps", str(env_steps)])
        module.main()
        out = capsys.readouterr().out
        assert form(out) == form(outputs(PAGE)[f"python -m docs.experiments.{name}"][0])
        lines, expected = out.splitlines(), [pattern.split("#") for pattern in patterns]
        assert len(lines) == len(expected), lines
        numbers = []
        for line, parts in zip(lines, expected, strict=True):
            found = re.fullmatch(f"({NUMBER})".join(map(re.escape, parts)), line)
            assert found, f"{line!r} is not {'#'.join(parts)!r}"
            numbers.append([float(number.strip(" %").replace(",", "")) for number in found.groups()])
        return numbers

    return run


def test_time_limits(table: Table) -> None:
    rows = table("time_limits", "values, gamma 0.95, limit 20   t =  0   t = 10   t = 19", "truncated, time hidden###",
                 "terminated, time hidden###", "terminated, time visible###", "true if it goes on###",
                 "true if it ends###", "", "targets of the last 3 steps where all values are 20", "truncated###",
                 "terminated###", env_steps=3000)
    assert rows[1] == [rows[1][0]] * 3  # what cannot be seen has no value
    assert rows[1][0] > 1.3 * rows[2][0]
    assert rows[4:6] == [[20.0] * 3, [12.83, 8.03, 1.0]]
    assert rows[8:] == [[20.0] * 3, [2.85, 1.95, 1.0]]


def test_memory(table: Table) -> None:
    rows = table("memory", "chance#", "without memory#", "   with memory#", env_steps=2500)
    assert all(0 <= number <= 1 for number, in rows)


def test_stale_states(table: Table) -> None:
    title = "lag (SGD steps)   distance of the state   change of a log-probability: mean   largest"
    rows = table("stale_states", title, *["####"] * 4, env_steps=5000)[1:]
    assert rows[0] == [0, 0, 0, 0]
    assert [row[0] for row in rows] == [0, 1, 5, 20]
    distances = [row[1] for row in rows]
    assert distances == sorted(set(distances))


def test_normalization(table: Table) -> None:
    rows = table("normalization", " rewards times    --normalize_returns   without it", "###", "###", "###",
                 "  inputs times      --normalize_input   without it", "###", "###", "###", env_steps=2500)
    assert [row[0] for row in rows if row] == [1, 10_000, 0.0001, 1, 1000, 0.001]
    assert rows[1][1] == rows[2][1] == rows[3][1] == rows[5][1]  # the size of the rewards changes nothing
    assert len({row[2] for row in rows[1:4]}) == 3  # but it does without


def test_lag(table: Table) -> None:
    rows = table("lag", "               lag: mean  largest   mean rho   pi/mu > 1   mean return",
                 *["V-trace#####", "GAE#####"] * 3, env_steps=2500)[1:]
    assert [row[1] for row in rows] == [0, 0, 16, 16, 16, 16]
    assert all(0.5 < row[2] < 1 and 0 < row[3] < 100 for row in rows)


def test_chain(table: Table) -> None:
    rows = table("chain", "value of the middle state", "versions newer     true      GAE  V-trace  V-trace, rho_bar 10",
                 *["#####"] * 3)[2:]
    old = float(chain.chain_values(chain.MU)[2])
    for lag, true, gae, vtrace, wide in rows:
        pi = 1 / (1 + math.exp(-chain.STEP * lag))
        kept = min(chain.MU, pi), min(1 - chain.MU, 1 - pi)  # the policy of rho_bar = 1 (IMPALA, equation 3)
        assert gae == pytest.approx(old, abs=0.015)
        assert wide == pytest.approx(true, abs=0.015)
        assert vtrace == pytest.approx(float(chain.chain_values(kept[0] / sum(kept))[2]), abs=0.015)
    assert rows[2][1] > rows[1][1] + 0.2 > rows[0][1] + 0.4
