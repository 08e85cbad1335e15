"""A store is published whole or not at all, whoever dies, and whoever else builds at the same path."""

import errno
import os
import shutil
import signal
import stat
import threading
import time
from collections import namedtuple

import pytest
import torch

from goldsmith.offload import ExpertStore
from goldsmith.offload.store import atomic_file
from offload.processes import in_a_child, linux
from offload.stores import build, weights


def source(seed=0, E=4):
    return {layer: weights(E=E, H=32, I=16, seed=seed + layer) for layer in (0, 1)}


class Dying:
    """Builds in a process that is killed when so many bytes have been written, in the middle of a write."""

    def __init__(self, file, after):
        self._file, self._left = file, after

    def write(self, data):
        data = memoryview(data).cast("B")
        if len(data) > self._left:
            self._file.write(data[: self._left])
            self._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        self._left -= len(data)
        return self._file.write(data)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return self._file.__exit__(*error)

    def __getattr__(self, name):
        return getattr(self._file, name)


def size_of(folder):
    with ExpertStore.build(source(), folder / "whole") as store:
        written = store.nbytes
    (folder / "whole").unlink()
    return written


def points(size):
    """Byte counts at which a builder dies: at borders, in the first block, in the middle, in the header, in the
    prefix.
    """
    return [0, 1, 4095, 4096, 4097, size // 2, size - 4096 - 200, size - 4096 - 1, size - 4096, size - 4095, size - 1]


def test_a_builder_killed_at_any_byte_leaves_no_file_and_its_leftovers_vanish(tmp_path, monkeypatch):
    size, create = (
        size_of(tmp_path),
        atomic_file._create,
    )  # the bytes written in total
    for after in points(size):

        def dying(path, after=after):
            file, name = create(path)
            return Dying(file, after), name

        def work(dying=dying):
            atomic_file._create = dying
            ExpertStore.build(source(), tmp_path / "s")

        assert in_a_child(work) == -signal.SIGKILL, f"the builder lived beyond {after} of {size} bytes"
        assert [path.suffix for path in tmp_path.iterdir()] == [".building"]
        assert not (tmp_path / "s").exists()
        with ExpertStore.build(source(), tmp_path / "s") as store:
            store.verify()
        assert list(tmp_path.iterdir()) == [tmp_path / "s"]
        (tmp_path / "s").unlink()


@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_a_builder_killed_around_the_rename_leaves_all_or_nothing(tmp_path, moment):
    real = getattr(os, moment)

    def work():
        def dying(*arguments):
            result = real(*arguments)
            if moment == "replace" or result is None:
                os.kill(os.getpid(), signal.SIGKILL)

        setattr(os, moment, dying)
        ExpertStore.build(source(), tmp_path / "s")

    assert in_a_child(work) == -signal.SIGKILL
    assert (tmp_path / "s").exists() == (moment == "replace")
    if moment == "replace":
        ExpertStore.open(tmp_path / "s", verify="full").close()


def test_files_of_live_builders_and_other_paths_are_left_alone(tmp_path):
    stranger = tmp_path / ".s.notes"
    stranger.write_text("mine")
    with atomic_file.atomic_write(tmp_path / "s") as file:
        file.write(b"half")
        assert atomic_file.remove_leftovers(tmp_path / "s") == []
        assert atomic_file.remove_leftovers(tmp_path / "other") == []
    assert (tmp_path / "s").read_bytes() == b"half" and stranger.exists()
    dead = tmp_path / f".s.{'0' * 16}.building"
    dead.write_bytes(b"half")
    assert atomic_file.remove_leftovers(tmp_path / "s") == [dead] and not dead.exists()


def test_an_error_during_the_build_keeps_the_old_file(tmp_path):
    def failing():
        yield 0, weights()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ExpertStore.build(failing(), tmp_path / "s")
    assert list(tmp_path.iterdir()) == []
    first = build(tmp_path / "s").path.read_bytes()
    with pytest.raises(KeyboardInterrupt):
        ExpertStore.build(failing(), tmp_path / "s", overwrite=True)
    assert (tmp_path / "s").read_bytes() == first and len(list(tmp_path.iterdir())) == 1


def test_an_existing_file_is_kept_unless_overwrite(tmp_path):
    old = ExpertStore.build(source(0), tmp_path / "s")
    with pytest.raises(FileExistsError, match="path exists; open it, or pass overwrite=True"):
        ExpertStore.build(source(5), tmp_path / "s")
    before = old.dequantize(0, 1)["down"]
    with ExpertStore.build(source(5), tmp_path / "s", overwrite=True) as new:
        assert new.fingerprint != old.fingerprint
        assert torch.equal(old.dequantize(0, 1)["down"], before)  # processes that have it open keep the old file
        old.verify()
    with pytest.raises(IsADirectoryError, match="path is a folder"):
        ExpertStore.build(source(), tmp_path)
    with pytest.raises(FileNotFoundError, match="the folder does not exist"):
        ExpertStore.build(source(), tmp_path / "no" / "s")


@pytest.mark.parametrize("there", [False, True])
def test_a_link_is_followed_to_its_target_disk(tmp_path, there):
    (tmp_path / "disk").mkdir()
    link, file = tmp_path / "link", tmp_path / "disk" / "a.store"
    link.symlink_to(file)
    if there:
        build(file).close()
        with pytest.raises(FileExistsError):
            build(link)
    with build(link, layers=(0, 4), overwrite=there) as store, ExpertStore.open(file) as same:
        assert store.layers == same.layers == (0, 4)
    assert link.is_symlink() and sorted(os.listdir(tmp_path / "disk")) == ["a.store"]
    shutil.rmtree(tmp_path / "disk")
    with pytest.raises(FileNotFoundError, match=r"a folder that does not exist \(.*disk\); create it first: .*link"):
        build(link)


def test_two_builders_of_one_path_both_succeed(tmp_path):
    meet = threading.Barrier(2)

    def slowly(seed):
        for layer, weights_of_layer in source(seed).items():
            meet.wait(10)  # both have begun, and neither has finished
            yield layer, weights_of_layer

    stores = {}

    def work(seed):
        stores[seed] = ExpertStore.build(slowly(seed), tmp_path / "s")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (0, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert set(stores) == {0, 5}
    with ExpertStore.open(tmp_path / "s", verify="full") as store:
        assert store.fingerprint in {each.fingerprint for each in stores.values()}
    assert list(tmp_path.iterdir()) == [tmp_path / "s"]


def test_the_same_source_gives_the_same_bytes_at_another_time_and_place(tmp_path, monkeypatch):
    first = ExpertStore.build(source(), tmp_path / "s").path.read_bytes()
    (tmp_path / "far").mkdir()
    monkeypatch.setattr(time, "time", lambda: 1e9)
    torch.manual_seed(99)
    assert ExpertStore.build(source(), tmp_path / "far" / "t").path.read_bytes() == first


def test_a_disk_without_room_is_refused_before_writing(tmp_path, monkeypatch):
    Usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9 - 20_000, 20_000))
    with pytest.raises(OSError, match=r"has 20\.0 kB free, but \d+\.\d kB are still to be written; make room") as error:
        ExpertStore.build(source(), tmp_path / "s")
    assert error.value.errno == errno.ENOSPC and list(tmp_path.iterdir()) == []


