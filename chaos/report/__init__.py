"""Makes one page, and one JSON file, of run records: what was hurt, what healed, how long it took, what clients noticed.

Reads `chaos.records` alone: no group, no daemon and no network are needed, and a report of last year's runs can be made today.
`source` reads, `figures` computes, `plots` draws, `page` writes, `compare` puts two reports side by side.
"""
