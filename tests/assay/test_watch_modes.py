"""A watch on the stack of dispatch modes, beside modes of the user."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from goldsmith import assay


class Counter(TorchDispatchMode):
    """Another mode of the user's, which counts operators."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_between_watched_steps_a_watch_is_off_the_stack_of_modes_and_leaves_others_on_it():
    model = torch.nn.Linear(4, 3)
    x, depth = torch.ones(2, 4), torch._C._len_torch_dispatch_stack
    with Counter() as outer, assay.watch(model, every=3) as w:
        model(x)
        assert depth() == 2
        model(x)
        assert depth() == 1
        with Counter() as inner:
            for _ in range(3):
                model(x)  # the second of these is watched again, below the user's mode
                assert depth() == (3 if w.listening else 2)
        assert depth() == 1 and outer.count >= inner.count > 0
    assert depth() == 0 and {row.step for row in w.rows} == {0, 3}
