"""What happened to cached blocks, between two reports. All are numbers of blocks."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(slots=True)
class CacheCounts:
    device_hits: int = 0  # of prompts when first admitted
    host_hits: int = 0
    store_hits: int = 0  # fetched
    lent_hits: int = 0  # read from a decode worker's cache
    demoted: int = 0  # device to host memory
    promoted: int = 0  # host memory to device
    swapped_out: int = 0  # device to host memory, with their request
    stored: int = 0  # computed here and written to the store
    dropped: int = 0  # computed here, and gone or failed before the store had them
    retained: int = 0  # asked for by a hint
    outbid: int = 0  # not retained, or no longer, as tenants may have so many
    yielded: int = 0  # retained, and evicted all the same as nothing else was left

    def take(self) -> CacheCounts:
        """What was counted since the last call."""
        taken = replace(self)
        for one in fields(self):
            setattr(self, one.name, 0)
        return taken


NOTHING = CacheCounts()
"""What almost every step counts."""
