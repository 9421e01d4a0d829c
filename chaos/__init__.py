"""Fault injection for groups that the executor runs: it does to a rank what a bad day would.

It knows a group only by its run directory, as an operator would, and never talks to the controller: what it injects must
be found by the daemon's own sensors. Nothing imports this package.
"""
