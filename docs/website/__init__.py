"""Make the site of the documentation from README, docs, notebooks, commands and docstrings."""
