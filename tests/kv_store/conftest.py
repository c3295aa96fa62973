from __future__ import annotations

import os

# UCX takes up whatever network interfaces there are; some come and go (containers, other tests).
os.environ.setdefault("UCX_NET_DEVICES", "lo")
