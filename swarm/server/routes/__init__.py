"""The server's HTTP routes. They decode requests, call the service and encode its answers, but decide nothing."""
