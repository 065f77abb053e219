"""A sum tree: draws an index in proportion to its number in logarithmic time. Used by `replay.py`."""

import math

import numpy as np


class SumTree:
    """Numbers in the leaves of a binary tree whose nodes hold the sums below them. Vectorized."""

    def __init__(self, nodes: np.ndarray) -> None:
        """Use an array of `num_nodes`, float64; the root is 1, the children of i are 2 i and 2 i + 1."""
        self.nodes, self.first_leaf = nodes, len(nodes) // 2
        self.depth = self.first_leaf.bit_length() - 1

    @staticmethod
    def num_nodes(num_leaves: int) -> int:
        """Return how large an array so many leaves need."""
        return 2 * 2 ** math.ceil(math.log2(max(2, num_leaves)))

    @property
    def total(self) -> float:
        return float(self.nodes[1])

    def __getitem__(self, leaves: np.ndarray) -> np.ndarray:
        return self.nodes[self.first_leaf + leaves]

    def __setitem__(self, leaves: np.ndarray, values: np.ndarray | float) -> None:
        nodes = self.first_leaf + leaves
        self.nodes[nodes] = values  # of a leaf that is named twice the last one
        for _ in range(self.depth):
            nodes = np.unique(nodes // 2)
            self.nodes[nodes] = self.nodes[2 * nodes] + self.nodes[2 * nodes + 1]

    def find(self, sums: np.ndarray) -> np.ndarray:
        """Return the leaves in which running sums [N], within [0, total), fall; never one that holds 0."""
        nodes, sums = np.ones(len(sums), dtype=np.int64), sums.copy()
        for _ in range(self.depth):
            left = self.nodes[2 * nodes]
            goes_right = (sums >= left) & (self.nodes[2 * nodes + 1] > 0)  # a sum may be rounded beyond the last one
            sums -= left * goes_right
            nodes = 2 * nodes + goes_right
        return nodes - self.first_leaf
