"""Measurements on real ranks: probes, traces, memory, and the profile of a cluster."""
