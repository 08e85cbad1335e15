"""Changes that concern more than one place of the golden: results for slices, to the padded end, readers, sums."""
