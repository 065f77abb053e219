"""Doom with other players and bots: matches, rewards, and what becomes of engines that die or stop."""

import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from signal import SIGKILL, SIGSEGV, SIGSTOP, SIGTERM
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
from parts import make_config
from running import ROOT, SMALL, Run, shared_memory, wait_until

from envs.families import make_vector_env
from runtime.guard import segments_of
from runtime.utils import UserError

doom = pytest.importorskip("envs.doom", exc_type=ModuleNotFoundError)
MINUTES = 0.2  # 105 decisions


def play(env: Any, seed: int, decisions: int = 105) -> list[Any]:
    """Play a match, always with the same actions; return what comes of each decision. seed: of the engines."""
    rng, returned = np.random.default_rng(0), [env.reset(seed)]
    for _ in range(decisions):
        actions = {agent: rng.integers(env.action_space(agent).nvec) for agent in env.possible_agents}
        returned.append(env.step(actions))
    return returned


def engines() -> list[psutil.Process]:
    return [each for each in psutil.Process().children(recursive=True) if each.name() == "vizdoom"]


@pytest.mark.parametrize("players", [1, 2])
def test_a_seed_determines_the_first_match(players: int) -> None:
    """Of engines that talk to each other only how it begins: when their messages come depends on the machine."""
    matches = []
    for seed in (7, 7, 8):
        env = doom.Doom(players=players, bots=2 - players, minutes=MINUTES)
        matches.append(play(env, seed))
        assert len(engines()) == players
        env.close()
        assert wait_until(lambda: not engines())
    first, again, other = ([np.stack([step[0]["player_0"]["obs"] for step in match]) for match in matches])
    assert first.shape == (106, 120, 160, 3)
    assert (first[: 106 if players == 1 else 2] == again[: 106 if players == 1 else 2]).all()
    assert (first[-1] != other[-1]).any()
    if players == 1:
        assert [step[1:] for step in matches[0][1:]] == [step[1:] for step in matches[1][1:]]
    *before, last = matches[0][1:]
    assert not any(cut for step in before for cut in step[3].values())
    assert last[3] == dict.fromkeys(env.possible_agents, True)
    if players == 2:
        assert sum(last[4][agent]["true_objective"] for agent in env.possible_agents) == 1


def test_agents_die_and_respawn_and_another_match_begins() -> None:
    """In it frags begin at 0. Who is dead does not act, and has no health; its death is its last action's."""
    cfg = make_config({"env": "doom_duel", "env_kwargs": f'{{"minutes": {MINUTES}}}', "env_frameskip": 4})
    env = make_vector_env(cfg, 2)
    step, rng, rows = env.reset([1, 2]), np.random.default_rng(0), []
    for _ in range(2 * 106):
        rows.append((step.active.copy(), step.rewards, step.obs[0]["measurements"][:, 0].copy(), step.was_reset))
        step = env.step([rng.integers([3, 3, 2, 2, 11], size=(4, 5)).astype(np.float32)])
    env.close()
    active, rewards, health, was_reset = map(np.array, zip(*rows, strict=True))
    assert np.flatnonzero(was_reset[:, 0]).tolist() == [0, 106]
    goes_on = ~was_reset.repeat(2, 1)[1:] & ~was_reset.repeat(2, 1)[:-1]
    died = active[:-1] & ~active[1:] & (health[1:] == 0)
    assert died.sum() > 5
    assert np.median(rewards[1:][died]) <= doom.SHAPING["death"]
    assert (~active[:-1] & active[1:] & goes_on).sum() > 5, "they respawn"
    assert (health[active] > 0).all()


def test_what_happened_is_weighed() -> None:
    """SEEN: health, armor, weapon, ammunition; COUNTED: frags, deaths, damage dealt and taken."""
    seen, seen_now = np.array([[50, 0, 2, 9], [0, 0, 5, 1]]), np.array([[75, 10, 2, 8], [100, 0, 2, 50]])
    counted, counted_now = np.array([[3, 1, 40, 10], [1, 3, 10, 40]]), np.array([[5, 1, 440, 10], [0, 4, 10, 240]])
    assert doom.what_happened(seen, counted, np.array([False, True]), seen_now, counted_now) == [
        {"frag": 2, "suicide": 0, "death": 0, "damage": 200, "damage_taken": 0, "health": 25, "armor": 10},
        {"frag": 0, "suicide": 1, "death": 1, "damage": 0, "damage_taken": 200, "health": 0, "armor": 0}]
    assert doom.objectives(np.array([3.0, 1.0]), 0) == [1.0, 0.0]
    assert doom.objectives(np.array([2.0, 2.0]), 0) == [0.5, 0.5]
    assert doom.objectives(np.array([2.0, 5.0]), 1) == [2.0, 5.0], "bots take part"
    assert doom.objectives(np.array([-4.0]), 1) == [-4.0]


