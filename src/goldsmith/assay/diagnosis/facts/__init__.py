"""Facts: the evidence about one failing case as data. Nothing here runs a kernel or makes a sentence."""
