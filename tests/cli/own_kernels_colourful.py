"""A module that raises a message with escape codes when it is imported, for tests of the command."""

raise ValueError("\x1b[31mred\x1b[0m")
