"""What servers and workers say to each other: messages, views, the state-machine contract, plain values on the wire."""
