"""Make tables, plots and pages: the only home of ms, GB and colours."""
