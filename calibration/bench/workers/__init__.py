"""What runs in the process of a peer: one file a library, and the loop that answers questions about it."""
