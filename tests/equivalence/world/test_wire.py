"""Messages and files go from process to process, and the end of one is seen."""

import os
import socket
from collections.abc import Iterator

import pytest

from equivalence.world import serve, wire

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Two ends of a connection."""
    ends = socket.socketpair()
    yield ends
    for end in ends:
        end.close()


def test_a_message_comes_with_its_files(pair: Pair) -> None:
    """JSON and descriptors of the receiver's own, message by message."""
    first, second = pair
    reading, writing = os.pipe()
    wire.send(first, {"a": [1, "ü" * 1_000]}, [writing])
    wire.send(first, {})
    os.close(writing)
    found = wire.receive(second)
    assert found is not None
    message, (handle,) = found
    assert message == {"a": [1, "ü" * 1_000]}
    assert not os.get_inheritable(handle)
    os.write(handle, b"x")
    assert os.read(reading, 1) == b"x"
    os.close(handle)
    os.close(reading)
    assert wire.receive(second) == ({}, [])


def test_an_end_is_nothing(pair: Pair) -> None:
    """Before a message, within its head and within its body."""
    first, second = pair
    assert not wire.anything([second], within=0)
    first.sendall(b"abc")
    assert wire.anything([second], within=0)
    first.close()
    assert wire.receive(second) is None
    assert wire.receive(second) is None


def test_half_a_body_is_nothing(pair: Pair) -> None:
    """A sender that died while sending sent no message."""
    first, second = pair
    first.sendall(wire._HEAD.pack(10, 0) + b"{}")
    first.close()
    assert wire.receive(second) is None


def test_missing_files_are_no_message(pair: Pair) -> None:
    """A message that announces a file and has none is none."""
    first, second = pair
    first.sendall(wire._HEAD.pack(2, 1) + b"{}")
    assert wire.receive(second) is None


@pytest.mark.parametrize(("size", "count"), [(2, 2), (10, 1)])
def test_files_of_half_a_message_are_closed(pair: Pair, size: int, count: int) -> None:
    """One that announces more files or bytes than there are leaves no descriptor."""
    first, second = pair
    reading, writing = os.pipe()
    socket.send_fds(first, [wire._HEAD.pack(size, count)], [writing])
    first.sendall(b"{}")
    first.close()
    os.close(writing)
    assert wire.receive(second) is None
    # The end of the pipe is seen: nobody holds its other side any more.
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_a_sender_that_is_stuck_is_nothing(pair: Pair) -> None:
    """After the time limit of the connection."""
    first, second = pair
    second.settimeout(0.01)
    first.sendall(b"abc")
    assert wire.receive(second) is None


def test_a_host_whose_launcher_was_replaced_ends(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where somebody else still holds the connection."""
    monkeypatch.setattr(serve, "_LOOK", 0.01)
    assert not serve._alive(pair[0], -1)
    wire.send(pair[1], {})
    assert serve._alive(pair[0], -1)
