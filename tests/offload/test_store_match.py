"""Whether a store holds these weights, and how the cache folder finds it again."""

import errno
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file

from goldsmith.offload import ExpertStore, StoreError, StoreMismatch
from goldsmith.offload.store import checkpoint, source_key
from goldsmith.offload.store.cache_folder import cache_folder, cached_store, fingerprint_of, store_path
from offload.stores import build, weights


def test_weights_of_another_model_are_refused_with_the_first_difference(tmp_path):
    source = {layer: weights(seed=layer) for layer in (0, 1)}
    with ExpertStore.build(source, tmp_path / "s", format="int8") as store:
        store.check_source(source)
        store.check_source({n: {k: t.float() for k, t in w.items()} for n, w in source.items()})  # the same numbers
        store.check_source(source, alpha=1.5)  # which silu does not use
        other = {**source, 1: {**source[1], "down": source[1]["down"].clone()}}
        other[1]["down"][4] *= 1.25
        differences = {
            r"layer 1, expert 4: different numbers": (other, {}),
            r"layer 1: 5 experts, but 6 in the store": ({**source, 1: {k: t[:5] for k, t in source[1].items()}}, {}),
            r"layer 2: it is not in the store, which has 0, 1": ({**source, 2: source[1]}, {}),
            r"layer 1: only the store has it": ({0: source[0]}, {}),
            r"layer 0, expert 0: H=32, I=32, but H=64, I=32 in the store": ({0: weights(H=32)}, {}),
            r"layer 0, expert 0: biases \['gate_up_bias'": ({0: weights(bias=True)}, {}),
            r"activation='gelu', but 'silu' in the store": (source, {"activation": "gelu"}),
            r"limit=7.0, but None in the store": (source, {"limit": 7}),
            r"format='bf16', but 'int8' in the store": (source, {"format": "bf16"}),
        }
        for text, (arguments, options) in differences.items():
            with pytest.raises(StoreMismatch, match=f"is not a store of these weights: {text}"):
                store.check_source(arguments, **options)
        with pytest.raises(StoreMismatch) as error:
            store.check_source(other)
        assert (error.value.layer, error.value.expert) == (1, 4)


def test_the_sample_of_an_expert_is_at_most_a_hundredth_of_its_file(tmp_path):
    from goldsmith.offload.store.samples import _sample

    for rows, cols in ((32, 64), (96, 128), (768, 2048), (1, 64), (1, 5000)):
        sampled = _sample(torch.zeros(rows, cols)).numel()
        assert sampled <= max(3, rows * cols / 200)
    with build(tmp_path / "s", E=2, H=16, I=8) as store:  # the smallest possible store: one page per expert
        sampled = sum(4 * _sample(torch.zeros(*size)).numel() for size in ((8, 16), (8, 16), (16, 8)))
        assert sampled <= 0.01 * store.expert_nbytes(0)


