"""mhc.head: collapses the streams to one at the end of the model."""
