"""mhc.head: the streams collapsed to one at the end of the model."""
