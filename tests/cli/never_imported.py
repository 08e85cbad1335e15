"""A module that does not end when it is imported, for tests of the command."""

while True:
    pass
