"""The endpoints, one file a group: each reads a request, asks, and answers; what is decided is decided elsewhere."""
