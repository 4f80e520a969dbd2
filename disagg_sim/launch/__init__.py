"""Turn deployments into commands and manifests of serving engines."""
