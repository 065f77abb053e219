"""Environments of several agents behind the vector-environment contract, on tapes that are known in advance."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import counting_agents
import numpy as np
import pytest
from counting_agents import CountingAgents
from gymnasium import spaces

from envs import families
from envs.flat_spaces import num_columns
from envs.multi_agent import ParallelVectorEnv, pettingzoo_maker
from envs.vector_env import EnvironmentFailure, Step
from runtime.utils import UserError

NUMBER, CHOICE = spaces.Box(-9, 9, (1,), np.float32), spaces.Discrete(3)
MASKED = spaces.Dict({"obs": NUMBER, "action_mask": spaces.MultiBinary(3)})
NONE: Mapping[Any, Any] = MappingProxyType({})


class Frame(NamedTuple):
    """What a reset or a step returns, {agent: value}; the observation of an agent is a number."""

    obs: dict[Any, Any]
    rewards: Mapping[Any, float] = NONE
    terminated: tuple = ()  # agents
    truncated: tuple = ()
    infos: Mapping[Any, Any] = NONE


class Tape:
    """Plays episodes that are known in advance, lists of frames, and keeps what it is called with.

    Its dicts are in another order than its agents.
    """

    def __init__(self, *episodes: list[Frame], agents: tuple = ("ann", "bob"),
                 space: Any = NUMBER, action_space: Any = CHOICE) -> None:
        self.possible_agents, self.space, self.act = list(agents), space, action_space
        self.episodes, self.frames = iter(episodes), iter(())
        self.alive: list[Any] = []
        self.seeds: list[int | None] = []
        self.actions: list[dict[Any, Any]] = []

    def observation_space(self, agent: Any) -> spaces.Space:
        return self.space[agent] if type(self.space) is dict else self.space

    def action_space(self, agent: Any) -> spaces.Space:
        return self.act[agent] if type(self.act) is dict else self.act

    @property
    def agents(self) -> list[Any]:
        return self.alive

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        self.seeds.append(seed)
        self.frames = iter(next(self.episodes))
        frame = next(self.frames)
        self.alive = [agent for agent in self.possible_agents if agent in frame.obs]
        return self.show(frame), frame.infos

    def step(self, actions: dict[Any, Any]) -> tuple[dict, dict, dict, dict, dict]:
        self.actions.append(actions)
        frame = next(self.frames)
        terminated, truncated = ({agent: agent in ended for agent in self.possible_agents}
                                 for ended in (frame.terminated, frame.truncated))
        self.alive = [agent for agent in self.alive if not terminated[agent] and not truncated[agent]]
        return self.show(frame), dict(reversed(frame.rewards.items())), terminated, truncated, frame.infos

    def show(self, frame: Frame) -> dict[Any, Any]:
        return {agent: np.array([value], np.float32) if isinstance(value, (int, float)) else value
                for agent, value in reversed(frame.obs.items())}


class Unlisted(Tape):
    """Has no list `agents` of those that are alive: only its flags say who has left."""

    agents = property()


class Vanishing(Tape):
    """Lists nobody after a step."""

    agents = property(lambda self: [] if self.actions else self.alive)


def make(*tapes: Any, **settings: Any) -> ParallelVectorEnv:
    return ParallelVectorEnv(list(tapes), "tape", **settings)


def act(env: ParallelVectorEnv, value: float = 1.0) -> Step:
    """Take the same action for all agents."""
    return env.step([np.full((len(kind.index), num_columns(kind.action_space)), value, np.float32)
                     for kind in env.kinds])


def numbers(step: Step) -> list[float]:
    return step.obs[0]["obs"][:, 0].tolist()


def masked(value: float, *mask: int) -> dict[str, np.ndarray]:
    return {"obs": np.array([value], np.float32), "action_mask": np.array(mask, np.int8)}


BEGIN, GOING_ON = Frame({"ann": 1, "bob": 2}), Frame({"ann": 5, "bob": 6})


# ---- steps and episodes ----------------------------------------------------------------------------------------------


def test_agents_are_numbered_environment_by_environment_and_grouped_by_their_spaces() -> None:
    seen = {agent: spaces.Box(-1, 1, (3 if agent == 1 else 2,), np.float32) for agent in range(4)}
    done = {agent: spaces.Discrete(2 if agent == 3 else 3) for agent in range(4)}
    env = make(*(Tape(agents=tuple(range(4)), space=seen, action_space=done) for _ in range(2)))
    assert (env.agents, env.kind_of_agent, env.num_envs) == (["0", "1", "2", "3"], [0, 1, 0, 2], 2)
    assert [kind.index.tolist() for kind in env.kinds] == [[0, 2, 4, 6], [1, 5], [3, 7]]
    assert [kind.obs_space["obs"].shape for kind in env.kinds] == [(2,), (3,), (2,)]
    assert [kind.action_space for kind in env.kinds] == [spaces.Discrete(3)] * 2 + [spaces.Discrete(2)]


def test_the_first_reset_is_seeded_and_later_ones_go_on() -> None:
    tapes = [Tape(*[[BEGIN, Frame({"ann": 3, "bob": 4}, terminated=("ann", "bob"))]] * 4) for _ in range(3)]
    env = make(*tapes)
    env.reset(40)
    for _ in range(4):
        act(env)
    env.reset(7)
    assert [tape.seeds for tape in tapes] == [[40, None, None, 7], [41, None, None, 8], [42, None, None, 9]]


@pytest.mark.parametrize("kind", [Tape, Unlisted])
def test_agents_leave_one_by_one_and_the_next_step_after_the_last_resets(kind: type[Tape]) -> None:
    """An agent that has left does not come back before the next episode, even if it is shown or rewarded."""
    tape = kind([Frame({"ann": 1, "bob": 2, "cid": 3}),
                 Frame({"ann": 4, "bob": 5, "cid": 6}, {"ann": -1.0}, terminated=("ann",)),
                 Frame({"ann": 99, "bob": 7, "cid": 8}, {"ann": 99.0, "bob": 1.0, "cid": 2.0}, truncated=("cid",),
                       infos={"ann": {"true_objective": 9.0}}),
                 Frame({"bob": 9}, {"bob": 3.0}, terminated=("bob",))],
                [Frame({"ann": -1, "bob": -2, "cid": -3})], agents=("ann", "bob", "cid"))
    env = make(tape)
    step = env.reset(0)
    assert step.was_reset.all()
    assert step.active.all()
    assert numbers(step) == [1, 2, 3]
    step = act(env)
    assert not step.was_reset.any()
    assert (step.terminated.tolist(), step.active.tolist()) == ([True, False, False], [False, True, True])
    assert step.rewards.tolist() == [-1, 0, 0]
    assert numbers(step) == [4, 5, 6]
    step = act(env)
    assert (step.truncated.tolist(), step.active.tolist()) == ([False, False, True], [False, True, False])
    assert not step.terminated.any(), "ann is reported once"
    assert np.isnan(step.objectives).all()
    assert step.rewards.tolist() == [0, 1, 2]
    assert numbers(step) == [4, 7, 8], "an agent that is gone keeps its final observation"
    step = act(env)
    assert (step.terminated.tolist(), step.active.any(), step.was_reset[0]) == ([False, True, False], False, False)
    step = act(env)
    assert step.was_reset[0]
    assert step.active.all()
    assert numbers(step) == [-1, -2, -3]
    assert not (step.rewards.any() or step.terminated.any() or step.truncated.any())
    assert [list(actions) for actions in tape.actions] == [["ann", "bob", "cid"], ["bob", "cid"], ["bob"]]


@pytest.mark.parametrize("obs", [{}, {"ann": 5, "bob": 6}])
def test_agents_that_vanish_with_the_episode_were_terminated(obs: dict[str, float]) -> None:
    env = make(Vanishing([BEGIN, Frame(obs, {"ann": 1.0, "bob": -1.0}, truncated=("bob",))], [BEGIN]))
    env.reset(0)
    step = act(env)
    assert (step.terminated.tolist(), step.truncated.tolist()) == ([True, False], [False, True])
    assert step.rewards.tolist() == [1, -1]
    assert not step.active.any()
    assert act(env).was_reset[0]


# ---- turns and masks -------------------------------------------------------------------------------------------------


def test_an_agent_named_by_the_info_is_the_only_one_that_acts() -> None:
    """Without a mask; the observations of the others come, and their rewards belong to their last actions."""
    turn = [{agent: {"active_agent": name} for agent in ("ann", "bob")} for name in ("ann", "bob", "bob", "ann")]
    tape = Tape([Frame({"ann": t, "bob": -t}, {"ann": 1, "bob": 2}, infos=infos) for t, infos in enumerate(turn)])
    env = make(tape)
    assert env.reset(0).active.tolist() == [True, False]
    steps = [act(env, 2) for _ in range(3)]
    assert [step.active.tolist() for step in steps] == [[False, True], [False, True], [True, False]]
    assert tape.actions == [{"ann": 2, "bob": 0}, {"ann": 0, "bob": 2}, {"ann": 0, "bob": 2}]
    assert all(step.rewards.tolist() == [1, 2] for step in steps)


def test_masks_of_several_choices() -> None:
    """A mask that leaves no option of one choice only matters when an action follows."""
    choices = spaces.MultiDiscrete([2, 3])
    masks = {"ann": {"action_mask": (np.array([1, 0]), np.array([0, 1, 1]))}}
    nothing = {"ann": {"action_mask": (np.array([1, 1]), np.array([0, 0, 0]))}}
    env = make(Tape([Frame(BEGIN.obs, infos=masks), Frame({"ann": 3, "bob": 4}, terminated=("ann",), infos=nothing)],
                    action_space=choices))
    assert env.reset(0).obs[0]["action_mask"].tolist() == [[1, 0, 0, 1, 1], [1, 1, 1, 1, 1]]
    assert act(env).obs[0]["action_mask"].all()
    env = make(Tape([Frame(BEGIN.obs, infos=masks), Frame(GOING_ON.obs, infos=nothing)], action_space=choices))
    env.reset(30)
    with pytest.raises(EnvironmentFailure, match="tape, seed 30, step 1, agent ann: the action mask forbids every"):
        act(env)


def test_masks_of_one_kind_of_agents_only_which_may_be_absent_at_the_beginning() -> None:
    ann, bob = masked(1, 0, 1, 1), {"obs": np.array([2], np.float32)}
    env = make(Tape([Frame({"bob": bob}), Frame({"ann": ann, "bob": bob}), Frame({"ann": masked(1, 0, 0, 0)})],
                    space={"ann": MASKED, "bob": spaces.Dict({"obs": NUMBER})}))
    step = env.reset(0)
    assert [set(kind.obs_space) for kind in env.kinds] == [{"obs", "action_mask"}, {"obs"}]
    assert (step.active.tolist(), step.obs[0]["action_mask"].tolist()) == ([False, True], [[1, 1, 1]])


# ---- actions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("space", "row", "expected", "inactive"), [
    (spaces.Discrete(3, start=-5), [2], -3, -5),
    (spaces.MultiDiscrete([2, 3]), [1, 2], [1, 2], [0, 0]),
    (spaces.MultiBinary(2), [0, 1], [0, 1], [0, 0]),
    (spaces.Box(-2, 6, (2,), np.float32), [1, -1], [6, -2], [2, 2]),
    (spaces.Dict({"go": spaces.Discrete(2), "aim": spaces.Box(0, 1, (1,), np.float64)}), [-1, 1],
     {"aim": [0], "go": 1}, {"aim": [0.5], "go": 0}),
    (spaces.Tuple((spaces.Discrete(2, start=1), spaces.Tuple((spaces.MultiBinary(1),)))), [0, 1],
     (1, ([1],)), (1, ([0],))),
], ids=str)
def test_actions_come_in_the_form_of_the_environment(space: spaces.Space, row: list[float], expected: Any,
                                                     inactive: Any) -> None:
    """Whatever was computed for an agent that does not act is ignored."""
    tape = Tape([Frame({"ann": 1, "bob": 2, "cid": 3}, infos={"bob": {"is_active": False}}), GOING_ON],
                agents=("ann", "bob", "cid"), action_space=space)
    env = make(tape)
    env.reset(0)
    env.step([np.array([row, [np.nan] * len(row), row], np.float32)])
    (actions,) = tape.actions
    assert all(space.contains(action) for action in actions.values())
    assert [plain(actions[agent]) for agent in ("ann", "bob", "cid")] == [expected, inactive, expected]


def plain(action: Any) -> Any:
    if isinstance(action, dict):
        return {key: plain(part) for key, part in action.items()}
    return tuple(map(plain, action)) if isinstance(action, tuple) else action.tolist()


def test_every_agent_gets_its_own_action() -> None:
    action_space = {"ann": spaces.Discrete(5), "bob": spaces.Box(-2, 2, (1,), np.float32), "cid": spaces.Discrete(5)}
    frame = Frame({"ann": 1, "bob": 2, "cid": 3})
    tape = Tape([frame, frame], agents=("ann", "bob", "cid"), action_space=action_space)
    env = make(tape, squash_actions=True)
    env.reset(0)
    env.step([np.array([[1], [2]], np.float32), np.array([[0.25]], np.float32)])
    assert tape.actions == [{"ann": 1, "bob": pytest.approx(2 * np.tanh(0.25)), "cid": 2}]


# ---- infos and failures ----------------------------------------------------------------------------------------------


def test_the_objective_is_what_the_info_holds_under_its_name() -> None:
    tape = Tape([BEGIN, Frame(GOING_ON.obs, terminated=("ann",), infos={"ann": {"frags": 3.5}, "bob": {}}),
                 Frame({"bob": 5}, terminated=("bob",), infos={"bob": {"frags": np.float32(-1)}})], [BEGIN])
    env = make(tape)
    env.objective = "frags"
    steps = [env.reset(0), act(env), act(env), act(env)]
    np.testing.assert_array_equal([step.objectives for step in steps],
                                  [[np.nan, np.nan], [3.5, np.nan], [np.nan, -1], [np.nan, np.nan]])


@pytest.mark.parametrize(("frame", "what"), [
    (Frame({"ann": 3, "bob": np.nan}), ", agent bob: observation 'obs' is not finite: [nan]"),
    (Frame({"ann": 3, "bob": 4}, {"ann": np.inf}), ", agent ann: reward is not finite: inf"),
])
def test_failures_name_the_environment_its_seed_the_step_and_the_agent(frame: Frame, what: str) -> None:
    env = make(Tape([BEGIN, *[GOING_ON] * 3]), Tape([BEGIN, GOING_ON, frame]))
    env.reset(70)
    act(env)
    with pytest.raises(EnvironmentFailure) as failure:
        act(env)
    assert str(failure.value) == f"tape, seed 71, step 2{what}"


def test_an_agent_that_is_none_of_the_possible_ones_is_refused() -> None:
    env = make(Unlisted([Frame({"ann": 1, "bobb": 2})]))
    with pytest.raises(EnvironmentFailure, match=r"reset\(\) raised ValueError: bobb: not among the possible_agents"):
        env.reset(0)


# ---- by name ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("env_id", "words"), [
    ("pettingzoo:no_such_game_v0", "No module named 'no_such_game_v0'"),
    ("pettingzoo:", "no module is called ''"), ("pettingzoo:json", "module 'json' has neither parallel_env nor env"),
    ("pettingzoo:classic.conect_four_v3", "No module named 'pettingzoo.classic.conect_four_v3'; check the name"),
])
def test_unknown_modules(env_id: str, words: str) -> None:
    pytest.importorskip("pettingzoo")
    with pytest.raises(UserError, match=words):
        families.find_spec(env_id)


def test_any_module_with_a_parallel_env_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pettingzoo")
    monkeypatch.setattr(counting_agents, "parallel_env", CountingAgents, raising=False)
    assert pettingzoo_maker("pettingzoo:counting_agents") is CountingAgents
