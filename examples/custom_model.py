"""A whole model of your own: `python -m examples.custom_model`.

Simplest is a subclass of `ActorCritic` that replaces what you need: `make_body` (encoder, core), `values`, `forward`.
From the command line: `python train.py --env CartPole-v1 --model examples.custom_model:SeparateNetworks`.
"""

from torch import nn

from model import ActorCritic, LeafEncoders
from normalizers import expanded_space
from trainer import APPO


class SeparateNetworks(ActorCritic):
    """Policy and value share nothing: the values have an encoder of their own, always in float32."""

    def __init__(self, cfg, obs_space, action_space):
        super().__init__(cfg, obs_space, action_space)
        self.value_encoder = LeafEncoders(cfg, {name: expanded_space(leaf) for name, leaf in self.leaves.items()})
        self.value_head = nn.Linear(self.value_encoder.out_size, 1)

    def values(self, features, normalized):
        features = self.value_encoder({name: normalized[name].float() for name in self.leaves})
        return self.value_head(features).squeeze(-1)


if __name__ == "__main__":
    with APPO("CartPole-v1", experiment="custom_model", model=SeparateNetworks) as appo:
        appo.train()
