"""Tests of `flat_spaces.py`: each kind of observation becomes its leaf, each row of numbers a valid action."""

import zlib
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv
from gymnasium.vector.utils import batch_space, iterate
from tiny import Tiny

from distributions import ActionDistribution
from envs import flat_spaces
from runtime.utils import UserError

inf, MAX = np.inf, np.finfo(np.float32).max


def vector(size: int, dtype: type = np.float32) -> spaces.Box:
    return spaces.Box(-inf, inf, (size,), dtype)


def image(*shape: int) -> spaces.Box:
    return spaces.Box(0, 255, shape, np.uint8)


# ---- observations ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "channels_last"), [
    ((84, 84, 3), True), ((72, 128, 3), True), ((7, 7, 21), True), ((8, 8, 111), True), ((84, 84, 4), True),
    ((4, 84, 84), False), ((3, 72, 128), False), ((21, 7, 7), False), ((111, 8, 8), False), ((1, 5, 9), False)])
def test_the_axis_of_the_channels_is_told_from_the_shape(shape: tuple[int, ...], channels_last: bool) -> None:
    assert flat_spaces.is_channels_last(shape) == channels_last


FLOAT_IMAGE, TABLE = spaces.Box(-inf, inf, (4, 5, 3), np.float32), [[2, 3], [4, 5]]
PLAIN = {  # space, its leaf, how one observation becomes one of the leaf
    "number": (spaces.Box(-5, 5, (), np.float32), vector(1), lambda x: [x]),
    "vector": (spaces.Box(-5, 5, (3,), np.float64), vector(3, np.float64), np.asarray),
    "integers": (spaces.Box(-5, 5, (3,), np.int32), vector(3, np.float64), np.asarray),
    "bytes": (spaces.Box(0, 255, (3,), np.uint8), vector(3), np.asarray),
    "matrix": (spaces.Box(-5, 5, (2, 3), np.float32), vector(6), np.ravel),
    "gray_image": (image(4, 5), image(1, 4, 5), lambda x: x[None]),
    "image_hwc": (image(4, 5, 3), image(4, 5, 3), np.asarray),
    "image_chw": (image(3, 4, 5), image(3, 4, 5), np.asarray),
    "float_image": (spaces.Box(0, 1, (4, 5, 3), np.float64), FLOAT_IMAGE, np.asarray),
    "discrete": (spaces.Discrete(4, start=-2), spaces.Discrete(4), lambda x: x + 2),
    "multi_discrete": (spaces.MultiDiscrete(TABLE, start=[[0, 1], [-2, 3]], dtype=np.int32),
                       spaces.MultiDiscrete([2, 3, 4, 5]), lambda x: np.ravel(x) - [0, 1, -2, 3]),
    "multi_binary": (spaces.MultiBinary((2, 3)), spaces.MultiBinary(6), np.ravel),
    "text": (spaces.Text(20, charset="ab "), spaces.MultiBinary(flat_spaces.TEXT_BITS), flat_spaces.hash_words),
}


def check_leaves(space: spaces.Space, leaves: dict[str, spaces.Space], convert: Any) -> None:
    """Play 5 steps in 3 environments; compare with converting each observation by itself."""
    assert flat_spaces.obs_leaves(space) == leaves
    space.seed(0)
    played = [[space.sample() for _ in range(5)] for _ in range(3)]
    env = SyncVectorEnv([partial(Tiny, observation_space=space, observe=partial(next, iter(tape)), length=9)
                         for tape in played])
    for t in range(5):
        batch = env.step(np.zeros(3, int))[0] if t else env.reset()[0]
        flat = flat_spaces.flatten_obs(space, leaves, batch)
        assert list(flat) == list(leaves)
        for name, leaf in leaves.items():
            expected = np.stack([np.asarray(convert(observations[t])[name]) for observations in played])
            assert flat[name].shape == (3, *leaf.shape)
            np.testing.assert_array_equal(flat[name], expected)
            assert batch_space(leaf, 3).contains(flat[name].astype(leaf.dtype)), "the leaf's space allows it"
            assert flat[name].dtype == np.int64 or not flat_spaces.num_options(leaf), "as one_hot needs it"


@pytest.mark.parametrize("kind", PLAIN)
def test_plain_observations(kind: str) -> None:
    space, leaf, convert = PLAIN[kind]
    check_leaves(space, {"obs": leaf}, lambda obs: {"obs": convert(obs)})


