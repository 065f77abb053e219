"""Doom against others: `doom_duel`, `doom_duel_bots`, `doom_deathmatch_bots`, on maps of the package vizdoom.

A parallel environment (`multi_agent.py`) of one to four players and up to eight of the game's own bots. An episode is a
match of some minutes; who dies is inactive until it respawns. What an agent sees is the screen, and its health, armor,
weapon and ammunition. Rewards are what happened to a player, weighed by its shaping, which populations tune; the true
objective is its frags, in a duel 1 for a match that is won and 0.5 for a draw.

Each player is an engine, a process of its own, and the engines of a match talk over UDP within this machine. They must
advance together, tic by tic, each called by a thread of its own: else they drift apart, or wait for each other for
ever. No wait is longer than `WAIT_SEC`; then, or when an engine has died, all of the match are killed, since closing
one whose host is gone would hang, and the rollout worker is replaced.
"""

import contextlib
import os
import socket
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
MOST_DAMAGE = 200.0  # that counts of one decision
SHAPING = {  # what each of these is worth to the player
    "frag": 1.0,
    "suicide": -1.0,
    "death": -0.5,
    "damage": 0.005,  # a point
    "damage_taken": -0.003,
    "health": 0.005,  # a point that it finds
    "armor": 0.005,
}
RULES = ("-deathmatch +timelimit 0 +sv_forcerespawn 1 +sv_noautoaim 1 +sv_respawnprotect 1 +sv_spawnfarthest 1 "
         "+sv_nocrouch 1 +sv_nojump 1 +sv_noexit 1 +viz_nocheat 1")


class Doom:
    """One match after another."""

    def __init__(self, wad: str = "multi_duel", players: int = 2, bots: int = 0, minutes: float = 2.0,
                 actions: str = "discretized", frame_skip: int = 4, render_mode: str | None = None) -> None:
        """Note what is played; the first reset begins the engines.

        Args:
            wad: multi_duel, multi_deathmatch, cig, or the path of a file of one's own; its first map is played.
            bots: the game's own players.
            minutes: how long an episode is, of the game's time.
            actions: discretized (those of Sample Factory without weapons), or small.

        Raises `UserError` for what cannot be.
        """
        if actions not in ACTIONS or players not in range(1, 5) or bots not in range(9) or minutes <= 0:
            raise UserError("Doom is for 1 to 4 players, 0 to 8 bots, minutes above 0 and the actions "
                            f"{' or '.join(ACTIONS)}, not for {players}, {bots}, {minutes} and {actions}")
        self.wad = wad
        self.bots = bots
        self.small = actions == "small"
        self.frame_skip = frame_skip
        self.num_decisions = max(1, round(minutes * 60 * TICS_PER_SEC / frame_skip))
        self.metadata = {"render_fps": TICS_PER_SEC}
        self.scale = 2 if render_mode else 1
        self.possible_agents = [f"player_{number}" for number in range(players)]
        variables = spaces.Box(0.0, np.inf, (len(SEEN),), np.float32)
        screen = spaces.Box(0, 255, (HEIGHT, WIDTH, 3), np.uint8)
        self.spaces = spaces.Dict(obs=screen, measurements=variables), spaces.MultiDiscrete(ACTIONS[actions])
        self.shapings = [SHAPING] * players
        self.games: list[Any] = []
        self.engines: list[psutil.Process] = []
        self.pool = ThreadPoolExecutor(players, "player")

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
            self.start(seed or 0)
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
        if self.small:
            forward, attack, turn = action
            side, run, degrees = 0, 0, SMALL_TURNS[turn]
        else:
            forward, side, attack, run, turn = action
            degrees = TURNS[turn]
        return [forward == 1, forward == 2, side == 1, side == 2, attack, run, degrees]

    def look(self) -> None:
        """Take over what the engines show of each player: its screen, what it sees and counts, whether it is dead."""
        states = [game.get_state() for game in self.games]
        self.screens = [state.screen_buffer for state in states]
        variables = np.array([state.game_variables for state in states])
        self.seen, self.counted, self.dead = np.split(variables, [len(SEEN), -1], 1)
        self.seen = self.seen.clip(min=0)  # of who is dead the health is -999,900
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
        """Begin new engines. One that ends meanwhile, for example since the port was taken, lets this process crash."""
        self.close()
        self.pool = ThreadPoolExecutor(len(self.possible_agents), "player")
        before = psutil.Process().children()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.games = [self.make_game(number, port, seed) for number in range(len(self.possible_agents))]
        with silent():
            self.together(lambda game: game.init())
        self.engines = [process for process in psutil.Process().children() if process not in before]

    def make_game(self, number: int, port: int, seed: int) -> Any:
        """Make the game of a player; the first one's is the host."""
        game = vizdoom.DoomGame()
        scenario = Path(vizdoom.__file__).parent / "scenarios" / f"{self.wad}.wad"
        game.set_doom_scenario_path(str(scenario if scenario.exists() else self.wad))
        game.set_doom_map("map01")
        game.set_doom_config_path(os.devnull)  # it would save its settings in the working folder
        game.set_seed(seed % 2**31)
        game.set_window_visible(False)
        game.set_render_hud(True)
        game.set_screen_format(vizdoom.ScreenFormat.RGB24)
        size = f"RES_{WIDTH * self.scale}X{HEIGHT * self.scale}"
        game.set_screen_resolution(getattr(vizdoom.ScreenResolution, size))
        game.set_available_buttons([getattr(vizdoom.Button, name) for name in BUTTONS])
        game.set_available_game_variables([getattr(vizdoom.GameVariable, name) for name in (*SEEN, *COUNTED, "DEAD")])
        place = f"-join 127.0.0.1:{port}" if number else f"-host {len(self.possible_agents)} -port {port} {RULES}"
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
        self.engines, self.games = [], []
        self.pool.shutdown(wait=False)


def advance(game: Any, buttons: list[float], tics: int, last: bool) -> None:
    """Play some tics; the last ones draw the screen."""
    game.set_action(buttons)
    game.advance_action(tics, last)


def what_happened(seen: np.ndarray, counted: np.ndarray, was_dead: np.ndarray, seen_now: np.ndarray,
                  counted_now: np.ndarray) -> list[dict[str, float]]:
    """Return how often what `SHAPING` weighs has happened to each player, from its `SEEN` and `COUNTED` before and now.

    A life that begins is no gain of health.
    """
    frags, deaths, damage, damage_taken = (counted_now - counted).T
    health, armor = np.where(was_dead, 0.0, (seen_now - seen)[:, :2].T).clip(min=0.0)
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
    """Let programs that are started meanwhile write to nowhere: engines tell a lot."""
    with open(os.devnull, "w") as nowhere, contextlib.ExitStack() as after:
        for number in (1, 2):
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
