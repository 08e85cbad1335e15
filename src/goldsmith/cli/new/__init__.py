"""`goldsmith new`: a kernel, its golden, its cases and a test to begin with."""
