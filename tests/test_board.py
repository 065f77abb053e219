"""The TensorBoard page: the names of its charts, and the tab of hyperparameters."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata

from config import make_config
from runtime.board import Board


def test_charts_have_plain_names_and_counters_have_none(tmp_path: Path) -> None:
    board = Board(tmp_path, None)
    board.add_row({"env_steps": 100, "env_frames": 400, "wall_sec": 5.0, "num_episodes": 3, "sgd_steps": 7, "fps": 80.0,
                   "mean_return": 2.0, "return_min": 1.0, "return_max": 3.0, "mean_length": None, "loss": 0.5,
                   "policy_lag_mean": 4.0, "eval_return": 9.0, "eval_env_steps": 90, "eval_sgd_steps": 6}, 100)
    board.flush()
    read = EventAccumulator(str(tmp_path)).Reload()
    scalars = {tag: [(scalar.step, scalar.value) for scalar in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
    assert scalars == {
        "system/frames_per_sec": [(100, 80)], "episode/return_mean": [(100, 2)], "episode/return_min": [(100, 1)],
        "episode/return_max": [(100, 3)], "train/loss": [(100, 0.5)], "lag/mean": [(100, 4)], "eval/return": [(90, 9)]}


def test_settings_are_hyperparameters(tmp_path: Path) -> None:
    cfg = make_config({"env": "CartPole-v1", "train_dir": "runs", "experiment": "one", "learning_rate": 0.01,
                       "encoder_mlp_layers": (64, 32), "use_rnn": True})
    board = Board(tmp_path, None)
    board.add_settings(cfg)
    board.flush()
    content = EventAccumulator(str(tmp_path)).Reload().PluginTagToContent(metadata.PLUGIN_NAME)
    session = metadata.parse_session_start_info_plugin_data(content[metadata.SESSION_START_INFO_TAG])
    assert session.group_name == "one in runs"
    assert session.hparams["learning_rate"].number_value == 0.01
    assert session.hparams["encoder_mlp_layers"].string_value == "64 32"
    assert session.hparams["use_rnn"].bool_value is True
    assert "keep_checkpoints" not in session.hparams
