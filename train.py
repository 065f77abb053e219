"""Train a policy: `python train.py --env PongNoFrameskip-v4`. `--help` lists every setting.

A thin command line over `supervisor.Supervisor`. Exit status: 0 when finished or stopped by Ctrl-C or SIGTERM after
saving, 2 for bad input (one line), 1 when a component failed (its traceback). Read next: `appo.py`.
"""

import signal
import sys
import time
from types import FrameType

from runtime.children import start_server

if __name__ == "__main__" and not {"-h", "--help", "--serial_mode"} & set(sys.argv):
    start_server()  # before the slow imports, so that it does its own meanwhile: the first SGD step comes 1 s earlier

from envs.families import describe_profiles
from runtime.command_line import algo_of, make_parser
from runtime.crew import ComponentError
from runtime.user_error import UserError
from supervisor import Supervisor


class StopRequest:
    """Turns Ctrl-C or SIGTERM into an orderly stop of the training; one more Ctrl-C, a second later, ends it at once.

    Before the training has begun there is nothing to save, and the program ends at once.
    """

    def __init__(self) -> None:
        self.training = False
        self.requested_at: float | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def __call__(self) -> bool:
        """Tell whether a stop was requested."""
        return self.requested_at is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        first, now = self.requested_at is None, time.monotonic()
        if first:
            self.requested_at = now
        again = number == signal.SIGINT and not first and now - self.requested_at > 1.0
        if again or (first and not self.training):
            raise KeyboardInterrupt


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    stop = StopRequest()
    try:
        algo = algo_of(argv)
        given = vars(make_parser(__doc__.splitlines()[0], describe_profiles(algo), algo).parse(argv))
        with Supervisor(**{"env": "", **given}) as system:
            stop.training = True
            system.train(should_stop=stop)
    except KeyboardInterrupt:
        print(f"train.py: ended {'without saving' if stop.training else 'before the training began'}", file=sys.stderr)
        return 1 if stop.training else 0
    except (UserError, ComponentError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
