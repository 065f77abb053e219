"""What users of Sample Factory type: each of its flags works or is answered in one line, and the lines are true."""

import dataclasses
import re

import pytest

import evaluate
from config import ALGORITHMS, Config, algorithm_class, make_config
from envs import families
from runtime.command_line import make_parser
from runtime.sample_factory import COUNTERPARTS, ELSEWHERE, LINES, VALUES
from runtime.user_error import UserError, closest

FLAGS = {field.name for algo in ALGORITHMS for field in dataclasses.fields(algorithm_class(algo).Settings)}
APPO = {field.name for field in dataclasses.fields(algorithm_class("appo").Settings)}
OF_EVALUATE = {flag.removeprefix("--") for action in evaluate.make_arguments()._actions
               for flag in action.option_strings}
PARSER = make_parser("", algo="appo")

# of cfg.py, all: those of train and enjoy
THEIRS = """
algo env experiment train_dir restart_behavior device seed num_policies async_rl serial_mode batched_sampling
num_batches_to_accumulate worker_num_splits policy_workers_per_policy max_policy_lag num_workers num_envs_per_worker
batch_size num_batches_per_epoch num_epochs rollout recurrence shuffle_minibatches gamma reward_scale reward_clip
value_bootstrap normalize_returns exploration_loss_coeff value_loss_coeff kl_loss_coeff exploration_loss gae_lambda
ppo_clip_ratio ppo_clip_value with_vtrace vtrace_rho vtrace_c optimizer adam_eps adam_beta1 adam_beta2 max_grad_norm
learning_rate lr_schedule lr_schedule_kl_threshold lr_adaptive_min lr_adaptive_max obs_subtract_mean obs_scale
normalize_input normalize_input_keys
actor_worker_gpus set_workers_cpu_affinity force_envs_single_thread default_niceness log_to_file
experiment_summaries_interval flush_summaries_interval stats_avg summaries_use_frameskip heartbeat_interval
heartbeat_reporting_interval train_for_env_steps train_for_seconds save_every_sec keep_checkpoints
load_checkpoint_kind save_milestones_sec save_best_every_sec save_best_metric save_best_after benchmark
encoder_mlp_layers encoder_conv_architecture encoder_conv_mlp_layers use_rnn rnn_size rnn_type rnn_num_layers
decoder_mlp_layers nonlinearity policy_initialization policy_init_gain actor_critic_share_weights adaptive_stddev
continuous_tanh_scale initial_stddev use_env_info_cache env_gpu_actions env_gpu_observations env_frameskip
env_framestack pixel_format use_record_episode_statistics episode_counter fps eval_env_frameskip no_render save_video
video_frames video_name max_num_frames max_num_episodes push_to_hub hf_repository policy_index eval_deterministic
train_script enjoy_script sample_env_episodes csv_folder_name with_wandb wandb_user wandb_project wandb_group
wandb_job_type wandb_tags wandb_dir with_pbt pbt_mix_policies_in_one_env pbt_period_env_steps pbt_start_mutation
pbt_replace_fraction pbt_mutation_rate pbt_replace_reward_gap pbt_replace_reward_gap_absolute pbt_optimize_gamma
pbt_target_objective pbt_perturb_min pbt_perturb_max res_w res_h wide_aspect_ratio num_agents num_humans num_bots
start_bot_difficulty timelimit record_to env_agents
""".split()  # noqa: SIM905  it is read more easily so


def parse(*argv: str) -> dict:
    return vars(PARSER.parse(argv))


@pytest.mark.parametrize("flag", THEIRS)
def test_every_flag_of_sample_factory_works_or_has_its_line(flag: str) -> None:
    if flag in APPO:
        assert flag not in LINES or flag == "eval_deterministic"
        return
    with pytest.raises(UserError) as refused:
        parse(f"--{flag}=1")
    assert str(refused.value) == f"unknown argument --{flag}: {LINES[flag]}"
    with pytest.raises(UserError, match=f"^unknown setting {flag}: |^--{flag} is a setting of --algo"):
        make_config({"env": "CartPole-v1", flag: 1})
    if flag not in OF_EVALUATE:
        with pytest.raises(UserError, match=re.escape(LINES[flag])):
            evaluate.make_arguments().parse([f"--{flag}"])


@pytest.mark.parametrize(("flag", "line"), [
    ("--eval_deterministic", "use --deterministic"), ("--algo=APPO", "it belongs to the training; leave it out"),
    ("--num_envs_per_worker=2", "it belongs to the training; leave it out"), ("--no_render", "leave it out"),
    ("--save_video", "--record_video FILE.mp4"), ("--max_num_episodes=10", "--episodes"),
    ("--device=gpu", "use --device=cuda"), ("--foo", "unknown argument --foo")])
def test_flags_of_enjoy_are_answered_by_evaluate(flag: str, line: str) -> None:
    with pytest.raises(UserError) as refused:
        evaluate.make_arguments().parse(["--env=CartPole-v1", flag])
    assert line in str(refused.value)
    assert "did you mean" not in str(refused.value)


