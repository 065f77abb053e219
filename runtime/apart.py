"""Calls a function in a process of its own, so that whatever the user's code does there ends nothing but itself.

An environment is made for the first time so: it may crash, hang, leave, or hold the interpreter's lock. Used by
`plan.py`.
"""

import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from runtime.children import start_server
from runtime.crew import ReportPipe, describe, describe_end, enter_child, kill_all, start_process
from runtime.user_error import ComponentError, UserError

LONGEST_SEC = 1e6  # that the system can wait


def call_apart(what: str, seconds: float, function: Callable[..., Any], *args: Any) -> Any:
    """Return function(*args) from another process, which is ended then. What goes there and back must be picklable.

    Raises `UserError` and `ComponentError` as the function does, and `ComponentError`, which begins with `what`, when
    it raises something else, when the process ends without an answer, or when that takes more seconds.
    """
    context = start_server()
    pipe, deadline = ReportPipe(context), time.monotonic() + min(seconds, LONGEST_SEC)
    process = context.Process(target=_answer, args=(pipe, what, function, args))
    try:
        start_process(process, what)
        pipe.writer.close()
        while True:
            ready = wait([pipe.reader, process.sentinel], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise ComponentError(f"{what} hangs: it takes more than {seconds:.0f} s")
            if not wait([pipe.reader], 0):  # what it has started may hold the pipe open
                raise EOFError
            for result, error in pipe.receive():
                if error is not None:
                    raise error
                return result
    except EOFError:
        raise ComponentError(describe_end(what, process)) from None
    finally:
        kill_all([process])
        pipe.reader.close()


def _answer(pipe: ReportPipe, what: str, function: Callable[..., Any], args: tuple) -> None:
    enter_child("apart")
    try:
        answer = function(*args), None
    except (UserError, ComponentError) as error:
        answer = None, error
    except BaseException as error:  # noqa: BLE001  whatever it is, it is told
        answer = None, ComponentError(f"{what} failed: {describe(error)}")
    try:
        pipe.send(answer)
    except Exception as error:  # noqa: BLE001  whatever cannot be pickled
        pipe.send((None, UserError(f"{what}: its spaces cannot be sent to other processes: {describe(error)}")))
