"""Waiting for KV from elsewhere, behind one door: remote prefill, shared fetches, transfers, leases, the store.

The scheduler parks a request in the `WaitingRoom` and gets it back. `Arrivals` has `PendingLookups` ask the store about
a prompt. The core passes messages to `RemoteKV`, which carries out what the waiting room decides. No other module needs
to look behind these names.
"""

from engine.remote_kv.lookups import PendingLookups
from engine.remote_kv.publications import Publish, next_publication
from engine.remote_kv.remote_kv import VERIFY_STORED_S, RemoteKV
from engine.remote_kv.waiting_room import Settled, WaitingRoom

__all__ = ["VERIFY_STORED_S", "PendingLookups", "Publish", "RemoteKV", "Settled", "WaitingRoom", "next_publication"]
