"""What requests keep on the device between forwards, and who may use which part of it.

Start with kv_cache.py (K and V in slots), then req_to_token.py (which slot holds each token),
allocator.py (free pages of slots) and radix_cache.py (prefixes that requests share).
state_pool.py and state_snapshots.py do the same for recurrent state. The scheduler decides; nothing
here does.
"""
