"""Faults, by family: each knows what it may touch, does one thing to it, says what takes it back, and does that when asked.

An injector refuses (ElasticError, before anything is done) what it was not told to touch: processes that the run directory
does not list as ranks, gateway or daemon of the group; files outside the folders that it was given; resources of other groups.
`chaos.injectors.registry` has them all by name.
"""
