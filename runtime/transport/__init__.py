"""Messages between ranks: process groups, transfers between meshes, shared memory, launch, and error propagation."""
