"""A module that does not end when it is imported, for tests of the command."""

from time import sleep

while True:
    sleep(0.01)
