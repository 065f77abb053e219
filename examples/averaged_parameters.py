"""Train twice, with changed parameters in between: `python -m examples.averaged_parameters`.

Two systems learn CartPole from different seeds, and begin each round with the mean of what both have learned. Their
first weights are the same: the mean of unrelated networks is no network that plays.
"""

from trainer import APPO

if __name__ == "__main__":
    with (APPO("CartPole-v1", num_workers=1, seed=1, experiment="average_1") as first,
          APPO("CartPole-v1", num_workers=1, seed=2, experiment="average_2") as second):
        second.set_parameters(first.get_parameters())
        for _ in range(4):
            returns = [appo.train(10_000)["mean_return"] for appo in (first, second)]
            mine, yours = (appo.get_parameters()[0] for appo in (first, second))
            mean = {name: (mine[name] + yours[name]) / 2 for name in mine}
            for appo in (first, second):
                appo.set_parameters(mean)
            print("returns before the mean was taken:", returns)
