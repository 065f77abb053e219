"""Export a trained policy as one file: `python -m tools.export train_dir/CartPole-v1 policy.onnx` (or `policy.pt2`).

The file needs nothing of this repository. It takes any number of observations at once and does what `Algorithm.act`
does in an evaluation with `--deterministic`, in float32. Names, dtypes and shapes are printed.

Inputs:
    obs, or the path of each part   observations as the environment gives them, but matrices flat, gray images 1xHxW,
                                    numbers from 0 on, texts as the bits of their words (`envs/flat_spaces.py`)
    action_mask                     which options are allowed, those of all choices side by side
    rnn_states, new_episode         next_rnn_states of the last step; where an episode begins and they do not count
Outputs:
    actions, or actions/ and a path the most likely actions, as the environment takes them
    action_parameters               to sample from, part by part: logits of choices (-1e9: forbidden) and of bits; of a
                                    Box means, then logarithms of deviations (clip them to -8, 5), where -1 is low and
                                    1 is high (with --squash_actions after tanh)
    and the algorithm's own         values: the expected return, discounted by --gamma, of rewards times --reward_scale
    next_rnn_states                 the next hidden states

    actions, *_ = onnxruntime.InferenceSession("policy.onnx").run(["actions"], {"obs": obs})
    outputs = torch.export.load("policy.pt2").module()({"obs": torch.as_tensor(obs)})       # {"actions": ...}
"""

import logging
import warnings
from pathlib import Path

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from algorithm import Data
from envs.flat_spaces import action_leaves, dtype_of, is_bounded, num_columns
from evaluate import Policy, load
from normalizers import RunningNormalizer
from runtime.command_line import OneLineParser
from runtime.utils import UserError, exit_status, run_command

MOST_ROWS = 2**20  # of observations at once
BATCH = "batch"  # the name of their axis


@exit_status
def main(argv: list[str]) -> None:
    """Write the file and say what is in it."""
    parser = OneLineParser(__doc__)
    parser.add_argument("run", help="a run's folder, of which the policy plays that evaluate.py would, or a checkpoint")
    parser.add_argument("file", type=Path, help="file to write, .onnx or .pt2 (torch.export)")
    parser.add_argument("--policy", type=int, default=0, help="which policy of a population [0]")
    parser.add_argument("--trust_run", action="store_true",
                        help="import code that the run's settings name, its environment included")
    args = parser.parse(argv)
    if args.file.suffix not in (".onnx", ".pt2"):
        raise UserError(f"{args.file} must end with .onnx or .pt2")
    warnings.simplefilter("ignore")  # of torch about itself
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    policy = load(args.run, policy=args.policy, trust_run=args.trust_run)
    exported = Exported(policy)
    inputs, program = exported.examples(), trace(exported)
    outputs = exported(inputs)
    if args.file.suffix == ".onnx":
        args.file.write_bytes(to_onnx(program, inputs, outputs))
    else:
        torch.export.save(program, args.file)
    print(f"exported {policy.source} to {args.file}, float32")
    for name, tensor in (inputs | outputs).items():
        print(f"{name}: {tensor.dtype} {[BATCH, *tensor.shape[1:]]}")


class Exported(nn.Module):
    """What is exported: from a dict of inputs to a dict of outputs."""

    def __init__(self, policy: Policy) -> None:
        """Export what a policy does."""
        super().__init__()
        self.algorithm = policy.algorithm
        self.model = policy.model
        self.obs_space = policy.kind.obs_space
        self.parts = {f"actions/{path}" if path else "actions": leaf
                      for path, leaf in action_leaves(policy.kind.action_space).items()}

    def forward(self, inputs: Data) -> Data:
        obs = {name: inputs[name] for name in self.obs_space}
        rows = next(iter(obs.values())).shape[0]  # len() would be the number of the example
        rnn_states = inputs.get("rnn_states", torch.zeros(rows, 0))
        new_episode = inputs.get("new_episode", torch.zeros(rows, dtype=torch.bool))
        columns, next_states = self.algorithm.act(self.model, obs, rnn_states, new_episode, deterministic=True)
        actions = columns.pop("actions").split([num_columns(leaf) for leaf in self.parts.values()], -1)
        outputs = {name: env_actions(leaf, action, squash=self.algorithm.cfg.squash_actions)
                   for (name, leaf), action in zip(self.parts.items(), actions, strict=True)}
        outputs |= columns
        return outputs | ({"next_rnn_states": next_states} if self.model.state_size else {})

    def examples(self) -> Data:
        """Make inputs of two rows."""
        inputs = {name: torch.as_tensor(np.stack([leaf.sample(), leaf.sample()]))
                  for name, leaf in self.obs_space.items()}
        if self.model.state_size:
            inputs["rnn_states"] = torch.zeros(2, self.model.state_size)
            inputs["new_episode"] = torch.zeros(2, dtype=torch.bool)
        return inputs


def env_actions(space: spaces.Space, columns: Tensor, *, squash: bool) -> Tensor:
    """Turn columns [B, n] of actions into the form of a plain space, as `flat_spaces.unflatten_actions` does."""
    columns, dtype = columns.reshape(-1, *space.shape), dtype_of(space)
    if not isinstance(space, spaces.Box):
        return columns.to(dtype) + torch.as_tensor(getattr(space, "start", 0), dtype=dtype)
    columns = columns.tanh() if squash else columns
    low, high = torch.as_tensor(1.0 * space.low), torch.as_tensor(1.0 * space.high)
    scaled = low + (columns.clamp(-1.0, 1.0) + 1.0) * 0.5 * (high - low)
    actions = torch.where(torch.as_tensor(is_bounded(space)), scaled, columns).clamp(low, high)
    return (actions if dtype.is_floating_point else actions.round()).to(dtype)


def trace(exported: Exported) -> torch.export.ExportedProgram:
    """Turn a policy into a graph of operators. A model of one's own must write x.shape[0], not len(x)."""
    for part in exported.model.modules():
        if isinstance(part, RunningNormalizer):
            part.CHUNK = MOST_ROWS * part.mean.numel()  # all rows at once, however many there are
    exported.requires_grad_(False)
    examples = exported.examples()
    batch = torch.export.Dim(BATCH, min=1, max=MOST_ROWS)
    return torch.export.export(exported, (examples,), dynamic_shapes=({name: {0: batch} for name in examples},))


def to_onnx(program: torch.export.ExportedProgram, inputs: Data, outputs: Data) -> bytes:
    """Return a graph of operators as an ONNX file."""
    onnx = torch.onnx.export(program, (), input_names=list(inputs), output_names=list(outputs), verbose=False)
    return onnx.model_proto.SerializeToString()


if __name__ == "__main__":
    run_command(main)
