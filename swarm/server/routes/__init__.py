"""What the server answers over HTTP. Routes decode, call, encode; they decide nothing."""
