"""Train: `python train.py --env PongNoFrameskip-v4`. `--help` lists every setting.

A thin command line over `supervisor.Supervisor`. Exit status: 0 when finished or stopped by Ctrl-C, SIGTERM or SIGHUP
after saving, 2 for bad input (one line), 1 when a component failed (its traceback). Read next: `trainer.py`.
"""

import contextlib
import sys

from runtime.console import forgive
from runtime.guard import take_programs_along
from runtime.stop import STOP_SIGNAL, end
from runtime.user_error import ComponentError, EnvironmentFailure, UserError


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    training = False
    try:
        with STOP_SIGNAL.watching():
            from psutil import Process  # noqa: PLC0415  slow, as all of these

            from runtime.children import start_server  # noqa: PLC0415

            if not {"-h", "--help", "--serial_mode"} & set(argv):
                start_server()  # does the slow imports at the same time: the first SGD step comes 1 s earlier
            from runtime.command_line import parse_settings  # noqa: PLC0415
            from supervisor import Supervisor  # noqa: PLC0415

            given = parse_settings(argv, (__doc__ or "").partition("\n")[0])
            system = Supervisor(**{"env": "", **given})
            with STOP_SIGNAL.deferred(), contextlib.closing(system):
                training = True
                system.records.since = Process().create_time()  # the imports count, too
                system.train()
    except BaseException as error:
        if STOP_SIGNAL() and not training:  # whatever the signal has interrupted
            print("train.py: ended before the training began", file=sys.stderr)
            return 0
        told_in_one_line = KeyboardInterrupt | UserError | ComponentError
        if isinstance(error, EnvironmentFailure) or not isinstance(error, told_in_one_line):
            raise
        print(f"train.py: {str(error) or 'ended without saving'}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    forgive()
    take_programs_along()
    end(main(sys.argv[1:]))
