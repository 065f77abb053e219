"""Doom matches between players and bots: `doom_duel`, `doom_duel_bots`, `doom_deathmatch_bots`, on maps of vizdoom.

A parallel environment (`multi_agent.py`) of one to four players and up to eight of the game's own bots. An episode is a
match of some minutes; a dead player is inactive until it respawns. An agent sees the screen, and its health, armor,
weapon and ammunition. Its reward is what happened to it, weighed by its shaping, which populations tune. The true
objective is its frags; between two players without bots 1 for a match that is won and 0.5 for a draw.

Each player is an engine, a process of its own, and the engines of a match talk by UDP. A thread for each player tells
its engine to play the next tic, all at the same time. Engines that are told otherwise drift apart or wait for each
other for ever. No wait is longer than `WAIT_SEC`. Then, or when an engine has died, all engines of the match are
killed, since one whose host is gone would never close, and the rollout worker is replaced.
"""

import contextlib
import os
import random
import socket
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import psutil
import vizdoom
from gymnasium import spaces

from runtime.utils import UserError, Values

TICS_PER_SEC = 35  # of the game
WAIT_SEC = 30.0
HEIGHT, WIDTH = 120, 160  # of what agents see; a picture for people is twice as large
# the choices: forward or back, right or left, attack, run, by how much to turn; small: forward or back, attack, turn
ACTIONS = {"discretized": [3, 3, 2, 2, 11], "small": [3, 2, 3]}
TURNS, SMALL_TURNS = (0, 2, -2, 4, -4, 6, -6, 8, -8, 10, -10), (0, 5, -5)  # degrees a tic
BUTTONS = "MOVE_FORWARD", "MOVE_BACKWARD", "MOVE_RIGHT", "MOVE_LEFT", "ATTACK", "SPEED", "TURN_LEFT_RIGHT_DELTA"
SEEN = "HEALTH", "ARMOR", "SELECTED_WEAPON", "SELECTED_WEAPON_AMMO"
COUNTED = "FRAGCOUNT", "DEATHCOUNT", "DAMAGECOUNT", "DAMAGE_TAKEN"  # since the engine began; frags of the match
MOST_DAMAGE = 200.0  # that is counted of one decision
SHAPING = {  # what each of these is worth to the player
    "frag": 1.0,
    "suicide": -1.0,
    "death": -0.5,
    "damage": 0.005,  # a point
    "damage_taken": -0.003,
    "health": 0.005,  # a point that it finds
    "armor": 0.005,
}
RULES = ("-deathmatch +timelimit 0 +sv_forcerespawn 1 +sv_noautoaim 1 +sv_spawnfarthest 1 +sv_nocrouch 1 +sv_nojump 1 "
         "+sv_noexit 1 +viz_nocheat 1 +sv_respawnprotect")


