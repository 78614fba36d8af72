"""The server's HTTP routes. They decode, call and encode, and decide nothing."""
