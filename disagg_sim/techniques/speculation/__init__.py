"""Speculative decoding: a drafter, its acceptance, and steps that verify drafts."""
