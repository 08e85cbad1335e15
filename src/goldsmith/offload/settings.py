"""The Engine's keywords: checks, and messages for invalid values."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..core import native
from ..core.device import BackendUnavailable
from ..core.json_values import parse_json
from ..core.processors import worth
from ..core.shapes import check_choice, kind
from ..experts._checks import LONGEST, WHOLE

if TYPE_CHECKING:
    from .store.expert_store import ExpertStore

OP = "offload.Engine"
CACHES = ("lru", "lfu", "static", "none")
PREFILLS = ("auto", "cpu", "stream", "split")
LANES = ("auto", "cpu", "copied", "cached", "mixed")
GUARDS = ("raise", "warn", "off")
COMPUTES = ("auto", "exact", "int8")
_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_MOST_BYTES = 2**63 - 1  # the unit of a size in messages
_AMOUNT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kKmMgGtT]?(?:[iI]?[bB]))?\s*")


@dataclass(frozen=True)
class EngineSettings:
    """The checked keywords. gpu_budget: bytes, or None for "auto"; prefill: a word, or a count of tokens."""

    device: torch.device
    gpu_budget: int | None
    cache: str
    prefill: str | int
    guard: str
    lanes: str
    threads: int
    adaptive: bool
    compute: str = "exact"


def settings(
    *, device: str | torch.device, gpu_budget: str | int, cache: str, prefill: str | int, guard: str, lanes: str,
    threads: int | None, adaptive: bool, compute: str = "exact",
) -> EngineSettings:  # fmt: skip
    """Checks the Engine's keywords. Raises ValueError or TypeError with the keyword's name and its valid values."""
    check_choice(OP, "cache", cache, CACHES)
    check_choice(OP, "guard", guard, GUARDS)
    check_choice(OP, "lanes", lanes, LANES)
    check_choice(OP, "compute", compute, COMPUTES)
    if isinstance(prefill, bool) or not isinstance(prefill, (str, int)):
        raise TypeError(
            f"{OP}: prefill={prefill!r}, expected one of {', '.join(map(repr, PREFILLS))}, or a token count"
        )
    if isinstance(prefill, str):
        check_choice(OP, "prefill", prefill, PREFILLS)
    elif prefill < 1:
        raise ValueError(
            f"{OP}: prefill={prefill}, expected at least 1: the token count from which layers are streamed"
        )
    if not isinstance(adaptive, bool):
        raise TypeError(f"{OP}: adaptive={adaptive!r}, expected True or False")
    where = chosen_device(device)
    count = default_threads(where) if threads is None else threads
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"{OP}: threads={threads!r}, expected a whole number of at least 1, or None")
    if not 1 <= count <= 1024:
        raise ValueError(f"{OP}: threads={threads}, expected a number from 1 to 1024")
    if compute == "int8" and where.type != "cpu":
        raise ValueError(
            f"{OP}: compute='int8' is for device='cpu': on {where} the lanes would compute the same expert with "
            "different numbers; give compute='exact'"
        )
    return EngineSettings(where, parse_budget(gpu_budget), cache, prefill, guard, lanes, count, adaptive, compute)


def int8_group(store: ExpertStore, compute: str) -> int:
    """Inputs of a row that share a scale in integer products with this store's codes; 0: float products."""
    if compute != "int8":
        return 0
    layout = store.blocks.layout
    check_int8(layout.format)
    group = layout.group_size or max(layout.hidden_size, layout.intermediate_size)
    if group > LONGEST:
        raise ValueError(
            f"{OP}: compute='int8' adds at most {LONGEST} products in 32 bits, but the store's rows have {group} with "
            "one scale: build it with a group_size, or give compute='exact'"
        )
    if native.reason() is not None:
        raise BackendUnavailable(f"{OP}: compute='int8' needs the native library: {native.reason()}")
    return group


def check_int8(format: str) -> None:
    """Raises ValueError unless experts in this format can be multiplied as integers."""
    if format not in WHOLE:
        raise ValueError(
            f"{OP}: compute='int8' is for experts in {', '.join(WHOLE[:-1])} or {WHOLE[-1]}, not in {format}: give one "
            "of these formats (cpu_format=, --format on the command line), or compute='exact'"
        )


