"""The other end of ps: servers that hold the parameters, and how workers talk to them."""
