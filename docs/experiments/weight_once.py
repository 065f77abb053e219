"""Should V-trace's weight enter the advantage, when PPO's ratio is a weight already? A bandit tells.

    python -m docs.experiments.weight_once

Three arms, whose rewards are known exactly. Actions were drawn by an old policy mu; the policy pi that learns has moved
on. The true gradient of pi's mean reward is known, too. Compared with it is the mean over mu's actions of

    ratio * A             the importance weight once: what PPO's loss has, where it does not clip
    ratio * (rho * A)     twice: V-trace's rho in the advantage, times PPO's ratio

in exact arithmetic, no sampling.
"""

import torch

REWARDS = torch.tensor([1.0, 0.0, 0.5], dtype=torch.float64)
RHO_BAR = 1.0

mu = torch.tensor([0.70, 0.20, 0.10], dtype=torch.float64)
logits = torch.log(torch.tensor([0.20, 0.50, 0.30], dtype=torch.float64)).requires_grad_()


def gradient(weights: torch.Tensor) -> torch.Tensor:
    """Return the mean over mu's actions of weights * A * grad log pi, [3]."""
    log_pi = logits.log_softmax(0)
    advantages = REWARDS - log_pi.exp().detach() @ REWARDS
    return torch.autograd.grad((mu * weights * advantages * log_pi).sum(), logits)[0]


if __name__ == "__main__":
    pi = logits.softmax(0)
    truth = torch.autograd.grad(pi @ REWARDS, logits, retain_graph=True)[0]
    ratio = (pi / mu).detach()
    rho = ratio.clamp(max=RHO_BAR)
    for name, weights in (("true gradient", None), ("weight once", ratio), ("weight twice", ratio * rho)):
        found = truth if weights is None else gradient(weights)
        print(f"{name:14}", "  ".join(f"{x:+.4f}" for x in found.tolist()))
