"""Does the size of rewards and observations matter? `python -m docs.experiments.normalization`

CartPole with rewards and observations multiplied before anything else sees them; the printed returns are the true ones,
of the last 100 episodes.

On 2 cores of a shared Zen 3 (AMD EPYC Milan), no GPU, seed 0, about a minute:

     rewards times    --normalize_returns   without it
                 1                  357.6         31.1
            10,000                  357.6         22.0
            0.0001                  357.6         27.6
      inputs times      --normalize_input   without it
                 1                  357.6        296.3
             1,000                  377.9        280.0
             0.001                  155.8         22.1

Seed 1, by column: 357.8 three times; 84.0, 23.2, 64.0; 357.8, 273.0, 155.0; 308.9, 248.7, 22.2. Rewards of 1 need
it, too: values of up to 100 dominate the gradient (with --value_loss_coeff 0.0005 it is 236.8 in place of 31.1).
Inputs with a deviation below 0.003 count as smaller ones, since 1e-5 is added to the variance.
"""

from docs.experiments import arguments, system

REWARDS = (1.0, 10_000.0, 0.0001)
INPUTS = (1.0, 1000.0, 0.001)


def mean_return(env_steps: int, **settings: object) -> float:
    """Train for a while; return how well it plays at the end."""
    with system("CartPole-v1", **settings) as made:
        return made.train(env_steps)["mean_return"]


def main() -> None:
    """Print two small tables."""
    given = arguments(__doc__, env_steps=50_000)
    for what, flag, factors in (("rewards", "normalize_returns", REWARDS), ("inputs", "normalize_input", INPUTS)):
        print(f"{what + ' times':>14}   {'--' + flag:>20}   without it")
        for factor in factors:
            scale = {"reward_scale": factor} if what == "rewards" else {"obs_scale": 1 / factor}
            returns = [mean_return(given.env_steps, seed=given.seed, **scale, **{flag: on}) for on in (True, False)]
            print(f"{factor:14,g}   {returns[0]:20.1f}   {returns[1]:10.1f}", flush=True)


if __name__ == "__main__":
    main()
