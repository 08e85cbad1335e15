"""mhc.coefficients: computes from the streams how strongly each is read, written and mixed."""
