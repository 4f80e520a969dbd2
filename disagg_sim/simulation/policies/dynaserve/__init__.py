"""DynaServe: its predictor and its policy."""
