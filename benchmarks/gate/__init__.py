"""Specimens for a judge of kernels by unknown authors: problems, candidates that cheat, and right candidates.

specimens.py  finds the files, reads their constants and builds targets
naive.py      two checkers as people write them; the cheating candidates pass
honest.py     `assay.check` in process; the right candidates pass
throughput.py  what one candidate costs, and whether 1,000 hostile ones leave anything behind (hostile.py)
"""
