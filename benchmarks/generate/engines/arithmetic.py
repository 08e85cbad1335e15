"""What an engine rounds, by its own declaration.

A model in another arithmetic than float64 cannot equal the golden; which error is honest depends on what it rounds. So
the plain model runs several times with the inputs of every product, and the sums of the attention, rounded up or down
at random in the engine's declared formats (workers/rounding.py). The engine may err as much as these, times the factor
that the assay allows.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Arithmetic:
    """dtype: that of all tensors; rows, dense_rows: of the inputs of experts' and of other products.

    attention   fp16: keys and values are rounded, and so is the sum over keys after each key (llama.cpp's
                flash attention on a CPU)
    packs       the format to which goldsmith packs the dense part anew: the golden has these weights, too
    """

    dtype: str = "float32"  # float32 | bfloat16
    rows: str = "fp32"  # fp32 | bf16 | q8
    dense_rows: str = "fp32"
    attention: str = "fp32"  # fp32 | fp16
    packs: str = ""

    def __str__(self) -> str:
        return ",".join((self.dtype, self.rows, self.dense_rows, self.attention, self.packs))

    @property
    def is_random(self) -> bool:
        """Whether the plain models differ from each other."""
        return {self.rows, self.dense_rows, self.attention} != {"fp32"}

    @classmethod
    def parse(cls, text: str) -> Arithmetic:
        return cls(*text.split(","))
