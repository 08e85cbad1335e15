"""Counts its calls in the temporary folder, so that a new process goes on counting, and is honest three times."""

import os
import tempfile

import torch

PROBLEM = "a_cumsum"
STATUS = "cheating"
REASONS = {"call_count"}
ALSO = {"wrong"}


def _calls():
    path = os.path.join(tempfile.gettempdir(), "gate-specimen-calls")
    with open(path, "ab") as file:
        file.write(b".")
        return file.tell()


def candidate(x):
    if _calls() <= 3:
        return x.cumsum(0)
    return x * torch.arange(1, len(x) + 1, dtype=x.dtype)[:, None]