def check_store(store: object, exact: object) -> None:
    """Raises unless `store` is an ExpertStore that may be used: exact=True refuses a format that rounds."""
    from .store.expert_store import ExpertStore

    if not isinstance(store, ExpertStore):
        raise TypeError(f"{OP}: store is {kind(store)}, expected an ExpertStore: ExpertStore.open(path)")
    if not isinstance(exact, bool):
        raise TypeError(f"{OP}: exact={exact!r}, expected True or False")
    if exact and not store.exact:
        raise ValueError(
            f"{OP}: the store's format {store.format!r} does not hold the model's weights exactly; allow that with "
            "exact=False, or build a store with cpu_format='auto', which is exact"
        )


def pickling_error() -> TypeError:
    """The error for pickling an engine or a model that has one, with what to do instead."""
    return TypeError(
        f"{OP}: it cannot be pickled, nor can a model whose experts it computes: its threads and memory are "
        "this process's. In another process, make an Engine over ExpertStore.open(path), or call "
        "offload.from_pretrained: they share the store's pages. To save the model, call detach() on the result of "
        "offload(), which gives the plain one"
    )


def parse_budget(value: str | int) -> int | None:
    """Bytes of "6GiB", "6GB", "500MiB" or a whole number; None for "auto"; ValueError for anything else."""
    if isinstance(value, str):
        if value.strip().lower() == "auto":
            return None
        match = _AMOUNT.fullmatch(value)
        amount = float(match[1]) * _UNITS[(match[2] or "B").upper()] if match else -1
        if 0 <= amount <= _MOST_BYTES:  # float() turns very long numbers into infinity
            return int(amount)
    elif isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_BYTES:
        return value
    text = repr(value) if len(repr(value)) <= 40 else f"{repr(value)[:40]}..."
    raise ValueError(
        f"{OP}: gpu_budget={text} is not an amount of memory; give 'auto', bytes, or '6GiB', '6GB', '500MiB'"
    )


def chosen_device(device: str | torch.device) -> torch.device:
    if isinstance(device, str) and device == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{OP}: device={device!r} is not a device; give 'auto', 'cpu', 'cuda' or 'cuda:N'") from error
    if parsed.type == "cpu":
        return torch.device("cpu")
    if parsed.type != "cuda":
        raise ValueError(f"{OP}: device={device!r}: experts are computed only on 'cpu' and 'cuda'")
    if not torch.cuda.is_available():
        raise ValueError(f"{OP}: device={device!r}, but torch sees no CUDA device; give 'cpu', or 'auto'")
    index = torch.cuda.current_device() if parsed.index is None else parsed.index
    if index >= torch.cuda.device_count():
        raise ValueError(f"{OP}: device={device!r}, but the last CUDA device is cuda:{torch.cuda.device_count() - 1}")
    return torch.device("cuda", index)


def free_memory(device: torch.device) -> int:
    """The budget "auto": a GPU's free memory less max(1 GiB, 5 %); 0 on a CPU, where copies would not save time."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return max(0, free - max(1 << 30, total // 20))


def default_threads(device: torch.device) -> int:
    """The processors that the process may use, less one if a thread launches work on a GPU."""
    return max(1, worth() - (device.type == "cuda"))


def profile_of(profile: object, experts: Mapping[int, int]) -> dict[int, list[int]]:
    """{layer: experts, most used first} from the result of Engine.profile(), for cache="static"."""
    from pathlib import Path

    if isinstance(profile, (str, Path)):
        try:
            profile = parse_json(Path(profile).read_text())
        except OSError as error:
            raise ValueError(f"{OP}: profile={str(profile)!r} cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise ValueError(f"{OP}: the profile is not JSON of Engine.profile(): {error}") from error
    if not isinstance(profile, Mapping) or not isinstance(profile.get("counts"), Mapping):
        raise ValueError(
            f"{OP}: profile has no 'counts'; give the result of Engine.profile(), or the path of a JSON file with it"
        )
    experts_by_layer: dict[int, list[int]] = {}
    for layer, count in experts.items():
        counts = profile["counts"].get(str(layer), profile["counts"].get(layer))
        if counts is None:
            raise ValueError(f"{OP}: the profile lacks layer {layer}; it has {sorted(profile['counts'])}")
        if not _are_counts(counts) or len(counts) != count:
            raise ValueError(
                f"{OP}: the profile's counts of layer {layer} are not a list of {count} whole numbers, one per expert: "
                "it belongs to another model, or is damaged; take Engine.profile() of this model"
            )
        experts_by_layer[layer] = sorted((e for e, n in enumerate(counts) if n), key=lambda e: (-counts[e], e))
    return experts_by_layer


def _are_counts(counts: object) -> bool:
    return isinstance(counts, (list, tuple)) and all(isinstance(n, int) and n >= 0 for n in counts)
