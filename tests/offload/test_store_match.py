"""Whether a store is of these weights, and where it is found again."""

import pytest
import torch

from goldsmith.offload import ExpertStore, StoreMismatch
from goldsmith.offload.folder import cache_folder, cached_store, fingerprint_of, store_path
from offload.stores import build, weights


def test_weights_of_another_model_are_refused_with_the_first_difference(tmp_path):
    source = {layer: weights(seed=layer) for layer in (0, 1)}
    with ExpertStore.build(source, tmp_path / "s", format="int8") as store:
        store.check_source(source)
        store.check_source({n: {k: t.float() for k, t in w.items()} for n, w in source.items()})  # the same numbers
        other = {**source, 1: {**source[1], "down": source[1]["down"].clone()}}
        other[1]["down"][4] *= 1.25
        differences = {
            r"layer 1, expert 4: other numbers": (other, {}),
            r"layer 1: 5 experts, and 6 in the store": ({**source, 1: {k: t[:5] for k, t in source[1].items()}}, {}),
            r"layer 2: it is not in the store, which has 0, 1": ({**source, 2: source[1]}, {}),
            r"layer 1: it is in the store alone": ({0: source[0]}, {}),
            r"layer 0, expert 0: H=32, I=32, and H=64, I=32 in the store": ({0: weights(H=32)}, {}),
            r"layer 0, expert 0: biases \['gate_up_bias'": ({0: weights(bias=True)}, {}),
            r"activation='gelu', and 'silu' in the store": (source, {"activation": "gelu"}),
            r"limit=7.0, and None in the store": (source, {"limit": 7}),
            r"format='bf16', and 'int8' in the store": (source, {"format": "bf16"}),
        }
        for text, (given, options) in differences.items():
            with pytest.raises(StoreMismatch, match=f"is not a store of these weights: {text}"):
                store.check_source(given, **options)
        with pytest.raises(StoreMismatch) as found:
            store.check_source(other)
        assert (found.value.layer, found.value.expert) == (1, 4)


def test_the_sample_of_an_expert_is_at_most_a_hundredth_of_its_file(tmp_path):
    from goldsmith.offload.samples import _sample

    for rows, cols in ((32, 64), (96, 128), (768, 2048), (1, 64), (1, 5000)):
        taken = _sample(torch.zeros(rows, cols)).numel()
        assert taken <= max(3, rows * cols / 200)
    with build(tmp_path / "s", E=2, H=16, I=8) as store:  # the smallest of all: a page for an expert
        taken = sum(4 * _sample(torch.zeros(*size)).numel() for size in ((8, 16), (8, 16), (16, 8)))
        assert taken <= 0.01 * store.expert_nbytes(0)


def test_stores_without_a_path_live_in_the_cache_folder_under_their_fingerprint(tmp_path, monkeypatch):
    monkeypatch.setenv("GOLDSMITH_CACHE", str(tmp_path / "cache"))
    source = {0: weights()}
    with cached_store(source) as store:
        assert store.path == store_path(fingerprint_of(source)) == store_path(store.fingerprint)
        assert store.path.is_relative_to(tmp_path / "cache")
        before = store.path.stat()
    with cached_store(source) as store:
        assert store.path.stat().st_mtime_ns == before.st_mtime_ns  # it was there
    others = [dict(format="int8"), dict(activation="gelu"), dict(limit=5.0), dict(format="int4", group_size=8)]
    paths = {cached_store(source, **other).path for other in others} | {cached_store({0: weights(seed=9)}).path}
    assert len(paths) == 5 and store.path not in paths
    store.path.write_bytes(b"GSEXPERT damaged")
    with cached_store(source) as again:
        again.verify()
    with pytest.raises(TypeError, match="to read it twice"):
        cached_store(iter(source.items()))
    with pytest.raises(ValueError, match="wanted 32 hexadecimal digits"):
        store_path("../../etc")


def test_the_cache_folder_is_the_users_unless_it_is_said(monkeypatch, tmp_path):
    monkeypatch.delenv("GOLDSMITH_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "goldsmith"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    assert cache_folder() == tmp_path / "me" / ".cache" / "goldsmith"
