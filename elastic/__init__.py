"""The Elastic EP executor: expert-parallel serving over slots that may be empty, without recapture on the survivors.

The controller side (this package, `controller`, `placement`, `launch`, `gateway`) never imports torch; everything that
does lives in `elastic.rank` and runs inside rank processes. The package must not know the `healer` daemon.
"""
