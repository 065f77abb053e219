"""A plain synchronous loop: sample, then learn, then sample again. Who works, and who waits?

    python -m docs.experiments.synchronous --seconds 20

PPO on Pong in one process, with the layers and the batches that `train.py` has on two cores without a GPU. It prints
how the time was spent, and draws `train_dir/synchronous.png`. What PPO can do without is left out: ReLU stands for ELU,
the learning rate and the normalization are constant, and rows that only reset are trained on, too. On two cores of a
Zen 3: 420 env_steps/s.
"""

import argparse
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from ale_py.vector_env import AtariVectorEnv
from torch import nn
from torch.distributions import Categorical

from appo import ppo_objective
from runtime.processes import Span, write_trace
from tools.timeline import draw_last
from vtrace import gae

T, EPOCHS, MINIBATCHES, ACTIONS, GAMMA, LAMBDA, CLIP = 64, 4, 4, 6, 0.99, 0.95, 0.2
spans: list[Span] = []


@contextmanager
def doing(lane: str, name: str):
    begin = time.perf_counter_ns()
    yield
    spans.append(Span(lane, name, begin, time.perf_counter_ns()))


def ask(net, obs):
    outputs = net(obs / 255)
    return Categorical(logits=outputs[:, :-1]), outputs[:, -1]


def sample(net, envs, obs):
    rows = []
    for _ in range(T):
        with doing("acting", "forward"), torch.no_grad():
            policy, values = ask(net, obs)
            actions = policy.sample()
        with doing("environments", "step"):
            following, rewards, terminated, truncated, _ = envs.step(actions.numpy())
        outcome = map(torch.tensor, (rewards, terminated, truncated))
        rows.append((obs, actions, policy.log_prob(actions), values, *outcome))
        obs = torch.from_numpy(following)
    with torch.no_grad():
        last_value = ask(net, obs)[1]
    return obs, last_value, map(torch.stack, zip(*rows, strict=True))


def learn(net, optimizer, last_value, rollout):
    obs, actions, log_probs, values, rewards, terminated, truncated = rollout
    values = torch.cat([values, last_value[None]])
    targets, advantages = gae(rewards.float(), values, terminated, truncated, GAMMA, LAMBDA)
    rows = [tensor.flatten(0, 1) for tensor in (obs, actions, log_probs, targets, advantages)]
    for _ in range(EPOCHS):
        for chosen in torch.randperm(len(rows[0])).chunk(MINIBATCHES):
            obs, actions, log_probs, targets, advantages = (tensor[chosen] for tensor in rows)
            policy, values = ask(net, obs)
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
            objective = ppo_objective((policy.log_prob(actions) - log_probs).exp(), advantages, CLIP)
            loss = (values - targets).square().mean() - objective.mean() - 0.01 * policy.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=20.0, help="of sampling and learning")
    parser.add_argument("--num_envs", type=int, default=32, help="environments, stepped together")
    args = parser.parse_args()
    net = nn.Sequential(nn.Conv2d(4, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.Flatten(),
                        nn.Linear(2592, 256), nn.ReLU(), nn.Linear(256, ACTIONS + 1))
    optimizer = torch.optim.Adam(net.parameters(), 3e-4, eps=1e-5)
    envs = AtariVectorEnv("pong", args.num_envs, stack_num=4, reward_clipping=True)
    obs, env_steps, begin = torch.from_numpy(envs.reset(seed=0)[0]), 0, time.perf_counter()
    while time.perf_counter() - begin < args.seconds:
        obs, last_value, rollout = sample(net, envs, obs)
        with doing("learning", "SGD"):
            learn(net, optimizer, last_value, rollout)
        env_steps += args.num_envs * T
    wall = time.perf_counter() - begin
    print(f"{env_steps / wall:,.0f} env_steps/s")
    for lane in ("environments", "acting", "learning"):
        busy = sum(span.end - span.begin for span in spans if span.thread == lane) / 1e9
        print(f"{lane:13} {busy / wall:4.0%} of the time")
    trace = Path("train_dir/synchronous.json")
    trace.parent.mkdir(exist_ok=True)
    write_trace(trace, {"loop": spans}, spans[0].begin, spans[-1].end)
    draw_last(trace, trace.with_suffix(".png"), 10.0)
