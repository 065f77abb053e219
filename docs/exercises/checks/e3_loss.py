"""Check of exercise 3: the loss and its gradient are those of the solution, with and without ends of episodes."""

from types import ModuleType

import torch

from docs.exercises.expect import expect, expect_close
from docs.exercises.losses import HEADS, loss_of, make_algorithm, minibatch
from docs.exercises.solutions import e3_loss as solution

CASES = (  # the coefficient, whether episodes end on the way, where to look
    (0.0, False, "The loss must be that of APPO: multiply the term by the coefficient"),
    (0.7, False, "KL(pi_t || pi_{t+1}) for t = 0 ... T-1, in this order; row T counts as a second one. Compare "
     "distributions, not their parameters: model.distribution(parameters).kl(other)"),
    (0.7, True, "Where the episode ends no decision follows, so the pair counts 0; `mean` divides by the valid rows"))


def check(student: ModuleType) -> str:
    """Return what a solution has shown. Raises `NotYet` for what is none."""
    for coeff, ends, look in CASES:
        mine, right = (make_algorithm(module, "SmoothPPO", smooth_coeff=coeff) for module in (student, solution))
        outputs, data = minibatch(ends)
        data |= torch.no_grad()(right.targets)(HEADS, outputs, data)
        loss, (gradient, _) = loss_of(mine, outputs, data)
        wanted, (wanted_gradient, _) = loss_of(right, outputs, data)
        what = f"smooth_coeff {coeff}, {'some' if ends else 'no'} episodes end on the way"
        expect_close(loss.total, wanted.total, f"{what}: the loss", f"{look} (loss)")
        expect_close(gradient, wanted_gradient, f"{what}: the gradient with respect to the logits",
                     "It flows into both policies of a pair: no detach() and no no_grad() (loss)")
    expect("smoothness" in loss.statistics, "loss.statistics has no 'smoothness'; add the term to it, so that "
           "TensorBoard shows it (loss)")
    expect_close(loss.statistics["smoothness"], wanted.statistics["smoothness"], "loss.statistics['smoothness']",
                 "TensorBoard shows what stands there: the term itself (loss)")
    return "neighbors are held together within an episode, not across its end, and APPO is what it was at 0."
