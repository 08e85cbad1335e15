"""mhc.connect_backward: the backward of one connection with both additions to dx made in one pass; internal."""
