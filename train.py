"""Train: `python train.py --env PongNoFrameskip-v4`. `--help` lists every setting.

A thin command line over `trainer.Trainer`. Exit status: 0 when finished or stopped by Ctrl-C, SIGTERM or SIGHUP after
saving, 2 for bad input (one line), 1 when a component failed (its traceback). Read next: `trainer.py`.
"""

import contextlib
import sys
import time

from runtime.processes import start_server
from runtime.utils import STOP_SIGNAL, ComponentError, EnvironmentFailure, UserError, forgive, run_command, this_rank


def main(argv: list[str]) -> int:
    """Run the command; return its exit status."""
    begun, training = time.time(), False
    with STOP_SIGNAL.watching(deferring=False):
        try:
            if not {"-h", "--help", "--serial_mode"} & set(argv):
                start_server()  # does the slow imports at the same time: the first SGD step comes 1 s earlier
            from config import parse_settings  # noqa: PLC0415  slow, as the next one
            from trainer import Trainer  # noqa: PLC0415

            trainer = Trainer(**{"env": "", **parse_settings(argv, (__doc__ or "").partition("\n")[0])})
            with STOP_SIGNAL.watching(deferring=True), contextlib.closing(trainer):
                training = True
                trainer.since = begun  # the imports count, too
                trainer.train()
        except BaseException as error:
            if STOP_SIGNAL() and not training:  # whatever the signal has interrupted
                print("train.py: ended before the training began", file=sys.stderr)
                return int(this_rank().world_size > 1)  # then torchrun ends the others
            is_one_line = isinstance(error, KeyboardInterrupt | UserError | ComponentError)
            if isinstance(error, EnvironmentFailure) or not is_one_line:
                raise
            print(f"train.py: {str(error) or 'ended without saving'}", file=sys.stderr)
            return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    forgive()
    run_command(main)
