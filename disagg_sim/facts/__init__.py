"""What is known: YAML files of systems, models, traffic, recipes, profiles and fits, as frozen specs."""
