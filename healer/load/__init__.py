"""Load: what the group is asked to do, measured as named signals, and how many ranks that takes.

`catalogue` names the signals, `exposition` and `series` turn a metrics endpoint's text into values, `scraper` fetches it,
`readings` keeps the newest value of each, `engine` decides, `forecast` raises the floor ahead of a daily peak,
`autoscaler` ties them together for the supervisor.

Knows nothing of ranks' insides and acts on nothing: a decision is a record, and the supervisor hands it on.
"""
