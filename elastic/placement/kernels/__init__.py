"""The solver's inner loops, compiled: one layer at a time over plain arrays. No records, no errors, no I/O.

Everything is deterministic: ties go to the lowest rank, slot or expert, unless said otherwise.
"""
