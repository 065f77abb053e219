"""The algorithms. Each is a class in a file that knows no trainer and no process; only the chosen one is imported."""

from typing import Any

from runtime.utils import UserError, find_function, nearest

NAMES = ("a3c", "apex", "appo", "impala", "pql")


def algorithm_class(name: str) -> Any:
    """Find the algorithm that --algo names, a subclass of `algorithm.Algorithm`. Raises `UserError`."""
    match name.lower():
        case "appo":
            from appo import AsyncPPO as found
        case "impala":
            from algorithms.impala import VTraceGradient as found
        case "a3c":
            from algorithms.a3c import NStepGradient as found
        case "apex":
            from algorithms.apex import ApeX as found
        case "pql":
            from algorithms.pql import ParallelQLearning as found
        case other if ":" in other:
            found = find_function("algo", name)
        case other:
            raise UserError(f"--algo={name} is unknown{nearest(other, NAMES)}; choose from {', '.join(NAMES)}, or "
                            "module:class")
    return found
