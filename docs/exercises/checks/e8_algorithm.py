"""Check of exercise 8: targets and loss as defined, one step at a time; then CartPole is learned."""

import contextlib
import io
import math
import tempfile
from types import ModuleType, SimpleNamespace

import torch
from gymnasium import spaces
from torch import Tensor

from algorithm import Algorithm, Data, MaskedMean
from config import make_config
from distributions import ActionDistribution
from docs.exercises.checks.e5_gae import advantage
from docs.exercises.expect import expect, expect_close, part
from normalizers import ReturnNormalizer
from reducer import ALONE
from runtime.by_name import reference
from trainer import Trainer

T, B, GAMMA = 6, 4, 0.9
SETTINGS = {"awr_lambda": 0.8, "temperature": 0.5, "largest_weight": 3.0, "gamma": GAMMA}
ENV_STEPS, GOAL = 30_000, 100.0  # who acts at random balances for 22 steps
RETURNS = ReturnNormalizer(running=True)  # as if returns of mean 0.5 and deviation 2 had been seen
RETURNS.mean.fill_(0.5), RETURNS.var.fill_(4.0), RETURNS.shown.fill_(1.0)
HEADS = SimpleNamespace(returns=RETURNS,
                        distribution=lambda parameters: ActionDistribution(spaces.Discrete(2), parameters))


def check_targets(algo: Algorithm, outputs: tuple[Tensor, Tensor], data: Data) -> Data:
    """Check the targets; return them."""
    got = algo.targets(HEADS, outputs, data)
    expect(isinstance(got, dict) and {"targets", "advantages"} <= got.keys(),
           f"targets() must return a dict with 'targets' and 'advantages', got {got!r}")
    columns = RETURNS.denormalize(outputs[1]), data["rewards"], data["terminated"], data["truncated"]
    wanted = torch.stack([torch.stack([
        advantage(*(x[t:, b] for x in (columns[1], columns[0], *columns[2:])), GAMMA, SETTINGS["awr_lambda"])
        for b in range(B)]) for t in range(T)])
    look = ("R is the TD(lambda) return, V(x_t) + GAE with lambda = awr_lambda, and A = R - V, all in units of the "
            "rewards: model.returns.denormalize (targets)")
    valid = data["valid"]
    for name, right in (("advantages", wanted), ("targets", columns[0][:-1] + wanted)):
        mine = got[name]
        mine = torch.where(valid, mine, right) if isinstance(mine, Tensor) and mine.shape == right.shape else mine
        expect_close(mine, right, f"targets(): {name}", look)
    return got


def check_loss(algo: Algorithm, outputs: tuple[Tensor, Tensor], data: Data) -> None:
    """Check the gradient of the loss, which is what moves the network."""
    free = tuple(x.clone().requires_grad_() for x in outputs)
    data = data | {"targets": data["targets"].masked_fill(~data["valid"], 100.0),  # of no decision: anything
                   "advantages": data["advantages"].masked_fill(~data["valid"], 100.0)}
    loss = algo.loss(HEADS, free, data, MaskedMean(data["valid"], ALONE)).total
    rows = data["valid"].nonzero().tolist()
    deviation = data["advantages"][data["valid"]].std(correction=0)
    logits, values = (x.clone().requires_grad_() for x in outputs)
    policy_loss, value_loss = torch.zeros(()), torch.zeros(())
    for t, b in rows:
        weight = min(math.exp(data["advantages"][t, b] / deviation / SETTINGS["temperature"]),
                     SETTINGS["largest_weight"])
        policy_loss = policy_loss - weight * logits[t, b].log_softmax(0)[int(data["actions"][t, b, 0])] / len(rows)
        value_loss = value_loss + (values[t, b] - RETURNS.normalize(data["targets"][t, b])).square() / len(rows)
    for name, x, right, term, look in (
            ("logits", free[0], logits, policy_loss, "Each valid row's -log pi(a|x) is weighed by min(exp(A / deviation"
             " / temperature), largest_weight); the deviation is that of the valid rows, mean.std"),
            ("values", free[1], values, 0.5 * value_loss, "0.5 * (V - R)^2, averaged over the valid rows, in the "
             "units of the value head: model.returns.normalize_targets")):
        (got,) = torch.autograd.grad(loss, x, retain_graph=True, allow_unused=True)
        expect(got is not None, f"the loss does not depend on the {name}. {look} (loss)")
        expect_close(got, torch.autograd.grad(term, right)[0], f"the loss's gradient with respect to the {name}, at ",
                     f"{look} (loss)")


def learn(kind: type[Algorithm]) -> float:
    """Train on CartPole in this process, always with the same numbers; return the mean return of 100 episodes."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()), Trainer(
            "CartPole-v1", algo=kind, serial_mode=True, seed=8, train_dir=folder, num_workers=1, num_envs_per_worker=16,
            device="cpu", save_every_sec=10_000) as system:
        return system.train(ENV_STEPS)["mean_return"]


def check(student: ModuleType) -> str:
    """Return what a solution has shown. Raises `NotYet` for what is none."""
    kind = part(student, "AWR")
    algo = kind(make_config(kind.Settings, {"env": "none", "algo": reference(kind)}, SETTINGS))
    ends = torch.rand(T, B)
    terminated, truncated = ends < 0.15, ends > 0.85
    valid = torch.cat([torch.ones(1, B, dtype=torch.bool), ~(terminated | truncated)[:-1]])
    outputs = torch.randn(T + 1, B, 2), torch.randn(T + 1, B)
    data = {"actions": torch.randint(2, (T, B, 1)).float(), "rewards": torch.randn(T, B), "terminated": terminated,
            "truncated": truncated, "valid": valid, "values": torch.randn(T, B), "log_probs": torch.zeros(T, B),
            "action_parameters": torch.zeros(T, B, 2)}
    check_loss(algo, outputs, data | check_targets(algo, outputs, data))
    score = learn(kind)
    expect(score >= GOAL, f"targets and loss are right, but CartPole's mean return after {ENV_STEPS:,} env_steps is "
           f"{score:.0f}; expected at least {GOAL:.0f}. Do the settings of the start still stand (Settings, profiles)?")
    return f"an algorithm of your own: CartPole's mean return rose from 22 to {score:.0f} in {ENV_STEPS:,} env_steps."
