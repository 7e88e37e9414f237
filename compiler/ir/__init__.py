"""The intermediate representation: graphs, specs, local programs, reshards, and the protocol of collectives."""
