"""The committed state, and each peer's progress: history, ledger, leases, reports, trust."""
