"""Chains of servers, hand-over to a server that joins, membership and the coordinator."""