class Doom:
    """Plays matches, one after another."""

    def __init__(self, wad: str = "multi_duel", level: str = "map01", players: int = 2, bots: int = 0,
                 minutes: float = 2.0, actions: str = "discretized", protected: bool = False, frame_skip: int = 4,
                 render_mode: str | None = None) -> None:
        """Store the settings; the first reset begins the engines.

        Args:
            wad, level: multi_duel, multi_deathmatch, cig, or the path of a file of one's own, and a map in it.
            bots: the game's own players.
            minutes: how long an episode is, of the game's time.
            actions: discretized (those of Sample Factory without weapons), or small.
            protected: for a moment nothing hurts a player that has respawned; so in Sample Factory.

        Raises `UserError` for impossible settings.
        """
        scenario = Path(vizdoom.scenarios_path, f"{wad}".removesuffix(".wad") + ".wad")
        self.wad = scenario if scenario.exists() else Path(f"{wad}").resolve()
        for is_refused, words in (
                (not self.wad.is_file(), f"wad={wad} is no file, and not multi_duel, multi_deathmatch or cig"),
                (players not in range(1, 5), f"players={players!r} must be 1, 2, 3 or 4"),
                (bots not in range(9), f"bots={bots!r} must be 0 to 8"),
                (players == 1 and not bots, "one player needs bots"),
                (not isinstance(minutes, int | float) or not 0 < minutes < 1e6, f"minutes={minutes!r} must be above 0"),
                (actions not in tuple(ACTIONS), f"actions={actions!r} must be {' or '.join(ACTIONS)}")):
            if is_refused:
                raise UserError(f"Doom: {words}; see --env_kwargs")
        self.level = level
        self.bots = bots
        self.small = actions == "small"
        self.rules = f"{RULES} {int(protected)}"
        self.frame_skip = frame_skip
        self.num_decisions = max(1, round(minutes * 60 * TICS_PER_SEC / frame_skip))
        self.metadata = {"render_fps": TICS_PER_SEC}
        self.scale = 2 if render_mode else 1
        self.shows_window = render_mode == "human"
        self.possible_agents = [f"player_{number}" for number in range(players)]
        variables = spaces.Box(0.0, np.inf, (len(SEEN),), np.float32)
        screen = spaces.Box(0, 255, (HEIGHT, WIDTH, 3), np.uint8)
        self.spaces = spaces.Dict(obs=screen, measurements=variables), spaces.MultiDiscrete(ACTIONS[actions])
        self.shapings = [SHAPING] * players
        self.games: list[Any] = []
        self.engines: list[psutil.Process] = []

    def observation_space(self, agent: str) -> spaces.Dict:
        return self.spaces[0]

    def action_space(self, agent: str) -> spaces.MultiDiscrete:
        return self.spaces[1]

    def get_default_reward_shaping(self) -> Values:
        return SHAPING

    def set_reward_shaping(self, shaping: Values, agent: int) -> None:
        self.shapings[agent] = shaping

    # ---- a match -------------------------------------------------------------------------------------------------

    def reset(self, seed: int | None = None, options: Any = None) -> tuple[Values, Values]:
        """Begin a match; with a seed by new engines, whose first match it determines."""
        if seed is not None or not self.games:
            self.start(random.getrandbits(31) if seed is None else seed)
        else:
            self.together(lambda game: game.new_episode())
        for command in ["removebots"] + ["addbot"] * self.bots:
            self.games[0].send_game_command(command)
        self.t = 0
        self.look()
        return self.observations(), self.infos()

    def step(self, actions: Values) -> tuple[Values, Values, Values, Values, Values]:
        """Play a decision; who gives no action does nothing."""
        nothing = np.zeros_like(self.spaces[1].nvec)
        buttons = [self.buttons(actions.get(agent, nothing)) for agent in self.possible_agents]
        tics = self.frame_skip if len(self.games) == 1 else 1  # at once: an engine alone waits for no other
        for tic in range(tics, self.frame_skip + 1, tics):
            self.together(lambda game, own, last=tic == self.frame_skip: advance(game, own, tics, last), buttons)
        self.t += 1
        before = self.seen, self.counted, self.dead
        self.look()
        rewards = {}
        happened = what_happened(*before, self.seen, self.counted)
        for agent, shaping, numbers in zip(self.possible_agents, self.shapings, happened, strict=True):
            rewards[agent] = sum(shaping[name] * number for name, number in numbers.items())
        is_over = self.t >= self.num_decisions
        infos = self.infos()
        if is_over:
            for info, objective in zip(infos.values(), objectives(self.counted[:, 0], self.bots), strict=True):
                info["true_objective"] = objective
        cut, terminated = (dict.fromkeys(self.possible_agents, ends) for ends in (is_over, False))
        return self.observations(), rewards, terminated, cut, infos

    def buttons(self, action: np.ndarray) -> list[float]:
        """Return the state of each of `BUTTONS`."""
        turns = TURNS
        if self.small:
            forward, attack, turn = action
            action, turns = (forward, 0, attack, 0, turn), SMALL_TURNS
        forward, side, attack, run, turn = action
        return [forward == 1, forward == 2, side == 1, side == 2, attack, run, turns[turn]]

    def look(self) -> None:
        """Read from the engines the screen of each player, what it sees and counts, and whether it is dead."""
        states = [game.get_state() for game in self.games]
        if None in states:
            raise RuntimeError(f"{self.level} of {self.wad.name} has ended before the match")
        self.screens = [state.screen_buffer for state in states]
        variables = np.array([state.game_variables for state in states])
        self.seen, self.counted, self.dead = np.split(variables, [len(SEEN), -1], 1)
        self.seen = self.seen.clip(min=0)  # a dead player's health is -999,900
        self.dead = self.dead[:, 0] > 0

    def observations(self) -> Values:
        return {agent: {"obs": screen[:: self.scale, :: self.scale], "measurements": seen.astype(np.float32)}
                for agent, screen, seen in zip(self.possible_agents, self.screens, self.seen, strict=True)}

    def infos(self) -> Values:
        return {agent: {"is_active": not dead} for agent, dead in zip(self.possible_agents, self.dead, strict=True)}

    def render(self) -> np.ndarray:
        """Return the screens of all players side by side, [H, W, 3] uint8."""
        return np.concatenate(self.screens, 1)

    # ---- engines -------------------------------------------------------------------------------------------------

    def start(self, seed: int) -> None:
        """Begin new engines. One that ends during its start, for example for a taken port, crashes this process."""
        self.close()
        self.pool = ThreadPoolExecutor(len(self.possible_agents), "player")
        before = psutil.Process().children()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
            free.bind(("", 0))  # as the engine does
            port = free.getsockname()[1]
        self.games = [self.make_game(number, port, seed) for number in range(len(self.possible_agents))]
        try:
            with tempfile.TemporaryDirectory() as scratch, contextlib.chdir(scratch), silent():
                os.mkdir("_vizdoom")  # where each engine writes, and would end if another made it at the same time
                self.together(lambda game: game.init())
        finally:
            self.engines = [each for each in psutil.Process().children() if each not in before]
            if not self.games:  # it has failed, when it was not yet known whom to kill
                self.close()

    def make_game(self, number: int, port: int, seed: int) -> Any:
        """Make the game of a player; the first one's is the host."""
        game = vizdoom.DoomGame()
        game.set_doom_scenario_path(str(self.wad))
        game.set_doom_map(self.level)
        game.set_doom_config_path(os.devnull)  # it would save its settings in the working folder
        game.set_seed(seed % 2**31)
        game.set_window_visible(self.shows_window and number == 0)
        game.set_render_hud(True)
        game.set_screen_format(vizdoom.ScreenFormat.RGB24)
        size = f"RES_{WIDTH * self.scale}X{HEIGHT * self.scale}"
        game.set_screen_resolution(getattr(vizdoom.ScreenResolution, size))
        game.set_available_buttons([getattr(vizdoom.Button, name) for name in BUTTONS])
        game.set_available_game_variables([getattr(vizdoom.GameVariable, name) for name in (*SEEN, *COUNTED, "DEAD")])
        place = f"-join 127.0.0.1:{port}" if number else f"-host {len(self.possible_agents)} -port {port} {self.rules}"
        game.add_game_args(f"{place} +viz_connect_timeout {WAIT_SEC / 3:.0f} +name player_{number} +colorset {number}")
        return game

    def together(self, function: Callable[..., Any], *args: list) -> None:
        """Call a function with the game of every player at the same time. A failure ends all engines."""
        calls = [self.pool.submit(function, *own) for own in zip(self.games, *args, strict=True)]
        done, waiting = wait(calls, WAIT_SEC, FIRST_EXCEPTION)
        failures = [error for call in done if (error := call.exception())]
        if failures or waiting:
            self.close()
            raise failures[0] if failures else TimeoutError(f"an engine has not answered for {WAIT_SEC:.0f} s")

    def close(self) -> None:
        """End all engines."""
        for engine in self.engines:
            with contextlib.suppress(psutil.NoSuchProcess):
                engine.kill()
        if self.games:
            self.pool.shutdown(wait=False)
        self.engines, self.games = [], []


