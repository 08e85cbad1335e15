"""From files and data sets to batches of tokens: sources, formats, conversations, packing, attention masks."""
