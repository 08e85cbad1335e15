"""`goldsmith adapter check` and `goldsmith adapter export`: an adapter in other runtimes."""
