"""Results of a sweep, a simulation, a plan or a study as one HTML file: no network, no server, nothing beside it."""
