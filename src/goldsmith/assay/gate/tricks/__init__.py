"""Tricks: how candidates get past checks, one file for each way of seeing them."""