def test_every_place_of_the_sample_counts(tmp_path):
    """Three rows of each matrix, one in the middle of each third, over their whole width; and both biases."""
    source = weights(H=96, I=48, bias=True, seed=3)
    I, H = 48, 96
    with ExpertStore.build({0: source}, tmp_path / "s") as store:
        places = {("gate_up_bias", (2, 0)), ("down_bias", (2, 0))}
        for name, first, rows, cols in (("gate_up", 0, I, H), ("gate_up", I, I, H), ("down", 0, H, I)):
            run = max(1, min(64, cols, rows * cols // (3 * 200)))
            for i in range(3):
                begin = i * (cols - run) // 2
                places |= {(name, (2, first + (2 * i + 1) * rows // 6, c)) for c in (begin, begin + run - 1)}
        for name, at in places:
            edited = {**source, name: source[name].clone()}
            edited[name][at] += 1
            with pytest.raises(StoreMismatch, match=r"layer 0, expert 2: different numbers \(in the sample"):
                store.check_source({0: edited})
        store.check_source({0: source})


def test_stores_without_a_path_live_in_the_cache_folder_under_a_key_of_their_contents(tmp_path, monkeypatch):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "cache"))
    source = {0: weights()}
    with cached_store(source) as store:
        assert store.path != store_path(store.fingerprint) and store.fingerprint == fingerprint_of(source)
        assert store.path.is_relative_to(tmp_path / "cache")
        before = store.path.stat()
    with cached_store(source) as store:
        assert store.path.stat().st_mtime_ns == before.st_mtime_ns  # it existed already
    others = [dict(format="int8"), dict(activation="gelu"), dict(limit=5.0), dict(format="int4", group_size=8)]
    paths = {cached_store(source, **other).path for other in others} | {cached_store({0: weights(seed=9)}).path}
    assert len(paths) == 5 and store.path not in paths
    store.path.write_bytes(b"GSEXPERT damaged")
    with cached_store(source) as again:
        again.verify()
    with pytest.raises(TypeError, match="it is read twice"):
        cached_store(iter(source.items()))
    with pytest.raises(ValueError, match="expected 32 hexadecimal digits"):
        store_path("../../etc")


def test_the_cache_folder_is_the_users_unless_the_variable_is_set(monkeypatch, tmp_path):
    monkeypatch.delenv("GOLDSMITH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "goldsmith"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert cache_folder() == tmp_path / "me" / ".cache" / "goldsmith"


def outside_of_the_sample(source):
    """The same weights but for one number, which the fingerprint does not cover."""
    edited = {layer: {name: tensor.clone() for name, tensor in w.items()} for layer, w in source.items()}
    edited[max(source)]["down"][3, 1, 1] += 1
    assert fingerprint_of(edited) == fingerprint_of(source)
    return edited


def test_one_number_outside_the_sample_makes_another_cached_store(tmp_path, monkeypatch):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path))
    source = {layer: weights(seed=layer) for layer in (0, 1)}
    edited = outside_of_the_sample(source)
    with cached_store(source) as plain, cached_store(edited) as other:
        assert plain.path != other.path
        assert torch.equal(other.dequantize(1, 3)["down"], edited[1]["down"][3].float())
        with open(
            plain.path, "r+b"
        ) as file:  # a damaged store does not match a model in memory, whose weights are deleted next
            file.seek(plain.blocks.stride + 4096)
            file.write(bytes(64))
    with cached_store(source) as again:
        again.verify()


def test_a_store_is_compared_in_full_on_request(tmp_path):
    source = {layer: weights(seed=layer, bias=True) for layer in (0, 1)}
    edited = outside_of_the_sample(source)
    with ExpertStore.build(source, tmp_path / "s") as store:
        store.check_source(edited)
        store.check_source(source, whole=True)
        with pytest.raises(StoreMismatch, match=r"layer 1, expert 3: different numbers in down"):
            store.check_source(edited, whole=True)
        wider = {n: {k: t.float() for k, t in w.items()} for n, w in source.items()}
        store.check_source(wider, whole=True)
        wider[0]["gate_up"][0, 1, 1] += 2**-20  # which bf16 rounds away
        with pytest.raises(StoreMismatch, match="layer 0, expert 0: gate has numbers that bf16 cannot hold"):
            store.check_source(wider, whole=True)
    with ExpertStore.build(source, tmp_path / "narrow", format="int8") as store:
        with pytest.raises(ValueError, match="whole=True needs an exact store, but int8 rounded"):
            store.check_source(source, whole=True)


def saved(folder, layers):
    """A checkpoint of these layers."""
    folder.mkdir(exist_ok=True)
    names = {"gate_up": "gate_up_proj", "down": "down_proj"}
    by_name = {f"model.layers.{n}.mlp.experts.{names[k]}": t for n, w in layers.items() for k, t in w.items()}
    save_file(by_name, folder / "model.safetensors")
    return folder


def test_a_store_of_another_model_under_this_key_is_rebuilt(tmp_path, monkeypatch):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "cache"))
    folders = [saved(tmp_path / f"model{seed}", {0: weights(seed=seed)}) for seed in (1, 2)]
    with cached_store(folders[0]) as one, cached_store(folders[1]) as two:
        paths, prints = [one.path, two.path], [one.fingerprint, two.fingerprint]
    shutil.copy(paths[1], paths[0])
    with cached_store(folders[0]) as again:
        assert again.path == paths[0] and again.fingerprint == prints[0] != prints[1]


