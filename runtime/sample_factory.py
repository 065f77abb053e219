"""What users of Sample Factory type that is called something else here, and what to type instead. Facts alone.

Most of its flags work as they are. Used by the command line, by `config.make_config` and by `envs/families.py`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from runtime.user_error import UserError, nearest

ENV_KWARGS = "an argument of the environment: give it with --env_kwargs"
NEVER_SHOWN = "nothing is shown unless evaluate.py has --render; leave it out"
OWN_MODEL = "not an option here; write the model as a function and name it with --model"
SAMPLES = "environments live on the CPU, in the rollout workers; leave it out"
NO_UPLOAD = "nothing is uploaded; the run's folder is all there is, and can be copied"
BOARD = "TensorBoard's records can be sent to Weights & Biases: three lines in docs/usage.md"
RESUME = "training resumes from the newest checkpoint, evaluate.py takes --checkpoint best or latest"
BEST = "best.pt has the best score of --eval_every_env_steps, or else mean of the last 100 returns; leave it out"
STALL = "a component that does nothing for --stall_timeout_sec is replaced; there is no other interval"
AGENTS = "the number of environments is --num_workers x --num_envs_per_worker"
STUDY = "many runs are started by: python -m tools.study FILE.toml"
VIDEO = "record a video with: python evaluate.py --record_video FILE.mp4"
EPISODES = "the number of episodes is --episodes of evaluate.py"
DOOM = "VizDoom's own scenarios have one player and no bots; make another game with --env module:function"
DMLAB = "there is no DMLab here; make its environment with --env module:function"

# names of flags -> what to do
FLAGS = {
    # training
    "batched_sampling": "each worker steps its environments as a batch already; leave it out",
    "num_batches_to_accumulate": "one dataset is assembled while another is trained on, never more; its size is "
                                 "--num_batches_per_epoch",
    "shuffle_minibatches": "minibatches are always drawn at random; leave it out",
    "value_bootstrap": "a time limit is always valued by its final observation; leave it out",
    "optimizer": "this algorithm has Adam (--adam_eps, --adam_beta1, --adam_beta2); leave it out",
    "actor_worker_gpus env_gpu_actions env_gpu_observations": SAMPLES,
    "force_envs_single_thread": "a rollout worker has one thread already; leave it out",
    "default_niceness": "niceness follows from the device and --num_epochs; leave it out",
    "use_env_info_cache": "what is known of an environment takes one reset; leave it out",
    "pixel_format": "images may be HxWxC or CxHxW, both are recognized; leave it out",
    "use_record_episode_statistics episode_counter": "true returns and lengths are always counted; leave it out",
    "benchmark": "use: python benchmark.py throughput --env ID",
    # records
    "log_to_file": "log.txt is always written; leave it out",
    "experiment_summaries_interval": "use --report_interval_sec",
    "flush_summaries_interval": "each report is written at once; its interval is --report_interval_sec",
    "stats_avg": "means are of the last 100 episodes; leave it out",
    "summaries_use_frameskip": "charts are over env_steps, calls of step(); env_frames stand beside them; leave it out",
    "heartbeat_interval heartbeat_reporting_interval": STALL,
    "load_checkpoint_kind": RESUME,
    "save_best_every_sec save_best_metric save_best_after": BEST,
    "with_wandb wandb_user wandb_project wandb_group wandb_job_type wandb_tags wandb_dir": BOARD,
    # networks
    "decoder_mlp_layers policy_initialization actor_critic_share_weights": OWN_MODEL,
    "continuous_tanh_scale": "use --squash_actions",
    # playing
    "save_video video_name": VIDEO,
    "video_frames": "a video lasts --episodes of evaluate.py",
    "no_render": NEVER_SHOWN,
    "render_mode": "use --render or --record_video of evaluate.py",
    "fps": "games are shown and recorded at their own speed; leave it out",
    "eval_env_frameskip": "games are played with the --env_frameskip of the training; leave it out",
    "max_num_episodes max_num_frames sample_env_episodes": EPISODES,
    "eval_deterministic": "use --deterministic",
    "policy_index": "use --policy of evaluate.py",
    "csv_folder_name eval_stats": "evaluate.py prints the mean, deviation and length of the returns; leave it out",
    "push_to_hub hf_repository train_script enjoy_script experiment_dir": NO_UPLOAD,
    # starting many runs
    "run backend pause_between experiment_suffix num_gpus max_parallel experiments_per_gpu ngc_job_template "
    "ngc_print_only slurm_gpus_per_job slurm_cpus_per_gpu slurm_print_only slurm_workdir slurm_partition "
    "slurm_sbatch_template slurm_timeout": STUDY,
    # its examples
    "env_agents envpool_num_threads envpool_thread_affinity_offset": AGENTS,
    "wide_aspect_ratio": "pictures of VizDoom are 4:3, resized to --res_w x --res_h; leave it out",
    "num_agents num_humans num_bots start_bot_difficulty timelimit": DOOM,
    "record_to demo_path": VIDEO,
    "dmlab_throughput_benchmark dmlab_renderer dmlab_gpus dmlab30_dataset dmlab_with_instructions "
    "dmlab_extended_action_set dmlab_use_level_cache dmlab_level_cache_path dmlab_one_task_per_worker": DMLAB,
    "clamp_actions clamp_rew_obs brax_render_res obs_key subtask ige_api_version character max_episode_steps "
    "penalty_step penalty_time fn_penalty_step savedir save_ttyrec_every add_image_observation crop_dim pixel_size "
    "add_stats_to_info custom_env_num_actions custom_env_episode_len my_custom_doom_arg": ENV_KWARGS,
    "use_prev_action use_tty_only h_dim msg_hdim color_edim char_edim use_crop use_crop_norm screen_kernel_size "
    "no_max_pool screen_conv_blocks blstats_hdim fc_after_cnn_hdim use_resnet": OWN_MODEL,
}
LINES = {name: line for names, line in FLAGS.items() for name in names.split()}

# values of flags that both have -> what to type
VALUES = {
    ("device", "gpu"): "use --device=cuda, or auto: a GPU where there is one",
    ("recurrence", -1): "use --recurrence=0, the whole rollout",
    ("save_milestones_sec", -1): "use --save_milestones_sec=inf, never",
    ("lr_schedule", "kl_adaptive_minibatch"): "use --lr_schedule=kl_adaptive",
    ("lr_schedule", "kl_adaptive_epoch"): "use --lr_schedule=kl_adaptive, which looks at every minibatch",
    ("encoder_conv_architecture", "convnet_impala"): "use --encoder_conv_architecture=convnet_a3c, the same two layers",
    ("optimizer", "lamb"): "use --optimizer=adam",
}

# its environments: the part behind the first "_" -> ours
ATARI = {"asteroid": "asteroids", "kongfumaster": "kungfumaster", "montezuma": "montezumarevenge",
         "privateye": "privateeye"}  # all others are called as the game
GAMES = """
    Alien Amidar Assault Asterix Asteroids Atlantis BankHeist BattleZone BeamRider Berzerk Bowling Boxing Breakout
    Centipede ChopperCommand CrazyClimber Defender DemonAttack DoubleDunk Enduro FishingDerby Freeway Frostbite Gopher
    Gravitar Hero IceHockey Jamesbond Kangaroo Krull KungFuMaster MontezumaRevenge MsPacman NameThisGame Phoenix Pitfall
    Pong PrivateEye Qbert Riverraid RoadRunner Robotank Seaquest Skiing Solaris SpaceInvaders StarGunner Surround Tennis
    TimePilot Tutankham UpNDown Venture VideoPinball WizardOfWor YarsRevenge Zaxxon""".split()  # noqa: SIM905  it is read more easily so
MUJOCO = {"hopper": "Hopper", "halfcheetah": "HalfCheetah", "humanoid": "Humanoid", "ant": "Ant",
          "standup": "HumanoidStandup", "doublependulum": "InvertedDoublePendulum", "pendulum": "InvertedPendulum",
          "reacher": "Reacher", "walker": "Walker2d", "pusher": "Pusher", "swimmer": "Swimmer"}
DOOM_IDS = {"basic": "Basic", "my_way_home_flat_actions": "MyWayHome", "my_way_home": "MyWayHome",
            "defend_the_center_flat_actions": "DefendCenter", "defend_the_center": "DefendCenter",
            "deadly_corridor": "DeadlyCorridor", "defend_the_line": "DefendLine",
            "health_gathering": "HealthGathering", "health_gathering_supreme": "HealthGatheringSupreme"}
COUNTERPARTS = {
    **{f"atari_{game.lower()}": f"{game}NoFrameskip-v4" for game in GAMES},
    **{f"mujoco_{name}": f"{ours}-v5" for name, ours in MUJOCO.items()},
    **{f"doom_{name}": f"Vizdoom{ours}-v1" for name, ours in DOOM_IDS.items()},
    "tictactoe": "pettingzoo:classic.tictactoe_v3", "nethack_score": "NetHackScore-v0",
    "nethack_staircase": "NetHackStaircase-v0", "nethack_pet": "NetHackStaircasePet-v0",
    "nethack_oracle": "NetHackOracle-v0", "nethack_gold": "NetHackGold-v0", "nethack_eat": "NetHackEat-v0",
    "nethack_scout": "NetHackScout-v0", "nethack_challenge": "NetHackChallenge-v0",
}
COUNTERPARTS["atari_surround"] = "ALE/Surround-v5"  # which has no older id
COUNTERPARTS |= {f"atari_{theirs}": COUNTERPARTS[f"atari_{game}"] for theirs, game in ATARI.items()}
ELSEWHERE = {
    "doom_": DOOM, "dmlab_": DMLAB,
    "quadrotor": "its quadrotors are a package of their own; make them with --env module:function",
    "isaacgym": "environments live on the CPU here; there is no Isaac Gym",
    "brax": "environments live on the CPU here; wrap Brax in a function, --env module:function",
    "envpool": "name the game itself, for example --env PongNoFrameskip-v4, which is stepped in C++",
    "megaverse": "make it with --env module:function", "nethack_": "its ids are NetHackScore-v0 and so on",
    "my_custom": "name your own with --env module:function (examples/custom_env.py)",
    "atari_": "Atari games are called as --env PongNoFrameskip-v4",
    "mujoco_": "MuJoCo's environments are called as --env Ant-v5",
}


def unknown_name(name: str, known: Iterable[str], beginning: str = "") -> str:
    """Say what to do instead of an unknown setting or flag: a line of the table, or the nearest known name."""
    line = LINES.get(name)
    return f": {line}" if line else nearest(f"{beginning}{name}", known)


def check_values(settings: Mapping[str, Any]) -> None:
    """Raise `UserError` for a value of Sample Factory's that is called something else here."""
    for name, value in settings.items():
        cure = VALUES.get((name, value)) if isinstance(value, str | int | float) else None
        if cure:
            raise UserError(f"--{name}={value if isinstance(value, str) else int(value)} is Sample Factory's; {cure}")


def other_name(env_id: str) -> str:
    """Say what one of Sample Factory's environments is called here; "": it is none."""
    name = env_id.lower()
    if ours := COUNTERPARTS.get(name):
        return f"; it is called --env {ours} here"
    return next((f"; {line}" for beginning, line in ELSEWHERE.items() if name.startswith(beginning)), "")
