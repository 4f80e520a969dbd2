"""The commands of the laboratory, such as ``disagg-sim validate``; ``disagg_sim.cli`` lists them."""
