"""Messages between a launcher, its host process and its ranks: JSON of a known length."""

import json
import os
import select
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

_HEAD = struct.Struct("<QI")
_MOST = 253  # descriptors that Linux hands over at once


def send(to: socket.socket, message: Mapping[str, Any], handles: Sequence[int] = ()) -> None:
    """Send a message, and open files with it.

    Args:
        to: a Unix stream socket.
        message: JSON values.
        handles: file descriptors; the receiver gets its own, the sender's stay open.

    Raises:
        OSError: nobody listens any more.
    """
    body = json.dumps(message).encode()
    head = _HEAD.pack(len(body), len(handles))
    if handles:
        socket.send_fds(to, [head], list(handles))
    else:
        to.sendall(head)
    to.sendall(body)


def receive(source: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and its open files; None once the other end is gone or stuck."""
    with ExitStack() as stack:
        try:
            first, handles, _, _ = socket.recv_fds(source, _HEAD.size, _MOST)
            for handle in handles:
                stack.callback(os.close, handle)
                # What a function starts gets none of them.
                os.set_inheritable(handle, False)  # noqa: FBT003 - as os has it
            head = first + _exactly(source, _HEAD.size - len(first)) if first else first
            if len(head) < _HEAD.size:
                return None
            size, count = _HEAD.unpack(head)
            body = _exactly(source, size)
        except (ConnectionError, TimeoutError):
            return None
        if len(body) < size or len(handles) != count:
            return None
        message = json.loads(body)
        stack.pop_all()
    return message, handles


def anything(sources: Sequence[socket.socket], *, within: float) -> bool:
    """Whether something can be heard from any of these, the end of one included.

    Args:
        sources: connections.
        within: seconds to wait for it.
    """
    waiting = select.poll()
    for source in sources:
        waiting.register(source, select.POLLIN)
    return bool(waiting.poll(1000 * within))


def _exactly(source: socket.socket, size: int) -> bytes:
    """So many bytes, or fewer where the stream ends."""
    found = bytearray()
    while len(found) < size:
        part = source.recv(min(size - len(found), 1 << 20))
        if not part:
            break
        found += part
    return bytes(found)
