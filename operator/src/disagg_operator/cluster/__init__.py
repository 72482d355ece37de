"""The operator on a cluster: effects around the pure decision."""
