"""Check of exercise 6: properties of any memory, whatever it remembers."""

from types import ModuleType

import torch
from torch import Tensor

from config import make_config
from docs.exercises.expect import expect, expect_close, part

B, L, SIZE, BEGIN = 3, 10, 5, 8  # episodes of row 1 begin at steps 2 and 8


def check(student: ModuleType) -> str:
    """Return what a solution has shown. Raises `NotYet` for what is none."""
    core = part(student, "make")(make_config({"env": "none"}), SIZE)
    sizes = getattr(core, "out_size", None), getattr(core, "state_size", None)
    expect(all(isinstance(size, int) and size > 0 for size in sizes), "out_size and state_size: expected whole numbers "
           f"above 0, got {sizes}; a core without a state has no memory (__init__)")
    features, begins = torch.randn(B, L, SIZE), torch.zeros(B, L, dtype=torch.bool)
    begins[1, 2] = begins[1, BEGIN] = True
    state = torch.rand(B, core.state_size)

    def run(features: Tensor, state: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
        outputs, after = core(features, state, begins)
        expect((outputs.shape, after.shape) == ((*features.shape[:2], core.out_size), (len(features), core.state_size)),
               f"expected outputs {[*features.shape[:2], core.out_size]} ([B, L, out_size]) and states "
               f"{[len(features), core.state_size]}, got {list(outputs.shape)} and {list(after.shape)} (forward)")
        return outputs, after

    outputs, after = run(features, state, begins)
    other_first = torch.cat([torch.randn(B, 1, SIZE), features[:, 1:]], 1)
    changed = (run(other_first, state, begins)[0] - outputs).abs().amax(2) > 1e-7  # [B, L]
    never = torch.zeros_like(begins)
    remembered = (run(other_first, state, never)[0] - run(features, state, never)[0]).abs().amax(2) > 1e-7
    expect(remembered[:, 1:BEGIN].all(), "another first observation does not change the outputs of the steps after it: "
           "nothing is remembered. The state after a step is what the next one begins with (forward)")
    steps, stepped = [], state
    for t in range(L):
        output, stepped = run(features[:, t : t + 1], stepped, begins[:, t : t + 1])
        steps.append(output)
    expect_close(outputs, torch.cat(steps, 1), "a sequence at once, as when learning, against step by step, as when "
                 "acting: outputs", "The same state must go from step to step, and be reset where new_episode "
                 "is True, in the middle of a sequence too (forward)")
    expect_close(after, stepped, "a sequence at once against step by step: the state after it",
                 "Return the state after the last step (forward)")
    expect(not changed[1, BEGIN:].any(), f"row 1 begins an episode at step {BEGIN}, but what came before still changes "
           "its outputs. The state before such a step counts as 0 (forward)")
    fresh, _ = run(features[1:2, BEGIN:], torch.zeros(1, core.state_size), begins[1:2, BEGIN:])
    expect_close(outputs[1:2, BEGIN:], fresh, f"row 1 from step {BEGIN} on, where an episode begins, against the same "
                 "steps with a state of 0", "A new episode's state is 0; the other rows keep theirs (forward)")
    other_begin = features.clone()
    other_begin[1, BEGIN] += 1
    changed = (run(other_begin, state, begins)[0] - outputs)[1, BEGIN:].abs().amax(1) > 1e-7
    expect(changed.all(), f"another observation at step {BEGIN}, with which an episode of row 1 begins, does not "
           "change the outputs from there on. The state before such a step counts as 0, not the step itself (forward)")
    alone, _ = run(features[:1], state[:1], begins[:1])
    expect_close(outputs[:1], alone, "row 0 by itself against row 0 in the batch", "Rows are different agents: they "
                 "must not touch each other (forward)")
    free = features.clone().requires_grad_()
    run(free, state, begins)[0][0, -1].square().sum().backward()
    expect(free.grad[0, 0].any(), "no gradient reaches the first step from the last output: what to remember is never "
           "learned. Carry the state without detach() (forward)")
    return "what it remembers survives from step to step, not from episode to episode, and acting and learning agree."
