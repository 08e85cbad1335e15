"""Patches: reads the candidate's source, edits copies of it, and runs them in child processes until one is right."""
