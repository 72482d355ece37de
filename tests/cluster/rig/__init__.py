"""A real Kubernetes on this machine, for tests and for `make cluster`."""
