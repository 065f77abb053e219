"""Compare three ways to backpropagate a GRU through time with resets: `python -m docs.recurrence` (one core).

pieces: `model.RecurrentCore`, cut wherever an episode of any row begins. loop: one step after another, the input
product of all steps at once. packed: `torch.nn.utils.rnn.PackedSequence`, one sequence for each episode. All three give
the same outputs; the times are medians of forward and backward.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from config import make_config
from docs.encoder import time_of
from model import RecurrentCore


def loop(core: RecurrentCore, features: Tensor, state: Tensor, new_episode: Tensor) -> Tensor:
    """Unroll step by step; arguments and result as in `RecurrentCore.forward`."""
    rnn, outputs = core.rnn, []
    inputs = nn.functional.linear(features, rnn.weight_ih_l0, rnn.bias_ih_l0)
    for t in range(features.shape[1]):
        state = state.masked_fill(new_episode[:, t, None], 0.0)
        x_reset, x_update, x_new = inputs[:, t].chunk(3, -1)
        h_reset, h_update, h_new = nn.functional.linear(state, rnn.weight_hh_l0, rnn.bias_hh_l0).chunk(3, -1)
        new = torch.tanh(x_new + torch.sigmoid(x_reset + h_reset) * h_new)
        state = torch.lerp(new, state, torch.sigmoid(x_update + h_update))
        outputs.append(state)
    return torch.stack(outputs, 1)


def packed(core: RecurrentCore, features: Tensor, state: Tensor, new_episode: Tensor) -> Tensor:
    """Run all episodes as sequences of their own, the longest first; arguments and result as above."""
    batch, length = new_episode.shape
    begins = new_episode.clone()
    begins[:, 0] = True
    starts = begins.flatten().nonzero()[:, 0]
    lengths = torch.diff(starts, append=torch.tensor([batch * length]))
    lengths, order = lengths.sort(descending=True, stable=True)
    starts = starts[order]
    sizes = (lengths[None] > torch.arange(int(lengths[0]))[:, None]).sum(1)
    rows = torch.cat([starts[:size] + t for t, size in enumerate(sizes.tolist())])
    goes_on = (starts % length == 0) & ~new_episode[starts // length, 0]
    first = torch.where(goes_on[:, None], state[starts // length], 0.0)
    output, _ = core.rnn(PackedSequence(features.flatten(0, 1)[rows], sizes), first[None])
    return output.data[rows.argsort()].unflatten(0, (batch, length))


def pieces(core: RecurrentCore, features: Tensor, state: Tensor, new_episode: Tensor) -> Tensor:
    """Do what the learner does."""
    return core(features, state, new_episode)[0]


def pass_through(way: Callable[..., Tensor], *args: object) -> None:
    """Run one pass forward and backward."""
    way(*args).sum().backward()


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print("rows x steps  units  new episodes   pieces     loop   packed   (ms)")
    for batch, length, units in ((32, 33, 512), (8, 65, 64)):
        for share in (0.0, 0.01, 0.1):
            core = RecurrentCore(make_config({"use_rnn": True, "rnn_size": units}), units)
            new_episode = torch.rand(batch, length) < share
            args = (core, torch.randn(batch, length, units), torch.randn(batch, units), new_episode)
            for way in (loop, packed):
                torch.testing.assert_close(way(*args), pieces(*args), rtol=0, atol=1e-5)
            times = [time_of(partial(pass_through, way, *args)) for way in (pieces, loop, packed)]
            print(f"{batch:4} x {length:2} {units:9} {share:12.0%} " + "".join(f"{1000 * sec:9.1f}" for sec in times))


if __name__ == "__main__":
    main()
