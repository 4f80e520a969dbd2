"""Read trace files: tables of several kinds, and Mooncake's lines."""
