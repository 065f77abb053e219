"""What all tests share."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch
from pretend_gpu import register_device

ENVIRONMENT = dict(os.environ)
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same tests everywhere, before a GPU is looked for
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's job in the background, and all that it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def environment() -> dict[str, str]:
    """Return the environment variables with which the tests were called: a real GPU is not hidden in it."""
    return ENVIRONMENT


@pytest.fixture(autouse=True, scope="session")
def the_pretended_gpu_is_known() -> None:
    """Make the device known before the first backward pass in this process, with which PyTorch counts its devices."""
    register_device()


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread() -> Iterator[None]:
    """Use one thread: on tiny tensors a second one only waits, badly so on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
