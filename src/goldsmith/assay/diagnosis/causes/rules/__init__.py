"""The catalogue of causes: for each id its rule, its sentence, and the next thing to try.

A rule is a function of a Reading (evidence with derived values) that returns a Match, or None if it sees nothing.
Rules read evidence, never names of operators. Several may match; `rank` orders them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...facts.evidence import Evidence
from . import changed_goldens, memory, parts, places, reductions, state, terms, unwritten_results, values
from .reading import Match, Reading

Matcher = Callable[[Reading], Match | None]
UNKNOWN, REFERENCE_FAULT = "unknown", "reference_fault"
NOTES = ("tie", "order_nondeterminism", "flushes_subnormals", "not_proven", "refused_layout")


@dataclass(frozen=True)
class Rule:
    """One cause: id, rule, the end of the sentence "<tensor> is wrong: ...", and the likely repair."""

    id: str
    rule: Matcher
    text: str
    mend: str


def _nothing(r: Reading) -> Match | None:
    return None


_ENTRIES = (
    Rule("never_written", unwritten_results.never_written, "part of it is never written",
          "launch a program for every element: check the grid, the ceiling division and the store's mask"),
    Rule("not_computed", unwritten_results.not_computed, "it is not computed at all",
          "look for an early return, a null pointer or a branch that skips it"),
    Rule("truncated_reduction", reductions.truncated_reduction, "a reduction is cut short",
          "loop over the whole axis: the block is smaller than it"),
    Rule("off_by_one", reductions.off_by_one, "a bound is off by one",
          "compare `<` with `<=` and the loop's end with the axis' length"),
    Rule("wrong_mask", reductions.wrong_mask, "a mask is wrong",
          "mask loads and stores at the tail, with the neutral element of the reduction as `other`"),
    Rule("wrong_axis", _nothing, "one axis is used instead of another",
          "check along which axis it is reduced, scaled or read"),
    Rule("overwritten_accumulator", reductions.overwritten_accumulator, "an accumulator is overwritten",
          "write `acc += ...`, not `acc = ...`, inside the loop"),
    Rule("uninitialised_accumulator", reductions.uninitialised_accumulator, "a sum starts from uninitialised memory",
          "zero the buffer before every launch that adds to it (autotuning resets it only while it tunes)"),
    Rule("lost_update", reductions.lost_update, "updates of one place are lost",
          "accumulate with atomics, or sort first"),
    Rule("low_precision_accumulation", reductions.low_precision_accumulation, "it is accumulated in too narrow a dtype",
          "keep sums in float32 and convert once, at the store"),
    Rule("missing_rescale", _nothing, "earlier blocks are not rescaled",
          "multiply the running sums by exp(old maximum - new maximum)"),
    Rule("missing_term", _nothing, "a term is missing", "add the term"),
    Rule("repeated_term", terms.repeated_term, "a term is added more than once",
          "look for an accumulation inside a loop or grid that repeats it"),
    Rule("sign_flip", terms.sign_flip, "a sign is flipped", "check the sign of the term"),
    Rule("wrong_factor", terms.wrong_factor, "a factor is wrong", "check where the factor is applied"),
    Rule("scale_bias", terms.scale_bias, "it is scaled by a constant close to 1",
          "check constants and approximate functions that it depends on"),
    Rule("transposed", places.transposed, "it, or an operand, is transposed", "check the order of the axes"),
    Rule("permuted", places.permuted, "its rows are in another order", "apply the permutation, or its inverse, once"),
    Rule("shifted", places.shifted, "it is shifted along an axis", "check the offset of the load or the store"),
    Rule("wrong_stride", places.wrong_stride, "a stride is wrong", "pass the tensor's own strides, in their order"),
    Rule("swapped_results", places.swapped_results, "results are exchanged", "check the order of what is returned"),
    Rule("dtype_width", places.dtype_width, "it is stored with another width than its buffer's",
          "convert to the buffer's dtype, or allocate it in the stored one"),
    Rule("wrong_format", places.wrong_format, "bytes are read in another format",
          "check the storage format's decoding"),
    Rule("layout_assumption", places.layout_assumption, "a memory layout is assumed",
          "use the strides, or call `.contiguous()`, gradients included"),
    Rule("expanded_gradient", places.expanded_gradient, "a gradient of stride 0 is read as dense",
          "use the gradient's strides, or call `.contiguous()` in the backward"),
    Rule("overrun", memory.overrun, "memory outside a buffer is written", "check sizes, strides and the store's mask"),
    Rule("stray_read", memory.stray_read, "memory outside a buffer is read", "mask the load and give it `other=`"),
    Rule("aliased", memory.aliased, "two tensors share memory", "give each a buffer of its own"),
    Rule("input_modified", memory.input_modified, "an input is modified",
          "store elsewhere, or declare it in `mutates=`"),
    Rule("use_after_free", memory.use_after_free, "memory is read after it was freed", "keep the tensor alive"),
    Rule("stale_state", state.stale_state, "an earlier call left state behind", "reset it at the start of a call"),
    Rule("stale_copy", state.stale_copy, "a copy of an input is not refreshed",
          "key the copy by version, or copy again"),
    Rule("stale_config", state.stale_config, "a configuration for other sizes is used", "key the cache by every size"),
    Rule("race", state.race, "threads or programs race", "give each its own buffer, or order them"),
    Rule("missing_sync", state.missing_sync, "a result is used before it is ready", "synchronise, or record an event"),
    Rule("overflow", values.overflow, "an intermediate overflows", "compute it in a wider range, or scale first"),
    Rule("missing_max_shift", values.missing_max_shift, "exponentials are computed without subtracting their maximum",
          "subtract the row's maximum before exp"),
    Rule("nan_swallowed", values.nan_swallowed, "NaN is swallowed",
          "let NaN through: remove nan_to_num or the comparison"),
    Rule("absolute_eps", values.absolute_eps, "an absolute epsilon differs from the definition",
          "put epsilon where the definition has it"),
    Rule("truncating_store", values.truncating_store, "it is truncated instead of rounded",
          "convert with round to nearest even"),
    Rule("index_overflow", values.index_overflow, "an offset overflows 32 bits", "compute offsets in int64"),
    Rule("invalid_index", memory.invalid_index, "a wrong index is used",
          "mask entries without a valid index, such as -1; add the base of the block, row or group"),
    Rule("wrong_decision", parts.wrong_decision, "a choice is not legal", "compare scores of chosen and other entries"),
    Rule("wrong_saved_tensor", parts.wrong_saved_tensor, "another tensor is read instead of the right one",
          "compare what is saved, or passed on, with what is read"),
    Rule("missing_partition", parts.missing_partition, "the work is not divided among ranks",
          "slice by rank, and add the rank's offset"),
    Rule("mask_shift", _nothing, "a mask is shifted",
          "compare `<` with `<=` in the mask, and check where its diagonal begins"),
    Rule("dropout_mismatch", parts.dropout_mismatch, "forward and backward drop different elements",
          "use one seed and one offset in both"),
    Rule("empty_group", parts.empty_group, "an empty group is mishandled", "return early, or guard the division"),
    Rule("single_element", memory.single_element, "one element is wrong", "look at what is special about its index"),
    Rule("exception", parts.exception, "the candidate raises", "read the error"),
    Rule("bad_config", parts.bad_config, "a configuration is not possible", "refuse it with a message, or handle it"),
    Rule(REFERENCE_FAULT, parts.reference_fault, "the golden is at fault", "fix the golden first, or the shape"),
    Rule(UNKNOWN, _nothing, "no known cause explains it", "name stages with assay.stage and diagnose again"),
)  # fmt: skip

CATALOGUE: dict[str, Rule] = {entry.id: entry for entry in _ENTRIES}


def matches(evidence: Evidence) -> dict[str, Match]:
    """The Match of every rule that fires, by cause.

    A rule that raises on the numbers of a wrong kernel counts as silent, and `evidence.left_out` records it.
    """
    reading = Reading(evidence)
    by_cause = {}
    for id, entry in CATALOGUE.items():
        try:
            match = entry.rule(reading)
        except Exception as error:  # noqa: BLE001 - one rule's mistake must not cost the others' answer
            evidence.left_out[f"rule {id}"] = f"{type(error).__name__}: {str(error).strip()[:200]}"
            continue
        if match is not None:
            by_cause[id] = match
    return changed_goldens.merged(evidence, by_cause)
