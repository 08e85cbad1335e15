"""Candidates in C++ and CUDA C++: how they are compiled, and the judge's cache of their libraries."""
