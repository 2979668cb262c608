"""A worker's side of the servers: discovery, connection, requests and conversations."""
