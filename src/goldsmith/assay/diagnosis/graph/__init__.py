"""The golden as a graph: its operators in order, forward and backward, and runs of it with some of them changed."""
