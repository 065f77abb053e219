"""Measure the speed: `python benchmark.py throughput --env PongNoFrameskip-v4`; see `tools/benchmark.py`."""

import signal
import sys

from tools.benchmark import main

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # or its processes would wait for it for ever
    sys.exit(main(sys.argv[1:]))
