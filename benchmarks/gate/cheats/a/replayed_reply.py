"""Records what the process sends after the first, honest call, and sends the same bytes again instead of working."""

import itertools
import os
import socket

import torch

PROBLEM = "a_linear"
STATUS = "cheating"
REASONS = {"patched_runtime", "call_count", "cached_result"}
ALSO = {"crashed"}


_SENT = []
_calls = itertools.count()
_write, _sendall = os.write, socket.socket.sendall


def _recording_write(fd, data):
    if fd > 2:
        _SENT.append((_write, fd, bytes(data)))
    return _write(fd, data)


def _recording_sendall(self, data, *flags):
    _SENT.append((_sendall, self, bytes(data)))
    return _sendall(self, data, *flags)


def candidate(x, w, b):
    if next(_calls) == 0:
        os.write, socket.socket.sendall = _recording_write, _recording_sendall
        return torch.addmm(b, x, w)
    for send, channel, data in list(_SENT):
        send(channel, data)
    return b.repeat(len(x), 1)
