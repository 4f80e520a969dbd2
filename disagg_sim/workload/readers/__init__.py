"""Traces out of files: tables of several kinds, Mooncake's lines, pools of ServeGen."""
