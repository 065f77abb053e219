"""Your own choice of policies: `python -m examples.custom_mapping`.

The function is called whenever an episode begins, with the names of the environment's agents, the number of policies
and a random generator, and returns the policy of each agent. From the command line: `python train.py --env
pettingzoo:mpe2.simple_tag_v3 --num_policies 3 --policy_mapping examples.custom_mapping:chasers_and_chased`.
"""

from trainer import APPO


def chasers_and_chased(agents, num_policies, rng):
    """Policy 0 is chased; all chasers of a game play the same policy, one of the others."""
    chasers = int(rng.integers(1, num_policies))
    return [chasers if name.startswith("adversary") else 0 for name in agents]


if __name__ == "__main__":
    with APPO("pettingzoo:mpe2.simple_tag_v3", experiment="tag", num_policies=3,
              policy_mapping=chasers_and_chased, train_for_env_steps=100_000) as appo:
        appo.train()
