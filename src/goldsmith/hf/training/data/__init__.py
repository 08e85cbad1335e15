"""From a text or JSON file to batches of tokens: documents, conversations, packing, attention masks."""
