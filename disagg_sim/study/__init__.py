"""Published studies, reproduced: their claims as code, and the runs and frontiers that judge them."""
