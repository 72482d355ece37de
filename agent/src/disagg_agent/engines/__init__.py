"""Engines that speak to the agent."""
