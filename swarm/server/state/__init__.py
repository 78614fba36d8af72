"""A server's bookkeeping: runs, leases, groups, batches, and how episodes end. Knows nothing of HTTP, torch or sockets."""
