"""Load YAML files of systems, models, traffic, recipes, profiles, engines and fits as frozen specs."""
