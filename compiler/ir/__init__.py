"""What all of the compiler trades in: graphs, specs, local programs, reshards, and the protocol of collectives."""
