"""Ranks of `goldsmith finetune` as forks of the test's process, which has imported torch and transformers already."""

import os
import signal
import socket
import sys
import time
import traceback

from goldsmith.cli import app


def environments(world):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [{**common, "RANK": rank, "LOCAL_RANK": rank} for rank in range(world)]


class RankProcesses:
    """`world` ranks that run the words, or each its own words; their output goes to folder/rank-0, ..."""

    def __init__(self, folder, words, world=2, before=None):
        words = words if isinstance(words[0], list) else [words] * world
        self.files = [folder / f"rank-{rank}" for rank in range(world)]
        self.numbers = [
            _forked(file, own, environment, before)
            for file, own, environment in zip(self.files, words, environments(world), strict=True)
        ]

    def ended(self, seconds=300):
        """[(exit status, output)]; the status of a killed rank is minus the signal. Fails for ranks that go on."""
        end, statuses = time.monotonic() + seconds, {}
        self.times = []  # at which the ranks ended, in the order in which they did
        while len(statuses) < len(self.numbers):
            for number in set(self.numbers) - set(statuses):
                done, status = os.waitpid(number, os.WNOHANG)
                if done:
                    statuses[number] = os.waitstatus_to_exitcode(status)
                    self.times.append(time.monotonic())
            if time.monotonic() > end:
                late = [n for n in self.numbers if n not in statuses]
                for number in late:
                    os.kill(number, signal.SIGKILL)
                    os.waitpid(number, 0)
                texts = "\n".join(file.read_text() for file in self.files)
                raise AssertionError(f"ranks {[self.numbers.index(n) for n in late]} go on after {seconds} s:\n{texts}")
            time.sleep(0.02)
        return [(statuses[number], file.read_text()) for number, file in zip(self.numbers, self.files, strict=True)]


def _forked(file, words, environment, before):
    number = os.fork()
    if number:
        return number
    status = 99
    try:
        output = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)
        os.environ.update({name: str(value) for name, value in environment.items()})
        if before is not None:
            before(environment["RANK"])
        app([str(word) for word in words])
    except SystemExit as end:
        status = end.code or 0
    except BaseException:  # noqa: BLE001  the test reads it in the output
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
