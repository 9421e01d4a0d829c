"""The router: one OpenAI address in front of a vLLM deployment with external load balancing, one API server a rank.

A process of its own, so that clients are served while the daemon is away. It knows ranks as the daemon's file names them
(slot, incarnation, URL, whether they take new requests) and speaks to them over HTTP only; it must not know verdicts,
policies, torch or vllm's code. What vLLM 0.33 does to the requests of a lost rank is undone here: they continue on another
rank, and the client sees a pause.

    config      the daemon's file, checked as a whole
    pool        the ranks, who takes a request, and the wait for one that does
    foreign     what a rank sent that may be anything, read within bounds
    probe       what a rank says of itself: alive, gate, load
    plan        what a request asks, and whether its answer can be continued elsewhere: pure
    transcript  the answer so far, and where another rank takes it up: pure
    upstream    one attempt on one rank, every ending told apart
    shapes      vLLM's answers taken apart and put together: pure
    attempts    one request over as many ranks as it takes
    answer      what the client gets, streamed or whole
    proxy       all else below /v1
    app         the HTTP routes
    files       the announcement, and lists of ranks for Envoy and nginx
    server      the process: signals, the file, start and end
    bench       what the router costs a request and a token
"""
