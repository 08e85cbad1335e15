"""Weights are copied to a staging buffer by a thread of its own (a stand-in for a copy engine), then multiplied."""

from __future__ import annotations

import threading
import time

import torch

from goldsmith import assay

STAGED: dict[tuple, torch.Tensor] = {}
DELAY = 0.002  # seconds that a copy takes


@assay.case(T=[6], H=[24], O=[10])
def tokens(make, T, H, O):
    return {"x": make.normal(T, H), "w": make.normal(O, H, std=H**-0.5)}


@assay.case(T=[3], H=[65], O=[7])
def odd(make, T, H, O):
    return tokens[0].draw(make, T, H, O)


@assay.case(T=[12], H=[16], O=[32])
def wide(make, T, H, O):
    return tokens[0].draw(make, T, H, O)


def golden(x, w):
    staged = assay.stage("staged", w * 1)
    return x @ staged.mT


class Copy:
    """A copy under way."""

    def __init__(self, to, source):
        def work():
            time.sleep(DELAY)
            to.copy_(source)

        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()

    def wait(self):
        self.thread.join()


def forward(x, w):
    staged = torch.empty(w.shape)
    copy = Copy(staged, w.detach())
    copy.wait()
    staged = assay.stage("staged", staged)
    return x @ staged.mT


def target():
    return assay.Target(forward, golden, cases=[tokens, odd, wide], name="transfer", outputs=("y",), backward=None)
