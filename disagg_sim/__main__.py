"""Run the command line: ``python -m disagg_sim``."""

from disagg_sim.cli.main import main

main()
