"""The file of packed experts: its format, how it is written, read, compared with a source, and cached."""
