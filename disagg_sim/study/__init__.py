"""Questions asked of whole frontiers: how much one gains over another, and where."""
