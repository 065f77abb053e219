"""Check of exercise 8: targets and gradients are those of the solution; then CartPole is learned."""

import contextlib
import io
import tempfile
from types import ModuleType

from algorithm import Algorithm
from docs.exercises.expect import expect, expect_close
from docs.exercises.losses import HEADS, loss_of, make_algorithm, minibatch
from docs.exercises.solutions import e8_algorithm as solution
from trainer import Trainer

SETTINGS = {"awr_lambda": 0.8, "temperature": 0.5, "largest_weight": 3.0, "gamma": 0.9}
ENV_STEPS, GOAL = 30_000, 100.0  # who acts at random balances for 22 steps
LOOK = {
    "targets": "R is the TD(lambda) return, V(x_t) + GAE with lambda = awr_lambda, and A = R - V, all in units of the "
               "rewards: model.returns.denormalize (targets)",
    "logits": "Each valid row's -log pi(a|x) is weighed by min(exp(A / deviation / temperature), largest_weight); the "
              "deviation is that of the valid rows, mean.std (loss)",
    "values": "0.5 * (V - R)^2, averaged over the valid rows, in the units of the value head: "
              "model.returns.normalize_targets (loss)"}


def learn(kind: type[Algorithm]) -> float:
    """Train on CartPole in this process, always with the same numbers; return the mean return of 100 episodes."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()), Trainer(
            "CartPole-v1", algo=kind, serial_mode=True, seed=8, train_dir=folder, num_workers=1, num_envs_per_worker=16,
            device="cpu", save_every_sec=10_000) as system:
        return system.train(ENV_STEPS)["mean_return"]


def check(student: ModuleType) -> str:
    """Return what a solution has shown. Raises `NotYet` for what is none."""
    mine, right = (make_algorithm(module, "AWR", **SETTINGS) for module in (student, solution))
    outputs, data = minibatch(ends=True)
    got, wanted = mine.targets(HEADS, outputs, data), right.targets(HEADS, outputs, data)
    expect(isinstance(got, dict) and wanted.keys() <= got.keys(),
           f"targets() must return a dict with 'targets' and 'advantages', got {got!r}")
    for name, column in wanted.items():
        expect_close(got[name], column, f"targets(): {name}", LOOK["targets"], rows=data["valid"])
        data[name] = column.masked_fill(~data["valid"], 100.0)  # of no decision: anything
    for name, gradient, column in zip(("logits", "values"), loss_of(mine, outputs, data)[1],
                                      loss_of(right, outputs, data)[1], strict=True):
        expect_close(gradient, column, f"the loss's gradient with respect to the {name}, at ", LOOK[name])
    score = learn(student.AWR)
    expect(score >= GOAL, f"targets and loss are right, but CartPole's mean return after {ENV_STEPS:,} env_steps is "
           f"{score:.0f}; expected at least {GOAL:.0f}. Do the settings of the start still stand (Settings, profiles)?")
    return f"an algorithm of your own: CartPole's mean return rose from 22 to {score:.0f} in {ENV_STEPS:,} env_steps."
