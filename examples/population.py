"""A population through the API: `python -m examples.population`.

Four policies learn CartPole, and population-based training mutates how. Then the best of them plays.
"""

from trainer import APPO, load

if __name__ == "__main__":
    with APPO("CartPole-v1", experiment="population", num_policies=4, with_pbt=True, pbt_start_mutation=10_000,
              pbt_period_env_steps=10_000, lr_schedule="constant") as appo:
        done = appo.train(150_000)
        returns = [policy["mean_return"] for policy in done["policies"]]
        best = max(range(4), key=lambda policy: returns[policy] or 0)
        print("returns:", returns, "actions of the best:", appo.predict([[0.0, 0.0, 0.1, 0.0]] * 3, policy=best)[0])
        appo.save("best_of_four.pt", policy=best)
    print("the same from its file:", load("best_of_four.pt", policy=best).predict([0.0, 0.0, 0.1, 0.0])[0])
