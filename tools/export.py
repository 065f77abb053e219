"""Export a trained policy as one file: `python -m tools.export train_dir/CartPole-v1 policy.onnx` (or `policy.pt2`).

The file needs nothing of this repository. It takes raw observations (of a text the bits of its words), any number at
once, and gives what `Algorithm.act` does in an evaluation with `--deterministic`, in float32: the most likely actions,
in the form of the environment; the parameters of their distribution, to sample from; values; with a memory the next
hidden states. What each input and output means is printed and in the file (ONNX: metadata and `doc_string`; `.pt2`: the
extra file `about.json`).

    actions, *_ = onnxruntime.InferenceSession("policy.onnx").run(["actions"], {"obs": obs})
    outputs = torch.export.load("policy.pt2").module()({"obs": torch.as_tensor(obs)})       # {"actions": ...}
"""

import argparse
import json
import logging
import sys
import warnings
from pathlib import Path

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from algorithm import Algorithm, Data
from envs.flat_spaces import ACTION_MASK, AgentKind, action_leaves, is_bounded, is_text, num_columns, plain_parts
from normalizers import RunningNormalizer
from runtime.command_line import OneLineParser
from runtime.files import replacing
from runtime.policy import load
from runtime.user_error import UserError, exit_status

MOST_ROWS = 2**20  # of observations at once
BATCH = "batch"  # the name of their axis
PARAMETERS = ("to sample from, part by part: logits of each choice (-1e9: forbidden), a logit of each bit; of a Box "
              "means, then logarithms of deviations (clip them to -8, 5), where -1 is low and 1 is high")


def dtype_of(space: spaces.Space) -> torch.dtype:
    return torch.from_numpy(np.zeros(0, space.dtype)).dtype


def env_actions(space: spaces.Space, columns: Tensor, *, squash: bool) -> Tensor:
    """Turn columns [B, n] of actions into the form of a plain space, as `flat_spaces.unflatten_actions` does."""
    columns, dtype = columns.reshape(-1, *space.shape), dtype_of(space)
    if not isinstance(space, spaces.Box):
        return columns.to(dtype) + torch.as_tensor(getattr(space, "start", 0), dtype=dtype)
    columns = columns.tanh() if squash else columns
    low, high = (torch.as_tensor(end if dtype.is_floating_point else 1.0 * end) for end in (space.low, space.high))
    scaled = low + (columns.clamp(-1.0, 1.0) + 1.0) * 0.5 * (high - low)
    actions = torch.where(torch.as_tensor(is_bounded(space)), scaled, columns).clamp(low, high)
    return (actions if dtype.is_floating_point else actions.round()).to(dtype)


def model_input(part: spaces.Space, leaf: spaces.Space, obs: Tensor) -> Tensor:
    """Turn raw observations [B, ...] of a plain space into those of a leaf, as `flat_spaces.flatten_obs` does."""
    start = getattr(part, "start", None)
    shifted = obs if start is None else obs.long() - torch.as_tensor(start)
    return shifted.reshape(-1, *leaf.shape).to(dtype_of(leaf))


