"""When a study may run, and the daemon that carries studies on by themselves."""
