"""Messages and the inboxes through which they come. Who sends what to whom is told in `shared_buffers.py`."""

import copy
import fcntl
import os
import select
import struct
import termios
from collections.abc import Callable, Sequence
from typing import Any

from runtime.user_error import UserError

SPLIT, SLOTS, PAUSE, RESUME, SAVE, COPY, LOAD, FINISH, CONFIGURE, EVALUATE, STOP = range(11)
Message = Sequence[int]  # (kind, index, ...)


class Inbox:
    """A queue of messages: a pipe of 8-byte records (kind, index), with any number of writers and readers, and no lock.

    The kernel makes a write of up to PIPE_BUF bytes whole or not at all, and a read takes whole records. So a process
    that dies inside either blocks nobody; multiprocessing's own queues have locks, which die with their holder.
    """

    RECORD = struct.Struct("ii")
    PER_READ = select.PIPE_BUF // RECORD.size  # records of one read
    AT_ONCE = 64  # records of one write; the kernel begins a new page where one does not fit: small ones waste little

    def __init__(self, context: Any, num_records: int) -> None:
        """Make it so large that no writer waits while at most num_records are there."""
        self.reader, self.writer = context.Pipe(duplex=False)
        size = num_records * self.RECORD.size * 8 // 7 + select.PIPE_BUF  # an eighth of a page is wasted at most
        try:
            if size > fcntl.fcntl(self.writer, fcntl.F_GETPIPE_SZ):
                fcntl.fcntl(self.writer, fcntl.F_SETPIPE_SZ, size)
        except PermissionError as error:
            raise UserError(f"the system allows no pipe of {size:,} bytes (/proc/sys/fs/pipe-max-size, and "
                            "pipe-user-pages-soft for all of a user); lower --num_envs_per_worker, or end other runs"
                            ) from error

    def to_write(self) -> "Inbox":
        """Return the same inbox for a process that only writes: a pipe's other end is one more descriptor."""
        end = copy.copy(self)
        end.reader = None
        return end

    def put(self, message: Message) -> None:
        """Write (kind, index, ...), one record for each index."""
        kind, *indices = message
        for start in range(0, len(indices), self.AT_ONCE):
            records = (self.RECORD.pack(kind, index) for index in indices[start : start + self.AT_ONCE])
            os.write(self.writer.fileno(), b"".join(records))

    def has_room(self, message: Message) -> bool:
        """Tell whether a message can be written without waiting."""
        (unread,) = struct.unpack("i", fcntl.ioctl(self.reader, termios.FIONREAD, bytes(4)))
        num_bytes = unread + (len(message) - 1) * self.RECORD.size
        return num_bytes * 8 // 7 + select.PIPE_BUF <= fcntl.fcntl(self.writer, fcntl.F_GETPIPE_SZ)

    def get(self, max_records: int = PER_READ) -> list[Message]:
        """Wait for messages; return all that are there, those of slots joined: (SLOTS, slot, ...)."""
        messages: list[Message] = []
        size = self.RECORD.size * min(max_records, self.PER_READ)
        for kind, index in self.RECORD.iter_unpack(os.read(self.reader.fileno(), size)):
            if kind == SLOTS and messages and messages[-1][0] == SLOTS:
                messages[-1].append(index)
            else:
                messages.append([kind, index])
        return messages

    def serve(self, handle: Callable[..., None], max_records: int = PER_READ) -> bool:
        """Wait for messages and pass each on as handle(kind, index, ...); return False when told to stop."""
        for message in self.get(max_records):
            if message[0] == STOP:
                return False
            handle(*message)
        return True

    def empty(self) -> bool:
        """Tell whether nothing is there."""
        return not self.reader.poll(0)