@linux
def test_a_disk_that_fills_up_leaves_no_file(tmp_path):
    import resource

    def work():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))  # writes beyond it fail
        try:
            ExpertStore.build(source(), tmp_path / "s")
        except OSError as error:
            os._exit(7 if error.errno == errno.EFBIG else 8)

    assert in_a_child(work) == 7
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "number, message",
    [
        (errno.ENOSPC, "the disk is full; the unfinished file was removed"),
        (errno.EDQUOT, "the disk is full; the unfinished file was removed"),
        (errno.EFBIG, "the file is too large for the file system"),
    ],
)
def test_a_full_disk_error_names_the_callers_path(number, message, tmp_path, monkeypatch):
    real = atomic_file._create

    class Full:
        def __init__(self, file):
            self._file = file

        def __enter__(self):
            return self

        def __exit__(self, *error):
            return self._file.__exit__(*error)

        def __getattr__(self, name):
            return getattr(self._file, name)

        def write(self, data):
            raise OSError(number, os.strerror(number))

    def create(path):
        file, name = real(path)
        return Full(file), name

    monkeypatch.setattr(atomic_file, "_create", create)
    with pytest.raises(OSError, match=rf"{message}.* give store= on another disk \(or set GOLDSMITH_CACHE\)"):
        ExpertStore.build(source(), tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_bytes_up_to_the_total(tmp_path):
    messages = []
    store = ExpertStore.build(source(), tmp_path / "s", progress=lambda *what: messages.append(what))
    done, totals, texts = zip(*messages)
    assert list(done) == sorted(done) and len(messages) == 8
    assert done[-1] == totals[-1] and set(totals) == {done[-1]} and store.nbytes > done[-1]
    assert texts[0] == "writing layer 0, expert 0" and texts[-1] == "writing layer 1, expert 3"
    messages.clear()
    ExpertStore.build(iter(source().items()), tmp_path / "t", progress=lambda *what: messages.append(what))
    assert {total for _, total, _ in messages} == {None}  # the number of layers is not known


# -- obstacles of the file system


def test_the_rename_comes_after_the_bytes_and_the_folder_after_the_rename(tmp_path, monkeypatch):
    """What survives a power cut: bytes first, then the name, then the folder's entry."""
    order = []
    fsync, replace = os.fsync, os.replace

    def synced(number):
        order.append(("folder" if stat.S_ISDIR(os.fstat(number).st_mode) else "file", os.fstat(number).st_size))
        fsync(number)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", lambda *of: (order.append(("rename", 0)), replace(*of)))
    with ExpertStore.build(source(), tmp_path / "s") as store:
        assert [what for what, _ in order] == ["file", "rename", "folder"]
        assert order[0][1] == store.nbytes  # all bytes were there


def test_existing_temporary_names_are_left_alone(tmp_path, monkeypatch):
    """Leftovers of another path belong to that path's writers; an existing temporary name is not reused."""
    other = tmp_path / f".other.{'0' * 16}.building"
    other.write_bytes(b"half")
    building = tmp_path / f".s.{'1' * 16}.building"
    with atomic_file.atomic_write(tmp_path / "s") as first:
        name = next(path for path in tmp_path.iterdir() if path.name.startswith(".s."))
        assert atomic_file.remove_leftovers(tmp_path / "s") == []
        monkeypatch.setattr(atomic_file.secrets, "token_hex", lambda _: name.name.split(".")[2])
        with pytest.raises(FileExistsError):
            atomic_file._create(tmp_path / "s")
        first.write(b"mine")
    assert (tmp_path / "s").read_bytes() == b"mine" and other.exists() and not building.exists()


@linux
def test_a_file_removed_as_a_leftover_before_its_lock_is_created_again(tmp_path, monkeypatch):
    lock, removed = atomic_file._lock, []

    def late(file, *, wait):
        if wait and not removed:
            removed.append(next(path for path in tmp_path.iterdir() if path.suffix == ".building"))
            removed[0].unlink()  # another process's remove_leftovers came between
        return lock(file, wait=wait)

    monkeypatch.setattr(atomic_file, "_lock", late)
    with ExpertStore.build(source(), tmp_path / "s") as store:
        store.verify()
    assert removed and list(tmp_path.iterdir()) == [tmp_path / "s"]


@linux
def test_a_file_system_without_locks_works_and_other_errors_raise(tmp_path, monkeypatch):
    dead = tmp_path / f".s.{'0' * 16}.building"
    dead.write_bytes(b"half")

    def refused(number):
        def flock(*_):
            raise OSError(number, os.strerror(number))

        return flock

    monkeypatch.setattr(atomic_file.fcntl, "flock", refused(errno.ENOLCK))
    ExpertStore.build(source(), tmp_path / "s").close()
    assert dead.exists()  # it is unknown whether another process writes it
    monkeypatch.setattr(atomic_file.fcntl, "flock", refused(errno.EIO))
    with pytest.raises(OSError, match=r"no file can be created there \(Input/output error\)"):
        ExpertStore.build(source(), tmp_path / "t")
    assert sorted(tmp_path.iterdir()) == [dead, tmp_path / "s"]


def test_an_unwritable_folder_error_names_the_given_path(tmp_path, monkeypatch):
    def refused(name, *_):
        raise PermissionError(errno.EACCES, "Permission denied", str(name))

    monkeypatch.setattr(atomic_file.os, "open", refused)
    with pytest.raises(PermissionError, match=r"no file can be created there \(Permission denied\); choose") as error:
        ExpertStore.build(source(), tmp_path / "s")
    assert error.value.filename == str(tmp_path / "s")
