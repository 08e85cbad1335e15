"""mhc.collapse: the weighted sum of the streams."""
