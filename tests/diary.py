"""An environment that writes every action into a file."""

import os
from typing import Any

from tiny import Tiny


class Diary(Tiny):
    """Episodes of 7 steps; path: of the file, to which all environments add their actions, 0 or 1."""

    length = 7

    def __init__(self, path: str) -> None:
        self.file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def reward(self, action: Any) -> float:
        os.write(self.file, b"01"[action : action + 1])
        return float(action)

    def close(self) -> None:
        os.close(self.file)
