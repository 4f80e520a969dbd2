"""Run tasks in this process, in worker processes, or on a cluster of Dask or Ray, whatever the tasks are."""
