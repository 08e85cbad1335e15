"""mhc.coefficients: how strongly streams are read, written and mixed, from the streams themselves."""
