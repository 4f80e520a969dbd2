"""DynaServe, claim by claim."""
