"""A learning rate that changes between calls, and in a callback: `python -m examples.changed_learning_rate`."""

from trainer import APPO


def stop_when_solved(row):
    """See each report; learn more slowly the better it plays, stop when the task is solved."""
    mean_return = row["mean_return"] or 0
    appo.change(learning_rate=1e-3 * (1 - mean_return / 1000))
    return mean_return < 475  # False ends the training


if __name__ == "__main__":
    with APPO("CartPole-v1", experiment="changed_rate", lr_schedule="constant", learning_rate=2e-3,
              report_interval_sec=1.0) as appo:
        appo.train(10_000)
        appo.change(learning_rate=1e-3)
        done = appo.train(100_000, callback=stop_when_solved)
        print(f"{done['total_env_steps']:,} env_steps, return {done['mean_return']:.1f}")
