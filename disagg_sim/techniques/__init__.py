"""Optional effects on serving, a folder each: what is not asked for costs nothing and changes nothing.

The first word of a file's name says what it may import, as if it stood in that room: ``facts``, ``requests``
(``workload/``), ``physics``, ``search``, ``law`` (``serving/``), ``plan`` (``planning/``), ``play`` (``simulation/``).
"""
