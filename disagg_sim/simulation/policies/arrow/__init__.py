"""Arrow: its profile, its ledger and its policy."""
