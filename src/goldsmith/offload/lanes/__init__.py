"""Execution: the CPU lane, the device lanes, how slots are filled and rows are merged."""
