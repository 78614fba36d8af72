"""Frames as they come: whole, however the system cuts them."""

from __future__ import annotations

import socket
import threading

from swarm.engine.training.channel import Fingerprint, Request, frame, received


class Cut(socket.socket):
    """Gives less than it was asked for, as a call that a signal interrupts does."""

    def recv(self, size: int, flags: int = 0) -> bytes:
        return super().recv(min(size, 3))


def test_a_frame_is_read_whole_however_it_is_cut() -> None:
    ours, theirs = socket.socketpair()
    request = Request(number=1, command=Fingerprint())
    sent = frame(request)
    with ours, Cut(fileno=theirs.detach()) as cut:
        threading.Thread(target=ours.sendall, args=(sent + sent,)).start()
        assert received(cut) == received(cut) == request


def test_a_frame_that_ends_early_is_none() -> None:
    ours, theirs = socket.socketpair()
    sent = frame(Request(number=1, command=Fingerprint()))
    with theirs:
        ours.sendall(sent[:-1])
        ours.close()
        assert received(theirs) is None
        assert received(theirs) is None
