"""Changes that concern the golden as a whole: its results for slices, to the padded end, or made again backward."""