def advance(game: Any, buttons: list[float], tics: int, last: bool) -> None:
    """Play some tics; the last ones draw the screen."""
    game.set_action(buttons)
    game.advance_action(tics, last)


def what_happened(seen: np.ndarray, counted: np.ndarray, was_dead: np.ndarray, seen_now: np.ndarray,
                  counted_now: np.ndarray) -> list[dict[str, float]]:
    """Return the amount of each event of `SHAPING`, for each player, from its `SEEN` and `COUNTED` before and now.

    A life that begins is no gain of health.
    """
    frags, deaths, damage, damage_taken = (counted_now - counted).T
    health, armor = np.where(was_dead | (deaths > 0), 0.0, (seen_now - seen)[:, :2].T).clip(min=0.0)
    numbers = np.stack([
        frags.clip(min=0.0),
        (-frags).clip(min=0.0),
        deaths,
        damage.clip(max=MOST_DAMAGE),
        damage_taken.clip(max=MOST_DAMAGE),
        health,
        armor,
    ], 1)
    return [dict(zip(SHAPING, own, strict=True)) for own in numbers.tolist()]


def objectives(frags: np.ndarray, bots: int) -> list[float]:
    """Return the true objective of each player of a match: who has won a duel, else its frags."""
    if len(frags) == 2 and not bots:
        frags = 0.5 + 0.5 * np.sign(frags - frags[::-1])
    return frags.tolist()


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Discard what programs that are started here print, and let them read nothing. It is of the whole process."""
    with open(os.devnull, "r+") as nowhere, contextlib.ExitStack() as after:
        for number in range(3):
            own = os.dup(number)
            after.callback(os.close, own)
            after.callback(os.dup2, own, number)
            os.dup2(nowhere.fileno(), number)
        yield


MATCHES = {
    "doom_duel": {},
    "doom_duel_bots": {"players": 1, "bots": 1},
    "doom_deathmatch_bots": {"wad": "cig", "players": 1, "bots": 7},
}
for env_id, settings in MATCHES.items():
    gym.register(env_id, entry_point="envs.doom:Doom", kwargs=settings)
