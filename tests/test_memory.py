"""Tests of `runtime/memory.py`: networks that no memory holds are refused before they take any."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from appo import APPO
from config import Config, make_config
from model import make_model
from runtime.memory import copies_of_weights, weights_that_fit
from runtime.user_error import UserError

VECTOR, IMAGE, FEW = spaces.Box(-1, 1, (4,)), spaces.Box(0, 255, (16, 16, 3), np.uint8), spaces.Discrete(2)
GB = 10**9


class LargeEncoder(nn.Module):
    """An encoder of a user, with a layer of 1 GB."""

    def __init__(self, cfg: Config, obs_space: dict[str, spaces.Box]) -> None:
        super().__init__()
        self.layer, self.out_size = nn.Linear(25, GB // 100), 8


class BrokenEncoder(nn.Module):
    def __init__(self, cfg: Config, obs_space: dict[str, spaces.Box]) -> None:
        super().__init__()
        torch.zeros(2, 3) @ torch.zeros(2, 3)


@pytest.mark.parametrize(("settings", "space", "actions", "cure"), [
    ({"use_rnn": True, "rnn_size": 10_000_000}, VECTOR, FEW, "lower --rnn_size or --rnn_num_layers"),
    ({"use_rnn": True, "rnn_size": 10**12}, VECTOR, FEW, "lower --rnn_size or --rnn_num_layers"),
    ({"use_rnn": True, "rnn_num_layers": 10**9}, VECTOR, FEW, "lower --rnn_size or --rnn_num_layers"),
    ({"encoder_mlp_layers": (10**9,)}, VECTOR, FEW, "lower --encoder_mlp_layers"),
    ({"encoder_mlp_layers": (10**18,)}, VECTOR, FEW, "lower --encoder_mlp_layers"),
    ({"encoder_mlp_layers": (10**30,)}, VECTOR, FEW, "lower --encoder_mlp_layers"),
    ({"encoder_conv_mlp_layers": (10**7,)}, IMAGE, FEW, "lower --encoder_conv_mlp_layers"),
    ({}, VECTOR, spaces.Discrete(10**9), "let the environment offer fewer actions"),
    ({"encoder": "test_memory:LargeEncoder"}, VECTOR, FEW, "make the layers of your own parts smaller"),
], ids=str)
def test_a_network_that_no_memory_holds_is_refused_and_the_setting_is_named(
        settings: dict[str, Any], space: spaces.Box, actions: spaces.Space, cure: str) -> None:
    cfg = make_config({"env": "test", "encoder_mlp_layers": (8,)}, settings)
    with pytest.raises(UserError, match=cure) as raised, weights_that_fit(cfg, True, GB):
        make_model(cfg, {"obs": space}, actions)
    assert "\n" not in str(raised.value)


def test_what_is_allowed_is_the_number_of_weights_times_their_copies() -> None:
    cfg = make_config({"env": "test", "encoder_mlp_layers": (2000,)})
    weights = 4 * copies_of_weights(cfg) * (4 * 2000 + 2000 + 2 * 2000 + 2 + 2000 + 1)
    with weights_that_fit(cfg, True, int(1.5 * weights)):
        make_model(cfg, {"obs": VECTOR}, FEW)
    with pytest.raises(UserError), weights_that_fit(cfg, True, weights):
        make_model(cfg, {"obs": VECTOR}, FEW)
    with weights_that_fit(cfg, False, weights):  # on a GPU there are fewer copies in the memory of the CPU
        make_model(cfg, {"obs": VECTOR}, FEW)
    make_model(cfg, {"obs": VECTOR}, FEW)  # nothing is counted any more


def test_other_errors_of_a_part_stay_what_they_are() -> None:
    cfg = make_config({"env": "test", "encoder": "test_memory:BrokenEncoder"})
    with pytest.raises(RuntimeError, match="cannot be multiplied"), weights_that_fit(cfg, True, GB):
        make_model(cfg, {"obs": VECTOR}, FEW)


def test_a_run_with_too_large_a_network_ends_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lower --encoder_mlp_layers"):
        APPO("CartPole-v1", train_dir=str(tmp_path), serial_mode=True, encoder_mlp_layers=(10**9,))
    assert not list(tmp_path.iterdir())