def test_dict_and_tuple_observations_are_named_by_their_paths() -> None:
    space, leaf, convert = ({kind: each[i] for kind, each in PLAIN.items()} for i in range(3))
    nested = spaces.Dict(
        camera=spaces.Dict(left=space["image_hwc"], right=space["gray_image"]),
        hands=spaces.Tuple((space["discrete"], spaces.Dict(text=space["text"]), spaces.Tuple((space["number"],)))))
    names = {"camera/left": "image_hwc", "camera/right": "gray_image", "hands/0": "discrete", "hands/1/text": "text",
             "hands/2/0": "number"}

    def parts(obs: Any) -> dict[str, Any]:
        found = [*obs["camera"].values(), obs["hands"][0], obs["hands"][1]["text"], obs["hands"][2][0]]
        return {name: convert[kind](part) for (name, kind), part in zip(names.items(), found, strict=True)}

    check_leaves(nested, {name: leaf[kind] for name, kind in names.items()}, parts)


def test_a_text_becomes_the_set_of_its_words() -> None:
    bits = flat_spaces.hash_words("Go to  the RED door, to the left")
    words = ["go", "to", "the", "red", "door,", "left"]
    assert set(np.flatnonzero(bits)) == {zlib.crc32(word.encode()) % flat_spaces.TEXT_BITS for word in words}
    assert not flat_spaces.hash_words("").any()


# ---- actions -----------------------------------------------------------------------------------------------------

ACTIONS = {  # space; numbers of columns, of parameters of a distribution, of bits of a mask
    "discrete": (spaces.Discrete(5, start=3), 1, 5, 5),
    "multi_discrete": (spaces.MultiDiscrete(TABLE, start=[[0, 1], [-2, 3]]), 4, 14, 14),
    "small_integers": (spaces.MultiDiscrete([2, 3], dtype=np.int8), 2, 5, 5),
    "multi_binary": (spaces.MultiBinary((2, 3)), 6, 6, 0),
    "box": (spaces.Box(np.array([-2, 0.1], np.float32), np.array([2, 0.3], np.float32)), 2, 4, 0),
    "double_matrix": (spaces.Box(-1, 3, (2, 3), np.float64), 6, 12, 0),
    "unbounded": (spaces.Box(np.array([-inf, 0, -inf]), np.array([inf, inf, 1]), dtype=np.float64), 3, 6, 0),
    "integers": (spaces.Box(-2, 3, (3,), np.int32), 3, 6, 0),
    "bytes": (spaces.Box(0, 255, (2,), np.uint8), 2, 4, 0),
    "tuple": (spaces.Tuple((spaces.Discrete(3), spaces.Tuple((spaces.MultiBinary(2), spaces.Box(-1, 1, (1,)))),
                            spaces.MultiDiscrete([2, 2], start=[1, 1]))), 6, 11, 7),
    "dict": (spaces.Dict(turn=spaces.Box(-3, 3, (2,)), hand=spaces.Dict(grip=spaces.Discrete(2, start=-1),
                                                                      keys=spaces.MultiBinary(3))), 6, 9, 2),
}


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize("kind", ACTIONS)
def test_rows_become_valid_actions(kind: str, squash: bool) -> None:
    space, *sizes = ACTIONS[kind]
    num_bits = sum(sum(flat_spaces.num_options(leaf)) for leaf in flat_spaces.action_leaves(space).values())
    assert [flat_spaces.num_columns(space), flat_spaces.num_action_parameters(space), num_bits] == sizes
    rows = ActionDistribution(space, torch.zeros(200, sizes[1])).sample().numpy()  # numbers also beyond the bounds
    untouched = rows.copy()
    batch = flat_spaces.unflatten_actions(space, rows, squash=squash)
    actions = list(iterate(batch_space(space, 200), batch))  # as SyncVectorEnv hands them to its environments
    assert len(actions) == 200
    assert all(space.contains(action) for action in actions)
    assert (rows == untouched).all()


@pytest.mark.parametrize(("space", "rows", "actions"), [
    (spaces.Discrete(3, start=5), [[0], [1], [2]], [5, 6, 7]),
    (spaces.MultiDiscrete([[2], [3]], start=[[10], [-1]]), [[0, 0], [1, 2]], [[[10], [-1]], [[11], [1]]]),
    (spaces.MultiBinary((1, 2)), [[0, 1], [1, 1]], [[[0, 1]], [[1, 1]]]),
    (spaces.Box(0, 2, (1,), np.int64), [[-3], [-0.51], [-0.49], [0.49], [0.51], [3]], [[0], [0], [1], [1], [2], [2]])])
def test_every_choice_has_its_index_and_whole_numbers_are_rounded_to(space: Any, rows: list, actions: list) -> None:
    found = flat_spaces.unflatten_actions(space, np.float32(rows))
    assert found.dtype == space.dtype
    assert found.tolist() == actions


