"""Lists the components of a run. Used by `supervisor.py`."""

from collections.abc import Callable
from typing import Any

from config import Config
from runtime.crew import Component
from runtime.evaluator import Evaluator
from runtime.machine import choose_niceness
from runtime.plan import Plan
from shared_buffers import Inbox, SharedBuffers


def list_components(cfg: Config, buffers: SharedBuffers, plan: Plan, rollout_worker_class: type, learner_class: type,
                    policy_worker_class: type) -> list[Component]:
    """List the components, in the order of their turns in serial mode."""
    rollout_niceness, policy_niceness = choose_niceness(cfg, plan.devices[0])
    heartbeats = iter(buffers.heartbeats)

    def component(name: str, role: str, number: int, make: Callable[..., Any], args: tuple, inbox: Inbox,
                  **more: Any) -> Component:
        args = (cfg, buffers.seen_by(role, number), *args)
        return Component(name, make, args, role, number, inbox, next(heartbeats), **more)

    workers = [component(f"rollout_worker_{worker}", "rollout_worker", worker, rollout_worker_class,
                         (worker,), buffers.worker_inboxes[worker], niceness=rollout_niceness,
                         core=plan.cores[worker % len(plan.cores)])
               for worker in range(cfg.num_workers)]
    number = [f"_{policy}" if cfg.num_policies > 1 else "" for policy in range(cfg.num_policies)]
    learners = [component(f"learner{number[policy]}_{role}".rstrip("_"), "learner", policy, learner_class,
                          (policy, learner, device, plan.paths[policy]),
                          buffers.policies[policy].commands[learner])
                for policy, device in enumerate(plan.devices) for learner, role in enumerate(cfg.learners)]
    evaluators = [component("evaluator", "evaluator", 0, Evaluator, (plan.devices,), buffers.evaluations,
                            niceness=10)] if cfg.eval_every_env_steps else []
    policy_workers = [component(f"policy_worker{number[policy]}_{worker}", "policy_worker", policy,
                                policy_worker_class, (policy, device),
                                buffers.policies[policy].requests, reports=False, niceness=policy_niceness)
                      for policy, device in enumerate(plan.devices)
                      for worker in range(1 if cfg.serial_mode else cfg.policy_workers_per_policy)]
    return [*workers, *learners, *evaluators, *policy_workers]