class Scripted:
    """An engine that shows numbers of a script."""

    def __init__(self, script: list[list[float]]) -> None:
        self.script, self.told = iter(script), []

    def get_state(self) -> SimpleNamespace:
        return SimpleNamespace(screen_buffer=np.zeros((120, 160, 3), np.uint8), game_variables=next(self.script))

    def set_action(self, buttons: list[float]) -> None:
        self.told.append(buttons)

    def advance_action(self, tics: int, last: bool) -> None:
        self.told.append((tics, last))

    def send_game_command(self, command: str) -> None:
        self.told.append(command)


def test_each_player_has_a_shaping_of_its_own_and_buttons_are_pressed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = [[100.0, 0, 5, 9, 0, 0, 0, 0, 0]] * 2
    now = [[100.0, 0, 5, 9, 1, 0, 100, 0, 0], [-999900.0, 0, 5, 9, 0, 1, 0, 100, 1]]
    games = [Scripted([before[i], now[i]]) for i in range(2)]
    monkeypatch.setattr(doom.Doom, "start", lambda self, seed: setattr(self, "games", games))
    env = doom.Doom(minutes=10)
    env.pool = ThreadPoolExecutor(2)
    env.set_reward_shaping(dict.fromkeys(doom.SHAPING, 0.0) | {"death": -7.0}, 1)
    env.reset(0)
    obs, rewards, *_, infos = env.step({"player_0": np.array([1, 2, 1, 0, 10])})
    assert rewards == {"player_0": 1.0 + 100 * doom.SHAPING["damage"], "player_1": -7.0}
    assert infos == {"player_0": {"is_active": True}, "player_1": {"is_active": False}}
    assert obs["player_1"]["measurements"].tolist() == [0, 0, 5, 9]
    for game, buttons in zip(games, ([1, 0, 0, 1, 1, 0, -10], [0, 0, 0, 0, 0, 0, 0]), strict=True):
        told = [buttons, (1, False)] * 3 + [buttons, (1, True)]
        assert game.told[-8:] == told
    assert games[0].told[0] == "removebots"


@pytest.mark.parametrize(("settings", "words"), [
    ({"players": 5}, "players=5 must be 1, 2, 3 or 4"), ({"players": "2"}, "players='2' must be"),
    ({"bots": 9}, "bots=9 must be 0 to 8"), ({"players": 1}, "one player needs bots"),
    ({"minutes": 0}, "minutes=0 must be above 0"), ({"minutes": "2"}, "minutes='2' must be above 0"),
    ({"actions": "continuous"}, "actions='continuous' must be discretized or small"),
    ({"wad": "nope"}, "wad=nope is no file, and not multi_duel")])
def test_what_cannot_be_played_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=f"^Doom: {words}"):
        doom.Doom(**settings)


