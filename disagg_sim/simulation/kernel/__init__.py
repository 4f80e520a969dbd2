"""The compiled instances, their step tables and their Python face."""