def test_lines_name_flags_that_exist() -> None:
    lines = [*LINES.values(), *VALUES.values(), *ELSEWHERE.values()]
    named = {flag for line in lines for flag in re.findall(r"--(\w+)", line)}
    assert named <= FLAGS | OF_EVALUATE
    assert not [line for line in lines if "\n" in line or len(line) > 120]


@pytest.mark.parametrize(("name", "value"), VALUES, ids=str)
def test_values_of_sample_factory_are_answered_and_the_answer_works(name: str, value: str | int) -> None:
    algo = "impala" if name == "optimizer" else "appo"
    with pytest.raises(UserError, match=f"--{name}={value} is Sample Factory's; use --{name}="):
        make_parser("", algo=algo).parse([f"--algo={algo}", f"--{name}={value}"])
    with pytest.raises(UserError, match=f"--{name}={value} is"):
        make_config({"env": "CartPole-v1", "algo": algo, name: value})
    use = re.search(rf"--{name}=(\w+)", VALUES[name, value])[1]
    make_config({"env": "CartPole-v1"}, vars(make_parser("", algo=algo).parse([f"--algo={algo}", f"--{name}={use}"])))


@pytest.mark.parametrize("theirs", COUNTERPARTS)
def test_environments_of_sample_factory_are_called_by_name(theirs: str) -> None:
    ours = COUNTERPARTS[theirs]
    with pytest.raises(UserError, match=f"--env={theirs} is unknown; it is called --env {re.escape(ours)} here"):
        families.find_spec(theirs)
    if ours.startswith("NetHack"):
        return
    if theirs.startswith("doom_"):
        pytest.importorskip("vizdoom")
    if theirs == "tictactoe":
        pytest.importorskip("pettingzoo.classic.tictactoe_v3")
    families.find_spec(ours)


@pytest.mark.parametrize("theirs", ["doom_battle", "doom_duel_bots", "dmlab_30", "quadrotor_multi", "atari_",
                                    "mujoco_x"])
def test_environments_without_counterpart_say_what_to_do(theirs: str) -> None:
    with pytest.raises(UserError) as refused:
        families.find_spec(theirs)
    assert "--env module:function" in str(refused.value) or "called as --env" in str(refused.value)
    assert "did you mean" not in str(refused.value)


# ---- how close is close ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("word", "meant"), [
    ("--num_worker", "num_workers"), ("--learning_rates", "learning_rate"), ("--learning-rate", "learning_rate"),
    ("--BatchSize", "batch_size"), ("--gama", "gamma"), ("--rolout", "rollout"), ("--num_envs", "num_envs_per_worker"),
    ("--workers", "num_workers"), ("--frameskip", "env_frameskip"), ("--seeds", "seed")])
def test_a_misspelled_or_shortened_flag_is_recognized(word: str, meant: str) -> None:
    with pytest.raises(UserError, match=rf"\(did you mean --{meant}\?\)"):
        parse(f"{word}=1")


@pytest.mark.parametrize("word", [
    "foo", "with_wandb", "with_atari", "benchmark", "render", "n_envs", "checkpoint", "num_steps", "clip_coef", "lr",
    "total_timesteps", "rate", "size", "dir", "rnn", "policy", "", "-", "---"])
def test_a_flag_that_only_resembles_one_gets_no_wrong_advice(word: str) -> None:
    assert closest(word, [f"--{field.name}" for field in dataclasses.fields(Config)]) is None


@pytest.mark.parametrize(("env_id", "meant"), [
    ("CartPole", "CartPole-v1"), ("cartpole-v1", "CartPole-v1"), ("CartPole-v7", "CartPole-v1"),
    ("PongNoFrameskip-v3", "PongNoFrameskip-v4"), ("Pong", "ALE/Pong-v5"), ("ale/pong-v5", "ALE/Pong-v5"),
    ("phys2d/CartPole", "phys2d/CartPole-v1"), ("Pendulum-v0", "Pendulum-v1"), ("FrozenLakes-v1", "FrozenLake-v1")])
def test_an_id_of_another_version_or_case_names_the_right_one(env_id: str, meant: str) -> None:
    with pytest.raises(UserError, match=rf"; did you mean {re.escape(meant)}\?$"):
        families.find_spec(env_id)


@pytest.mark.parametrize("env_id", ["atari_pong", "Foo-v0", "MyGame-v1", "maze", "Poker-v0", "doom"])
def test_an_id_that_only_resembles_one_gets_no_wrong_advice(env_id: str) -> None:
    with pytest.raises(UserError) as refused:
        families.find_spec(env_id)
    assert "did you mean" not in str(refused.value)


def test_a_bare_environment_is_no_flag() -> None:
    with pytest.raises(UserError, match="unknown argument CartPole-v1; name an environment with --env"):
        parse("CartPole-v1")
