"""Child processes that load edited copies of the files of a candidate, and run them."""
