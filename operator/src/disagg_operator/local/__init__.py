"""Local mode: the objects that a cluster would get, run as processes on this machine."""
