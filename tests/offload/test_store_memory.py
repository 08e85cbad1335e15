"""A store's memory: how little a build holds, one copy for all readers, read-only pages, and closing."""

import copy
import faulthandler
import gc
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from goldsmith import experts
from goldsmith.offload import ExpertStore, StoreMismatch
from offload.processes import in_a_child, linux
from offload.stores import build

# -- memory -----------------------------------------------------------------------------------------------------------

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # freed memory is returned at once, and not counted
PEAK = """
import sys, torch
from goldsmith.offload import ExpertStore
E, H, I = 5, 2048, 1024
size = 3 * H * I * 4

def layer():
    return {"gate_up": (torch.full((2 * I, H), 0.5 + e) for e in range(E)),
            "down": (torch.full((H, I), 0.5 + e) for e in range(E))}

def peak():
    return next(int(row.split()[1]) * 1024 for row in open("/proc/self/status") if row.startswith("VmHWM"))

small = {0: {"gate_up": torch.randn(1, 64, 32), "down": torch.randn(1, 32, 32)}}
for format in ("fp32", "int4"):
    ExpertStore.build(small, sys.argv[1] + "/small", format=format, overwrite=True)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak begins anew
    before = peak()
    ExpertStore.build(iter([(0, layer())]), sys.argv[1] + "/s", format=format, overwrite=True)
    print((peak() - before) / size)
"""


@linux
def test_a_build_holds_at_most_three_experts(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", PEAK, tmp_path], capture_output=True, text=True, env=os.environ | MALLOC
    )
    assert done.returncode == 0, done.stderr
    assert all(float(peak) <= 3 for peak in done.stdout.split()), done.stdout


def pss_of(path, process="self"):
    """kB of a file's pages charged to a process: its own, and its share of common ones."""
    total, ours = 0, False
    with open(f"/proc/{process}/smaps") as lines:
        for line in lines:
            if "-" in line.split(" ", 1)[0]:
                ours = line.rstrip().endswith(str(path))
            elif ours and line.startswith("Pss:"):
                total += int(line.split()[1])
    return total


@linux
def test_two_processes_use_no_more_memory_than_one(tmp_path):
    with build(tmp_path / "s", E=8, H=512, I=256, format="fp32") as store:
        size = store.nbytes // 1024
        store.verify()
        alone = pss_of(store.path)
        assert alone >= 0.9 * size
        ready, go = os.pipe(), os.pipe()
        child = os.fork()
        if not child:
            try:
                with ExpertStore.open(store.path, verify="full") as other:  # a mapping of its own
                    store.close()
                    os.write(ready[1], b"%d" % pss_of(other.path))
                    os.read(go[0], 1)
            finally:
                os._exit(0)
        os.read(ready[0], 20)
        together = pss_of(store.path) + pss_of(store.path, child)
        os.write(go[1], b"x")
        os.waitpid(child, 0)
        assert together <= 1.1 * alone


@linux
def test_pages_are_mapped_shared_and_cannot_be_written(tmp_path):
    with build(tmp_path / "s") as store:
        with open("/proc/self/maps") as lines:
            modes = {line.split()[1] for line in lines if line.rstrip().endswith(str(store.path))}
        assert modes == {"r--s"}

        def write():
            faulthandler.disable()  # pytest's handler, which would report this death as its own
            store.raw(0, 0).fill_(0)

        assert in_a_child(write) == -signal.SIGSEGV
        store.verify()


def test_a_killed_reader_leaves_the_store_unchanged(tmp_path):
    with build(tmp_path / "s") as store:

        def work():
            with ExpertStore.open(store.path) as own:
                own.raw(0, 0).sum()
                os.kill(os.getpid(), signal.SIGKILL)

        assert in_a_child(work) == -signal.SIGKILL
        store.verify()
        ExpertStore.open(store.path, verify="full").close()


# -- closing ----------------------------------------------------------------------------------------------------------


def mapped(path):
    with open("/proc/self/maps") as lines:
        return any(line.rstrip().endswith(str(path)) for line in lines)


@linux
def test_views_keep_the_mapping_until_the_last_one_is_gone(tmp_path):
    store = build(tmp_path / "s")
    wanted = experts.slots(torch.ones(1, 64), torch.zeros(1, 1, dtype=torch.long), store.experts(1))
    view, base = store.raw(1, 2), store.experts(1)
    kept = view.clone()
    store.close()
    store.close()
    assert store.closed and mapped(store.path) and torch.equal(view, kept)
    assert torch.equal(experts.slots(torch.ones(1, 64), torch.zeros(1, 1, dtype=torch.long), base), wanted)
    for use in (lambda: store.raw(0, 0), lambda: store.experts(1), lambda: store.verify(), store.whole):
        with pytest.raises(ValueError, match="was closed; open it again"):
            use()
    assert store.nbytes == store.path.stat().st_size  # properties that need no page still work
    del view
    gc.collect()
    assert mapped(store.path)
    del base
    gc.collect()
    assert not mapped(store.path)


def test_a_pickle_holds_the_path_not_the_bytes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with build(Path("s")) as store:
        sent = pickle.dumps(store)
        assert len(sent) < 1000 < store.nbytes
        monkeypatch.chdir(tmp_path.parent)
        with pickle.loads(sent) as other, copy.deepcopy(store) as third:
            assert torch.equal(other.raw(1, 2), store.raw(1, 2)) and torch.equal(third.raw(1, 2), store.raw(1, 2))
    build(tmp_path / "s", layers=(0, 2), overwrite=True).close()
    with pytest.raises(StoreMismatch, match="s holds other weights than when it was pickled"):
        pickle.loads(sent)


def test_a_with_block_closes_and_the_constructor_is_refused(tmp_path):
    with build(tmp_path / "s") as store:
        assert not store.closed
    assert store.closed and repr(store).endswith("closed)")
    with pytest.raises(TypeError, match="use ExpertStore.build or ExpertStore.open"):
        ExpertStore(tmp_path / "s")


def test_a_store_of_16_gigabytes_opens_at_once(tmp_path):
    """A sparse file: only the header is read, here of 16 GB in blocks of 1 MB with their checksums."""
    from goldsmith.offload.store import header

    with build(tmp_path / "s", E=1, H=512, I=512, format="fp32") as store:
        blocks, count = store.blocks, -(-16_000_000_000 // store.blocks.stride // 48)
        entries, at = [], header.PAGE
        for layer in range(48):
            sums = bytes(header.DIGEST * len(blocks.sections) * count)
            entries.append(header.LayerEntry(layer, count, at, sums, bytes(header.SAMPLE * count)))
            at += count * blocks.stride
        text = header.Header(blocks, "silu", 1.702, None, "float32", True, "0" * 32, entries).text()
    with open(tmp_path / "large", "wb") as file:
        file.write(header.prefix(text, at))
        file.seek(at)
        file.write(text)
    begin = time.perf_counter()
    with ExpertStore.open(tmp_path / "large") as large:
        assert time.perf_counter() - begin < 1
        assert large.nbytes >= 16_000_000_000 and len(large.layers) == 48


def test_the_package_imports_no_transformers():
    text = "import sys, goldsmith.offload; assert not {'transformers', 'peft', 'triton'} & set(sys.modules)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
