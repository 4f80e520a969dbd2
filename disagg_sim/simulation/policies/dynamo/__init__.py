"""The planners of Dynamo: by load and by SLO."""