def test_all_players_are_in_the_same_tic_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their second match begins without frags. Bots join it, too."""
    monkeypatch.chdir(tmp_path)
    before, threads = shared_memory(), threading.active_count()
    env = doom.Doom(players=3, bots=2, minutes=MINUTES, wad="multi_deathmatch.wad")
    play(env, 0)
    tics = [{game.get_state().tic for game in env.games} for _ in range(20) if env.step({})]
    assert [len(each) for each in tics] == [1] * 20
    assert [max(each) for each in tics] == list(range(min(tics[0]), min(tics[0]) + 80, 4))
    env.reset()
    assert (env.counted[:, 0] == 0).all()
    env.step({})
    assert env.games[0].get_game_variable(doom.vizdoom.GameVariable.PLAYER_COUNT) == 5
    env.close()
    assert wait_until(lambda: not engines() and threading.active_count() == threads)
    assert not shared_memory() - before - segments_of(set(psutil.pids()))
    assert not list(tmp_path.iterdir())


def test_one_plays_against_bots_with_a_small_set_of_actions() -> None:
    """A bot frags who only stands, and turns on the spot."""
    env = doom.Doom("multi_duel", players=1, bots=1, actions="small", minutes=1.0)
    env.reset(0)
    assert env.action_space("player_0").nvec.tolist() == doom.ACTIONS["small"]
    deaths = [env.step({"player_0": np.array([0, 0, 1])})[4]["player_0"] for _ in range(525)]
    assert any(not info["is_active"] for info in deaths)
    assert deaths[-1]["true_objective"] == 0, "it frags nobody, not even itself"
    assert env.render().shape == (120, 160, 3)
    env.close()


@pytest.mark.parametrize("player", [0, 1])
@pytest.mark.parametrize(("number", "error"), [(SIGKILL, "crash"), (SIGSTOP, "has not answered for 1 s")])
def test_a_match_ends_with_an_engine_that_dies_or_stops(monkeypatch: pytest.MonkeyPatch, number: int, error: str,
                                                        player: int) -> None:
    env = doom.Doom(minutes=MINUTES)
    play(env, 0, decisions=3)
    monkeypatch.setattr(doom, "WAIT_SEC", 1.0)
    begun, all_of_it = time.monotonic(), engines()
    all_of_it[player].send_signal(number)
    with pytest.raises(Exception, match=error):
        [env.step({}) for _ in range(3)]
    assert time.monotonic() - begun < 5
    assert not psutil.wait_procs(all_of_it, 5)[1]
    monkeypatch.setattr(doom, "WAIT_SEC", 30.0)
    env.reset()
    env.close()


def test_a_port_that_is_taken_ends_the_process_at_once(tmp_path: Path) -> None:
    """A defect of vizdoom, by which it leaves files, too. A rollout worker is replaced, and asks for another port."""
    code = """if True:
        import socket, sys
        from envs.doom import Doom
        taken, make = socket.socket(socket.AF_INET, socket.SOCK_DGRAM), Doom.make_game
        taken.bind(("", 0))
        Doom.make_game = lambda self, number, port, seed: make(self, number, taken.getsockname()[1], seed)
        Doom().reset(0)"""
    before, begun = shared_memory(), time.monotonic()
    mark = {"DOOM_TEST": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | mark, check=False)
    assert done.returncode == -SIGSEGV
    assert time.monotonic() - begun < 20
    for engine in psutil.process_iter(["environ"]):  # the other one waits for its host
        if mark.items() <= (engine.info["environ"] or {}).items():
            engine.kill()
            assert wait_until(lambda engine=engine: not engine.is_running())
    for path in shared_memory() - before - segments_of(set(psutil.pids())):
        if "ViZDoom" in path:
            Path(path).unlink()


def test_faults_are_overcome_within_40_seconds(tmp_path: Path) -> None:
    """DOOM_FAULTS=30 python -m pytest tests/test_doom.py, of a run of four duels; 10 to 35 s each."""
    rng = random.Random(0)
    flags = ("--env=doom_duel", *SMALL, "--num_workers=2", "--num_envs_per_worker=2", "--train_for_env_steps=1e9",
             "--max_restarts=1000", '--env_kwargs={"minutes": 0.2}')
    faults = ["killed", "worker", "stopped"] * 100
    with Run(tmp_path, *flags) as run:
        assert run.learns()
        for number, fault in enumerate(faults[: int(os.environ.get("DOOM_FAULTS", "2"))]):
            begun, begin, components = time.monotonic(), len(run.read("log.txt")), run.components()
            victim = components[rng.choice(["rollout_worker_0", "rollout_worker_1"])]
            engine = rng.choice([each for each in victim.children() if each.name() == "vizdoom"])
            (victim if fault == "worker" else engine).send_signal(SIGSTOP if fault == "stopped" else SIGKILL)
            assert run.until(lambda begin=begin: run.blamed(begin)), fault
            seconds = time.monotonic() - begun
            assert run.learns(), fault
            assert wait_until(lambda: sum(member.name() == "vizdoom" for member in run.members()) == 8)
            assert wait_until(lambda: not [*run.temporary.glob("*/_vizdoom")])  # no engine begins any more
            print(f"{number}: {fault}, replaced after {seconds:.1f} s, all play after {time.monotonic() - begun:.1f} s")
            assert seconds < 40
        run.process.send_signal(SIGTERM)
    assert run.status == 0
