"""RaisedError: what the message of an exception says, as data. The messages are torch's, Python's and the kernel's."""

from __future__ import annotations

import re
from dataclasses import dataclass

# messages of sanitizers, and of libraries with guards of their own
_BEYOND = re.compile(
    r"written \d+ bytes? (beyond|past|behind)|buffer.overflow|guard \w+ (was|were) (changed|overwritten)|"
    r"out.of.bounds (write|store)",
    re.IGNORECASE,
)
_OUT = re.compile(r"index (-?\d+) is out of bounds for \w+ \d+ with size (\d+)")
_COUNT = re.compile(
    r"selected (index|number) k |\bk not in range|k should be (at most|less)|kth value out of", re.IGNORECASE
)
_SIZES = re.compile(r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)")
_PLACE = re.compile(r" \([^()]*:\d+\)$")  # file and line: their names say nothing about the error
_CONFIG = re.compile(
    r"zerodivision|division by zero|modulo by zero|floating.point exception|sigfpe|out of resource|shared memory|"
    r"must be (a )?(power|multiple|divisible|positive)|not divisible|invalid (launch|config|argument)|num_warps|"
    r"block.?size|group.?size|illegal (instruction|launch)",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class RaisedError:
    """Statements about one exception.

    writes_beyond  memory outside a buffer was written
    out_of_range   an index, or a number of entries, is out of range
    index          an index is out of range, and not a number of entries
    too_many       more entries were requested than an axis has, such as the best 4 of 3 in a last tile
    one_beyond     the index just after the last one was refused
    one_apart      two sizes that should be equal differ by one, or a list ended one too early
    config         sizes, divisions or launches
    """

    writes_beyond: bool = False
    out_of_range: bool = False
    index: bool = False
    too_many: bool = False
    one_beyond: bool = False
    one_apart: bool = False
    config: bool = False

    @classmethod
    def read(cls, message: str) -> RaisedError:
        """The statements about an exception with this message."""
        lower, out, sizes = message.lower(), _OUT.search(message), _SIZES.search(message)
        too_many = _COUNT.search(message) is not None
        outside = "out of range" in lower or "out of bounds" in lower
        return cls(
            writes_beyond=_BEYOND.search(message) is not None,
            out_of_range="out of" in message,
            index="index" in lower and outside and not too_many,
            too_many=too_many,
            one_beyond=out is not None and int(out[1]) == int(out[2]),
            one_apart="list index out of range" in message
            or sizes is not None
            and abs(int(sizes[1]) - int(sizes[2])) == 1,
            config=too_many or _CONFIG.search(_PLACE.sub("", message)) is not None,
        )
