"""The gateway: an OpenAI-compatible front of one group, and the request ledger that makes a rank's death invisible.

A process of its own, so that clients are served while the daemon is away. It knows ranks as routes only (slot,
incarnation, socket), and tokens as what ranks emit; it must not know views, placements, torch or the daemon.

    ledger      what every request is owed: pure, decides which emission counts
    router      which rank takes a request, and what changes when routes change: pure
    dispatcher  owns the ledger and the connections to the ranks; replays, hands over, gives up in time
    text        tokens to text and back: the stream never shows half a character, stop strings
    schema      what a client may ask, and the error envelope
    envelope    bodies, JSON answers and errors, as the router before vLLM has them too
    completions one answer to one client, streamed or whole
    api         the HTTP routes
    control     the socket on which the controller names the ranks
    server      the process: files, ports, signals, start and end
"""
