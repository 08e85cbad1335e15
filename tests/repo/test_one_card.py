"""Tests take turns at the GPU: one that times has it alone, and is not kept waiting by the others."""

import threading
import time

from one_card import turn


def test_who_wants_the_device_alone_waits_for_the_others_and_is_not_overtaken(tmp_path):
    events = []

    def visit(name, alone):
        with turn(tmp_path, alone=alone):
            events.append(name)

    with turn(tmp_path, alone=False):
        together = threading.Thread(target=visit, args=("together", False))
        together.start()
        together.join(10)
        threads = [threading.Thread(target=visit, args=(name, name == "alone")) for name in ("alone", "later")]
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        assert events == ["together"]
    for thread in threads:
        thread.join(10)
    assert events == ["together", "alone", "later"]
