"""The laboratory beside the package: fits to measurements, their errors, and the claims of published papers.

It is in a clone alone. ``disagg_sim.laboratory`` finds it there.
"""
