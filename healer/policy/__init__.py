"""The policy: a YAML file in (`load`, `schema`), decisions with their reasons out (`decide`).

Pure: it must not know how evidence is gathered nor how an action is carried out.
"""
