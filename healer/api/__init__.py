"""The HTTP API: what the daemon knows, and the few things that it can be asked to do.

It runs in the supervisor's loop. Reading is open to whoever reaches the address; control needs the bearer token where the
policy names one (it must, off loopback), and a JSON body, which a page in a browser cannot send unasked.
"""

from healer.api.app import Daemon, make_app
from healer.api.auth import read_token
from healer.api.server import Server, listen

__all__ = ["Daemon", "Server", "listen", "make_app", "read_token"]
