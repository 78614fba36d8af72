"""Never run: the simulated server answers for the clients, too."""
