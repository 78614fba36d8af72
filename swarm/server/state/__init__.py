"""The bookkeeping of a server: runs, leases, groups, batches, fates. Refuses to know HTTP, torch and sockets."""