def test_an_image_of_another_layout_is_not_reinterpreted() -> None:
    space = spaces.Box(0, 255, (4, 6, 3), np.uint8)
    with pytest.raises(ValueError, match=r"is \(3, 4, 6\), and its space \(4, 6, 3\)"):
        flat_spaces.flatten_obs(space, flat_spaces.obs_leaves(space), np.zeros((2, 3, 4, 6), np.uint8))


def test_parts_lie_side_by_side_in_the_order_of_the_space() -> None:
    space = spaces.Dict({  # which gymnasium sorts
        "b": spaces.MultiBinary(2), "a": spaces.Tuple((spaces.Discrete(9), spaces.Box(-1, 1, (2,))))})
    assert list(flat_spaces.action_leaves(space)) == ["a/0", "a/1", "b"]
    action = flat_spaces.unflatten_actions(space, np.float32([[7, 0.25, -0.5, 0, 1]]))
    assert list(action) == ["a", "b"]
    assert [part.tolist() for part in (*action["a"], action["b"])] == [[7], [[0.25, -0.5]], [[0, 1]]]


@pytest.mark.parametrize(("low", "high", "action", "expected"), [
    (-2, 2, [-1, 0, 1, 0.5, 9], [-2, 0, 2, 1, 2]), (0, 10, [-1, 0, 1, -0.5, -9], [0, 5, 10, 2.5, 0]),
    (-inf, inf, [-7, 0, 7], [-7, 0, 7]), (0, inf, [-7, 0.5, 7], [0, 0.5, 7]),
    (-1.7e38, 1.7e38, [0.5, -1, 7], [0.85e38, -1.7e38, 1.7e38]),
    (-2e38, 2e38, [0.5, -1, 7], [0.5, -1, 7]), (-MAX, MAX, [0.5, -1, 7], [0.5, -1, 7])])
def test_actions_are_in_units_of_their_range_and_clipped_where_float32_can_hold_it_and_others_pass(
        low: float, high: float, action: list[float], expected: list[float]) -> None:
    scaled = flat_spaces.unflatten_actions(spaces.Box(low, high, (1,), np.float32), np.float32(action)[:, None])
    assert scaled.dtype == np.float32
    np.testing.assert_allclose(scaled[:, 0], expected, rtol=1e-6)


def test_squashed_actions_are_tanh_in_units_of_the_range() -> None:
    space = spaces.Box(np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32))
    actions = np.random.default_rng(0).normal(0, 2, (50, 2)).astype(np.float32)
    expected = np.tanh(actions) * [2, 5] + [0, 5]
    squashed = flat_spaces.unflatten_actions(space, actions, squash=True)
    np.testing.assert_allclose(squashed, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_rounding_never_leaves_the_bounds(dtype: type) -> None:
    bounds = np.sort(np.random.default_rng(0).normal(0, 10, (2, 500)), 0).astype(dtype)
    space = spaces.Box(bounds[0], bounds[1], dtype=dtype)
    for extreme in (-1, 1, 5):
        (action,) = flat_spaces.unflatten_actions(space, np.full((1, 500), extreme, np.float32))
        assert space.contains(action)
        np.testing.assert_allclose(action, bounds[max(0, min(extreme, 1))], 1e-5, 0.02 if dtype == np.float16 else 0)


@pytest.mark.parametrize(("space", "part"), [
    (spaces.Box(-1, 1, (2, 2, 2, 2)), "observation 'obs'"), (None, "observation 'obs'"),
    (spaces.Dict(near=vector(2), far=spaces.Tuple((vector(2), spaces.Sequence(vector(2))))), "observation 'far/1'"),
    (None, "the action space"), (spaces.Box(-1, 1, (0,)), "the action space"), (spaces.Dict(), "the action space"),
    (spaces.Tuple((spaces.Discrete(2), spaces.Text(3))), "part '1' of the action space")])
def test_unsupported_spaces_are_refused_naming_the_part(space: spaces.Space, part: str) -> None:
    leaves = flat_spaces.obs_leaves if part.startswith("observation") else flat_spaces.action_leaves
    with pytest.raises(UserError, match=f"^{part} is .*supported are"):
        leaves(space)


def test_masks_are_joined_into_one_row_of_bits() -> None:
    for mask in (np.array([1, 0, 1, 1, 0], np.int8), np.array([1, 0, 1, 1, 0], bool), [True, False, True, True, False],
                 (np.array([1, 0]), np.array([True, True, False])), [np.array([1, 0]), ([1], np.array([[1, 0]]))]):
        row = flat_spaces.flatten_mask(mask)
        assert row.dtype == bool
        assert row.tolist() == [True, False, True, True, False]
