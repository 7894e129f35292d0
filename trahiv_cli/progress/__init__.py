"""What is committed and who is where: history, ledger, leases, reports, and whom to trust."""
