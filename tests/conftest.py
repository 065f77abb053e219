"""What all tests share."""

import os
import signal

import torch
from pretend_gpu import register_device

os.environ.setdefault("REAL_GPU", os.environ.get("CUDA_VISIBLE_DEVICES", "0"))  # pytest -n imports this twice
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the same tests everywhere, before a GPU is looked for
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's job in the background, and all that it starts
    signal.signal(signal.SIGINT, signal.default_int_handler)
register_device()  # before the first backward pass in this process, with which PyTorch counts its devices
torch.set_num_threads(1)  # on tiny tensors a second one only waits, badly so on a busy machine