class Exported(nn.Module):
    """What is exported, a dict of inputs to a dict of outputs, and what they mean."""

    def __init__(self, algorithm: Algorithm, model: nn.Module, kind: AgentKind) -> None:
        """Export what agents of a kind do. A text is read as the bits of its words, since tensors hold no text."""
        super().__init__()
        self.algorithm = algorithm
        self.model = model
        self.obs_space = kind.obs_space
        parts = {path or "obs": part for path, part in plain_parts(kind.space).items() if not is_text(part)}
        self.texts = kind.obs_space.keys() - parts.keys() - {ACTION_MASK}  # that may be in the infos
        self.raw = {name: parts.get(name, leaf) for name, leaf in kind.obs_space.items()}
        self.parts = {f"actions/{path}" if path else "actions": leaf
                      for path, leaf in action_leaves(kind.action_space).items()}

    def forward(self, inputs: Data) -> Data:
        obs = {name: model_input(self.raw[name], leaf, inputs[name]) for name, leaf in self.obs_space.items()}
        rows = next(iter(obs.values())).shape[0]  # len() would be the number of the example
        states = (inputs.get("rnn_states", torch.zeros(rows, 0)),
                  inputs.get("new_episode", torch.zeros(rows, dtype=torch.bool)))
        columns, next_states = self.algorithm.act(self.model, obs, *states, deterministic=True)
        actions = columns["actions"].split([num_columns(leaf) for leaf in self.parts.values()], -1)
        outputs = {name: env_actions(leaf, action, squash=self.algorithm.cfg.squash_actions)
                   for (name, leaf), action in zip(self.parts.items(), actions, strict=True)}
        outputs |= {name: columns[name] for name in ("action_parameters", "values", "q_best") if name in columns}
        return outputs | ({"next_rnn_states": next_states} if self.model.state_size else {})

    def examples(self) -> Data:
        """Make inputs of two rows."""
        inputs = {name: torch.zeros(2, *part.shape, dtype=dtype_of(part)) + torch.as_tensor(getattr(part, "start", 0))
                  for name, part in self.raw.items()}
        states = {"rnn_states": torch.zeros(2, self.model.state_size), "new_episode": torch.zeros(2, dtype=torch.bool)}
        return inputs | (states if self.model.state_size else {})

    def meanings(self) -> dict[str, str]:
        """Say what each input and output is."""
        cfg = self.algorithm.cfg
        said = {name: f"raw observation of {cfg.env}: {part}" for name, part in self.raw.items()}
        said |= dict.fromkeys(self.texts, "the words of a text, as envs.flat_spaces.hash_words() gives them")
        said |= {name: f"most likely action, as the environment takes it: {leaf}" for name, leaf in self.parts.items()}
        returns = f"expected return, discounted by {cfg.gamma:g}, of rewards times {cfg.reward_scale:g}"
        said |= {ACTION_MASK: "which options are allowed, those of all choices side by side",
                 "rnn_states": "hidden states, next_rnn_states of the last step", "values": returns, "q_best": returns,
                 "new_episode": "an episode begins, rnn_states do not count", "next_rnn_states": "next hidden states",
                 "action_parameters": PARAMETERS + " (after tanh)" * cfg.squash_actions}
        return {name: " ".join(text.split()) for name, text in said.items()}


def trace(policy: Exported) -> torch.export.ExportedProgram:
    """Turn a policy into a graph of operators. A model of one's own must write x.shape[0], not len(x)."""
    for part in policy.model.modules():
        if isinstance(part, RunningNormalizer):
            part.CHUNK = MOST_ROWS * part.mean.numel()  # all rows at once, however many there are
    policy.requires_grad_(False)
    examples = policy.examples()
    batch = torch.export.Dim(BATCH, min=1, max=MOST_ROWS)
    with warnings.catch_warnings(action="ignore"):  # of torch about itself
        return torch.export.export(policy, (examples,), dynamic_shapes=({name: {0: batch} for name in examples},))


def to_onnx(program: torch.export.ExportedProgram, inputs: Data, outputs: Data, about: dict[str, str]) -> bytes:
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore"):
        onnx = torch.onnx.export(program, (), input_names=list(inputs), output_names=list(outputs), verbose=False)
    onnx.model.metadata_props.update(about)
    for value in (*onnx.model.graph.inputs, *onnx.model.graph.outputs):
        value.doc_string, value.shape[0] = about[value.name], BATCH
    return onnx.model_proto.SerializeToString()


@exit_status
def main(argv: list[str]) -> None:
    """Write the file and say what is in it."""
    parser = OneLineParser(description=__doc__, allow_abbrev=False,
                           formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run's folder, of which the policy plays that evaluate.py would, or a checkpoint")
    parser.add_argument("file", type=Path, help="file to write, .onnx or .pt2 (torch.export)")
    parser.add_argument("--policy", type=int, help="which policy of a population [the one with the best score]")
    parser.add_argument("--trust_run", action="store_true",
                        help="import code that the run's settings name, its environment included")
    args = parser.parse(argv)
    if args.file.suffix not in (".onnx", ".pt2"):
        raise UserError(f"{args.file} must end in .onnx or .pt2")
    loaded = load(args.run, policy=args.policy, precision="float32", trust_run=args.trust_run)
    policy = Exported(loaded.algorithm, loaded.model, loaded.kind)
    inputs, program = policy.examples(), trace(policy)
    outputs = policy(inputs)
    about = {"policy": loaded.source} | {name: policy.meanings()[name] for name in inputs | outputs}
    args.file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(args.file) as file:
        if args.file.suffix == ".onnx":
            file.write(to_onnx(program, inputs, outputs, about))
        else:
            torch.export.save(program, file, extra_files={"about.json": json.dumps(about, indent=2)})
    print(f"exported {loaded.source} to {args.file}, float32")
    for name, tensor in (inputs | outputs).items():
        kind = "input" if name in inputs else "output"
        print(f"{kind} {name}: {tensor.dtype} {[BATCH, *tensor.shape[1:]]}, {about[name]}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
