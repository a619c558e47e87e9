"""The pure core, and the shells that drive it: ZeroMQ router, embedded scheduler, client library."""
