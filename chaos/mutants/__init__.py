"""Deliberate faults in copies of the code, each of which a scenario must catch: `python -m chaos.mutants`.

A checker that was never seen to find anything proves nothing. `mutants.toml` holds the faults as data, `catalogue` reads them and
puts them into a copy, `trial` runs the scenario there and asks the checkers of the code as it is.
"""
