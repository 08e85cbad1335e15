"""Faults of sharded computations after public bugs, with right versions: how well the assay over ranks names them."""