def test_files_that_change_between_key_and_build_leave_no_store(tmp_path, monkeypatch):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "cache"))
    folder, plain = saved(tmp_path / "model", {0: weights(seed=1)}), ExpertStore.build

    def build(source, path, **options):
        saved(folder, {0: weights(seed=2)})
        return plain(source, path, **options)

    monkeypatch.setattr(ExpertStore, "build", build)
    with pytest.raises(StoreError, match="files of .*model changed while they were read; run it again"):
        cached_store(folder)
    assert not list((tmp_path / "cache" / "stores").glob("*.experts"))
    monkeypatch.undo()
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "cache"))
    with cached_store(folder) as store:
        store.check_source(folder, whole=True)


def test_files_that_change_during_hashing_leave_no_key(tmp_path, monkeypatch):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "cache"))
    source = {0: weights(seed=1)}
    folder, plain = saved(tmp_path / "model", source), source_key.fingerprint_and_key

    def fingerprint_and_key(*arguments, whole, **progress):
        result = plain(*arguments, whole=whole, **progress)
        if whole:
            saved(folder, outside_of_the_sample(source))
        return result

    monkeypatch.setattr("goldsmith.offload.store.cache_folder.fingerprint_and_key", fingerprint_and_key)
    with pytest.raises(StoreError, match="changed while they were read"):
        cached_store(folder)
    assert not list((tmp_path / "cache").rglob("*.*")) and not list((tmp_path / "cache" / "keys").glob("*"))


def test_a_folder_is_hashed_once_and_again_after_its_files_change(tmp_path, monkeypatch):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "cache"))
    source = {layer: weights(seed=layer) for layer in (0, 1)}
    read = []
    monkeypatch.setattr(source_key, "_digest", lambda piece, plain=source_key._digest: read.append(1) or plain(piece))
    folder = saved(tmp_path / "model", source)
    with cached_store(folder) as first, cached_store(source) as same:
        assert first.path == same.path and read
    read.clear()
    with cached_store(folder) as again:
        assert again.path == first.path and not read
    was = (folder / "model.safetensors").stat()
    saved(folder, outside_of_the_sample(source))
    os.utime(folder / "model.safetensors", ns=(was.st_atime_ns, was.st_mtime_ns))  # as `cp -p` and archives preserve it
    with cached_store(folder) as edited:
        assert edited.path != first.path and read
    keys = tmp_path / "cache" / "keys"
    keys.rename(tmp_path / "keys")
    keys.write_text("")  # a file in the folder's place, so that no key can be cached: the files are hashed again
    read.clear()
    with cached_store(folder) as edited_again:
        assert edited_again.path == edited.path and read
    keys.unlink()
    (tmp_path / "keys").rename(keys)
    for key in (tmp_path / "cache" / "keys").iterdir():
        key.write_text("../../etc/passwd")
    with cached_store(folder) as edited_again:
        assert edited_again.path == edited.path


def test_an_unreadable_file_is_not_called_broken(tmp_path, monkeypatch):
    folder = saved(tmp_path / "model", {0: weights()})

    def refused(path, mode):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(checkpoint, "open", refused, raising=False)
    with pytest.raises(ValueError, match=r"model\.safetensors cannot be read: Permission denied"):
        ExpertStore.build(folder, tmp_path / "s")
    assert not (tmp_path / "s").exists()
