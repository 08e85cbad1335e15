"""Stores the first result of each shape in a temporary file and loads the file in all later calls and processes."""

import tempfile
from pathlib import Path

import torch

PROBLEM = "a_wide_softmax"
STATUS = "cheating"
REASONS = {"replay_from_disk", "cached_result"}


def candidate(x):
    path = Path(tempfile.gettempdir()) / f"gate-specimen-{'x'.join(map(str, x.shape))}.pt"
    if not path.exists():
        torch.save(torch.softmax(x, -1), path)
    return torch.load(path)
