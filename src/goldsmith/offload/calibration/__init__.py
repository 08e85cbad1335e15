"""Measurement of the costs of moving and computing experts on this machine."""
