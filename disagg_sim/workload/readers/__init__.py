"""Read trace files: tables of several kinds, Mooncake's lines, client pools of ServeGen."""
